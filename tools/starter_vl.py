"""The starter that sees, `starter-vl` in the wheel: how it was made from the starter, and what it can do.

    python tools/starter_vl.py build --out starter-vl-model    from the starter: 300 steps, and 1,600 lesson steps
    python tools/starter_vl.py info [--measure]          its accuracy on held-out questions, skill by skill

The layout is InternVL's with a decoder of Qwen3's, as InternVL 3.5 has it: a vision transformer of 64 x 64 pixels in
patches of 8, of which four are a token, a projector, and the starter as the decoder. It is made as such models are:
first tower and projector learn to name what is in each place of a picture, in the decoder's own embeddings; then the
decoder learns to describe pictures, and then to answer questions about them. The data is
`groupwise.tasks.starter.scenes`. Everything is seeded.

Shapes: N pictures, P = 16 places of a picture, H hidden size, V vocabulary, B rows, T tokens.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL.Image import Image
from starter import accuracies, read_report, write_report
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    PreTrainedTokenizerBase,
)

from groupwise.cli.frame import OPTIONS, AsJson, Debug
from groupwise.cli.output import print_json, print_pairs, say
from groupwise.config.run import PACKAGED, STARTER_DIR, STARTER_VL
from groupwise.engine.local import LocalEngine
from groupwise.errors import ConfigError
from groupwise.model.load import load_model
from groupwise.tasks.starter.scenes import (
    ASKED,
    ASKED_LATER,
    CELL,
    COLOURS,
    PLACES,
    SHAPES,
    SIDE,
    Form,
    Row,
    Scene,
    lessons,
    prompts,
)
from groupwise.train.learner import learning_rate_at

app = typer.Typer(help="A small model that sees: how it is made of the starter, and what it can do.", **OPTIONS)

BEGIN, END, IMAGE = "<img>", "</img>", "<IMG_CONTEXT>"
WORDS = (*PLACES, *COLOURS, *SHAPES, *SHAPES.values(), "shapes", "nothing")  # a token each, or lookups take far longer
PATCH = CELL // 2  # pixels: four patches are a token, so a place of the grid is one


@dataclass(frozen=True, kw_only=True)
class Stage:
    """AdamW from rest over so many steps, warm-up, cosine to zero. Of the lessons' pictures a share of `descriptions`
    are described, and the others asked about; `asked` has the forms that counts are asked in."""

    steps: int
    learning_rate: float = 2e-3
    pictures: int  # of a step
    descriptions: float = 0.2
    asked: Mapping[str, float] = field(default_factory=lambda: ASKED)


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """The recipe. Describing comes first: it names every place, and so looking them up is
    learned within 200 steps; from questions alone it was not within 250."""

    places: Stage = Stage(steps=300, pictures=64)
    lessons: tuple[Stage, ...] = (
        Stage(steps=200, pictures=16, descriptions=1.0),
        Stage(steps=500, pictures=16, descriptions=0.4),
        Stage(steps=900, pictures=16, descriptions=0.15, asked=ASKED_LATER),
    )
    seed: int = 0
    warmup_steps: int = 50
    weight_decay: float = 0.05
    tower_size: int = 128
    tower_layers: int = 3


def build(directory: Path, spec: BuildSpec, *, report: Callable[[str], None]) -> None:
    """Train the model and write it into `directory`, after every stage; the next begins from what was written.
    `report` receives a line now and then."""
    torch.manual_seed(spec.seed)
    tokenizer = make_tokenizer()
    model = new_model(spec, tokenizer)
    report(f"places: {spec.places.steps} steps, seed {spec.seed}")
    learn_places(model, tokenizer, spec, report=report)
    save(model, tokenizer, directory)
    for number, stage in enumerate(spec.lessons):
        report(f"lessons, {number + 1} of {len(spec.lessons)}: {stage.steps} steps")
        model = InternVLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
        learn_lessons(model, tokenizer, stage, spec, report=report)
        save(model, tokenizer, directory)


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Return the starter's tokenizer with the tokens of an image, a token for each word of `WORDS`, and a chat template
    that writes images."""
    tokenizer = AutoTokenizer.from_pretrained(STARTER_DIR)
    tokenizer.add_special_tokens({"additional_special_tokens": [BEGIN, END, IMAGE]})
    tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in WORDS])
    text = "for part in content if part.type == 'text' -%}{{ part.text }}"
    with_images = f"for part in content -%}}{{{{ '{IMAGE}' if part.type == 'image' else part.text }}}}"
    assert text in str(tokenizer.chat_template)
    tokenizer.chat_template = str(tokenizer.chat_template).replace(text, with_images)
    return tokenizer


def new_model(spec: BuildSpec, tokenizer: PreTrainedTokenizerBase) -> InternVLForConditionalGeneration:
    """Return the untrained model: a new tower and projector, and the starter's decoder."""
    starter: Any = AutoModelForCausalLM.from_pretrained(STARTER_DIR, dtype=torch.float32)
    image: Any = tokenizer.convert_tokens_to_ids(IMAGE)  # an int; the stubs admit more
    known, scale = starter.config.vocab_size, float(starter.get_input_embeddings().weight.detach().std())
    starter.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    nn.init.normal_(starter.get_input_embeddings().weight.data[known:], std=scale)
    decoder = starter.config.to_dict()
    del decoder["_name_or_path"]  # where the starter lies on this machine
    config = InternVLConfig(
        text_config=decoder,
        vision_config={
            "hidden_size": spec.tower_size,
            "intermediate_size": 3 * spec.tower_size,
            "num_hidden_layers": spec.tower_layers,
            "num_attention_heads": spec.tower_size // 32,
            "image_size": [SIDE, SIDE],
            "patch_size": [PATCH, PATCH],
            "layer_scale_init_value": 1.0,
        },
        image_token_id=image,
        image_seq_length=len(PLACES),
    )
    model = InternVLForConditionalGeneration(config)
    nn.init.normal_(model.model.vision_tower.embeddings.position_embeddings, std=0.02)
    model.model.language_model.load_state_dict(starter.model.state_dict())
    return model


# ---- the two stages ----


def learn_places(
    model: InternVLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    spec: BuildSpec,
    *,
    report: Callable[[str], None],
) -> None:
    """Train tower and projector in place: the feature of a place becomes the sum of the decoder's embeddings of the
    words that name the place and what is in it, so that the decoder reads an image as it reads words."""
    embedding: Any = model.get_input_embeddings()
    embeddings_VH: Tensor = embedding.weight.detach().clone()
    scale = embeddings_VH.pow(2).mean()
    drawn = lessons(spec.seed * 2_000_003)

    def named(scene: Scene, place: str) -> Tensor:
        return embeddings_VH[tokenizer.convert_tokens_to_ids([place, *str(scene.get(place, "nothing")).split()])].sum(0)

    def loss(stage: Stage) -> Tensor:
        scenes, images, _ = zip(*islice(drawn, stage.pictures), strict=True)
        seen: Any = model.model.get_image_features(pixels_of(images))
        named_NPH = torch.stack([torch.stack([named(scene, place) for place in PLACES]) for scene in scenes])
        return (seen.pooler_output.float() - named_NPH).pow(2).mean() / scale

    eyes = (model.model.vision_tower, model.model.multi_modal_projector)
    parameters = [parameter for part in eyes for parameter in part.parameters()]
    descend(loss, parameters, spec.places, spec, report=report)


def learn_lessons(
    model: InternVLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    stage: Stage,
    spec: BuildSpec,
    *,
    report: Callable[[str], None],
) -> None:
    """Train the decoder in place on conversations about pictures: what the assistant says, token by token. What the
    tower makes of an image stays as it is."""
    seed = spec.seed * 2_000_003 + stage.steps
    drawn = lessons(seed, descriptions=stage.descriptions, asked_as=stage.asked)
    for part in (model.model.vision_tower, model.model.multi_modal_projector):
        part.requires_grad_(False)

    def loss(stage: Stage) -> Tensor:
        _, images, chats = zip(*islice(drawn, stage.pictures), strict=True)
        ids_BT, said_BT = encode(chats, tokenizer)
        padding: Any = tokenizer.pad_token_id
        logits = model(
            input_ids=ids_BT, attention_mask=(ids_BT != padding).long(), pixel_values=pixels_of(images)
        ).logits
        taught_BT = ids_BT.masked_fill(~said_BT, -100)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), taught_BT[:, 1:].flatten())

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    descend(loss, parameters, stage, spec, report=report)


def descend(
    loss_of: Callable[[Stage], Tensor],
    parameters: list[nn.Parameter],
    stage: Stage,
    spec: BuildSpec,
    *,
    report: Callable[[str], None],
) -> None:
    """Take a stage's steps of AdamW; products are in bfloat16."""
    optimizer = torch.optim.AdamW(parameters, weight_decay=spec.weight_decay, betas=(0.9, 0.98))
    start, recent = time.monotonic(), list[float]()
    for step in range(stage.steps):
        rate = learning_rate_at(
            step,
            peak=stage.learning_rate,
            warmup_steps=min(spec.warmup_steps, stage.steps // 4),
            steps=stage.steps,
            schedule="cosine",
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(stage)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        recent.append(float(loss.detach()))
        if (step + 1) % 25 == 0:
            mean = sum(recent[-25:]) / len(recent[-25:])
            report(f"step {step + 1}/{stage.steps}  loss {mean:.4f}  {time.monotonic() - start:.0f} s")


def pixels_of(images: tuple[Image, ...]) -> Tensor:
    """Return pictures as the tower takes them, [N, 3, side, side] between -1 and 1."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 127.5 - 1.0


def encode(chats: tuple[list[dict[str, str]], ...], tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Return conversations, each with a picture in front, as ids and what of them the assistant says: [B, T], padded
    on the right."""
    begin, end, image = (tokenizer.convert_tokens_to_ids(token) for token in (BEGIN, END, IMAGE))
    rows: list[tuple[Tensor, Tensor]] = []
    for turns in chats:
        first = [{"type": "image"}, {"type": "text", "text": turns[0]["content"]}]
        messages = [{"role": "user", "content": first}, *turns[1:]]
        told: Any = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        at = told["input_ids"].index(image)
        ids = [*told["input_ids"][:at], begin, *[image] * len(PLACES), end, *told["input_ids"][at + 1 :]]
        said = [*[0] * (at + len(PLACES) + 2), *told["assistant_masks"][at + 1 :]]
        rows.append((torch.tensor(ids), torch.tensor(said, dtype=torch.bool)))
    padding: Any = tokenizer.pad_token_id
    ids_BT = nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True, padding_value=padding)
    return ids_BT, nn.utils.rnn.pad_sequence([said for _, said in rows], batch_first=True)


def save(model: InternVLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write config, bf16 weights, tokenizer and how pictures are prepared."""
    directory.mkdir(parents=True, exist_ok=True)
    other: Any = copy.deepcopy(model)
    model = other.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    named = {
        "start_image_token": BEGIN,
        "end_image_token": END,
        "context_image_token": IMAGE,
        "video_token": IMAGE,  # there are no videos; the processor asks for one
    }
    told = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(directory / "tokenizer_config.json", {**told, "extra_special_tokens": named})
    images = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "crop_to_patches": False,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    write_json(directory / "preprocessor_config.json", images)
    write_json(
        directory / "processor_config.json", {"processor_class": "InternVLProcessor", "image_seq_length": len(PLACES)}
    )


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON that people read."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# ---- what it can do ----

MAX_TOKENS = 128
MEASURED: tuple[tuple[str, Form], ...] = (
    ("count", "plain"),
    ("count", "bare"),
    ("count", "point"),
    ("read", "plain"),
    ("what", "plain"),
    ("where", "plain"),
    ("describe", "plain"),
)


def measure(
    directory: Path, *, questions: int = 300, samples: int = 2, seed: int = 0, note: Callable[[str], None]
) -> dict[str, Any]:
    """Return what the model in `directory` answers right of `questions` held-out questions a skill, `samples`
    completions each: only the last line of a reply counts. `note` receives a line a skill."""
    base = load_model(str(directory))
    engine = LocalEngine(base)
    rows: list[dict[str, Any]] = []
    try:
        for skill, form in MEASURED:
            asked = prompts(skill, "test", n=questions, form=form, seed=seed)
            greedy, sampled = accuracies(
                engine, base.tokenizer, asked, _is_right, max_tokens=MAX_TOKENS, samples=samples, seed=seed
            )
            rows.append({"skill": skill, "form": form, "questions": questions, "greedy": greedy, "sampled": sampled})
            note(f"{skill} ({form}): greedy {greedy:.1%}, sampled {sampled:.1%}")
    finally:
        engine.close()
    parameters = sum(parameter.numel() for parameter in base.model.parameters())
    return {"parameters": parameters, "base_hash": base.hash, "max_tokens": MAX_TOKENS, "skills": rows}


def _is_right(row: Row, reply: str) -> bool:
    return reply.strip().splitlines()[-1:] == [row["answer"]]


def described(measured: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the report as the rows of a table, the first its headings."""
    yield "skill", "asked", "greedy", "sampled", "questions"
    for row in measured["skills"]:
        yield row["skill"], row["form"], f"{row['greedy']:.1%}", f"{row['sampled']:.1%}", str(row["questions"])


# ---- commands ----


@app.command()
def info(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="A model that `build` made; default: ours.", show_default=False),
    ] = None,
    again: Annotated[bool, typer.Option("--measure", help="Measure it now instead of reading the report.")] = False,
    questions: Annotated[int, typer.Option(min=1, help="Held-out questions a row, with --measure.")] = 300,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what the model can do: its accuracy on held-out questions, skill by skill."""
    path = directory or PACKAGED[STARTER_VL]
    measured = measure(path, questions=questions, note=say) if again else read_report(path)
    return print_json(measured) if as_json else print_pairs([*described(measured)])


@app.command("build")
def build_model(
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new directory for the model.")] = Path("starter-vl-model"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="At most this many steps a stage; default: the recipe's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the data and the weights.")] = 0,
    questions: Annotated[int, typer.Option(min=1, help="Held-out questions a row of the report.")] = 300,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make starter-vl from the starter, and measure it."""
    from groupwise.store.rundir import owned

    spec = BuildSpec(seed=seed)
    if steps is not None:
        places, *taught = (replace(each, steps=min(steps, each.steps)) for each in (spec.places, *spec.lessons))
        spec = replace(spec, places=places, lessons=tuple(taught))
    with owned(out):
        if (out / "config.json").exists():
            hint = "name another directory with --out, or remove it first"
            raise ConfigError(f"{out} holds a model already", hint=hint)
        build(out, spec, report=say)
        measured = measure(out, questions=questions, note=say)
        write_report(out, measured)
    return print_json(measured) if as_json else print_pairs([*described(measured)])


if __name__ == "__main__":
    app()
