"""Traces: what texts would accept at any draft length, and what the planner saw and chose."""
