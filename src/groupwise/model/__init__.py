"""The base model: loading, chat templates, the packed forward over shared prompts, and its memory estimate."""
