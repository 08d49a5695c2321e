"""Several processes and machines: who leads and follows, how they are started, whether they can work together."""
