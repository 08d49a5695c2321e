"""A server and its worker, killed, starved of disk space, and looked at."""
