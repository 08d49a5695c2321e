"""The loop and what it is made of: batches, updates, evaluation, health, jobs, launching on several machines."""
