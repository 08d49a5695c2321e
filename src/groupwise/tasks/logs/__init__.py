"""Logs of what a model was asked and answered, as prompts to learn from."""
