"""Everything on disk: adapter versions, the job ledger, run directories, checkpoints, rollouts, metrics."""
