"""TRL: its configuration files and scripts are read as runs."""
