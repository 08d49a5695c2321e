"""Axolotl: its files of GRPO, SFT and DPO are read as runs."""
