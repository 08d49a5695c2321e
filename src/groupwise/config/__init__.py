"""One description of every knob, for YAML files, HTTP jobs and the SDK; and importers of other systems' files."""
