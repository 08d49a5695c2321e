"""vLLM as the engine: one server or several, started here or elsewhere, or inside the trainer's process."""
