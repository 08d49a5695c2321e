"""Everything on disk: adapter versions, the job ledger, run directories, rollouts, what is logged of a run."""
