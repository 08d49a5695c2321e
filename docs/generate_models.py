"""The tables of docs/models.md, made from what tests measure and write: docs/models.json (`tests/slow/test_models.py`),
docs/models_seeing.json (`tests/slow/test_seeing_families.py`), docs/models_vllm.json
(`tests/vllm_server/test_vllm_families.py`) and docs/reply_formats.json
(`tests/model/reply_formats/test_reply_families.py`).

    python docs/generate_models.py    write the tables into docs/models.md

A table stands between `<!-- NAME -->` and `<!-- end -->`; the rest of the page is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TARGET, DATA, OF_VLLM = FOLDER / "models.md", FOLDER / "models.json", FOLDER / "models_vllm.json"
LISTED_BY_VLLM = """
    ApertusForCausalLM BambaForCausalLM Cohere2ForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM
    Ernie4_5ForCausalLM Exaone4ForCausalLM FalconH1ForCausalLM GPT2LMHeadModel GPTNeoXForCausalLM Gemma2ForCausalLM
    Gemma3ForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM GptOssForCausalLM GraniteForCausalLM
    GraniteMoeHybridForCausalLM HunYuanDenseV1ForCausalLM JambaForCausalLM KimiLinearForCausalLM Lfm2ForCausalLM
    Lfm2MoeForCausalLM Llama4ForCausalLM LlamaForCausalLM Mamba2ForCausalLM MambaForCausalLM MiniMaxM2ForCausalLM
    MistralForCausalLM MixtralForCausalLM NemotronHForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoeForCausalLM
    Phi3ForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM SeedOssForCausalLM
    Starcoder2ForCausalLM
"""  # classes in its registry of models, of those that the tests here have
OF_SEEING = FOLDER / "models_seeing.json"
OF_REPLIES = FOLDER / "reply_formats.json"
FORMATS = {
    "hermes": "Hermes",
    "qwen_xml": "Qwen's XML",
    "llama": "Llama's",
    "mistral": "Mistral's",
    "mistral_args": "Mistral's since v11",
    "glm": "GLM's",
    "deepseek_v3": "DeepSeek's",
    "deepseek_v31": "DeepSeek's since V3.1",
    "kimi": "Kimi's",
    "minimax": "MiniMax's",
    "lfm2": "LFM2's",
    "harmony": "Harmony",
    "gemma4": "Gemma 4's",
}
TEMPLATES = {  # family of tests/template_families.py -> the models whose template it has
    "starter": "the starter",
    "hermes": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3.5",
    "nemotron": "Nemotron 3 Nano",
    "llama3": "Llama 3.1",
    "mistral": "Mistral before tokenizer v11 *",
    "mistral v13": "Mistral since tokenizer v13 *",
    "glm": "GLM-4.5",
    "deepseek v3": "DeepSeek-V3, R1",
    "deepseek v3.1": "DeepSeek-V3.1 *",
    "kimi": "Kimi K2 Thinking *",
    "minimax": "MiniMax-M2 *",
    "lfm2": "LFM2",
    "lfm2.5": "LFM2.5",
    "gpt-oss": "gpt-oss",
    "gemma 4": "Gemma 4",
}

Families = Mapping[str, Mapping[str, Any]]


def families(rows: Families) -> Iterator[str]:
    """How each is sampled and trained, and what of its chat is read."""
    yield "| models | class | sampled | trained | tool calls | thoughts | vLLM |"
    yield "|---|---|---|---|---|---|---|"
    tried = json.loads(OF_VLLM.read_text(encoding="utf-8"))["families"]
    for key, row in rows.items():
        calls, thoughts = row["tool_calls"], row["thinking"]
        cells = [row["name"], f"`{row['class']}`", row["sampled"], row["trained"], FORMATS.get(calls, calls)]
        cells.append(mark(thoughts))
        yield f"| {' | '.join([*cells, vllm(row['class'], tried.get(key, {}))])} |"


def seeing(_: Families) -> Iterator[str]:
    """How what sees is sampled and trained, how an image is placed, and what was measured."""
    yield "| models | class | sampled | trained | images | positions | sampler - trainer, nats | trainer - PEFT, nats |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in json.loads(OF_SEEING.read_text(encoding="utf-8")).values():
        ahead = f"; tokens of one see each other {row['ahead']}" if row["ahead"] else ""
        images = row["images"] + ahead + (", with deepstack" if row["deepstack"] else "")
        positions = "one a token" if row["positions"] == 1 else "three a token"
        numbers = (f"{row[name]:.0e}" for name in ("gap", "peft_gap"))
        cells = [row["name"], f"`{row['class']}`", row["sampled"], row["trained"], images, positions, *numbers]
        yield f"| {' | '.join(cells)} |"


def mark(text: str) -> str:
    """A cell of which markers are code, as in "<think>, not read"."""
    return re.sub(r"<[^,]*[>\w]", lambda tag: f"`{tag[0]}`", text).replace("|", r"\|")


def replies(_: Families) -> Iterator[str]:
    """What of replies is read, shown again, streamed and constrained, by the template of each family."""
    done = ("read", "rendered", "streamed", "constrained")
    yield "| template | calls | read | rendered | streamed | constrained | thinking | prefill |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, row in json.loads(OF_REPLIES.read_text(encoding="utf-8")).items():
        cells = [TEMPLATES[name], FORMATS[row["format"]], *("yes" if row[each] else "no" for each in done)]
        yield f"| {' | '.join([*cells, mark(row['thinking']), 'yes' if row['prefill'] else 'no'])} |"


def agreement(rows: Families) -> Iterator[str]:
    """What was measured of each."""
    yield "| class | sampler - trainer, nats | trainer - PEFT, nats | gradient | `all-linear` adapts |"
    yield "|---|---|---|---|---|"
    for row in rows.values():
        numbers = (f"{row[name]:.0e}" for name in ("gap", "peft_gap", "gradient"))
        yield f"| `{row['class']}` | {' | '.join(numbers)} | {', '.join(f'`{name}`' for name in row['targets'])} |"


def reasons(rows: Families) -> Iterator[str]:
    """Why what does not run packed does not."""
    yield from ("| why not packed | classes |", "|---|---|")
    for why in dict.fromkeys(row["why"] for row in rows.values() if row["why"]):
        names = [f"`{row['class']}`" for row in rows.values() if row["why"] == why]
        yield f"| {why} | {', '.join(names)} |"


def vllm(name: str, tried: Mapping[str, Any]) -> str:
    """Whether vLLM has sampled such a model here, and how far from the trainer."""
    if "gap" in tried:
        return f"{tried['gap']:.0e} nats"
    if "refused" in tried:
        return "not on a CPU"
    return "listed, not tried" if name in LISTED_BY_VLLM.split() else "not tried"


def refusals(rows: Families) -> Iterator[str]:
    """Why vLLM does not sample what it was tried with."""
    yield from ("| class | what vLLM says |", "|---|---|")
    for key, found in json.loads(OF_VLLM.read_text(encoding="utf-8"))["families"].items():
        if "refused" in found:
            yield f"| `{rows[key]['class']}` | `{found['refused'].replace('|', ' ')}` |"


TABLES: dict[str, Callable[[Families], Iterator[str]]] = {
    "families": families,
    "seeing": seeing,
    "replies": replies,
    "agreement": agreement,
    "reasons": reasons,
    "refusals": refusals,
}
BLOCK = re.compile(rf"(<!-- ({'|'.join([*TABLES, 'versions'])}) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The page with its tables as the data is now."""
    data = json.loads(DATA.read_text(encoding="utf-8"))

    def block(found: re.Match[str]) -> str:
        if found[2] == "versions":
            of_vllm = {"vLLM": json.loads(OF_VLLM.read_text(encoding="utf-8"))["vllm"]}
            said = ", ".join(f"{name} {number}" for name, number in (data["versions"] | of_vllm).items())
            return f"{found[1]}Measured with {said}, on a CPU.\n{found[3]}"
        return "\n".join([found[1], *TABLES[found[2]](data["families"]), "", found[3]])

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
