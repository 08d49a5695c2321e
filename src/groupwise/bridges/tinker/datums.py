"""Datums of the Tinker wire -> datums of the SDK, and log-probabilities back.

    tokens      model_input's chunks, one after the other (`chunks`); the last target closes the sequence
    targets     target_tokens [N], any tokens; of cross_entropy also [N, K], and its weights as many
    values      weights of cross_entropy; logprobs and advantages of the other losses; sequence_ratio_mask of gspo

A datum with K targets a position becomes K of the SDK, one a column, whose tokens the learner packs once.

Losses are those of `sdk.losses`, sums over all positions. What is not supported is refused with what to do instead.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from groupwise.bridges.tinker.chunks import chunks_of_message, written_out
from groupwise.bridges.tinker.proto import BFLOAT16, FLOAT32, INT32, INT64, ForwardBackwardOutput
from groupwise.errors import DataError, RequestError
from groupwise.recorded import DROPPED, MaskEntry, SamplingMask
from groupwise.sdk.datums import TARGETS, Datum
from groupwise.sdk.losses import BUILT_IN, CROSS_ENTROPY
from groupwise.server.errors import echo
from groupwise.types import Completion

if TYPE_CHECKING:
    from groupwise.model.vision import Vision

log = logging.getLogger(__name__)

SEQUENCE_MASK = "sequence_ratio_mask"
STABLE_REINFORCE = "stable_reinforce"
ANCHORED = ("dro", "gspo")  # these read the log-probabilities of every position, so that padding is left out
MOST_TARGETS = 32  # a position: the LM head runs once for each
UNOFFERED = {  # losses that tinker 0.38 names and that are not here, and why
    STABLE_REINFORCE: "its formula is not published: use importance_sampling or cispo, or name the loss to train in "
    "its place when starting the server (tinker_stable_reinforce)",
    "custom": "code of a client's does not run in this server: forward_backward_custom runs it in the client",
}
COUNTED = ("mismatch/dropped_tokens",)
MOST_TOKENS = 1 << 22  # of one sequence, before the model's context is checked
ENTRY = 512  # bytes of a remembered completion, in addition to its arrays

_TYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}


def loss_config(message: Any) -> dict[str, float]:
    """Return the loss's knobs. Raises RequestError: a loss or a knob that there is not."""
    name = message.loss_fn
    if name not in BUILT_IN:
        hint = f"use one of {', '.join(BUILT_IN)}, or forward_backward_custom with a function of yours"
        if name in UNOFFERED:
            hint = f"{UNOFFERED[name]}; {hint}"
        raise RequestError(f"there is no loss {echo(name)}", hint=hint, field="loss_fn")
    config: dict[str, float] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        if value.HasField("text"):
            raise RequestError(f"{echo(key)} of {name} is a text; its knobs are numbers", field="loss_fn_config")
        config[key] = value.number
    return config


def stand_in(message: Any, loss: str | None) -> bool:
    """Have a request for `stable_reinforce` train `loss`, if the server's owner named one, with the defaults of its
    knobs; returns whether it was done. Raises RequestError: the request has knobs, which are of the loss that it names.
    """
    if message.loss_fn != STABLE_REINFORCE or loss is None:
        return False
    if knobs := sorted({*message.loss_fn_config, *message.loss_fn_config_v2}):
        raise RequestError(
            f"loss_fn_config has {echo(knobs[0])}; this server trains {loss} in place of {STABLE_REINFORCE}, whose "
            "formula is not published, and would give the value another meaning",
            hint=f"leave loss_fn_config out, or ask for {loss} by its name",
            field="loss_fn_config",
        )
    message.loss_fn = loss
    return True


def datums_of(message: Any, *, vision: Vision | None = None, most: int = MOST_TOKENS) -> list[Datum]:
    """Return the datums of a ForwardBackwardRequest, as its loss reads them; those of one with K targets a position in
    a row.

    `vision`: the model's eyes; `most`: tokens that it reads.

    Raises:
        RequestError: an image that it cannot be shown, several targets with a policy loss, a value that this loss does
            not have or lacks.
        ContextLengthError: more than `most` tokens.
        DataError: as `Datum`.
    """
    return [
        datum
        for i, each in enumerate(message.data)
        for datum in _columns(each, message.loss_fn, vision, where=f"data[{i}]", most=most)
    ]


def widths_of(message: Any) -> list[int | None]:
    """Return K for every datum with targets [N, K], None for targets [N], of a message that `datums_of` has read."""
    shapes = [list(each.loss_fn_inputs[TARGETS].shape) for each in message.data]
    return [shape[1] if len(shape) == 2 else None for shape in shapes]


def _columns(message: Any, loss: str, vision: Vision | None, *, where: str, most: int) -> Iterator[Datum]:
    """Yield a datum of the SDK for each target of a position."""
    pieces, inputs = chunks_of_message(message.model_input, where), _inputs(message, loss, where=where)
    tokens = written_out(pieces, vision, where=where, most=most)
    for name, values in inputs.items():
        if len(values) != len(tokens):
            shown = SEQUENCE_MASK if name == "mask" else name
            raise RequestError(
                f"{where}.{shown} has {len(values)} entries and its model_input {len(tokens)} tokens",
                hint="give one for each token",
            )
    if loss not in ANCHORED:
        inputs["mask"] = np.ones(len(tokens))  # every target has a log-probability, whatever its weight
    if all(values.ndim == 1 for values in inputs.values()):
        yield _datum(tokens, inputs, where)
        return
    targets, weights = inputs[TARGETS], inputs["weights"]
    if targets.shape != weights.shape or not 1 <= targets.shape[1] <= MOST_TARGETS:
        raise RequestError(
            f"{where} has {TARGETS} of shape {list(targets.shape)} and weights of shape {list(weights.shape)}",
            hint=f"give both [N, K], with K from 1 to {MOST_TARGETS}",
        )
    for k in range(targets.shape[1]):
        yield _datum(tokens, inputs | {TARGETS: targets[:, k], "weights": weights[:, k]}, where)


def _datum(tokens: list[int], inputs: dict[str, Any], where: str) -> Datum:
    try:
        return Datum(model_input=tokens, loss_fn_inputs=inputs)
    except DataError as error:
        raise DataError(f"{where}: {error.message}", hint=error.hint, field=where, kind=error.kind) from None


def _inputs(message: Any, loss: str, *, where: str) -> dict[str, Any]:
    """Return the values of a datum that this loss reads, as arrays."""
    inputs = {name: _array(tensor, f"{where}.{name}") for name, tensor in message.loss_fn_inputs.items()}
    wanted = _wanted(loss)
    if unknown := sorted(set(inputs) - set(wanted)):
        raise RequestError(
            f"{where} has {echo(unknown[0])}, which {loss} does not read here; it reads {', '.join(wanted)}",
            hint="leave it out; thresholds go into loss_fn_config, per-token ones into forward_backward_custom",
        )
    optional = ("weights", SEQUENCE_MASK)  # these have a default, or their own word
    if missing := [name for name in wanted if name not in inputs and name not in optional]:
        raise RequestError(
            f"{where} has no {missing[0]}, which {loss} reads", hint=f"it reads {', '.join(wanted)}, one a token"
        )
    if inputs[TARGETS].dtype.kind == "f":
        raise RequestError(f"{where}.{TARGETS} is of a float type", hint="targets are int64")
    if loss == CROSS_ENTROPY:
        inputs.setdefault("weights", np.ones(inputs[TARGETS].shape))
    elif wide := [name for name, values in inputs.items() if values.ndim == 2]:
        raise RequestError(
            f"{where}.{wide[0]} is of 2 dimensions; {loss} has one target and one value a position",
            hint="several targets a position are for cross_entropy",
        )
    if loss == "gspo":
        inputs["mask"] = _ratio_mask(inputs, where)
    return inputs


def _wanted(loss: str) -> tuple[str, ...]:
    if loss == CROSS_ENTROPY:
        return (TARGETS, "weights")
    return (TARGETS, "logprobs", "advantages", *((SEQUENCE_MASK,) if loss == "gspo" else ()))


def _ratio_mask(inputs: dict[str, Any], where: str) -> Any:
    """Return gspo's mask. Raises for an advantage outside it, whose token is not a part of the ratio."""
    if SEQUENCE_MASK not in inputs:
        raise RequestError(f"{where} has no {SEQUENCE_MASK}, which gspo reads", hint="1 where the policy spoke")
    mask = (inputs.pop(SEQUENCE_MASK) != 0).astype(float)
    outside = zip(inputs.get("advantages", ()), mask, strict=False)
    if any(advantage and not inside for advantage, inside in outside):
        raise RequestError(f"{where} has an advantage outside its {SEQUENCE_MASK}", hint="set it to 0 there")
    return mask


def _array(tensor: Any, where: str) -> Any:
    """Return a tensor of one dimension, or of two, dense or sparse."""
    kind, shape = _TYPES.get(tensor.dtype), list(tensor.shape)
    if kind is None:
        name = "bfloat16" if tensor.dtype == BFLOAT16 else str(tensor.dtype)
        raise RequestError(f"{where} is of type {name}; float32 and int64 are read", hint="convert it")
    if len(shape) > 2:
        raise RequestError(f"{where} is of {len(shape)} dimensions", hint="give tensors [N] or [N, K]")
    if tensor.HasField("sparse_csr"):
        return _from_csr(tensor.sparse_csr, kind, shape, where)
    raw = tensor.dense
    if len(raw) % kind.itemsize or min(shape, default=0) < 0 or (shape and prod(shape) * kind.itemsize != len(raw)):
        raise RequestError(f"{where} has {len(raw)} bytes for shape {shape} of {kind.itemsize} bytes each")
    return np.frombuffer(raw, kind).reshape(shape or -1)


def _from_csr(csr: Any, kind: np.dtype, shape: list[int], where: str) -> Any:
    """Return a compressed sparse row tensor [N, K], whose gaps are 0; checked before anything of its size is made."""
    parts = ((csr.values, kind), (csr.crow_indices, np.dtype("<i8")), (csr.col_indices, np.dtype("<i8")))
    if len(shape) == 2 and min(shape) >= 0 and not any(len(raw) % each.itemsize for raw, each in parts):
        values, ends, columns = (np.frombuffer(raw, each) for raw, each in parts)
        lengths, small = np.diff(ends), prod(shape) <= MOST_TOKENS
        counted = len(lengths) == shape[0] and len(values) == len(columns) == lengths.sum() and not ends[:1].any()
        if small and counted and (lengths >= 0).all() and ((columns >= 0) & (columns < shape[1])).all():
            dense = np.zeros(shape, kind)
            dense[np.repeat(np.arange(shape[0]), lengths), columns] = values
            return dense
    raise RequestError(
        f"{where} is not a sparse tensor of shape {shape}",
        hint=f"give CSR [N, K] of at most {MOST_TOKENS} entries with their gaps, or a dense tensor",
    )


# ---- what was sampled with top_p or top_k ----
_NARROWED = ":narrowed"  # ends the ids of sequences that were sampled so: they are known by it whoever forgets what


def sequence_ids(request: str, count: int, *, narrowed: bool) -> list[str]:
    """Return the ids of a request's completions, by which the spans of datums name them. `narrowed`: by top_p or
    top_k."""
    return [f"{request}:{i}{_NARROWED if narrowed else ''}" for i in range(count)]


@dataclass(frozen=True, eq=False)
class NarrowedRun:
    """Targets of a datum that its spans say are of a completion sampled with top_p or top_k here: the `places` of those
    that the loss makes something of, and the completion's id."""

    places: Any
    sequence_id: str
    where: str  # the datum


def narrowed_runs(message: Any, loss: str, *, where: str) -> list[NarrowedRun]:
    """Return those of a datum that `datums_of` took. Raises RequestError: its spans do not cover its targets."""
    if loss == CROSS_ENTROPY or not message.loss_fn_input_spans:
        return []
    advantages_J = _array(message.loss_fn_inputs["advantages"], where)
    runs, end = [], 0
    for span in message.loss_fn_input_spans:
        sampled = span.sampled_tokens
        first, end = end, end + (sampled.length if span.HasField("sampled_tokens") else span.prompt_tokens.length)
        if not first <= end <= len(advantages_J):
            break
        places = first + np.flatnonzero((advantages_J[first:end] != 0) | (loss in ANCHORED))
        if sampled.sequence_id.endswith(_NARROWED) and len(places):
            runs.append(NarrowedRun(places, sampled.sequence_id, where))
    if end != len(advantages_J):
        raise RequestError(
            f"{where}.loss_fn_input_spans do not cover its {len(advantages_J)} targets",
            hint="give runs of 0 and more targets that cover them all in order, as Datum.with_provenance checks",
            field=f"{where}.loss_fn_input_spans",
        )
    return runs


@dataclass(frozen=True, eq=False)
class _Sampled:
    """A completion as the server sampled it: its tokens, the log-probabilities that the client got, and the part of the
    vocabulary from which each token was sampled (`kept`)."""

    prompt: bytes  # its digest
    prompt_len: int
    ids_T: Any
    logprobs_T: Any
    kept: SamplingMask

    @property
    def size(self) -> int:
        """Return the approximate bytes in memory."""
        kept = self.kept
        return ENTRY + self.ids_T.nbytes + self.logprobs_T.nbytes + len(kept.kinds + kept.lengths + kept.words)


class SampledMasks:
    """Remembers the part of the vocabulary that each token of a completion could be drawn from, with top_p or top_k,
    until the completion comes back in a datum to be trained: the wire has no field for it.

    A completion is known by its prompt, its tokens and the log-probabilities that were told with them, all exactly, so
    that nothing else is taken for it. The oldest go when all take more than `most` bytes. For threads.
    """

    def __init__(self, *, most: int):
        self._most, self._size, self._forgotten = most, 0, False
        self._by_prompt: dict[bytes, list[_Sampled]] = {}
        self._in_order: deque[_Sampled] = deque()
        self._lengths: Counter[int] = Counter()  # of the prompts
        self._lock = threading.Lock()

    def remember(self, prompt_ids: Sequence[int], completion: Completion) -> None:
        """Keep what the tokens of a completion could be, if they could not be everything."""
        if completion.kept is None or not completion.token_ids:
            return
        (prompt,) = _digests(np.asarray(prompt_ids, "<i8"), [len(prompt_ids)])
        ids_T, logprobs_T = np.asarray(completion.token_ids, "<i4"), np.asarray(completion.kept_logprobs, "<f4")
        made = _Sampled(prompt, len(prompt_ids), ids_T, logprobs_T, completion.kept)
        with self._lock:
            self._by_prompt.setdefault(prompt, []).append(made)
            self._in_order.append(made)
            self._lengths[made.prompt_len] += 1
            self._size += made.size
            while self._size > self._most:
                self._forget()

    def _forget(self) -> None:
        oldest = self._in_order.popleft()
        self._size -= oldest.size
        self._lengths[oldest.prompt_len] -= 1
        alike = self._by_prompt[oldest.prompt]
        alike.remove(oldest)
        if not alike:
            del self._by_prompt[oldest.prompt]
        if not self._forgotten:
            self._forgotten = True
            log.warning(
                "what completions sampled with top_p or top_k could be is being forgotten, the oldest first "
                "(tinker_mask_bytes is %d): those that are trained later are refused where spans say whose they are, "
                "and else trained as if drawn from everything",
                self._most,
            )

    def attach(self, datum: Datum, claimed: Sequence[NarrowedRun] = ()) -> Datum:
        """Return the datum with what each of its targets could be (`Datum.kept`), where it has completions that are
        known: of one turn or of several, whole or cut.

        Raises RequestError: a target that is `claimed` to be of a completion is of none that is known.
        """
        found = self._known_in(datum)
        entries: list[MaskEntry] = [(DROPPED, np.zeros(0, "<i4"))] * len(datum.targets)
        is_known_J = np.zeros(len(entries), bool)
        for each in found:
            first = each.prompt_len - 1
            mine = each.kept.entries()[: len(entries) - first]
            entries[first : first + len(mine)] = mine
            is_known_J[first : first + len(mine)] = True
        for run in claimed:
            if unknown := int((~is_known_J[run.places]).sum()):
                raise RequestError(
                    f"{run.where} trains {unknown} tokens of {echo(run.sequence_id)}, which was sampled with top_p or "
                    "top_k, and what they could be is forgotten, or was told with other log-probabilities",
                    hint="train it sooner, with what was told, or raise tinker_mask_bytes; or sample with top_p 1 and "
                    "top_k -1; without its spans it is trained as if drawn from everything, which biases it",
                    field=f"{run.where}.loss_fn_input_spans",
                )
        return replace(datum, kept=SamplingMask.of_entries(found[0].kept.vocabulary, entries)) if found else datum

    def _known_in(self, datum: Datum) -> list[_Sampled]:
        """Return the remembered completions that a datum has."""
        with self._lock:
            lengths = sorted(length for length, count in self._lengths.items() if count)
            if not lengths or "logprobs" not in datum.loss_fn_inputs:
                return []
            ids_N, targets_J = np.asarray(datum.tokens, "<i8"), np.asarray(datum.targets)
            told_J = np.asarray(datum.loss_fn_inputs["logprobs"], "<f4")
            lengths = [length for length in lengths if length < len(ids_N)]
            known = [each for key in _digests(ids_N, lengths) for each in self._by_prompt.get(key, ())]
        return [each for each in known if _is_in(each, targets_J, ids_N[1:], told_J)]


def _digests(ids_N: Any, lengths: Sequence[int]) -> Iterator[bytes]:
    """Yield the digests of the first `length` tokens, for each of the ascending lengths."""
    digest, done = blake2b(digest_size=16), 0
    for length in lengths:
        digest.update(ids_N[done:length].tobytes())
        done = length
        yield digest.copy().digest()


def _is_in(sampled: _Sampled, *rows_J: Any) -> bool:
    """Return whether the targets, the tokens that are read next and the log-probabilities of a datum are, from the end
    of the prompt on, those of a completion, as far as both go."""
    first = sampled.prompt_len - 1
    count = min(len(sampled.ids_T), len(rows_J[0]) - first)
    expected = (sampled.ids_T, sampled.ids_T, sampled.logprobs_T)
    return all(
        np.array_equal(row[first : first + count], mine[:count]) for row, mine in zip(rows_J, expected, strict=True)
    )


# ---- and back ----
def encode_output(
    logprobs: Sequence[Sequence[float]], metrics: Mapping[str, float], widths: Sequence[int | None]
) -> bytes:
    """Return log-probabilities [N] or [N, K] of every datum of the wire, whose K are `widths`, and metrics as
    `name:reduction`, as a ForwardBackwardOutput. A record has datums of one K."""
    message = ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    rows = (np.asarray(row, "<f4") for row in logprobs)
    arrays = [next(rows) if k is None else np.stack([next(rows) for _ in range(k)], -1) for k in widths]
    for trailing, alike in groupby(arrays, key=lambda array: array.shape[1:]):
        several = list(alike)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(several))
        field = record.fields["logprobs"]
        field.data, field.dtype = b"".join(array.tobytes() for array in several), FLOAT32
        field.offsets = np.cumsum([0, *(array.nbytes for array in several)]).astype("<i8").tobytes()
        field.trailing_shape.extend(trailing)
    for name, value in metrics.items():
        message.metrics[name] = float(value)
    return message.SerializeToString()


def wire_metrics(metrics: Mapping[str, float], *, loss: float) -> dict[str, float]:
    """Return our metrics under names that say how chunks combine; `loss:sum` is the loss itself."""
    named = {f"{name}:{_reduction(name)}": value for name, value in metrics.items() if name != "loss/policy"}
    return {"loss:sum": loss, **named}


def _reduction(name: str) -> str:
    if name.endswith(("_max", "/max")):
        return "max"
    if name.endswith(("_min", "/min")):
        return "min"
    return "sum" if name in COUNTED else "mean"
