"""The requests of the guide of the feedback loop, as its page has them."""

from __future__ import annotations

import json

QUESTION = "What is 47 + 138? Reply with just the number."
ROLLOUTS = """{
    "prompts": [
      [{"role": "user", "content": "What is 47 + 138? Reply with just the number."}],
      [{"role": "user", "content": "What is 23 * 17? Reply with just the number."}]
    ],
    "n": 8,
    "temperature": 0.9,
    "max_tokens": 64,
    "seed": 42
  }"""
SCORED = """{
    "groups": [{
      "messages": [{"role": "user", "content": "What is 47 + 138? Reply with just the number."}],
      "completions": [
        {"text": "185", "reward": 1.0},
        {"text": "The answer is 184", "reward": 0.0},
        {"text": "185.", "reward": 1.0},
        {"text": "47 + 138 = 185", "reward": 0.8}
      ]
    }],
    "config": {
      "learning_rate": 1e-5,
      "kl_coeff": 0.1,
      "clip_epsilon": 0.2,
      "lora_rank": 16,
      "output_name": "math-correctness",
      "auto_load": true
    }
  }"""
GROUP = json.loads(SCORED)["groups"][0]
