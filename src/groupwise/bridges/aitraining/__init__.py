"""aitraining: its flags and saved parameters are read as runs, and its three-method environments are played."""
