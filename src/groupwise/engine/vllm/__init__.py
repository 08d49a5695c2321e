"""vLLM as the sampler: in a server of its own, in this process, or several of them."""
