"""Unsloth: its GRPO scripts and notebooks are read as runs."""
