"""The learner's side: LoRA, the one forward, optimizer steps."""
