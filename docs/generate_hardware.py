"""The example and the tables of docs/hardware.md, made by what `groupwise check FILE --gpus 1x80` asks and prints.

python docs/generate_hardware.py    write both into docs/hardware.md
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from groupwise.cli.print_fit import print_fit
from groupwise.config.run import load_config
from groupwise.run.gpu_fit import Cards, GpuFit, fit

sys.path.insert(0, str(Path(__file__).parent))
from published_shapes import shape_dir

CONFIGS = Path(__file__).parent.parent / "configs"
TARGET = Path(__file__).parent / "hardware.md"
EXAMPLE = re.compile(r"```text\nmodel .*?```", re.DOTALL)
BLOCK = re.compile(r"(<!-- fits -->\n).*?(<!-- end -->)", re.DOTALL)
GIB = 1 << 30
SHIPPED = {  # the GPU that its head names, and the shape of its model
    "gsm8k-0.5b": ("Qwen2.5-0.5B", "1x16"),
    "gsm8k-qwen3-0.6b": ("Qwen3-0.6B", "1x24"),
    "math-1.5b": ("Qwen2.5-1.5B", "1x24"),
    "countdown-3b": ("Qwen2.5-3B", "1x48"),
    "reverse-text-0.6b": ("Qwen3-0.6B", "1x16"),
    "wordle-1.7b": ("Qwen3-1.7B", "1x48"),
    "alphabet-sort-4b": ("Qwen3-4B", "1x80"),
    "tool-use-4b": ("Qwen3-4B", "1x80"),
}
SIZES, GPUS = ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen3-30B-A3B"), ("1x24", "1x80", "8x80")
HEAD = ("", "| run | model | GPUs | in the worst batch | micro-batch | at once | hours on H100s |", "|---" * 7 + "|")


def found(config: str, shape: str, gpus: str, *overrides: str) -> GpuFit:
    """What a shipped configuration takes with a model of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        run = load_config(CONFIGS / f"{config}.yaml", [f"model={shape_dir(shape, Path(folder))}", *overrides])
        return fit(run, Cards.parse(gpus))


def row(name: str, shape: str, gpus: str, fits: GpuFit) -> str:
    """A line of a table."""
    low, high = fits.hours
    used = f"{fits.needed.total / GIB:.1f} of {fits.available / GIB:.1f} GiB" + ("" if fits.fits else ": **no**")
    hours = f"{low:.1g} to {high:.1g}" if high < 1 else f"{low:.0f} to {high:.0f}"
    rows = f"{fits.rows}" if fits.rows else "vLLM"
    return f"| {name} | {shape} | {gpus} | {used} | {fits.micro_tokens:,} | {rows} | {hours if fits.fits else ''} |"


def tables() -> Iterator[str]:
    """The lines of both tables."""
    yield from HEAD
    for config, (shape, gpus) in SHIPPED.items():
        yield row(f"`{config}`", shape, gpus, found(config, shape, gpus))
    yield from ("", "`gsm8k-qwen3-0.6b` with other models:", *HEAD)
    for shape in SIZES:
        for gpus in GPUS:
            yield row("", shape, gpus, found("gsm8k-qwen3-0.6b", shape, gpus))
        yield row("`engine=vllm`", shape, GPUS[-1], found("gsm8k-qwen3-0.6b", shape, GPUS[-1], "engine=vllm"))


def example() -> list[str]:
    """The lines that the page's command prints."""
    fits = found("gsm8k-qwen3-0.6b", "Qwen3-0.6B", "1x24")
    named = replace(fits, config=fits.config.model_copy(update={"model": "Qwen/Qwen3-0.6B"}))
    print_fit(Console(file=(written := io.StringIO()), width=118), named)
    return [line.rstrip() for line in written.getvalue().splitlines()]


def page(text: str) -> str:
    """The page with its example and its tables as they are now."""
    text = EXAMPLE.sub(lambda block: "\n".join(["```text", *example(), "```"]), text)
    return BLOCK.sub(lambda block: "\n".join(["<!-- fits -->", *tables(), "", "<!-- end -->"]), text)


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
