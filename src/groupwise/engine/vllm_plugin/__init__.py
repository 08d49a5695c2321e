"""Plugins that run inside vLLM's own processes: a directory for their PYTHONPATH, whose modules import nothing of
ours."""
