"""prime-rl: its `rl.toml` is read as a run."""
