"""Reads the arguments of a script of TRL or Unsloth (Python, or a notebook) without running any of it.

    model, tokenizer = FastLanguageModel.from_pretrained("Qwen/Qwen3-0.6B", max_seq_length=2048)    from_pretrained
    model = FastLanguageModel.get_peft_model(model, r=16)                                           get_peft_model
    args = GRPOConfig(num_generations=8, max_steps=100)                                             at the top level
    trainer = GRPOTrainer(model, [exact], args, train_dataset=dataset)                              model, rewards, data

and SFTTrainer and DPOTrainer with their configurations in the same way.

A value is read if it is a literal, a name that is bound once, to what can be read, arithmetic on such, or
`torch.bfloat16`. Any other is an `Unread`: the run needs it said in another way. Of several calls of one kind the last
before the trainer counts, and none under `if False:`.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ruamel.yaml.error import StringMark
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from groupwise.bridges.trl.notebook import python_of
from groupwise.config.formats.keys import Unread
from groupwise.errors import ConfigError

UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel")
METHODS = ("GRPO", "SFT", "DPO")
CONFIGS = {f"{of}{method}Config": f"{method}Config" for method in METHODS for of in ("", "Unsloth")}
TRAINERS = {f"{of}{method}Trainer": f"{method}Trainer" for method in METHODS for of in ("", "Unsloth")}
SAMPLING = ("SamplingParams", "vLLMSamplingParams", "dict")
POSITIONS = {  # the names of positional arguments, where they have one
    "from_pretrained": ("model_name", "max_seq_length", "dtype", "load_in_4bit"),
    "get_peft_model": ("", "r", "target_modules", "lora_alpha", "lora_dropout"),
    **{f"{method}Config": ("output_dir",) for method in METHODS},
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "SFTTrainer": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "DPOTrainer": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "LoraConfig": (),
}
TAKEN = (*POSITIONS["GRPOTrainer"], "processing_class", "tokenizer", "peft_config", "reward_processing_classes")
LORA = {name: f"lora_{name}" for name in ("r", "target_modules", "modules_to_save", "task_type")} | {
    name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")
}
"""LoraConfig's arguments under the names of `trl grpo`."""
LORA_DEFAULTS = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
Numbered = dict[str, tuple[Any, int]]  # name -> value, line from 1


class _Unknown(Exception):
    """The value of an expression is not known without running it."""


def parse_script(text: str, *, source: str) -> tuple[dict[str, Any], Node]:
    """Return the arguments in TRL's words, Unsloth's calls as sections, and nodes that know their lines.

    The lines of a notebook are those of its code cells, one after another. Raises ConfigError: malformed, without a
    trainer that is read, or with `**arguments` that cannot be read.
    """
    if source.endswith(".ipynb"):
        text = python_of(text, source=source)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        of = f"{sys.version_info.major}.{sys.version_info.minor}"
        hint = f"it is read as Python {of} reads it; what a newer one added needs Groupwise in a newer one"
        raise ConfigError(f"malformed Python in {source}, line {error.lineno}: {error.msg}", hint=hint) from None
    return _Script(tree, source).arguments()


class _Script:
    """Reads a training script without running it: the calls in it, and the values that its names are bound to."""

    def __init__(self, tree: ast.Module, source: str):
        self.tree, self.source = tree, source
        self.dead = {id(each) for branch in _never(tree) for each in ast.walk(branch)}
        nodes = [each for each in ast.walk(tree) if id(each) not in self.dead]
        self.bound = Counter(name for each in nodes for name in _binds(each))
        self.values = dict(pair for each in nodes for pair in _assigns(each))
        self.unpacked = {name for each in nodes for name in _unpacks(each)}
        self.functions = {each.name: each.lineno for each in nodes if isinstance(each, ast.FunctionDef)}
        self.modules = dict(pair for each in nodes for pair in _imports(each))
        self.calls = sorted((each for each in nodes if isinstance(each, ast.Call)), key=lambda call: call.lineno)

    def arguments(self) -> tuple[dict[str, Any], Node]:
        found = {method: call for method in METHODS if (call := self._last(f"{method}Trainer")) is not None}
        if not found:
            hint = "scripts of TRL and Unsloth that train by GRPO, SFT or DPO are read; one of ours is run with python"
            raise ConfigError(f"{self.source} calls no GRPOTrainer, SFTTrainer or DPOTrainer", hint=hint)
        if "GRPO" not in found and len(found) > 1:
            hint = "give each a script of its own, and make stages of what they are imported as (stages)"
            raise ConfigError(f"{self.source} calls an SFTTrainer and a DPOTrainer", hint=hint)
        method, trainer = next(iter(found.items()))
        called, of = f"{method}Trainer", f"{method}Config"
        given = self._expressions(trainer, called)
        self._refuse_parsed(given, of)
        top: Numbered = {}
        if (config := self._config(given, trainer, of)) is not None:
            top |= self._read(config, of, "")
        sections: dict[str, tuple[Numbered, int]] = {}
        for kind in ("from_pretrained", "get_peft_model"):
            if (call := self._last(kind, before=trainer.lineno)) is not None:
                sections[kind] = self._read(call, kind, f"{kind}."), call.lineno
        if "from_pretrained" not in sections:
            top |= self._model(given, trainer)
            if (lora := self._last("LoraConfig", before=(trainer.end_lineno or trainer.lineno) + 1)) is not None:
                read = self._read(lora, "LoraConfig", "LoraConfig.")
                top |= {name: (value, lora.lineno) for name, value in LORA_DEFAULTS.items()}
                top |= {LORA[name]: pair for name, pair in read.items() if name in LORA}
                sections["LoraConfig"] = {name: each for name, each in read.items() if name not in LORA}, lora.lineno
        top |= self._rewards(given)
        top |= self._datasets(given)
        others = {name: node for name, node in given.items() if name not in TAKEN}
        said = {name: (self._argument(called, node), node.lineno) for name, node in others.items()}
        sections[called] = said, trainer.lineno
        return _document(top, sections)

    # ---- calls ----

    def _last(self, kind: str, *, before: int | None = None) -> ast.Call | None:
        found = [each for each in self.calls if _kind(each) == kind and (before is None or each.lineno < before)]
        return found[-1] if found else None

    def _config(self, given: dict[str, ast.expr], trainer: ast.Call, kind: str) -> ast.Call | None:
        """Return the configuration that the trainer is given, or else the last before it, or the only one."""
        said = self._followed(given["args"]) if "args" in given else None
        if isinstance(said, ast.Call) and _kind(said) == kind:
            return said
        return self._last(kind, before=trainer.lineno) or self._last(kind)

    def _argument(self, kind: str, node: ast.expr) -> Any:
        """Return an argument of the trainer as it is written, and its value where older versions had what is now the
        configuration's there."""
        if kind == "GRPOTrainer":
            return _short(node)
        try:
            return self._known(node, frozenset())
        except _Unknown:
            return _short(node)

    def _refuse_parsed(self, given: dict[str, ast.expr], config: str) -> None:
        """Raise ConfigError where the arguments or the adapter are made when the script runs, as by a parser."""
        found = []
        for name, kind in (("args", config), ("peft_config", "LoraConfig")):
            node = given.get(name)
            if node is None or isinstance(node, ast.Constant):
                continue
            said = self._followed(node)
            made = isinstance(said, ast.Name) and said.id not in self.unpacked  # an argument, or bound more than once
            if not ((isinstance(said, ast.Call) and _kind(said) == kind) or (made and self._last(kind))):
                found.append(f"line {node.lineno}: {name}, `{_short(node)}`, is known only when the script runs")
        if found:
            hint = "give the YAML file that its parser reads (--config) in its place, or call groupwise.from_trl in it"
            raise ConfigError(f"{self.source} cannot be read:" + "".join(f"\n  - {each}" for each in found), hint=hint)

    def _expressions(self, call: ast.Call, kind: str) -> dict[str, ast.expr]:
        """Return the arguments by name. Raises ConfigError for those that have none."""
        names = POSITIONS[kind]
        place = f"{self.source}:{call.lineno}: {_name(call.func)}"
        if any(isinstance(each, ast.Starred) for each in call.args) or len(call.args) > len(names):
            raise ConfigError(
                f"{place} has arguments without names", hint="write them as keywords, as in max_steps=100"
            )
        given = {name: each for name, each in zip(names, call.args, strict=False) if name}
        for keyword in call.keywords:
            if keyword.arg is not None:
                given[keyword.arg] = keyword.value
                continue
            spread = self._followed(keyword.value)
            if not isinstance(spread, ast.Dict) or not all(isinstance(key, ast.Constant) for key in spread.keys):
                what = f"{place}(**{ast.unparse(keyword.value)}) is known only when the script runs"
                raise ConfigError(what, hint="write them as keywords, or call groupwise.from_trl in the script")
            given |= {str(key.value): each for key, each in zip(spread.keys, spread.values, strict=True)}  # type: ignore[union-attr]
        return given

    def _read(self, call: ast.Call, kind: str, under: str) -> Numbered:
        return {
            name: (self._value(each, f"{under}{name}"), each.lineno)
            for name, each in self._expressions(call, kind).items()
        }

    # ---- values ----

    def _value(self, node: ast.expr, name: str) -> Any:
        """Return the value of the argument `name`, or an Unread."""
        try:
            return self._known(node, frozenset())
        except _Unknown:
            return Unread(f"`{_short(node)}` is known only when the script runs", f"{name}=VALUE")

    def _known(self, node: ast.expr, seen: frozenset[str]) -> Any:
        """Return what an expression comes to. Raises _Unknown."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
            return node.value
        if isinstance(node, ast.Name) and self.bound[node.id] == 1 and node.id in self.values and node.id not in seen:
            return self._known(self.values[node.id], seen | {node.id})
        if isinstance(node, ast.List | ast.Tuple):  # the end-of-sequence token stops here in any case
            return [self._known(each, seen) for each in node.elts if getattr(each, "attr", None) != "eos_token"]
        if isinstance(node, ast.Dict):
            keys = [None if key is None else self._known(key, seen) for key in node.keys]
            return {_text(key): self._known(each, seen) for key, each in zip(keys, node.values, strict=True)}
        if isinstance(node, ast.Attribute) and _name(node).startswith("torch."):
            return node.attr
        if isinstance(node, ast.Call) and _name(node.func).rpartition(".")[2] in SAMPLING and not node.args:
            return {_text(each.arg): self._known(each.value, seen) for each in node.keywords}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -_number(self._known(node.operand, seen))
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right = self._known(node.left, seen), self._known(node.right, seen)
            if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add):
                return left + right
            try:
                return OPERATORS[type(node.op)](_number(left), _number(right))
            except ArithmeticError:
                raise _Unknown from None
        raise _Unknown

    def _followed(self, node: ast.expr) -> ast.expr:
        """Return what a name that is bound once stands for; anything else is itself."""
        seen: set[str] = set()
        while (
            isinstance(node, ast.Name) and self.bound[node.id] == 1 and node.id in self.values and node.id not in seen
        ):
            seen.add(node.id)
            node = self.values[node.id]
        return node

    # ---- what the trainer is given ----

    def _model(self, given: dict[str, ast.expr], trainer: ast.Call) -> Numbered:
        """Return the model of a script of TRL's: its name, or what was loaded by it."""
        node = given.get("model")
        if node is None:
            return {}
        held = self._followed(node)
        if isinstance(held, ast.Call) and _name(held.func).endswith(".from_pretrained") and held.args:
            held = held.args[0]
        return {"model_name_or_path": (self._value(held, "model_name_or_path"), trainer.lineno)}

    def _rewards(self, given: dict[str, ast.expr]) -> Numbered:
        """Return references to imported functions, and names of reward models; functions of the script are Unread."""
        if (node := given.get("reward_funcs")) is None:
            return {}
        listed = self._followed(node)
        entries = listed.elts if isinstance(listed, ast.List | ast.Tuple) else [listed]
        names = [_name(each) for each in entries]
        found = [self._reference(each) for each in entries]
        if all(found):
            return {"reward_funcs": (found, node.lineno)}
        of = [f"{name} (line {self.functions[name]})" if name in self.functions else name for name in names]
        instead = ",".join(f"my_rewards:{name.rpartition('.')[2]}" for name in names)
        why = f"the script is not run, so copy {', '.join(of)} into a module beside it, such as my_rewards.py"
        return {"reward_funcs": (Unread(why, f"rewards=[{instead}]"), node.lineno)}

    def _reference(self, node: ast.expr) -> str | None:
        """Return `module.function` of an imported function, or the name of a reward model."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        first, dot, rest = _name(node).partition(".")
        if first not in self.modules or self.bound[first] != 1:
            return None
        return f"{self.modules[first]}{dot}{rest}"

    def _datasets(self, given: dict[str, ast.expr]) -> Numbered:
        """`load_dataset` with literal arguments; other data are Unread."""
        said: Numbered = {}
        train, held_out = given.get("train_dataset"), given.get("eval_dataset")
        read = None if train is None else self._loaded(train)
        if read is not None and train is not None:
            names = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
            said = {names[key]: (value, train.lineno) for key, value in read.items()}
        elif train is not None:
            what = "write its rows to a file there, as in dataset.to_json('prompts.jsonl')"
            said["dataset_name"] = (
                self._unread("train_dataset", train, what, "data.source=prompts.jsonl"),
                train.lineno,
            )
        if held_out is not None:
            other = self._loaded(held_out)
            same = read is not None and other is not None and {**other, "split": ""} == {**read, "split": ""}
            what = "write its rows to a file there"
            unread = self._unread("eval_dataset", held_out, what, "eval.data.source=held_out.jsonl")
            split = other.get("split") if same and other is not None else unread
            said["dataset_test_split"] = (split, held_out.lineno)
        return said

    def _unread(self, name: str, node: ast.expr, what: str, instead: str) -> Unread:
        said = _short(self._followed(node))
        return Unread(f"{name}, `{said}`, is known only when the script runs: {what}", instead)

    def _loaded(self, node: ast.expr) -> dict[str, str] | None:
        """Return what `load_dataset` is called with: path, name and split; None for anything else."""
        call = self._followed(node)
        if not isinstance(call, ast.Call) or _name(call.func).rpartition(".")[2] != "load_dataset":
            return None
        named = {each.arg: each.value for each in call.keywords}
        pairs = dict(zip(("path", "name"), call.args, strict=False)) | named
        read = {str(name): self._value(each, "") for name, each in pairs.items()}
        if read.get("path") in ("json", "csv", "parquet") and isinstance(read.get("data_files"), str):
            return {"path": read["data_files"]} | ({"split": read["split"]} if "[" in (read.get("split") or "") else {})
        known = read.keys() <= {"path", "name", "split"} and all(isinstance(each, str) for each in read.values())
        return read if known and read.keys() >= {"path", "split"} else None


# ---- expressions ----


def _kind(call: ast.Call) -> str | None:
    """Return which of the calls that are read this is."""
    of, _, last = _name(call.func).rpartition(".")
    if last in ("from_pretrained", "get_peft_model"):
        return last if of.rpartition(".")[2] in UNSLOTH else None
    return CONFIGS.get(last) or TRAINERS.get(last) or (last if last in POSITIONS else None)


def _name(node: ast.AST) -> str:
    """Return `a.b.c` for names and attributes; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (of := _name(node.value)):
        return f"{of}.{node.attr}"
    return ""


def _short(node: ast.expr) -> str:
    said = " ".join(ast.unparse(node).split())
    return said if len(said) <= 60 else f"{said[:57]}..."


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Unknown
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):  # None is what `**` stands for
        raise _Unknown
    return value


def _never(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements under `if False:`."""
    for each in ast.walk(tree):
        if isinstance(each, ast.If) and isinstance(each.test, ast.Constant) and not each.test.value:
            yield from each.body


def _binds(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds, by assignment, definition, argument or import."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]


def _assigns(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the name that a statement binds to an expression."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        yield node.targets[0].id, node.value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        yield node.target.id, node.value


def _unpacks(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds to parts of a value."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple | ast.List):
                yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that an import binds, with what they are called in full."""
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for each in node.names:
            yield each.asname or each.name, f"{node.module}.{each.name}"
    elif isinstance(node, ast.Import):
        for each in node.names:
            first = each.name.partition(".")[0]
            yield (each.asname, each.name) if each.asname else (first, first)


def _document(top: Numbered, sections: Mapping[str, tuple[Numbered, int]]) -> tuple[dict[str, Any], Node]:
    """Return the values and nodes of the top level and of the sections."""
    data: dict[str, Any] = {name: value for name, (value, _) in top.items()}
    pairs = [_pair(name, ScalarNode("", "", _mark(line)), line) for name, (_, line) in top.items()]
    for section, (inside, line) in sections.items():
        data[section] = {name: value for name, (value, _) in inside.items()}
        held = [_pair(name, ScalarNode("", "", _mark(at)), at) for name, (_, at) in inside.items()]
        pairs.append(_pair(section, MappingNode("", held, _mark(line)), line))
    return data, MappingNode("", pairs, _mark(1))


def _pair(name: str, node: Node, line: int) -> tuple[Node, Node]:
    return ScalarNode("", name, _mark(line)), node


def _mark(line: int) -> StringMark:
    return StringMark("", 0, line - 1, 0, "", 0)
