"""Every option with its bounds and default, for YAML files, HTTP jobs and the SDK; importers of other systems'
files."""
