"""The proof on one GPU: what only hardware shows, part by part. `python benchmarks/gpu` runs it (`__main__.py`)."""
