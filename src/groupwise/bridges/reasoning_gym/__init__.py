"""reasoning-gym: its generators' problems as prompts, their scores as rewards, their difficulty."""
