"""aitraining: its flags and saved parameters are read as runs."""
