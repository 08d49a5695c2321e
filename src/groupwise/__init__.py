"""Groupwise: GRPO post-training you can start on a laptop and keep when you have a cluster."""

__version__ = "0.1.0"
