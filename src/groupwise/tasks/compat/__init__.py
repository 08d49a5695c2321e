"""Environments and agents written for other systems: three-method classes, TRL, verifiers, OpenEnv."""
