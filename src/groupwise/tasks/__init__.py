"""Tasks: prompts, environments and agents with several turns, tool calls, and the starter model's own tasks."""
