"""Reads, writes and constrains the replies of models: tool calls and thoughts, one file a format."""
