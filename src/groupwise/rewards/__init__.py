"""Reward functions: the contract (`base`) and ready ones (`text`, `math`). Rewards never see the trainer."""
