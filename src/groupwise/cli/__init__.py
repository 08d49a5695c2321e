"""The command line: `groupwise run | serve | train | adapters | rollouts | check | doctor ...`."""
