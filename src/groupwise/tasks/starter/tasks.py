"""The starter model's tasks: seeded generators of small chat problems with one right answer each.

    supervised_conversations   what the starter was trained on (the train split only)
    prompts                    rows for GRPO and for evaluation, from either split
    is_correct                 how the starter's report judges a reply

A *problem* is (skill, operands); its wording and the style of its answer are drawn apart from it. A problem is held
out when crc32 of its name is divisible by 5, so that the two splits share no problem whatever the seeds, wordings and
styles; what commutes (47 + 138 and 138 + 47) is one problem.

A *style* is the form of the answer: `bare` 185, `sentence` The answer is 185., `think` a working in <think> and then
the answer, `tags` <answer>185</answer>; a `plain` prompt asks for none of them. The supervised answers follow the style
that was asked for only part of the time (`STYLE_NOISE`), so that following it is half learned as well.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from groupwise.errors import DataError

# ---- the knobs of the supervised data: shares, normalised where they are used ----
SKILL_WEIGHTS = {
    "add": 0.30,
    "sub": 0.14,
    "mul": 0.10,
    "copy": 0.08,
    "count": 0.08,
    "sort": 0.08,
    "compare": 0.06,
    "json": 0.06,
    "tool": 0.10,
}
ASKED_STYLES = {"plain": 0.25, "bare": 0.40, "sentence": 0.08, "think": 0.12, "tags": 0.15}
UNASKED_STYLES = {"bare": 0.60, "sentence": 0.20, "think": 0.10, "tags": 0.10}  # what a plain prompt is answered in
STYLE_NOISE = 0.3  # share of answers in a style that was not asked for
CURIOUS_SKILLS = {**SKILL_WEIGHTS, "add": 0.40, "sub": 0.30}  # later lessons: more of what is hard,
CURIOUS_STYLES = {**ASKED_STYLES, "think": 0.40}  # and more of it worked out
SYSTEM_SHARE = 0.1  # share of conversations that open with a system message
SECOND_TURN_SHARE = 0.1  # share of conversations with a second problem in them

Style = Literal["plain", "bare", "sentence", "think", "tags"]
Split = Literal["train", "test"]
Conversation = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Mix:
    """The mixture of supervised conversations: shares of the skills and of the styles that are asked for, and for a
    style the share of answers that ignore it (`STYLE_NOISE` where it is not named)."""

    skills: Mapping[str, float] = field(default_factory=lambda: SKILL_WEIGHTS)
    asked: Mapping[str, float] = field(default_factory=lambda: ASKED_STYLES)
    noise: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Holds a problem in one wording. `working` is the text that a `think` answer has before the answer."""

    skill: str
    operands: tuple[int | str, ...]
    question: str
    answer: str
    working: str

    @property
    def held_out(self) -> bool:
        """Return whether the problem belongs to the test split; stable across runs and machines (crc32, not hash())."""
        name = f"{self.skill}:{','.join(map(str, self.operands))}"
        return zlib.crc32(name.encode()) % 5 == 0


@dataclass(frozen=True)
class Skill:
    """A skill of the starter: its description, how its exact match is judged, and how one of its cases is drawn."""

    name: str
    description: str
    judged: str
    draw: Callable[[random.Random], Case]
    styles: tuple[Style, ...] = ("bare", "sentence", "think", "tags")
    noun: str = "answer"  # "Reply with just the {noun}."


# ---- wordings ----
ADD = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "Compute {a}+{b}.",
    "{a} + {b} = ?",
    "{a}+{b}=",
    "Add {a} and {b}.",
    "Find the sum of {a} and {b}.",
    "How much is {a} + {b}?",
    "Calculate {a} + {b}.",
)
SUB = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "Compute {a}-{b}.",
    "{a} - {b} = ?",
    "{a}-{b}=",
    "Subtract {b} from {a}.",
    "How much is {a} - {b}?",
    "Calculate {a} - {b}.",
)
MUL = (
    "What is {a} * {b}?",
    "What is {a} times {b}?",
    "Compute {a}*{b}.",
    "{a} * {b} = ?",
    "{a}*{b}=",
    "Multiply {a} by {b}.",
    "How much is {a} * {b}?",
    "Calculate {a} * {b}.",
)
COPY = ('Repeat: "{text}"', 'Copy this: "{text}"', 'Say "{text}".', 'Write exactly: "{text}"', 'Echo: "{text}"')
COUNT = ("How many {item} are in: {text}?", "Count the {item} in: {text}.", "How often is {item} in: {text}?")
SORT = ("Sort: {text}.", "Sort these numbers: {text}.", "Put in order: {text}.", "Order from small to large: {text}.")
MAX = ("Which is the largest: {text}?", "Find the maximum of {text}.", "What is the biggest of {text}?", "max({text})=")
MIN = ("Which is the smallest: {text}?", "Find the minimum of {text}.", "What is the least of {text}?", "min({text})=")
JSON = ("{name} is {age} years old.", "{name} is {age}.", "My name is {name} and I am {age}.", "{name}, age {age}.")
JSON_ASK = ("Give JSON with name and age.", "Write it as JSON.", "Make JSON: name, age.")
TOOL = ("What is {a} {op} {b}?", "Compute {a}{op}{b}.", "Use the calculator: {a} {op} {b}", "{a} {op} {b} = ?")

ASKS: dict[str, tuple[str, ...]] = {
    "plain": ("",),
    "bare": ("Reply with just the {noun}.", "Just the {noun}.", "Only the {noun}, please.", "Give only the {noun}."),
    "sentence": ("Answer in a sentence.", "Use a full sentence."),
    "think": ("Think step by step.", "Think first.", "Show your thinking."),
    "tags": ("Put the answer in <answer> tags.", "Use <answer> tags.", "Answer in <answer> tags."),
}
SENTENCES = ("The answer is {answer}.", "The result is {answer}.", "It is {answer}.")
SYSTEMS = ("You are a helpful assistant.", "You are Groupwise.", "Be brief.", "You are good at arithmetic.")
NAMES = """
    Ada Alan Amir Ana Anna Ben Bo Carl Chen Dana David Ella Emil Emma Eva Fay Finn Grace Hana Hugo Ida Ines Ivan
    Jack Jan Joe Jonas Kai Kate Kim Lara Lea Leo Lily Lin Luca Maria Max Maya Mei Mia Milo Nina Noah Nora Olga Omar
    Otto Paul Pia Ravi Rosa Ruth Sam Sara Sofia Tara Tim Tom Vera Yuki Zoe
""".split()  # noqa: SIM905
WORDS = """
    apple bear bird blue boat book bread cat chair city cloud coin cow day desk dog door duck egg fish flower fox
    frog garden glass gold green hand hat hill home horse house ice iron key king lake lamp leaf light lion moon
    mouse music night orange paper pear pen plane rain red river road rock rose salt sand sea ship shoe silver sky
    snow song spoon star stone sun table tea tiger train tree wall water wind window wolf wood yellow
""".split()  # noqa: SIM905

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate arithmetic.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


# ---- one case of each skill ----
def _add(rng: random.Random) -> Case:
    a, b = rng.randint(10, 99), rng.randint(10, 999)
    if rng.random() < 0.5:
        b = rng.randint(10, 99)
    low, high = sorted((a, b))
    if rng.random() < 0.5:
        a, b = b, a
    return Case("add", (low, high), rng.choice(ADD).format(a=a, b=b), str(a + b), _columns(a, b, sign=1))


def _sub(rng: random.Random) -> Case:
    b = rng.randint(10, 99)
    a = rng.randint(b, 99 if rng.random() < 0.5 else 999)
    return Case("sub", (a, b), rng.choice(SUB).format(a=a, b=b), str(a - b), _columns(a, b, sign=-1))


def _mul(rng: random.Random) -> Case:
    a, b = (
        (rng.randint(2, 9), rng.randint(10, 99)) if rng.random() < 0.75 else (rng.randint(11, 25), rng.randint(11, 25))
    )
    low, high = sorted((a, b))
    ones, tens = low * (high % 10), low * (high // 10 * 10)
    working = f"{low}*{high // 10 * 10}={tens}\n{low}*{high % 10}={ones}\n{tens}+{ones}={a * b}"
    if rng.random() < 0.5:
        a, b = b, a
    return Case("mul", (low, high), rng.choice(MUL).format(a=a, b=b), str(a * b), working)


def _columns(a: int, b: int, *, sign: int) -> str:
    """Return the school method from the right, one column a line: 7+8=15, then 4+3+1=8, then 0+1=1."""
    lines, carry = [], 0
    for i in range(len(str(max(a, b)))):
        x, y = a // 10**i % 10, b // 10**i % 10
        terms = f"{x}{'+' if sign > 0 else '-'}{y}"
        if carry:
            terms += "+1" if carry > 0 else "-1"
        total = x + sign * y + carry
        lines.append(f"{terms}={total}")
        carry = total // 10  # 1 or 0 when adding, -1 or 0 when subtracting
    return "\n".join(lines)


def _copy(rng: random.Random) -> Case:
    def word() -> str:
        if rng.random() < 0.5:
            return rng.choice(WORDS)
        return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))

    text = " ".join(word() for _ in range(rng.randint(1, 3)))
    return Case("copy", (text,), rng.choice(COPY).format(text=text), text, "I copy the text.")


def _count(rng: random.Random) -> Case:
    kinds = rng.sample("abcdefghkmnprstuxyz" if rng.random() < 0.5 else WORDS, 3)
    items = [rng.choice(kinds) for _ in range(rng.randint(3, 8))]
    text, seen, lines = " ".join(items), 0, []
    for item in items:
        seen += item == kinds[0]
        lines.append(f"{item} {seen}")
    question = rng.choice(COUNT).format(item=kinds[0], text=text)
    return Case("count", (kinds[0], text), question, str(seen), "\n".join(lines))


def _sort(rng: random.Random) -> Case:
    numbers = rng.sample(range(1, 100), rng.randint(3, 5))
    ordered = sorted(numbers)
    question = rng.choice(SORT).format(text=_listed(numbers))
    return Case("sort", tuple(ordered), question, _listed(ordered), "\n".join(f"next {number}" for number in ordered))


def _compare(rng: random.Random) -> Case:
    numbers = rng.sample(range(1, 1000), rng.randint(2, 4))
    largest = rng.random() < 0.5
    answer = max(numbers) if largest else min(numbers)
    question = rng.choice(MAX if largest else MIN).format(text=_listed(numbers))
    working = "\n".join(f"{answer}{'>' if largest else '<'}{number}" for number in numbers if number != answer)
    return Case("compare", ("max" if largest else "min", *sorted(numbers)), question, str(answer), working)


def _json(rng: random.Random) -> Case:
    name, age = rng.choice(NAMES), rng.randint(1, 99)
    question = f"{rng.choice(JSON).format(name=name, age=age)} {rng.choice(JSON_ASK)}"
    return Case("json", (name, age), question, json.dumps({"name": name, "age": age}), f"name {name}\nage {age}")


def _tool(rng: random.Random) -> Case:
    op = rng.choice("+-*")
    b, a = sorted((rng.randint(10, 999), rng.randint(10, 999)))
    question = rng.choice(TOOL).format(a=a, b=b, op=op)
    return Case("tool", (a, op, b), question, calculate(f"{a}{op}{b}"), f"{a}{op}{b}")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def calculate(expression: str) -> str:
    """Return the calculator tool's answer: "47*12" -> "564"; "error" unless it is two whole numbers around + - or
    *."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*([+*-])\s*(\d{1,9})\s*", expression)
    if match is None:
        return "error"
    a, op, b = int(match[1]), match[2], int(match[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[op])


_EXACT = "the whole reply is the answer, in the style asked for"
SKILLS: dict[str, Skill] = {
    skill.name: skill
    for skill in (
        Skill("add", "add a two-digit and a two- or three-digit number", _EXACT, _add, noun="number"),
        Skill("sub", "subtract a two-digit number, never below zero", _EXACT, _sub, noun="number"),
        Skill("mul", "one digit by two digits, or two small two-digit numbers", _EXACT, _mul, noun="number"),
        Skill("copy", "repeat one to three words", _EXACT, _copy, styles=("bare", "tags"), noun="text"),
        Skill("count", "count one letter or word in a short list", _EXACT, _count, noun="number"),
        Skill("sort", "sort three to five numbers", f"{_EXACT}; numbers joined by ', '", _sort, noun="list"),
        Skill("compare", "the largest or smallest of two to four numbers", _EXACT, _compare, noun="number"),
        Skill("json", "a sentence to a JSON object", f"{_EXACT}; in json.dumps form", _json, ("bare", "tags"), "JSON"),
        Skill(
            "tool",
            "call the calculator, then answer",
            "a reply with a tool call: the call evaluates to the answer; any other: as the rest",
            _tool,
            styles=("bare", "sentence"),
            noun="number",
        ),
    )
}


def supervised_conversations(
    seed: int, n: int, split: Split = "train", *, mix: Mix | None = None
) -> list[Conversation]:
    """`n` conversations {"messages", "tools", "skill"}, mixed as `mix` says; equal for equal arguments.

    Train the starter on "train" only; "test" is there to measure its loss on problems that it has not seen.
    """
    rng = random.Random(f"supervised/{split}/{seed}")
    mix = mix or Mix()
    names, weights = list(mix.skills), list(mix.skills.values())
    conversations = []
    for _ in range(n):
        skill = SKILLS[rng.choices(names, weights)[0]]
        messages = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < SYSTEM_SHARE else []
        for _ in range(2 if rng.random() < SECOND_TURN_SHARE else 1):
            messages += _solved(_draw(skill, rng, split=split), rng, mix=mix)
        tools = [CALCULATOR] if skill.name == "tool" else None
        conversations.append({"messages": messages, "tools": tools, "skill": skill.name})
    return conversations


def prompts(
    skill: str | Sequence[str] = "add", split: Split = "train", *, n: int = 512, seed: int = 0, style: Style = "bare"
) -> list[Row]:
    """`n` distinct problems {"prompt", "answer", "skill", "style"} (and "tools" with the skill `tool`), skills in turn.

    Raises DataError for an unknown skill, split or style, a style that the skill does not have, or more problems than
    there are.
    """
    skills = [_known_skill(name, style=style) for name in ([skill] if isinstance(skill, str) else skill)]
    if not skills or split not in ("train", "test"):
        raise DataError(f"no prompts for skill={skill!r}, split={split!r}; give a skill, and split 'train' or 'test'")
    rng = random.Random(f"prompts/{split}/{seed}")
    rows: list[Row] = []
    seen: set[tuple[str, tuple[int | str, ...]]] = set()
    duplicates = 0
    while len(rows) < n:
        chosen = skills[len(rows) % len(skills)]
        case = _draw(chosen, rng, split=split)
        if (case.skill, case.operands) in seen:
            duplicates += 1
            if duplicates > 1000:  # in a row: there is hardly a new problem left
                raise DataError(
                    f"{chosen.name} has only about {len(seen)} distinct {split} problems; n is {n}; lower n"
                )
            continue
        duplicates = 0
        seen.add((case.skill, case.operands))
        row = {"prompt": [_asked(case, rng, style=style)], "answer": case.answer, "skill": case.skill, "style": style}
        rows.append({**row, "tools": [CALCULATOR]} if case.skill == "tool" else row)
    return rows


def is_correct(skill: str, reply_text: str, answer: str, style: Style = "bare") -> bool:
    """Exact match after stripping, in the form that `style` asks for; a `plain` prompt takes any of the forms.

    `tool` alone has two turns: a reply with a call is right when the call evaluates to the answer.
    """
    reply = reply_text.strip()
    if skill == "tool" and "<tool_call>" in reply:
        return _called(reply) == answer
    if style == "bare":
        return reply == answer
    if style == "tags":
        return re.sub(r"\s*(</?answer>)\s*", r"\1", reply) == f"<answer>{answer}</answer>"
    if style == "think":
        thought, end, rest = reply.partition("</think>")
        return thought.startswith("<think>") and bool(end) and rest.strip() == answer
    if style == "sentence":
        return reply in {sentence.format(answer=answer) for sentence in SENTENCES}
    return any(is_correct(skill, reply, answer, form) for form in ("bare", "tags", "think", "sentence"))


def _draw(skill: Skill, rng: random.Random, *, split: Split) -> Case:
    while (case := skill.draw(rng)).held_out != (split == "test"):
        pass
    return case


def _known_skill(name: str, *, style: str) -> Skill:
    if name not in SKILLS:
        raise DataError(f"the starter has no skill {name!r}; its skills are {', '.join(SKILLS)}")
    if style != "plain" and style not in SKILLS[name].styles:
        raise DataError(f"skill {name!r} has no style {style!r}; it has plain, {', '.join(SKILLS[name].styles)}")
    return SKILLS[name]


def _asked(case: Case, rng: random.Random, *, style: Style) -> dict[str, Any]:
    ask = rng.choice(ASKS[style]).format(noun=SKILLS[case.skill].noun)
    return {"role": "user", "content": f"{case.question} {ask}".strip()}


def _solved(case: Case, rng: random.Random, *, mix: Mix) -> list[dict[str, Any]]:
    """Return the turns of one problem, from the question to the answer."""
    forms = SKILLS[case.skill].styles
    asked = _pick(mix.asked, ("plain", *forms), rng)
    style: Style = asked
    if asked == "plain":
        style = _pick(UNASKED_STYLES, forms, rng)
    elif rng.random() < mix.noise.get(asked, STYLE_NOISE):
        style = rng.choice([form for form in forms if form != asked])
    turns = [_asked(case, rng, style=asked)]
    if case.skill == "tool":
        call = {"name": "calculator", "arguments": {"expression": case.working}}
        turns.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        turns.append({"role": "tool", "name": "calculator", "content": case.answer})
    return [*turns, {"role": "assistant", "content": _styled(case, rng, style=style)}]


def _pick(shares: Mapping[str, float], allowed: Sequence[str], rng: random.Random) -> Any:
    names = [name for name in shares if name in allowed]
    return rng.choices(names, [shares[name] for name in names])[0]


def _styled(case: Case, rng: random.Random, *, style: Style) -> str:
    if style == "sentence":
        return rng.choice(SENTENCES).format(answer=case.answer)
    if style == "think":
        return f"<think>\n{case.working}\n</think>\n\n{case.answer}"
    if style == "tags":
        return f"<answer>{case.answer}</answer>"
    return case.answer


def _called(reply: str) -> str | None:
    """Return what the first tool call of `reply` evaluates to; None when it is not a calculator call."""
    match = re.search(r"<tool_call>(.*?)</tool_call>", reply, re.DOTALL)
    try:
        call = json.loads(match[1]) if match else {}
        return calculate(call["arguments"]["expression"]) if call["name"] == "calculator" else None
    except (ValueError, KeyError, TypeError):
        return None
