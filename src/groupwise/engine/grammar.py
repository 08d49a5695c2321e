"""Structured outputs: which tokens may come next, so that a completion is text of a `Grammar`.

    Grammar -> (GrammarCompiler, once) -> a matcher, copied for every row -> the tokens that it allows (allowed_tokens)

The matcher is llguidance's (github.com/guidance-ai/llguidance): a lexer of regular-expression derivatives under an
Earley parser, walked over the tokenizer's trie. It says of the whole vocabulary which tokens begin or continue some
text of the grammar; the others' logits become -inf, and one of these is drawn. Where the text is complete the
end-of-turn tokens are allowed, and where nothing can follow they alone.

JSON is written as models write it: at most a space between two signs, or a line end and the indentation of the next.
Unbounded space would be valid, and a model that once begins with it may never end.

A grammar comes from a client and cannot be trusted. So its length is bounded, and so are the parts of a schema that are
known to explode (`check_bounds`). The grammar is compiled in a process that can be killed (`vetting`) before it is
compiled here, in a separate thread; and the library bounds the work of each token. A grammar that reaches a bound
during sampling fails only its own request.

Shapes: C rows with a grammar, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from groupwise.config.yaml import dotted
from groupwise.engine.vetting import BESIDE, Debts, TokenizerParts, Vetting, too_costly
from groupwise.errors import GrammarError, OverloadedError
from groupwise.types import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

MOST_CHARACTERS = 1 << 16  # of a grammar with its parts
MOST_STATES = 50_000  # of a matcher's lexer, 1 to 2 kB each
MOST_FUEL = 100_000  # of a matcher's lexer for one token; the hardest tried take 0.1 s, and fail there
MATCH_S, MATCH_TOKEN_S = 1.0, 0.005  # that a request's grammar may take, and more for each token; most take under 0.001
MOST_COMPILED = 64  # grammars that are kept,
MOST_KEPT = 256 << 20  # and bytes of memory that compiling them took
MOST_VERDICTS = 4096  # grammars of which is known whether they may be compiled
COMPILED_BESIDE = 2  # grammars that are compiled here at the same time
COMPILE_S = 30.0  # for one grammar, with those that wait before it
TRIED = 4  # tokens that are tried of a new grammar
PROBED = 256  # parts of a schema that are compiled alone to find which of them is wrong
TOGETHER = 4  # rows from which on llguidance's own threads share the work

WHITESPACE = r"[ ]|\r?\n[ \t]{0,64}"
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Values of `format` that are kept to. All others only describe, as by JSON Schema's default all do."""

MOST_STEP = 50_000  # of `multipleOf`, without its point,
MOST_ROUND = 100  # ... and without the zeros at its end
MOST_PATTERNS = 128  # `patternProperties` of one schema

Schema = dict[str, Any]


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps those that were used last. For any thread.

    Args:
        vocabulary: the number of logits, V.
        eos_ids: the ids that end a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, vocabulary: int, eos_ids: Sequence[int]):
        self._source, self._vocabulary, self._eos_ids = tokenizer, vocabulary, list(eos_ids)
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()  # those that were used last
        self._held: WeakValueDictionary[Grammar, Future[LLMatcher]] = WeakValueDictionary()  # all that anything holds
        self._sizes: WeakKeyDictionary[Future[LLMatcher], int] = WeakKeyDictionary()  # bytes that compiling it took
        self._verdicts: OrderedDict[bytes, int | None] = OrderedDict()  # bytes of memory; None is too much of anything
        self._debts = Debts()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(BESIDE, thread_name_prefix="groupwise-grammar")
        self._building, self._compiling = threading.Lock(), threading.Semaphore(COMPILED_BESIDE)
        self._closed = False

    def prepare(self, grammar: Grammar, *, sender: str = "") -> Future[LLMatcher]:
        """Compile a grammar in a thread, once. The future is shared: do not cancel it. Who holds it finds the grammar
        compiled, whatever else is asked for meanwhile.

        It raises GrammarError, OverloadedError where grammars of the `sender` that were refused have taken too long
        lately, and NotReadyError where there is no process to vet it.
        """
        with self._lock:
            future = self._held.get(grammar)
            if future is None or (future.done() and future.exception() is not None):
                try:
                    self._debts.check(sender)
                except OverloadedError as error:  # of this sender alone: others may ask for the same
                    refused: Future[LLMatcher] = Future()
                    refused.set_exception(error)
                    return refused
                future = self._held[grammar] = self._threads.submit(self._compile_for, sender, grammar)
            self._compiled[grammar] = future
            self._compiled.move_to_end(grammar)
            self._forget()
        return future

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Return a compiled grammar, to be copied (`deep_copy`) and not to be used itself. Waits while it is compiled.

        Raises:
            GrammarError: it cannot be compiled.
        """
        try:
            return self.prepare(grammar).result(timeout=COMPILE_S)
        except TimeoutError:
            raise too_slow(grammar) from None

    def close(self) -> None:
        """End what is being vetted at once; what was vetted and is being compiled ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._closed = True
        if vetting := self.__dict__.get("_vetting"):
            vetting.close()

    def _forget(self) -> None:
        """Keep as many as may be, and as much: those that were used last."""
        while len(self._compiled) > MOST_COMPILED or self._bytes > MOST_KEPT:
            self._compiled.popitem(last=False)

    @property
    def _bytes(self) -> int:
        return sum(self._sizes.get(each, 0) for each in self._compiled.values())

    # ---- in a thread ----
    @cached_property
    def _parts(self) -> TokenizerParts:
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self._source, PreTrainedTokenizerFast) or not self._eos_ids:
            lack = "no fast tokenizer (tokenizer.json)" if self._eos_ids else "no end-of-turn token"
            raise GrammarError(f"this model has {lack}, so its text cannot be kept to a grammar")
        most = max(self._vocabulary, len(self._source))
        backend = copy.copy(self._source.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return TokenizerParts(backend.to_str(), most, tuple(self._eos_ids))

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """Return it as llguidance has it; a second for a large vocabulary. Raises GrammarError where it can have
        none."""
        return self._parts.open()

    @cached_property
    def _vetting(self) -> Vetting:
        return Vetting(self._parts)

    def _compile_for(self, sender: str, grammar: Grammar) -> LLMatcher:
        self._start()
        try:
            return self._compile(grammar)
        except GrammarError as error:
            self._debts.charge(sender, error.seconds)
            raise

    def _compile(self, grammar: Grammar) -> LLMatcher:
        check_bounds(grammar)
        self._vet(grammar)
        with self._compiling:
            return compile_grammar(grammar, self.tokenizer)

    def _start(self) -> None:
        """Load the parts that all grammars need; this takes a second, which counts for no sender. Raises GrammarError
        if this model's text cannot be kept to one, and NotReadyError."""
        with self._building:
            assert self.tokenizer
            vetting = self._vetting
        if self._closed:
            vetting.close()
        vetting.start()

    def _vet(self, grammar: Grammar) -> None:
        """Raise GrammarError, NotReadyError."""
        key, costly = digest(grammar), None
        with self._lock:
            known, size = key in self._verdicts, self._verdicts.get(key)
        if not known:
            try:
                size = self._vetting.vet(grammar)
            except GrammarError as error:
                if error.kind != "limit":
                    raise
                costly = error
        with self._lock:
            self._verdicts[key] = size
            self._verdicts.move_to_end(key)
            if size is not None and (future := self._held.get(grammar)) is not None:
                self._sizes[future] = size
            while len(self._verdicts) > MOST_VERDICTS:
                self._verdicts.popitem(last=False)
            self._forget()
        if size is None:
            raise costly or too_costly(grammar)


def digest(grammar: Grammar) -> bytes:
    """Return what stands for a grammar, whatever errors call it."""
    parts = [(name, digest(part)) for name, part in grammar.parts]
    said = repr(
        (
            grammar.kind.value,
            grammar.source,
            grammar.thoughts,
            grammar.thought_tokens,
            grammar.marks,
            grammar.lenient,
            parts,
        )
    )
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).digest()


def check_grammar(grammar: Grammar) -> None:
    """Compile a grammar for a vocabulary of bytes: what is wrong with it whatever the model. Raises GrammarError."""
    check_bounds(grammar)
    with closing(Vetting(TokenizerParts())) as vetting:
        vetting.vet(grammar)


def too_slow(grammar: Grammar) -> GrammarError:
    """Return the error for a grammar that was not compiled in time."""
    message = f"{grammar.field} was not compiled after {COMPILE_S:g} seconds"
    return GrammarError(message, hint="make it smaller", field=grammar.field)


def allowed_tokens(matchers: Sequence[LLMatcher], vocabulary: int) -> np.ndarray:
    """Return which tokens may come next: booleans [C, V]. A matcher that failed (`is_error`) allows none."""
    from llguidance import numpy as masks

    bits_CW = masks.allocate_token_bitmask(len(matchers), vocabulary)
    if len(matchers) < TOGETHER:
        for row, matcher in enumerate(matchers):
            bits_CW[row].view(np.uint8)[:] = 0
            if not matcher.is_error():
                raw = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: bits_CW.shape[1] * 4]
                bits_CW[row].view(np.uint8)[: len(raw)] = raw
    else:
        masks.fill_next_token_bitmask_par(_executor(), [(each, row) for row, each in enumerate(matchers)], bits_CW)
        bits_CW[[each.is_error() for each in matchers]] = 0
    return np.unpackbits(bits_CW.view(np.uint8), axis=1, bitorder="little")[:, :vocabulary].astype(bool)


class MatchTime:
    """Seconds that the engine's thread spent on following one request's grammar. What takes as long for each token as a
    step takes for a whole batch holds everybody up."""

    def __init__(self) -> None:
        self._left = MATCH_S

    def take(self, seconds: float, *, tokens: int = 0) -> None:
        """Count these seconds, which went to so many tokens."""
        self._left += MATCH_TOKEN_S * tokens - seconds

    @property
    def is_over(self) -> bool:
        """Return whether the request has had more than it may."""
        return self._left < 0


def failed(grammar: Grammar, matcher: LLMatcher) -> GrammarError:
    """Return the error for a matcher that ran into a bound while it was used, or whose request took too long
    (`MatchTime`)."""
    why = matcher.get_error().partition("\n")[0] or "its tokens take too long"
    return GrammarError(
        f"{grammar.field} is too complex for the next token to be found in time: {why}",
        hint="make it smaller: fewer optional properties and alternatives",
        field=grammar.field,
    )


_EXECUTOR: list[Any] = []


def _executor() -> Any:
    """Return llguidance's threads, which all engines share."""
    if not _EXECUTOR:
        from llguidance import LLExecutor

        _EXECUTOR.append(LLExecutor())
    return _EXECUTOR[0]


# ---- from a Grammar to llguidance ----
def check_bounds(grammar: Grammar) -> None:
    """Raise GrammarError for a grammar that is too long, or has what is known to explode when it is compiled."""
    length = len(grammar.source) + sum(len(part.source) for _, part in grammar.parts)
    if length > MOST_CHARACTERS:
        raise GrammarError(
            f"{grammar.field} has {length} characters; it may have {MOST_CHARACTERS}",
            hint="make it smaller",
            field=grammar.field,
        )
    for each in (grammar, *(part for _, part in grammar.parts)):
        if each.kind is GrammarKind.JSON_SCHEMA:
            _check_schema(each)


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile it in this thread, however long that takes. Raises GrammarError."""
    matcher, wrong = _try(grammar, tokenizer)
    if not wrong:
        return matcher
    for part in (each for _, each in grammar.parts):
        if why := _try(part, tokenizer)[1]:
            raise _refused(part, why, tokenizer)
    raise _refused(grammar, wrong, tokenizer)


def _try(grammar: Grammar, tokenizer: LLTokenizer) -> tuple[LLMatcher, str]:
    """Return a matcher, and what is wrong with the grammar; nothing is."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MOST_STATES, step_lexer_fuel=MOST_FUEL, verbose_errors=False)
    matcher = LLMatcher(
        tokenizer, json.dumps({"grammars": _definitions(grammar, tokenizer)}), log_level=0, limits=limits
    )
    trial = matcher.deep_copy()
    for _ in range(TRIED):
        if trial.is_error() or trial.is_stopped():
            break
        bits = np.unpackbits(np.frombuffer(trial.compute_bitmask(), np.uint8), bitorder="little")
        bits[list(tokenizer.eos_tokens)] = 0
        if trial.is_error() or not bits.any():
            break
        trial.consume_token(int(bits.argmax()))
    return matcher, trial.get_error()


def _definitions(grammar: Grammar, tokenizer: LLTokenizer) -> list[dict[str, Any]]:
    """Return llguidance's list of grammars; the first one is the entry."""
    answer = {"name": "answer", **_definition(grammar, tokenizer)}
    parts = [{"name": name, **_definition(part, tokenizer)} for name, part in grammar.parts]
    if grammar.thoughts == "none":
        return [answer, *parts]
    return [{"name": "reply", "lark_grammar": _with_thought(grammar, tokenizer)}, answer, *parts]


def lark_text(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """Return a grammar, its parts and its thoughts as one text in llguidance's Lark: vLLM takes no list of grammars.

    Only llguidance reads its first line, by which vLLM tells it from grammars of its other libraries. JSON stands on
    one line, with or without a space between two of its parts: versions of llguidance before 1.9 (vLLM 0.32 asks for
    1.7) do not heed a pattern of whitespace.

    Raises:
        GrammarError: what is to be JSON, or Lark, is none.
    """
    header = "%llguidance {}"
    if grammar.thoughts == "none":
        source = _one_source(grammar, tokenizer)
        return source if "%llguidance" in source else f"{header}\n{source}"
    thought = _with_thought(grammar, tokenizer).replace("@answer", "answer")
    return f"{header}\n{thought}\nanswer: %lark {{\n{_one_source(grammar, tokenizer)}\n}}"


_REFERENCE = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])*/|@([a-z_0-9]+)')  # texts and patterns are passed over


def _one_source(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """Return a grammar with its parts, whose thoughts are another's affair, as Lark with a rule `start`."""
    definition = _definition(grammar, tokenizer, _ONE_LINE)
    if "json_schema" in definition:
        return f"start: %json {json.dumps(definition['json_schema'])}"
    rules = [_REFERENCE.sub(lambda found: found[1] or found[0], definition["lark_grammar"])]
    rules += [f"{name}: %lark {{\n{_one_source(part, tokenizer)}\n}}" for name, part in grammar.parts]
    return "\n".join(rules) if grammar.parts else definition["lark_grammar"]


def _definition(grammar: Grammar, tokenizer: LLTokenizer, written: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return it in llguidance's terms; JSON is `written` as said there, or as models write it."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return {"json_schema": {"type": "object", "x-guidance": _options(written, lenient=False)}}
        case GrammarKind.JSON_SCHEMA:
            schema = _without_formats(_schema(grammar))
            return {"json_schema": {**schema, "x-guidance": _options(written, lenient=grammar.lenient)}}
        case GrammarKind.REGEX:
            from llguidance import regex_to_lark

            return {"lark_grammar": f"start: /{regex_to_lark(grammar.source, use_ascii='d')}/"}
        case GrammarKind.CHOICE:
            quoted = (json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.source))
            return {"lark_grammar": f"start: {' | '.join(quoted)}"}
        case GrammarKind.LARK:
            return {"lark_grammar": _lark(grammar)}
        case GrammarKind.FREE:
            return {"lark_grammar": _free(marker(grammar.marks[0], tokenizer))}


def _free(opening: str) -> str:
    """Return any text, in Lark, in which no thought begins: one is what stands before an answer, not within it."""
    token = _TOKEN.match(opening)
    if token is None:
        return "start: <[*]>*"
    begun = re.match(r'\s*("(?:\\.|[^"\\])*")', opening[token.end() :])
    if begun is None:
        return f"start: <[^{token[1]}]>*"
    first = f"\\x{{{ord(json.loads(begun[1])[0]):x}}}"
    return f"start: <[^{token[1]}]>* (<[{token[1]}]> OTHER <[^{token[1]}]>*)*\nOTHER: /[^{first}](.|\\n)*/"


def _options(written: Mapping[str, Any] | None, *, lenient: bool) -> dict[str, Any]:
    return {**(written or {"whitespace_pattern": WHITESPACE}), "lenient": lenient, "coerce_one_of": lenient}


def _lark(grammar: Grammar) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar.source)
    except Exception as error:  # the parser of a client's text may raise anything
        raise GrammarError(f"{grammar.field} is neither Lark nor GBNF: {error}", field=grammar.field) from None


def _with_thought(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """Return a reply in Lark: a thought, which is free until its tokens are used up, and then the answer.

    Raises:
        GrammarError: the thought is bounded, and its end is several tokens of this model's: they could not be forced.
    """
    opening, closing = (marker(text, tokenizer) for text in grammar.marks)
    start = "thought @answer" if grammar.thoughts == "begun" else f"{opening} thought @answer | @answer"
    lines = [f"start: {start}", "thought: ended GAP", "TEXT: /(.|\\n)*/", "GAP: /\\n{0,2}/"]
    most, is_token = grammar.thought_tokens, _TOKEN.match(closing) is not None
    if most is not None:
        if not is_token or not _TOKEN.match(opening):
            raise GrammarError(
                f"{grammar.field} bounds a thought, and this model has no token of its own for {grammar.marks[1]}",
                hint="leave it out, and bound the whole completion by max_tokens",
                field=grammar.field,
            )
        return "\n".join([*lines, f"ended: said {closing}", f"said[max_tokens={most}]: TEXT"])
    return "\n".join([*lines, f"ended: TEXT {closing}" if is_token else f"ended[lazy]: TEXT {closing}"])


def marker(text: str, tokenizer: LLTokenizer) -> str:
    """Return a marker in Lark: the special tokens in it as what they are, what is between them as text."""
    parts: list[str | list[int]] = []
    for token in tokenizer.tokenize_str(text, parse_special=True):
        if tokenizer.is_special_token(token):
            parts.append(f"<[{token}]>")
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(token)
        else:
            parts.append([token])
    return " ".join(part if isinstance(part, str) else json.dumps(tokenizer.decode_str(part)) for part in parts)


_TOKEN = re.compile(r"<\[([0-9]+)\]>")


# ---- JSON Schema ----
def _schema(grammar: Grammar) -> Schema:
    try:
        schema = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{grammar.field} is not JSON: {error}", field=grammar.field) from None
    if not isinstance(schema, dict):
        raise GrammarError(f"{grammar.field} is {schema!r}; a schema is an object", field=grammar.field)
    return schema


_ONE = ("additionalProperties", "items", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf", "items")
_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Schema]]:
    """Yield the schemas in a schema, and where they are."""
    for key in _ONE:
        if isinstance(schema.get(key), dict):
            yield (key,), schema[key]
    for key in _LISTS:
        for i, each in enumerate(schema[key] if isinstance(schema.get(key), list) else ()):
            if isinstance(each, dict):
                yield (key, i), each
    for key in _NAMED:
        for name, each in (schema[key] if isinstance(schema.get(key), dict) else {}).items():
            if isinstance(each, dict):
                yield (key, name), each


def _check_schema(grammar: Grammar) -> None:
    """Raise GrammarError, which names the key, for what takes the compiler minutes and gigabytes."""
    pending: list[tuple[tuple[str | int, ...], Schema]] = [((), _schema(grammar))]
    while pending:
        path, schema = pending.pop()
        step, patterns = schema.get("multipleOf"), schema.get("patternProperties")
        if isinstance(step, int | float) and not _is_small(step):
            raise _beyond(
                grammar, (*path, "multipleOf"), f"is {step}", f"a number of digits up to {MOST_STEP}, or a round one"
            )
        if isinstance(patterns, dict) and len(patterns) > MOST_PATTERNS:
            said = f"has {len(patterns)} patterns, each of which is compared with each other"
            raise _beyond(grammar, (*path, "patternProperties"), said, f"{MOST_PATTERNS} at most")
        pending += [((*path, *where), below) for where, below in _subschemas(schema)]


def _is_small(step: float) -> bool:
    """Return whether a multiple of it can be told digit by digit: a state is kept for each remainder."""
    if isinstance(step, bool) or (isinstance(step, float) and not math.isfinite(step)):
        return True  # it is refused for what it is
    digits = f"{Decimal(repr(step)):f}".strip("-")
    whole = digits.replace(".", "")
    return int(whole) <= MOST_STEP or int(digits.removesuffix(".0").rstrip("0").replace(".", "") or 0) <= MOST_ROUND


def _beyond(grammar: Grammar, path: tuple[str | int, ...], said: str, valid: str) -> GrammarError:
    named = dotted((grammar.field, *path))
    return GrammarError(f"{named} {said}; it may be {valid}", hint="check the answer yourself", field=named)


def _without_formats(schema: Schema) -> Schema:
    """Return the schema without values of `format` that only describe, and without options for the library."""
    pending = [schema]
    while pending:
        each = pending.pop()
        each.pop("x-guidance", None)
        kind = each.get("format")
        if kind is None or (isinstance(kind, str) and kind not in FORMATS):  # the library refuses what is no text
            each.pop("format", None)
        pending += [below for _, below in _subschemas(each)]
    return schema


def _refused(grammar: Grammar, why: str, tokenizer: LLTokenizer) -> GrammarError:
    """Return the error for a grammar that is wrong, with the path to the part that is."""
    path = _path(grammar, why, tokenizer) if grammar.kind is GrammarKind.JSON_SCHEMA else ()
    named = dotted((grammar.field, *path))
    lines = [line.strip() for line in _cause(why).splitlines() if line.strip()]
    if lines and lines[0].startswith("Unimplemented keys"):
        shown = lines[0].partition(": ")[2].strip("[]")
        hint = "leave it out and check the answer yourself"
        return GrammarError(f"{named} has {shown}, which cannot be guaranteed", hint=hint, field=named)
    return GrammarError(f"{named} cannot be compiled: {' '.join(lines)}", field=named)


def _path(grammar: Grammar, why: str, tokenizer: LLTokenizer) -> tuple[str | int, ...]:
    """Return the path to the innermost part of a schema that, alone, is wrong for the same reason."""
    root = _schema(grammar)
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    found: tuple[str | int, ...] = ()
    at, left = root, PROBED
    while True:
        for path, below in _subschemas(at):
            left -= 1
            alone = {**shared, **below}
            if left >= 0 and _cause(_try(Grammar.of_json(alone, lenient=grammar.lenient), tokenizer)[1]) == _cause(why):
                found, at = (*found, *path), below
                break
        else:
            return found


def _cause(why: str) -> str:
    """Return an error without where it was met."""
    return why.partition("while processing")[0].strip()
