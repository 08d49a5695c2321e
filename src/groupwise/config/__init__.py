"""Every option with its bounds and default, for YAML, HTTP jobs and the SDK; how files in other words are read."""
