"""Writes pictures/, prompts.jsonl and held_out.jsonl: a question per line, with its picture's file and the answer.

The pictures are drawn as shapes in a grid, like those that the small model was trained on. With pictures of your own
you need only the lines.
"""

import json
from pathlib import Path

from groupwise.tasks.starter.scenes import prompts

Path("pictures").mkdir(exist_ok=True)
for name, rows in (
    ("prompts", prompts("count", "train", n=960, form="bare")),
    ("held_out", prompts("count", "test", n=256, form="bare")),
):
    with open(f"{name}.jsonl", "w") as file:
        for number, row in enumerate(rows):
            picture = f"pictures/{name}-{number}.png"
            row["image"].save(picture)
            print(json.dumps({"prompt": row["prompt"], "image": picture, "answer": row["answer"]}), file=file)
