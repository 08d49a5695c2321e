"""The base model: loaded, run packed over shared prompts, its memory estimated, its weights shared by processes."""
