"""Translates how several processes share a model in another system to our `train.parallel` and `train.cpu_offload`.

    fsdp, fsdp_config, fsdp_version, dp_shard_size     FSDP: parallel fsdp; its `offload` is cpu_offload
    deepspeed                                          a file, its name or its content: ZeRO 3 is fsdp, 1 and 2 are
    ddp
    accelerate_config                                  of `trl grpo`: a file, or one of the names that TRL has

ZeRO 1 and 2 cut what the optimizer keeps, and not the weights: with an adapter that is next to nothing, and the same
update either way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.config.formats.keys import boolean
from groupwise.config.formats.translation import Translation
from groupwise.errors import GroupwiseError

_ZERO = re.compile(r"zero[-_]?(?:stage[-_]?)?([0-3])", re.IGNORECASE)

_PLAIN = ("multi_gpu", "single_gpu", "ddp", "no", "multi_cpu")

FSDP_WORDS = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard", "offload", "auto_wrap")


def fsdp(value: Any) -> Any:
    """Accept true or false, or FSDP's words in a list or one text."""
    if isinstance(value, bool):
        return value
    words = value.replace(",", " ").split() if isinstance(value, str) else value
    if words in (["true"], ["false"]):
        return boolean(words[0])
    if not isinstance(words, list) or any(word not in FSDP_WORDS for word in words):
        raise ValueError(f"true or false, or some of {', '.join(FSDP_WORDS)}")
    return words


def settings(value: Any) -> Any:
    """Return a mapping, or the path of a file with one."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str) or not value:
        raise ValueError("a mapping, or the path of a file")
    return value


def put_parallel(t: Translation, folder: Path) -> None:
    """Set `train.parallel` and `train.cpu_offload`; named files are read from `folder`."""
    asked = [name for name in ("fsdp", "deepspeed", "accelerate_config") if name in t.keys and t[name]]
    if len(asked) > 1:
        t.problem(asked[1], f"{asked[0]} says how the model is shared too; write one of them")
        return
    if asked == ["deepspeed"] or asked == ["accelerate_config"]:
        _put_file(t, asked[0], folder)
    elif asked or _given_config(t) or ("dp_shard_size" in t.keys and (t["dp_shard_size"] or 1) > 1):
        _put_fsdp(t)


def _given_config(t: Translation) -> bool:
    return t["fsdp"] is None and bool(t["fsdp_config"])


def _put_fsdp(t: Translation) -> None:
    words = t["fsdp"] if isinstance(t["fsdp"], list) else []
    if "no_shard" in words:
        t.put("train.parallel", "ddp", "fsdp")
        return
    t.put("train.parallel", "fsdp", *(name for name in ("fsdp", "fsdp_config", "dp_shard_size") if name in t.keys))
    settings = t["fsdp_config"] if isinstance(t["fsdp_config"], dict) else {}
    if "offload" in words or _offloads(settings):
        t.put("train.cpu_offload", True, "fsdp", "fsdp_config")


def _offloads(settings: Mapping[str, Any]) -> bool:
    asked = [settings.get(name) for name in ("offload_params", "fsdp_offload_params", "cpu_offload")]
    return any(value is True or str(value).lower() == "true" for value in asked)


def _put_file(t: Translation, name: str, folder: Path) -> None:
    said = t[name]
    content = said if isinstance(said, dict) else _read(folder / said)
    found = _of_name(str(said)) if content is None else _of_content(content)
    if found is None:
        why = f"what {said!r} asks for is unknown; it is no file here, and its name tells no stage of ZeRO"
        t.refuse(name, why, instead=f"{name}=null train.parallel=fsdp")
        return
    parallel, offload = found
    t.put("train.parallel", parallel, name)
    if offload and parallel == "fsdp":
        t.put("train.cpu_offload", True, name)


def _read(path: Path) -> Mapping[str, Any] | None:
    """Return the mapping in a JSON or YAML file; None if there is none."""
    from groupwise.config.yaml import Document

    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text("utf-8")) if path.suffix == ".json" else Document.read(path).data
    except (ValueError, GroupwiseError):
        return None


def _of_name(said: str) -> tuple[str, bool] | None:
    """Return (parallel, whether weights are offloaded) for a file's name or one of TRL's."""
    stem = Path(said).stem.lower()
    offload = "offload" in stem
    if stage := _ZERO.search(stem):
        return ("fsdp" if stage[1] == "3" else "ddp"), offload
    if "fsdp" in stem:
        return "fsdp", offload
    return ("ddp", False) if stem in _PLAIN else None


def _of_content(content: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Return the same of a DeepSpeed file, or of accelerate's."""
    if isinstance(zero := content.get("zero_optimization"), Mapping):
        offload = zero.get("offload_param") or {}
        return ("fsdp" if zero.get("stage") == 3 else "ddp"), offload.get("device", "none") == "cpu"
    kind = str(content.get("distributed_type", "")).upper()
    if kind == "FSDP":
        return "fsdp", _offloads(content.get("fsdp_config") or {})
    if kind == "DEEPSPEED":
        settings = content.get("deepspeed_config") or {}
        offload = settings.get("offload_param_device") == "cpu"
        return ("fsdp" if settings.get("zero_stage") == 3 else "ddp"), offload
    return ("ddp", False) if kind.lower() in _PLAIN else None
