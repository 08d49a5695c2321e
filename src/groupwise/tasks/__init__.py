"""What is trained on: prompts, chat templates and tool calls, environments, agents, the starter's own tasks."""
