"""Arguments of transformers' Trainer and TRL's GRPOConfig, which several systems' configurations have taken over."""
