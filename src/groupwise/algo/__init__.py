"""The algorithm as plain functions: advantages, policy losses, the KL, and metrics of a step. Start with
`advantage`, then `loss`."""
