"""The algorithm as plain functions: advantages, policy losses, micro-batches. Start with `advantage`, then `loss`."""
