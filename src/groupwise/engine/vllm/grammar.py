"""Structured outputs through vLLM: the text that it is sent, and from which tokens those that it sampled were drawn.

vLLM keeps to a grammar with one of several libraries, which differ in what they leave out without a word: xgrammar, its
first choice, does not heed `allOf` and `not`. It is therefore always sent llguidance's Lark, which only llguidance
reads, the library of the local engine: what vLLM samples is text of the very grammar.

It says with which probability a token was drawn from those that the grammar allowed (`processed_logprobs`), and not
which these were. The same grammar is walked here over the sampled tokens to find them, so that the trainer computes the
same restricted distribution. That both are the same is checked once for each kind of grammar (`VllmEngine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from groupwise.engine.grammar import GrammarCompiler, allowed_tokens, lark_text
from groupwise.errors import EngineError
from groupwise.model.load import LoadedModel
from groupwise.recorded import SamplingMask, mask_entry
from groupwise.types import Grammar


class VllmGrammars:
    """Grammars of one model's tokens as vLLM has them. For any thread."""

    def __init__(self, base: LoadedModel):
        end: Any = base.tokenizer.eos_token_id  # which alone ends a text there
        self._vocabulary = base.vocabulary
        self._compiler = GrammarCompiler(
            base.tokenizer, vocabulary=base.vocabulary, eos_ids=list(base.eos_ids)[:1] if end is None else [end]
        )

    def prepare(self, grammar: Grammar, *, sender: str = "") -> Future[Any]:
        """See `LiveEngine.prepare`."""
        return self._compiler.prepare(grammar, sender=sender)

    def option(self, grammar: Grammar) -> dict[str, str]:
        """Return vLLM's `structured_outputs`. Raises GrammarError if vLLM does not have the grammar, or the model's
        tokens cannot be constrained."""
        return {"grammar": lark_text(grammar, self._compiler.tokenizer)}

    def mask(self, grammar: Grammar, token_ids: Sequence[int]) -> SamplingMask:
        """Return the part of the vocabulary from which each of these tokens was sampled. Raises EngineError: the
        grammar does not allow one of them."""
        text = lark_text(grammar, self._compiler.tokenizer)
        matcher = self._compiler.matcher(Grammar.lark(text, field=grammar.field)).deep_copy()
        entries = []
        for t, token in enumerate(token_ids):
            allowed_V = allowed_tokens([matcher], self._vocabulary)[0]
            if not allowed_V[token]:
                raise EngineError(
                    f"vLLM sampled token {token} in place {t} of a completion, and {grammar.field} does not allow it",
                    hint="its llguidance keeps to another grammar than this one's; sample with engine: local",
                )
            matcher.consume_token(token)
            entries.append(mask_entry(allowed_V))
        return SamplingMask.of_entries(self._vocabulary, entries)

    def close(self) -> None:
        self._compiler.close()
