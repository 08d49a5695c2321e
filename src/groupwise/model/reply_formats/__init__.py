"""How models write what they say, one file a format: tool calls and thoughts, read, written and constrained."""
