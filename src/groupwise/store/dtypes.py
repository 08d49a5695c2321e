"""The number types in which a whole model is written, by format. Standard library only.

MERGED    as transformers saves it
GGUF      as llama.cpp reads it, with that format's names of the types
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

MERGED = ("float32", "bfloat16", "float16")
GGUF = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}

BY_FORMAT: Mapping[str, Collection[str]] = {"merged": MERGED, "gguf": GGUF}
