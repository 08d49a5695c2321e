"""Environments: episodes of several turns, with tools. The contract is in `base`."""
