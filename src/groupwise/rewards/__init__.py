"""Reward functions: what one is (`base`), ready ones (`text`, `math`, ...), worker processes and a sandbox. No
trainer."""
