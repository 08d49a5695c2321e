"""Writes pictures/, prompts.jsonl and held_out.jsonl: a question, the file of its picture and the answer a line.

The pictures are drawn, as shapes in a grid, since the small model was taught on such; of your own only the lines are
needed.
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
