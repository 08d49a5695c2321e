"""The Tinker API: sessions, training, sampling and checkpoints for clients of the `tinker` package."""
