"""Formats of configurations: how another system's file becomes a run of ours, and the tables of its keys."""
