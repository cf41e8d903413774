"""Oracle traces: what texts would accept at any draft length."""
