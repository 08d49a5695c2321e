"""Agents: programs that play an episode by themselves and know the policy as an OpenAI endpoint only (`load`)."""
