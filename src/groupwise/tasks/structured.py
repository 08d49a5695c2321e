"""The form that a reply must have, as one `Grammar`: an answer as asked for, tool calls in the model's own format, and
what of a reply is free.

    reply_grammar   tools, whether one must be called, and an answer's grammar -> the grammar of a reply
    answer_grammars the same without tools, for several conversations
    format_grammar  OpenAI's `response_format` -> the grammar of an answer
    of_reply        sampling parameters with an answer's grammar -> those of one reply, which may think and call tools
    with_thoughts   a grammar with what a reply to this prompt may think in front (`thoughts_of`)

A call is written as the model's chat template writes it (`model.reply_formats`), with a name that was offered and
arguments that are valid for it. The engine keeps to a grammar; here it is only written, in llguidance's Lark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from groupwise.model.chat import THINKS, decode, opens_thought, template_reads, template_thinks
from groupwise.model.reply_formats.format import ReplyFormat, Tool
from groupwise.model.reply_formats.known import format_of
from groupwise.model.reply_formats.lark import TEXT
from groupwise.types import Grammar, GrammarKind, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUDGET = "rollout.thinking_budget"


def thoughts_of(prompt_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Literal["none", "optional", "begun"]:
    """Return what `Grammar.thoughts` is for a reply to this prompt: "begun" where it ends inside a thought, "optional"
    where the model thinks unasked, or the chat template has a switch for thoughts and the prompt does not show that
    they are off."""
    if opens_thought(prompt_ids, tokenizer):
        return "begun"
    form = format_of(tokenizer)
    thinks = template_reads(THINKS, tokenizer) or (form.thinks_unasked and template_thinks(tokenizer))
    return "optional" if thinks and not form.thought_is_over(decode(prompt_ids[-8:], tokenizer)) else "none"


def with_thoughts(
    grammar: Grammar,
    tokenizer: PreTrainedTokenizerBase,
    thoughts: Literal["none", "optional", "begun"],
    *,
    tokens: int | None = None,
) -> Grammar:
    """Return a grammar with what may be thought in front, for `tokens` tokens at most, between the model's own
    marks."""
    marks = format_of(tokenizer).thought
    return replace(grammar, thoughts=thoughts, thought_tokens=tokens, marks=(marks.start, marks.end))


def answer_grammars(
    answer: Grammar | None, prompts: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> list[Grammar | None]:
    """Return the grammar of the reply to each of several conversations, whose answers all have the same."""
    written = reply_grammar(format_of(tokenizer), (), tokenizer, answer=answer)
    return [written and with_thoughts(written, tokenizer, thoughts_of(ids, tokenizer)) for ids in prompts]


def format_grammar(
    kind: Literal["text", "json_object", "json_schema"],
    schema: Mapping[str, Any] | None = None,
    *,
    strict: bool | None = None,
) -> Grammar | None:
    """Return what OpenAI's `response_format` of this type asks for; None for text. `strict` false leaves to the model
    what of the schema cannot be guaranteed."""
    if kind == "text":
        return None
    if kind == "json_object" or schema is None:
        return Grammar.of_json(field="response_format")
    return Grammar.of_json(schema, lenient=strict is False, field="response_format.json_schema.schema")


def of_reply(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[Tool] = (),
) -> SamplingParams:
    """Return `params` for the reply to this prompt, where `params.grammar` is that of an answer: the reply may think
    first, for `params.thinking_budget` tokens, and may be calls of `tools` instead. Raises GrammarError where what a
    tool takes cannot be guaranteed."""
    budget = params.thinking_budget
    if params.grammar is None and budget is None:
        return params
    thoughts = thoughts_of(prompt_ids, tokenizer)
    if params.grammar is None:
        if thoughts == "none":
            return params
        return replace(params, grammar=with_thoughts(free_reply(), tokenizer, thoughts, tokens=budget))
    grammar = reply_grammar(format_of(tokenizer), tools, tokenizer, answer=params.grammar)
    assert grammar is not None  # as there is an answer
    return replace(params, grammar=with_thoughts(grammar, tokenizer, thoughts, tokens=budget))


def free_reply() -> Grammar:
    """Return the grammar of a reply of which only the thought is bounded (`rollout.thinking_budget`)."""
    return Grammar(GrammarKind.FREE, field=BUDGET)


def reply_grammar(
    form: ReplyFormat,
    tools: Sequence[Tool],
    tokenizer: PreTrainedTokenizerBase,
    *,
    choice: Literal["auto", "required"] = "auto",
    only: str | None = None,
    several: bool = True,
    answer: Grammar | None = None,
) -> Grammar | None:
    """Return the grammar of a reply for which `tools` were offered.

    Args:
        choice: "required" for a call of any of them; "auto" for calls or an answer. Without an `answer`, "auto" leaves
            text free, and calls in it are kept to their form if one of the tools is `strict`.
        only: the name of the tool that is to be called; None is any.
        several: whether there may be more than one call.
        answer: the grammar of a reply that is not a call.

    Returns:
        None where everything is allowed.

    Raises:
        GrammarError: what a tool takes cannot be guaranteed in this format.
    """
    strict = any(tool["function"].get("strict") for tool in tools)
    if answer is None and (not tools or (choice == "auto" and not strict)):
        return None
    if not tools and not form.answer_head:
        return answer
    writer = form.writer(tools, tokenizer, only=only)
    if answer is not None and not tools:
        return Grammar(GrammarKind.LARK, f"start: {writer.answer()}", parts=(("content", answer),), field=answer.field)
    calls = writer.calls(several=several)
    if choice == "auto" and answer is not None:
        rules, parts = [f"start: calls | {writer.answer()}\ncalls: {calls}"], [("content", answer)]
    elif choice == "auto":
        rules, parts = [writer.amid_text(several=several)], []
    else:
        rules, parts = [f"start: {calls}"], []
    source = "\n".join([*rules, *writer.rules, f"TEXT: {TEXT}"])
    return Grammar(GrammarKind.LARK, source, parts=(*parts, *writer.parts), field="tools")
