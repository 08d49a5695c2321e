"""Writes prompts.jsonl and held_out.jsonl: one question with its answer per line. You can use any file of this form."""

import json
import random

pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
random.Random(0).shuffle(pairs)
for name, part in (("prompts.jsonl", pairs[:2000]), ("held_out.jsonl", pairs[2000:2128])):
    with open(name, "w") as file:
        for a, b in part:
            question = f"What is {a} + {b}? Reply with just the number."
            row = {"prompt": question, "answer": str(a + b)}
            print(json.dumps(row), file=file)
