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
MISTRAL_V13 = MISTRAL.replace(  # ... and since tokenizer v13: a marker for each call
    "[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}]",
    "{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}{{ c.function.arguments | tojson }}"
    "{% endfor %}",
)
PLAIN = (  # no special token anywhere
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
REMADE = Path(__file__).parent / "chat_templates"  # where TRL has none: after what models' repositories publish
CHATML = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<|eom_id|>")
TURNS = ("<start_of_turn>", "<end_of_turn>")
INST = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]")  # fmt: skip
DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
            "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")  # fmt: skip
DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                  "<｜tool▁sep｜>")  # fmt: skip
KIMI_MARKS = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
              "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
              "<|tool_call_end|>")  # fmt: skip
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")
GEMMA4 = ("<|turn>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>",
          "<|channel>", "<channel|>", "<|think|>", '<|"|>')  # fmt: skip
MINIMAX_MARKS = ("]~!b[", "]~b]", "[e~[")
LFM2_MARKS = ("<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>",
              "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>")  # fmt: skip
GLM_TAGS, MINIMAX_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), ("<minimax:tool_call>",
                          "</minimax:tool_call>")  # fmt: skip
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


@dataclass(frozen=True)
class Family:
    """A template (its text, or the name of one in `REMADE` or of TRL's), the special tokens in it, and those with
    a role of their own."""

    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    pad: str | None = None
    tags: tuple[str, ...] = ()  # of calls, which are texts in some tokenizers and tokens in others

    @property
    def source(self) -> str:
        return self.template if "{" in self.template else template_of(self.template)


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
    "glm": Family("glm4moe", GLM, "<|endoftext|>", pad="<|endoftext|>", tags=GLM_TAGS),
    "no special tokens": Family(PLAIN, (), "<|endoftext|>", pad="<|endoftext|>"),
}

# Families whose templates take earlier messages in another form than OpenAI's (`ReplyFormat.history`), or write calls
# as these do.
OTHERS = {
    "mistral v13": Family(MISTRAL_V13, (*INST, "[ARGS]"), "</s>", bos="<s>", pad="</s>"),
    "deepseek v3": Family("deepseekv3", (*DEEPSEEK, *DEEPSEEK_CALLS), "<｜end▁of▁sentence｜>", bos="<bos>"),
    "deepseek v3.1": Family("deepseek_v31", (*DEEPSEEK, *DEEPSEEK_CALLS), "<｜end▁of▁sentence｜>", bos="<bos>"),
    "kimi": Family("kimi_k2_thinking", KIMI_MARKS, "<|im_end|>", pad="<|endoftext|>"),
    "minimax": Family("minimax_m2", MINIMAX_MARKS, "[e~[", pad="<|endoftext|>", tags=MINIMAX_TAGS),
    "lfm2": Family("lfm2_v2", LFM2_MARKS, "<|im_end|>", bos="<|startoftext|>", pad="<|endoftext|>"),
    "lfm2.5": Family("lfm2_2_5_v2", LFM2_MARKS, "<|im_end|>", bos="<|startoftext|>", pad="<|endoftext|>"),
    "gpt-oss": Family("gptoss", HARMONY, "<|return|>", pad="<|endoftext|>"),
    "gemma 4": Family("gemma4_v5", GEMMA4, "<turn|>", bos="<bos>", pad="<pad>"),
}


def template_of(name: str) -> str:
    """A model's own template, as TRL ships it, or one in `REMADE`."""
    own = REMADE / f"{name}.jinja"
    if own.exists():
        return own.read_text(encoding="utf-8")
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    return (folder / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The family's template on the adversarial tokenizer. The markers of thoughts and calls are tokens, not special."""
    family = (FAMILIES | OTHERS)[name]
    return with_tokens(family.source, family.special, eos=family.eos, bos=family.bos, pad=family.pad)


@functools.cache
def plain_tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The same where the family's own tokens, and the tags of its calls, are not declared special either."""
    family = (FAMILIES | OTHERS)[name]
    tokenizer = with_tokens(family.source, (), eos=family.eos, bos=family.bos, pad=family.pad)
    tokenizer.add_tokens(
        [AddedToken(each, special=False, normalized=False) for each in (*family.special, *family.tags)]
    )
    return tokenizer


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
