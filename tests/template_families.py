"""Chat templates of model families, each with an adversarial tokenizer: byte-level BPE that nothing keeps from merging
across words, line ends and the edges of what is said, so that text encoded again rarely has the ids it was sampled as.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from groupwise.tasks.starter.tokenizer import CHAT_TEMPLATE, MARKERS

# What Mistral's templates do since v3: tools stand before the last user message, results in a block of their own.
MISTRAL = (
    "{{ bos_token }}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and m == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}]{% else %} {{ m.content }}{% endif %}"
    "{{ eos_token }}{% else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}{% endfor %}"
)
PLAIN = (  # no special token anywhere
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHATML = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<|eom_id|>")
TURNS = ("<start_of_turn>", "<end_of_turn>")
INST = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]")  # fmt: skip
DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
            "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")  # fmt: skip
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


@dataclass(frozen=True)
class Family:
    """A template (one of TRL's by name, or its text), the special tokens in it, and those with a role of their own."""

    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    pad: str | None = None

    @property
    def source(self) -> str:
        return self.template if "{" in self.template else of_trl(self.template)


FAMILIES = {
    "starter": Family(CHAT_TEMPLATE.read_text(encoding="utf-8"), CHATML, "<|im_end|>", pad="<|endoftext|>"),
    "hermes": Family("qwen2_5", CHATML, "<|im_end|>", pad="<|im_end|>"),
    "qwen3": Family("qwen3", CHATML, "<|im_end|>", pad="<|endoftext|>"),
    "qwen3_5": Family("qwen3_5_think", CHATML, "<|im_end|>", pad="<|endoftext|>"),
    "llama3": Family("llama3_1", HEADERS, "<|eot_id|>", bos="<|begin_of_text|>", pad="<|eot_id|>"),
    "mistral": Family(MISTRAL, INST, "</s>", bos="<s>", pad="</s>"),
    "gemma": Family("gemma", TURNS, "<end_of_turn>", bos="<bos>", pad="<pad>"),
    "deepseek": Family("deepseek_r1_distill", DEEPSEEK, "<｜end▁of▁sentence｜>", bos="<bos>"),
    "nemotron": Family("nemotron_3_nano", CHATML, "<|im_end|>", pad="<|endoftext|>"),
    "glm": Family("glm4moe", GLM, "<|endoftext|>", pad="<|endoftext|>"),
    "no special tokens": Family(PLAIN, (), "<|endoftext|>", pad="<|endoftext|>"),
}


def of_trl(name: str) -> str:
    """A model's own template, as TRL ships it."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    return (folder / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The family's template on the adversarial tokenizer. The markers of thoughts and calls are tokens, not special."""
    family = FAMILIES[name]
    return with_tokens(family.source, family.special, eos=family.eos, bos=family.bos, pad=family.pad)


def with_tokens(
    template: str, special: tuple[str, ...], *, eos: str, bos: str | None = None, pad: str | None = None
) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(_merges())
    named = dict.fromkeys((*special, *(token for token in (eos, bos, pad) if token)))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token=bos, pad_token=pad, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


@functools.cache
def _merges() -> str:
    """BPE without a pre-tokenizer, trained on what straddles: ends of answers, line ends, JSON, beginnings of turns."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    texts = [
        f'assistant\n\n{a} {b}\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n\nuser\nThe answer is {a}{b}.\n'
        for a in range(12)
        for b in range(12)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe.to_str()
