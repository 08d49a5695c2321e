"""TRL: its files, scripts and `GRPOConfig` are read as runs; its environments and rollout functions are played."""
