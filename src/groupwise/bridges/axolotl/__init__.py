"""Axolotl: its GRPO files are read as runs."""
