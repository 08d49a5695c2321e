"""PEFT's adapter_config.json: checked for options that would make PEFT compute something else than we serve.

    check_config    every option in its range; what would compute anything but W x + scale B A x is refused
    adapted         what each pair of tensors changes and its scale, as PEFT has it; or why PEFT would not apply it

When PEFT loads an adapter it first injects one into the model, as the configuration says: into the modules that
`target_modules` names, without `exclude_modules` and within `layers_to_transform`, into those whose weight
`target_parameters` names, and around those whose experts' parameters it names (`ExpertTargets`); each of the first rank
and alpha whose pattern matches its name. Then it fills in the tensors of the file, and drops those that found no place
with a warning. We compute with every tensor of the file. So each of them must have a place, of its own rank.

An adapter may come from an untrusted source: its regular expressions have a time limit, and all other work here is at
most proportional to the file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

import regex

from groupwise.config.lora import EXPERT_PARAMETERS, EXPERTS, MAX_ALPHA
from groupwise.errors import AdapterError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
MAX_RANK = 4096
MAX_NAME = 512  # characters of a module's name, or of a pattern
MAX_EXPRESSION = 8192  # characters of a regular expression of modules
MAX_SHAPES = 256  # of the names in one pattern's keys; those of a model's modules have a few dozen
MAX_EXPRESSIONS = 64  # regular expressions among them
MATCHING_S = 2.0  # of a processor, for all regular expressions, over all modules

T = TypeVar("T")

# What may be set without changing what the adapter computes, or is taken into account here. Whatever else is set, in
# this PEFT or a later one, is an option that would not be applied.
_KNOWN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size",
    "r", "rank_pattern", "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_dora",
    "use_rslora",
}  # fmt: skip
_REFUSED = {
    "modules_to_save": "must be empty: whole layers are not served",
}
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # the others change the base weights too
_WEIGHT = ".weight"
_NESTED = ".base_layer"
_NAMES = "give the names of the modules"
_NAME = regex.compile(r"\^?[\w.]+")


def check_config(config: Mapping[str, Any]) -> None:
    """Raise AdapterError unless the configuration is of plain LoRA, and every option is one that PEFT takes."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    auto = config.get("auto_mapping")
    library = auto.get("parent_library") if isinstance(auto, Mapping) else auto
    plain_library = library is None or str(library).split(".")[0] == "transformers"
    checks = (
        (config.get("peft_type") == "LORA", "peft_type", "must be 'LORA'"),
        (_is_rank(rank), "r", f"must be a whole number from 1 to {MAX_RANK}"),
        (_is_alpha(alpha), "lora_alpha", f"must be a positive number up to {MAX_ALPHA:g}"),
        (config.get("bias", "none") == "none", "bias", "must be 'none': biases are not served"),
        (plain_library, "auto_mapping", "must be of transformers: PEFT imports it"),
        *((not config.get(key), key, rule) for key, rule in _REFUSED.items()),
    )
    for valid, key, rule in checks:
        if not valid:
            _refuse(key, f"is {_shown(config.get(key))}; it {rule}")
    for key, value in config.items():
        if value and key not in _KNOWN:
            raise AdapterError(f"{CONFIG}: {key[:80]!r} is set; it is not served", hint="train a plain LoRA adapter")
    start = config.get("init_lora_weights")
    if not any(start is same or (isinstance(start, str) and start == same) for same in _PLAIN_STARTS):
        raise AdapterError(
            f"{CONFIG}: init_lora_weights is {_shown(start)}, which changes the base weights as well",
            hint="convert it: PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )
    _check_patterns(config)
    _check_targets(config)


def _check_patterns(config: Mapping[str, Any]) -> None:
    rules = {
        "alpha_pattern": (_is_alpha, f"it must be positive, up to {MAX_ALPHA:g}"),
        "rank_pattern": (_is_rank, f"it must be a positive whole number up to {MAX_RANK}"),
    }
    for key, (valid, rule) in rules.items():
        patterns = config.get(key) or {}
        if not isinstance(patterns, Mapping):
            _refuse(key, f"is {_shown(patterns)}; it must be an object")
        for module, value in patterns.items():
            if len(module) > MAX_NAME:
                _refuse(key, f"has {module[:80]!r}...; a key has at most {MAX_NAME} characters")
            if not valid(value):
                _refuse(key, f"gives {module[:80]!r} {_shown(value)}; {rule}")


def _check_targets(config: Mapping[str, Any]) -> None:
    """`target_modules` and what narrows them, as PEFT takes them."""
    targets, layers = config.get("target_modules"), config.get("layers_to_transform")
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        value = config.get(key)
        if isinstance(value, str):
            if len(value) > MAX_EXPRESSION:
                _refuse(key, f"has {len(value):,} characters; the limit is {MAX_EXPRESSION:,}")
        elif value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            _refuse(key, f"is {_shown(value)}; it must be a list of names of modules")
    weights: Any = config.get("target_parameters") or []
    if not isinstance(weights, list) or not all(isinstance(name, str) and _is_parameter(name) for name in weights):
        raise AdapterError(
            f"{CONFIG}: target_parameters is {_shown(weights)}; only weights of linear layers, of routers and of fused "
            f"experts ({', '.join(EXPERT_PARAMETERS)}) can be adapted",
            hint="train an adapter without the other parameters",
        )
    if not targets and not weights:
        _refuse("target_modules", f"is {_shown(targets)}; it must say which modules the adapter is for")
    numbers = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if not all(type(number) is int for number in numbers):
        _refuse("layers_to_transform", f"is {_shown(layers)}; it must be a list of the layers' numbers")
    patterns = config.get("layers_pattern") or []
    for name in [patterns] if isinstance(patterns, str) else patterns:
        if len(name) > MAX_NAME or not _NAME.fullmatch(name):
            _refuse("layers_pattern", f"has {name[:80]!r}; it must be a name, as 'layers'")
    narrowed = [key for key in ("layers_to_transform", "layers_pattern") if config.get(key) is not None]  # [] too
    if isinstance(targets, str) and narrowed:
        _refuse(narrowed[0], "is set, and target_modules is an expression; PEFT takes only one of the two")
    if patterns and layers is None:
        _refuse("layers_pattern", "is set without layers_to_transform; PEFT takes it only with that")


class Adapted(NamedTuple):
    """Names the parameter that a pair of an adapter's tensors changes, with the scale and shape of the change."""

    name: str  # of a linear module or a router; of the experts' parameters, `<module>.gate_up_proj`
    scale: float  # what PEFT multiplies B A by: alpha / r, or alpha / sqrt(r) with `use_rslora`
    rank: int  # of one expert
    experts: int  # 1 if it is not a parameter of experts

    def unpacked(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pair as in the file, A [E r, in] and B [out, r E], as A [E, r, in] and B [E, out, r]. PEFT has the
        rows of A expert by expert, and the columns of B rank by rank."""
        return a.view(self.experts, -1, a.shape[1]), b.view(b.shape[0], -1, self.experts).permute(2, 0, 1)


def packed(a_ERI: Tensor, b_EOR: Tensor) -> tuple[Tensor, Tensor]:
    """Return a [E, r, in] and B [E, out, r] as PEFT's files have them: the inverse of `Adapted.unpacked`."""
    return a_ERI.flatten(0, 1), b_EOR.permute(1, 2, 0).flatten(1)


def is_expert_parameter(name: str) -> bool:
    """Return whether this full name is that of a fused parameter of experts."""
    module, _, parameter = name.rpartition(".")
    return parameter in EXPERT_PARAMETERS and module.rpartition(".")[2] == EXPERTS


class ExpertTargets:
    """The parameters of experts that an adapter changes, and the names of their tensors in PEFT's files. Where several
    of one module are changed, PEFT wraps one in the other in the order in which the module has them: the tensors of the
    last are `<module>.lora_A`, of the one before it `<module>.base_layer.lora_A`."""

    def __init__(self, config: Mapping[str, Any]):
        self._wanted = frozenset(name for name in config.get("target_parameters") or () if not name.endswith(_WEIGHT))

    def of(self, module: str) -> list[str]:
        """Return the full names of those of a module, in that order."""
        every = [f"{module}.{parameter}" for parameter in EXPERT_PARAMETERS] if self._wanted else []
        named = (name for name in every if is_expert_parameter(name))
        return [name for name in named if any(name[start:] in self._wanted for start in _starts(name))]

    def name(self, key: str) -> str:
        """Return what the tensors `<key>.lora_A.weight` change: the module `key`, or a parameter of experts. Raises
        AdapterError where PEFT would have no place for them."""
        module, depth = key, 0
        while module.endswith(_NESTED):
            module, depth = module.removesuffix(_NESTED), depth + 1
        parameters = self.of(module)
        if not parameters and not depth:
            return key
        if depth >= len(parameters):
            raise AdapterError(
                f"{CONFIG}: PEFT would not apply the tensors of {key[:120]!r}: target_parameters names "
                f"{len(parameters)} of this module",
                hint="name the parameters of the experts in target_parameters",
            )
        return parameters[-1 - depth]

    def key(self, name: str) -> str:
        """Return the inverse of `name`."""
        module = name.rpartition(".")[0]
        if not is_expert_parameter(name) or name not in (parameters := self.of(module)):
            return name
        return module + _NESTED * (len(parameters) - 1 - parameters.index(name))


def adapted(config: Mapping[str, Any], rows: Mapping[str, int]) -> dict[str, Adapted]:
    """Return PEFT's use of each pair of tensors, by its key (without `.lora_A.weight`).

    Args:
        config: passes `check_config`.
        rows: key, as in the file without PEFT's prefix -> the rows of its lora_A: the rank, or experts times rank.

    Raises AdapterError if PEFT would give a module another rank, or would not adapt it at all.
    """
    targets = ExpertTargets(config)
    names = {key: targets.name(key) for key in rows}
    plain = {key: count for key, count in rows.items() if names[key] == key}
    found = {key: Adapted(key, scale, rows[key], 1) for key, scale in applied_scales(config, plain).items()}
    matching, root = _Matching(), math.sqrt if config.get("use_rslora") else float
    alphas = _Patterns[float](config, "alpha_pattern", matching)
    own = _Patterns[int](config, "rank_pattern", matching)
    for key, name in names.items():
        if name != key:
            rank = own.first(name, config["r"])
            if rows[key] % rank:
                raise AdapterError(
                    f"{CONFIG}: lora_A of {key[:120]!r} has {rows[key]} rows, and r is {rank} for each of its experts",
                    hint="say so in rank_pattern",
                )
            found[key] = Adapted(name, alphas.first(name, config["lora_alpha"]) / root(rank), rank, rows[key] // rank)
    return {key: found[key] for key in rows}


def applied_scales(config: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, float]:
    """Module -> what PEFT multiplies B A by: alpha / r, or alpha / sqrt(r) with `use_rslora`; without experts.

    Args:
        config: passes `check_config`.
        ranks: module, as the model names it -> the rank of its tensors.

    Raises AdapterError if PEFT would give a module another rank, or would not adapt it at all.
    """
    matching = _Matching()
    alphas = _Patterns[float](config, "alpha_pattern", matching)
    own = _Patterns[int](config, "rank_pattern", matching)
    is_target, root = _Targets(config, matching), math.sqrt if config.get("use_rslora") else float
    scales = {}
    for module, rank in ranks.items():
        if why := is_target.refusal(module):
            raise AdapterError(
                f"{CONFIG}: PEFT would not apply the tensors of {module[:120]!r}: {why}",
                hint="remove the tensors, or name their module in target_modules",
            )
        key = is_target.pattern_key(module)
        expected = own.first(key, config["r"])
        if rank != expected:
            raise AdapterError(
                f"{CONFIG}: the tensors of {module[:120]!r} have rank {rank} but r in {CONFIG} is {expected}",
                hint="say so in rank_pattern",
            )
        scales[module] = alphas.first(key, config["lora_alpha"]) / root(rank)
    return scales


# ---- patterns ----
class _Matching:
    """A stranger's regular expressions, within a time for all of them together, over all modules. It is that of the
    processor, so that a busy machine refuses nothing that an idle one takes; and other threads run meanwhile."""

    def __init__(self) -> None:
        self._left = MATCHING_S

    def fullmatch(self, expression: str, text: str, key: str) -> bool:
        """Raise AdapterError, which names the option `key`, if it is none or takes too long."""
        if self._left <= 0:
            _refuse(key, f"takes too long to match with the names of all modules, as {_shown(expression)}; {_NAMES}")
        began = time.thread_time()
        try:
            return regex.fullmatch(expression, text, timeout=self._left, concurrent=True) is not None
        except regex.error as error:
            _refuse(key, f"has {_shown(expression)}, which is no regular expression: {error}")
        except TimeoutError:
            _refuse(key, f"has {_shown(expression)}, which takes too long to match; {_NAMES}")
        finally:
            self._left -= time.thread_time() - began


class _Patterns(Generic[T]):
    """PEFT's `rank_pattern` and `alpha_pattern`: the first key counts that matches a module's name, or what follows one
    of its dots, as a regular expression.

    Almost every key is a name, in which "." stands for any character, perhaps after "^", the beginning of the module's
    name. It matches texts of its own length. Such keys are kept by their shape, which is that length and where they
    have dots, so that a module is looked up once for each shape and not compared with every key.
    """

    def __init__(self, config: Mapping[str, Any], option: str, matching: _Matching):
        self._option, self._matching = option, matching
        self._shapes: dict[int, dict[tuple[bool, tuple[int, ...]], dict[str, tuple[int, T]]]] = {}
        self._expressions: list[tuple[str, tuple[int, T]]] = []
        for order, (key, value) in enumerate((config.get(option) or {}).items()):
            if not _NAME.fullmatch(key):
                self._expressions.append((rf"(.*\.)?({key})", (order, value)))
                continue
            text = key.removeprefix("^")
            shape = (text != key, tuple(i for i, letter in enumerate(text) if letter == "."))
            self._shapes.setdefault(len(text), {}).setdefault(shape, {}).setdefault(text, (order, value))
        if len(self._expressions) > MAX_EXPRESSIONS or sum(map(len, self._shapes.values())) > MAX_SHAPES:
            limits = (
                f"{MAX_EXPRESSIONS} regular expressions, or names of more than {MAX_SHAPES} shapes (lengths and dots)"
            )
            _refuse(option, f"has more than {limits}")

    def first(self, module: str, default: T) -> T:
        """Return the value of the first key that matches."""
        found = [hit for start in _starts(module) for hit in self._hits(module[start:], whole=start == 0)]
        found += [hit for key, hit in self._expressions if self._matching.fullmatch(key, module, self._option)]
        return min(found, key=lambda hit: hit[0])[1] if found else default

    def _hits(self, text: str, *, whole: bool) -> Iterator[tuple[int, T]]:
        for (anchored, dots), keys in self._shapes.get(len(text), {}).items():
            if anchored and not whole:
                continue
            letters = list(text)
            for dot in dots:
                letters[dot] = "."
            if hit := keys.get("".join(letters)):
                yield hit


def _starts(module: str) -> list[int]:
    """Return where a name begins, and what follows each of its dots."""
    return [0, *(i + 1 for i, letter in enumerate(module) if letter == ".")]


# ---- which modules ----
class _Targets:
    """Decides by its name whether PEFT adapts a module."""

    def __init__(self, config: Mapping[str, Any], matching: _Matching):
        layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern") or []
        self._targets, self._excluded = _names(config.get("target_modules")), _names(config.get("exclude_modules"))
        self._weights = frozenset(config.get("target_parameters") or ())
        self._layers = {layers} if isinstance(layers, int) else set(layers or ())
        self._patterns = [patterns] if isinstance(patterns, str) else patterns
        self._matching = matching

    def refusal(self, module: str) -> str | None:
        """Return why it is not adapted."""
        if not self._has_weight_named(module):
            return self._refusal_by_name(module)
        if self._refusal_by_name(module) is None:
            return "target_modules names it and target_parameters its weight; PEFT takes only one of the two"
        return None

    def pattern_key(self, module: str) -> str:
        """Return the text that PEFT matches with the patterns of ranks and alphas."""
        return module + _WEIGHT if self._has_weight_named(module) else module

    def _has_weight_named(self, module: str) -> bool:
        return bool(self._weights) and any(module[start:] + _WEIGHT in self._weights for start in _starts(module))

    def _refusal_by_name(self, module: str) -> str | None:
        if self._excluded and self._named(self._excluded, module, "exclude_modules"):
            return "exclude_modules names it"
        if self._targets != "all-linear" and not self._named(self._targets, module, "target_modules"):
            return "target_modules does not name it"
        if self._layers and self._layer(module) not in self._layers:
            return "its layer is not in layers_to_transform"
        return None

    def _named(self, names: frozenset[str] | str, module: str, key: str) -> bool:
        if isinstance(names, frozenset):
            return any(module[start:] in names for start in _starts(module))
        return self._matching.fullmatch(names, module, key)

    def _layer(self, module: str) -> int | None:
        """Return the number of its layer: the first one in its name, or the one that follows a name of
        `layers_pattern`."""
        if not self._patterns:
            found = regex.match(r".*?\.[^.]*\.(\d+)\.", module)
        else:
            every = (regex.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module) for pattern in self._patterns)
            found = next((match for match in every if match), None)
        return None if found is None else int(found[1])


def _names(value: Sequence[str] | str | None) -> frozenset[str] | str:
    return value if isinstance(value, str) else frozenset(value or ())


# ---- values ----
def _is_parameter(name: str) -> bool:
    return name.endswith(_WEIGHT) or name.rpartition(".")[2] in EXPERT_PARAMETERS


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= MAX_ALPHA


def _shown(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, str) else repr(str(value)[:80])


def _refuse(key: str, why: str) -> NoReturn:
    raise AdapterError(f"{CONFIG}: {key} {why}")
