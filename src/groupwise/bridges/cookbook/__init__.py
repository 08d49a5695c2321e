"""The Fireworks cookbook: its recipe's `Config` and `main`."""
