"""docs/loop.png: the training loop beside the learning curves of the demo.

python docs/draw_loop.py        needs matplotlib; the curves are those of docs/learning.json (benchmarks/learning.py)
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).parent
INK, BLUE, GREY = "#1f2933", "#1f6feb", "#9aa5b1"
STAGES = [
    ("prompts", "a file, a dataset, an environment", 0.50, 0.90),
    ("sample", "G completions of each, with\ntheir token ids and logprobs", 0.80, 0.64),
    ("score", "reward functions, a judge,\nor you over HTTP", 0.80, 0.28),
    ("advantage", "how much better than\nthe others of its group", 0.50, 0.06),
    ("train", "LoRA or all weights,\none forward for all losses", 0.20, 0.28),
    ("publish", "a PEFT adapter, checked,\nthen active: name@step", 0.20, 0.64),
]
WIDTH, HEIGHT = 0.36, 0.15


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1.15, 1))
    draw_loop(left)
    draw_curves(right)
    figure.tight_layout()
    figure.savefig(HERE / "loop.png", dpi=110)


def draw_loop(axes: Axes) -> None:
    """The stages of a step as boxes on a circle; after the first, prompts enter it from outside."""
    axes.set(xlim=(0, 1), ylim=(-0.04, 1))
    axes.axis("off")
    for name, what, x, y in STAGES:
        box = FancyBboxPatch(
            (x - WIDTH / 2, y - HEIGHT / 2), WIDTH, HEIGHT, boxstyle="round,pad=0.01", facecolor="white", edgecolor=INK
        )
        axes.add_patch(box)
        axes.text(x, y + 0.042, name, ha="center", va="center", fontsize=11, weight="bold", color=BLUE)
        axes.text(x, y - 0.03, what, ha="center", va="center", fontsize=8, color=INK)
    ends = [((0.69, 0.90), (0.80, 0.73)), ((0.80, 0.55), (0.80, 0.37)), ((0.80, 0.19), (0.69, 0.08))]
    ends += [((0.31, 0.08), (0.20, 0.19)), ((0.20, 0.37), (0.20, 0.55)), ((0.39, 0.64), (0.61, 0.64))]
    for start, end in ends:
        axes.add_patch(
            FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=INK, shrinkA=0, shrinkB=0)
        )
    axes.text(0.5, 0.66, "the next step\nsamples from it", ha="center", va="bottom", fontsize=7.5, color=INK)


def draw_curves(axes: Axes) -> None:
    """Held-out greedy accuracy over steps: three seeds and the two controls."""
    runs = json.loads((HERE / "learning.json").read_text(encoding="utf-8"))["runs"]
    for name, run in runs.items():
        points = [(row["step"], row["eval/greedy/reward"]) for row in run["metrics"] if "eval/greedy/reward" in row]
        seed = name.startswith("seed")
        style = {"color": BLUE} if seed else {"color": GREY, "linestyle": "--" if "shuffled" in name else ":"}
        label = "three seeds" if name == "seed 0" else None if seed else f"control: {name}"
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label, **style)
    axes.set(xlabel="training step", ylabel="held-out accuracy, greedy", ylim=(-0.03, 1.03))
    axes.set_title("make demo: sums and differences, 512 held-out prompts", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center right")


if __name__ == "__main__":
    main()
