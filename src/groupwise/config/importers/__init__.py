"""Configurations of other systems, read as ours: the same file, the same overrides, the same run."""
