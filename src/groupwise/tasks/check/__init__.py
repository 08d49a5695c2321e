"""`groupwise env check`: an environment is played before anything is trained on it, and judged."""
