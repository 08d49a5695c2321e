"""The tasks of the starter that sees: seeded pictures of shapes and digits, and questions about them.

    draw_scene   a random picture: things in a grid of four columns, a to d, and four rows, 1 to 4
    prompts      rows for GRPO and for evaluation, from either split: a picture, a question and its answer
    lessons      what `starter-vl` was taught with: a picture and several questions with answers, as one conversation

A picture is 64 x 64 pixels, and a place of the grid 16 x 16. What is in a place, a shape in a colour or a digit, is a
*thing*; where in its place it is, how large, and how light the ground is, is drawn apart from it. A question about a
picture is held out when crc32 of the things and of what is asked is divisible by 5, so that the two splits share none.

A question can be answered at once, or by pointing first: `<think>`, the places of what is counted, `</think>`, then
how many they are. Unasked, the model points at one question in four (`POINTS`), so that pointing is half learned.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from groupwise.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

SIDE, CELL = 64, 16  # pixels of a picture, and of a place
COLUMNS, ROWS = "abcd", "1234"
PLACES = tuple(f"{column}{row}" for row in ROWS for column in COLUMNS)  # in reading order
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 40),
    "green": (34, 150, 60),
    "blue": (40, 80, 210),
    "yellow": (240, 190, 20),
    "black": (20, 20, 20),
}
SHAPES = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
DIGITS = "0123456789"
# The bars of a seven-segment display that are lit: top, the upper two, middle, the lower two, bottom.
BARS = ("1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011")

POINTS = 0.25  # share of counts that are pointed at, unasked
ASKED = {"plain": 0.5, "bare": 0.3, "point": 0.2}  # shares of the forms that a lesson asks counts in,
ASKED_LATER = {"plain": 0.4, "bare": 0.15, "point": 0.45}  # and a later one
ASKS = {"plain": "", "bare": " Just the number.", "point": " Point at each first."}
QUESTIONS_EACH = 5  # questions about one picture of a lesson

Split = Literal["train", "test"]
Form = Literal["plain", "bare", "point"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Thing:
    """The content of a place in a scene: a shape in a colour, or a digit, which is black."""

    what: str
    colour: str = "black"

    def __str__(self) -> str:
        return f"{self.colour} {self.what}" if self.what in SHAPES else self.what


Scene = Mapping[str, Thing]  # of places


@dataclass(frozen=True)
class Asked:
    """A question about a scene, the answer, and for a count the places that are counted."""

    skill: str
    question: str
    answer: str
    places: tuple[str, ...] | None = None

    def reply(self, *, pointing: bool) -> str:
        """Return the reply of a lesson."""
        if not pointing or self.places is None:
            return self.answer
        return f"<think>\n{' '.join(self.places) or 'none'}\n</think>\n\n{self.answer}"


# ---- scenes ----


def draw_scene(rng: random.Random) -> Scene:
    """Return a random scene: up to nine things that are alike, some that are not, and in half of them a number of up to
    three digits."""
    free = list(PLACES)
    scene: dict[str, Thing] = {}
    if rng.random() < 0.5:
        number = str(rng.randint(0, 999))
        row, start = rng.choice(ROWS), rng.randrange(len(COLUMNS) - len(number) + 1)
        for column, digit in zip(COLUMNS[start:], number, strict=False):
            scene[f"{column}{row}"] = Thing(digit)
        free = [place for place in free if not place.endswith(row)]  # or it would be read with its neighbours
    rng.shuffle(free)
    alike, others = rng.randint(0, 9), rng.randint(0, 5)
    thing = _any_thing(rng)
    for i, place in enumerate(free[: alike + others]):
        scene[place] = thing if i < alike else _any_thing(rng)
    return {place: scene[place] for place in PLACES if place in scene}


def _any_thing(rng: random.Random) -> Thing:
    return Thing(rng.choice(list(SHAPES)), rng.choice(list(COLOURS)))


def picture_of(scene: Scene, rng: random.Random) -> Image:
    """Return a picture of a scene: RGB, 64 x 64. Needs Pillow (`pip install 'groupwise[images]'`)."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise DataError("pictures need Pillow, which is not here", hint="pip install 'groupwise[images]'") from None
    image = Image.new("RGB", (SIDE, SIDE), tuple(rng.randint(225, 255) for _ in range(3)))
    canvas = ImageDraw.Draw(image)
    for place, thing in scene.items():
        radius = rng.choice((4, 5, 6))
        x, y = (
            CELL * among.index(name) + rng.randint(radius + 1, CELL - radius - 2)
            for among, name in zip((COLUMNS, ROWS), place, strict=True)
        )
        _draw_thing(canvas, thing, x, y, radius)
    return image


def _draw_thing(canvas: ImageDraw, thing: Thing, x: int, y: int, r: int) -> None:
    """Draw a thing within `r` pixels of (x, y)."""
    colour = COLOURS[thing.colour]
    if thing.what == "circle":
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif thing.what == "square":
        canvas.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    elif thing.what == "triangle":
        canvas.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    elif thing.what == "cross":
        canvas.line((x - r, y - r, x + r, y + r), fill=colour, width=3)
        canvas.line((x - r, y + r, x + r, y - r), fill=colour, width=3)
    else:
        left, right, top, bottom = x - r + 1, x + r - 1, y - r, y + r
        ends = (
            (left, top, right, top),
            (left, top, left, y),
            (right, top, right, y),
            (left, y, right, y),
            (left, y, left, bottom),
            (right, y, right, bottom),
            (left, bottom, right, bottom),
        )
        for bar, lit in zip(ends, BARS[int(thing.what)], strict=True):
            if lit == "1":
                canvas.line(bar, fill=colour, width=2)


# ---- questions ----


def _count(scene: Scene, rng: random.Random) -> Asked:
    shapes = [thing for thing in scene.values() if thing.what in SHAPES]
    of = rng.choice(shapes) if shapes and rng.random() < 0.85 else _any_thing(rng)
    kind = rng.choice(("both", "both", "shape", "colour"))
    several = SHAPES[of.what]
    name = {"both": f"{of.colour} {several}", "shape": several, "colour": f"{of.colour} shapes"}[kind]
    places = tuple(
        place
        for place, thing in scene.items()
        if thing.what in SHAPES
        and (kind == "colour" or thing.what == of.what)
        and (kind == "shape" or thing.colour == of.colour)
    )
    return Asked("count", f"How many {name} are there?", str(len(places)), places)


def _what(scene: Scene, rng: random.Random) -> Asked:
    place = rng.choice(list(scene)) if scene and rng.random() < 0.8 else rng.choice(PLACES)
    return Asked("what", f"What is at {place}?", str(scene.get(place, "nothing")))


def _where(scene: Scene, rng: random.Random) -> Asked:
    shown = [*scene.values()]
    once = [(place, thing) for place, thing in scene.items() if shown.count(thing) == 1 and thing.what in SHAPES]
    if not once:
        return _what(scene, rng)
    place, thing = rng.choice(once)
    return Asked("where", f"Where is the {thing}?", place)


def _read(scene: Scene, rng: random.Random) -> Asked:
    number = "".join(thing.what for thing in scene.values() if thing.what in DIGITS)
    return Asked("read", "Which number is written?", number) if number else _what(scene, rng)


def _describe(scene: Scene, rng: random.Random) -> Asked:
    return Asked("describe", "Describe it.", ", ".join(f"{place} {scene.get(place, 'nothing')}" for place in PLACES))


SKILLS: dict[str, Callable[[Scene, random.Random], Asked]] = {
    "count": _count,
    "read": _read,
    "what": _what,
    "where": _where,
    "describe": _describe,
}


def is_held_out(scene: Scene, asked: Asked) -> bool:
    """Return whether a question about a scene is of the test split; on every machine the same."""
    name = ";".join(f"{place}:{thing}" for place, thing in scene.items()) + asked.question
    return zlib.crc32(name.encode()) % 5 == 0


def prompts(
    skill: str | Sequence[str] = "count", split: Split = "train", *, n: int = 1000, form: Form = "plain", seed: int = 0
) -> list[Row]:
    """Return rows for GRPO or evaluation: `prompt`, `image` (a PIL image), `answer`, `skill`.

    Args:
        skill: `count`, `read`, `what`, `where` or `describe`; of several as many each.
        split: `train`, or `test`, of which the model was taught none.
        n: the number of rows.
        form: for counts, `bare` asks for just the number, `point` to point at each thing first, `plain` for neither.
        seed: the seed of the pictures and questions.

    Raises:
        DataError: there is no such skill or form.
    """
    skills = [skill] if isinstance(skill, str) else [*skill]
    if unknown := [each for each in skills if each not in SKILLS]:
        raise DataError(f"starter-vl has no skill {unknown[0]!r}; its skills are {', '.join(SKILLS)}")
    if form not in ASKS:
        raise DataError(f"there is no form {form!r} of a question; there are {', '.join(ASKS)}")
    rng = random.Random(f"{split} {seed}")
    rows: list[Row] = []
    while len(rows) < n:
        wanted = skills[len(rows) % len(skills)]
        asked = SKILLS[wanted](scene := draw_scene(rng), rng)
        if asked.skill == wanted and is_held_out(scene, asked) == (split == "test"):
            question = asked.question + (ASKS[form] if wanted == "count" else "")
            row = {"prompt": question, "image": picture_of(scene, rng), "answer": asked.answer, "skill": wanted}
            rows.append(row)
    return rows


def lessons(
    seed: int, *, descriptions: float = 0.2, asked_as: Mapping[str, float] = ASKED
) -> Iterator[tuple[Scene, Image, list[dict[str, str]]]]:
    """Yield endless lessons of the train split: a scene, its picture, and a conversation about it without the picture;
    a share of `descriptions` describe the picture, and the others are of several questions."""
    rng = random.Random(seed)
    while True:
        scene = draw_scene(rng)
        turns: list[dict[str, str]] = []
        describes = rng.random() < descriptions
        if describes and is_held_out(scene, _describe(scene, rng)):
            continue
        while len(turns) < (2 if describes else 2 * QUESTIONS_EACH):
            skill = "describe" if describes else rng.choice(("count", "count", "read", "what", "where"))
            asked = SKILLS[skill](scene, rng)
            if is_held_out(scene, asked):
                continue
            form = rng.choices([*asked_as], [*asked_as.values()])[0] if asked.skill == "count" else "plain"
            pointing = form == "point" or (form == "plain" and rng.random() < POINTS)
            turns.append({"role": "user", "content": asked.question + ASKS[form]})
            turns.append({"role": "assistant", "content": asked.reply(pointing=pointing)})
        yield scene, picture_of(scene, rng), turns
