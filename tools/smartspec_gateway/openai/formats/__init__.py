"""How models read and write: chat templates, reasoning, tool calls, grammars of both."""
