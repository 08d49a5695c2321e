"""verifiers: its environments are played by agents, of version 0.4 and of those before."""
