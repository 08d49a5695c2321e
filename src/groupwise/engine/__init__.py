"""Samplers: token ids in, token ids and behaviour logprobs out, at a named policy version."""
