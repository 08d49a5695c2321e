"""Images as tokens: what lets a model that sees run in packed rows, shared prompts and caches like any other.

An image takes places among a prompt's tokens, as many as its features. Each place has a token id of its own, beyond
every vocabulary, made of the image's content and the number of the place:

    (ids: `image_tokens`)

    Vision.expand           token ids of a rendered conversation, one for each image -> with each image written out
    Vision.embed            token ids -> embeddings, an image's from the vision tower, which runs once for each image
    Vision.positions        token ids -> rotary positions: one a token, or three (M-RoPE, arXiv 2409.12191, section 2.1)

Where the tower is frozen, its features are computed without a graph, and kept for the next sampling or training of the
same image, up to a number of bytes. Where its own parameters train, they are kept for the sampling of one version
(`changed`). Where an adapter changes it, who runs it says what an image's features are (`See`). An image as the tower
takes it is kept, too, up to a number of bytes, so that it is decoded once for the passes of a step.

Shapes: S packed tokens, n tokens of an image, H hidden size.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PROCESSOR_MAPPING, AutoImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from groupwise.config.lora import PROJECTOR
from groupwise.config.lora import VISION as VISION_PART
from groupwise.config.trained import TEXT
from groupwise.errors import ChatError, DataError, FieldError, ModelError
from groupwise.model.image_tokens import FIRST, PLACES, VISION, is_first, key_of, vision_of
from groupwise.pictures import ImageError, Picture, kept_pictures, read_picture

log = logging.getLogger(__name__)

KEPT_BYTES = 1 << 30  # of features
PREPARED_BYTES = 256 << 20  # of images as the tower takes them
PROJECTORS = {  # as families call them
    "multi_modal_projector", "connector", "merger", "deepstack_merger_list", "image_newline", "embed_vision",
}  # fmt: skip
EARS = {"audio_tower", "embed_audio"}  # they hear nothing here, and do not train
MOST_SEEN = 1 << 14  # images that are known at once, where others can be looked at again


@dataclass(frozen=True)
class Seen:
    """An image as the model takes it: the token ids of what stands in the text for it, how many of them are its own,
    and, with M-RoPE, their extent in time, rows and columns. `alone`: in a prompt with other images it would be cut
    otherwise."""

    picture: Picture
    written: tuple[int, ...]
    tokens: int
    grid: tuple[int, int, int] | None
    alone: bool


@dataclass(frozen=True)
class Features:
    """Holds the tower's output for an image: `rows` [n, H], and `deep`, one [n, H] for each of the first layers
    (Qwen3-VL's deepstack, arXiv 2406.04334)."""

    rows: Tensor
    deep: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.rows, *self.deep))


# Tokens of images, and their places in the packed row -> the features of each one's image
See = Callable[[Sequence[int], Sequence[int]], Sequence[Features]]


class Vision:
    """The eyes of one loaded model.

    Args:
        model: transformers' model of images and text.
        make_processor: makes its processor.
        settings: the processor's settings, as in processor_config.json.

    Without its model, as it is pickled with a tokenizer, it still makes token ids of images; one process may do that,
    and another, with the same shelf, compute them.
    """

    shelf: Path | None = None  # see `keep_in`
    blind: str | None = None  # why no images can be given (`packed_check.look`)
    looked = False

    def __init__(self, model: PreTrainedModel, make_processor: ProcessorOf, *, settings: Mapping[str, Any]):
        config: Any = model.config
        self._make_processor, self._model, self._settings = make_processor, model, dict(settings)
        self.name, processor = type(model).__name__, self.processor
        self.token_id = int(getattr(config, "image_token_id", None) or processor.image_token_id)
        self.token = str(processor.image_token)
        self.rendered_id = int(processor.tokenizer.convert_tokens_to_ids(self.token))  # an image as the template has it
        self.both_ways, self.in_windows = sees_both_ways(config), config.model_type != "gemma3"
        self.axes = 3 if "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {}) else 1
        self._merge = int(getattr(config.vision_config, "spatial_merge_size", 1))
        self._seen: OrderedDict[int, Seen] = OrderedDict()
        self._features: OrderedDict[int, Features] = OrderedDict()
        self._inputs: OrderedDict[int, dict[str, Any]] = OrderedDict()  # of the tower
        self._lock = RLock()

    def __deepcopy__(self, memo: Any) -> Vision:
        return self  # second module trees over the same weights see with the same eyes

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_model", "_lock", "_features", "_inputs", "_seen", "processor")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=RLock(), _features=OrderedDict(), _inputs=OrderedDict(), _seen=OrderedDict())

    @cached_property
    def processor(self) -> Any:
        """Return the image processor of transformers, made on first use."""
        return self._make_processor()

    # -- token ids ----------------------------------------------------------------------------------------------------

    def expand(self, ids: Sequence[int], pictures: Sequence[Picture], *, before: int = 0) -> list[int]:
        """Return the token ids of a rendered conversation, or of its end behind `before` other images, with each image
        written out as the processor does, of ids of its own, where the template has its placeholder.

        Raises:
            ChatError: the template did not render as many images as there are.
            DataError: an image cannot be decoded, or has too many tokens.
            ModelError: what is computed of images is not what the model itself computes.
        """
        if self.blind is not None:
            raise ModelError(f"{self.name} cannot be given images: {self.blind}")
        ids, number = list(ids), before + len(pictures)
        if (rendered := ids.count(self.rendered_id)) != len(pictures):
            raise ChatError(
                f"the chat template renders {rendered} images, and the messages have {len(pictures)}",
                hint='use {"type": "image"} parts in messages whose role the template takes images from',
            )
        expanded, following = list[int](), iter(pictures)
        for token in ids:
            if token != self.rendered_id:
                expanded.append(token)
                continue
            seen = self._note(next(following))
            if seen.alone and number > 1:
                message = f"the prompt has {number} images, and {self.name} cuts several"
                raise ModelError(f"{message} otherwise than one, which is not supported", hint="give one image")
            expanded += self._written(seen)
        return expanded

    def _written(self, seen: Seen) -> Iterator[int]:
        """Yield what stands for an image, its own tokens with its own ids."""
        place = FIRST + key_of(seen.picture.digest) * PLACES
        for token in seen.written:
            yield place if token == self.token_id else token
            place += token == self.token_id

    def placeholders(self, ids: Sequence[int]) -> list[int]:
        """Return token ids as the tokenizer knows them: its own image token for each token of an image."""
        return [self.token_id if token >= FIRST else token for token in ids]

    def in_short(self, ids: Sequence[int]) -> list[int]:
        """Return `placeholders` of ids in which the places of an image that stand together are one."""
        begin = [i == 0 or token < FIRST or token != ids[i - 1] + 1 for i, token in enumerate(ids)]
        return self.placeholders([token for token, begins in zip(ids, begin, strict=True) if begins])

    def shortened(self, ids: Sequence[int]) -> tuple[list[int], list[Picture]]:
        """Return the inverse of `expand`: token ids as the template renders them, with one placeholder where an image
        stands, and the images.

        Raises:
            DataError: an image is not known here, or not whole.
        """
        short, pictures, at = list[int](), list[Picture](), 0
        while at < len(ids):
            if ids[at] < FIRST:
                short.append(ids[at])
                at += 1
                continue
            seen = self._known(ids[at])
            written, before = [*self._written(seen)], seen.written.index(self.token_id)
            begin = at - before
            if begin < 0 or [*ids[begin : begin + len(written)]] != written:
                raise DataError("an image among the token ids is not written as this model writes it", kind="image")
            del short[len(short) - before :]
            short.append(self.rendered_id)
            pictures.append(seen.picture)
            at = begin + len(written)
        return short, pictures

    def pictures(self, ids: Sequence[int]) -> list[Picture]:
        """Return the images of a row of tokens, in order."""
        return [self._known(token).picture for token in ids if token >= FIRST and is_first(token)]

    def picture(self, token: int) -> Picture | None:
        """Return the image that a token is of; None where it is not known here."""
        try:
            return self._known(token).picture
        except DataError:
            return None

    def has(self, ids: Sequence[int]) -> bool:
        """Return whether the ids of images among a row's tokens are of images that are known, each whole and in
        order."""
        at, places = 0, [(place, token) for place, token in enumerate(ids) if token >= FIRST]
        while at < len(places):
            where, token = places[at]
            try:
                seen = self._known(token)
            except DataError:
                return False
            of_it, first = places[at : at + seen.tokens], token - token % PLACES
            if [each for _, each in of_it] != list(range(first, first + seen.tokens)):
                return False
            if seen.grid is not None and of_it[-1][0] - where != seen.tokens - 1:
                return False
            at += seen.tokens
        return self.blind is None

    def forget(self, picture: Picture) -> None:
        """Drop what is known of an image, its file too."""
        with self._lock:
            seen = self._seen.get(key_of(picture.digest))
            if seen is not None and self.shelf is not None and seen.picture.used(self.shelf):
                assert seen.picture.path is not None
                seen.picture.path.unlink(missing_ok=True)
            for known in (self._seen, self._features, self._inputs):
                known.pop(key_of(picture.digest), None)

    def noted(self) -> dict[int, Seen]:
        """Return the images that are known here and kept on the shelf: what `learn` takes in another process."""
        with self._lock:
            return {} if self.shelf is None else dict(self._seen)

    def learn(self, noted: Mapping[int, Seen]) -> None:
        """Take over the images that another process has read, with the same shelf."""
        with self._lock:
            self._seen |= {key: seen for key, seen in noted.items() if key not in self._seen}

    def warm_up(self) -> None:
        """Import what prepares images."""
        if self.blind is None:
            self._looked_at(sample_picture())

    def _note(self, picture: Picture) -> Seen:
        """Return an image as the model takes it, which is worked out once, and keep its file."""
        key = key_of(picture.digest)
        with self._lock:
            seen = self._seen.get(key) or self._looked_at(picture)
            if seen.picture != picture:
                raise DataError("two images have the same first 46 bits of their SHA-256", kind="image")
            if self.shelf is not None and not seen.picture.used(self.shelf):
                seen = replace(seen, picture=picture.keep(self.shelf))
            self._seen[key] = seen
            while self.shelf is not None and len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
        return seen

    def _looked_at(self, picture: Picture) -> Seen:
        inputs, written = self._prepared(picture)
        shown = tuple(self.processor.tokenizer.encode(written, add_special_tokens=False))
        tokens, grid = shown.count(self.token_id), inputs.get("image_grid_thw")
        if tokens > PLACES:
            message = f"an image has {tokens} tokens; at most {PLACES} are supported"
            raise ImageError(picture, message, hint="make it smaller")
        extent = None if grid is None else _extent(grid[0].tolist(), self._merge)
        if "_model" in vars(self):  # else another process computes them
            self._keep_inputs(picture, {**inputs})
        return Seen(picture, shown, tokens, extent, alone="batch_num_images" in inputs)

    def _known(self, token: int) -> Seen:
        key = (token - FIRST) // PLACES
        if (seen := self._seen.get(key)) is None:
            names = [] if self.shelf is None else kept_pictures(self.shelf, f"{key << 2:012x}"[:11])
            if not (found := [path for path in names if key_of(path.stem) == key]):
                raise DataError(
                    f"token id {token} is of an image that is not known here (looked for in {self.shelf})", kind="image"
                )
            seen = self._note(read_picture(found[0]))
        return seen

    def _prepared(self, picture: Picture) -> tuple[Any, str]:
        """Return what the processor makes of an image: the tensors, and what stands in the text for it. Raises
        ImageError where it refuses the image."""
        processor, settings = self.processor, self.processor.tokenizer.init_kwargs
        told = processor._merge_kwargs(
            processor.valid_processor_kwargs, tokenizer_init_kwargs=settings, return_tensors="pt"
        )
        pixels = picture.pixels()
        try:
            inputs, (replacement,) = processor._process_images([[pixels]], **told["images_kwargs"])
        except ValueError as error:  # as of one that is far wider than high
            message = f"this model's processor does not take an image: {error}"
            raise ImageError(picture, message, hint="crop it, or give it another size") from error
        return inputs, replacement

    def save(self, folder: Path) -> None:
        """Write how images are prepared, as transformers reads it, into a model's folder."""
        self.processor.image_processor.save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(self._settings, indent=2), encoding="utf-8")

    def keep_in(self, folder: Path) -> None:
        """Keep each image that is encoded, also those that were, as a file in `folder`, named by its SHA-256.

        The images of token ids that another process encoded are looked for there.
        """
        with self._lock:
            self.shelf = folder
            for key, seen in self._seen.items():
                self._seen[key] = replace(seen, picture=seen.picture.keep(folder))

    # -- embeddings ---------------------------------------------------------------------------------------------------

    def embed(self, ids_BT: Tensor, embeddings: torch.nn.Module, see: See) -> dict[str, Any]:
        """Return the inputs of the text decoder for rows of tokens: `inputs_embeds` [B, T, H], and what deepstack adds.

        Raises:
            DataError: an image is not known here.
        """
        image_BT = ids_BT >= FIRST
        embeds_BTH, tokens = embeddings(ids_BT.masked_fill(image_BT, self.token_id)), ids_BT[image_BT].tolist()
        seen = see(tokens, image_BT.flatten().nonzero()[:, 0].tolist())
        every = {id(each): each for each in seen}
        starts = dict(zip(every, accumulate((len(each.rows) for each in every.values()), initial=0), strict=False))
        at_n = [starts[id(each)] + token % PLACES for each, token in zip(seen, tokens, strict=True)]
        at_n = torch.tensor(at_n, device=ids_BT.device)
        rows_nH = torch.cat([each.rows for each in every.values()])[at_n].to(embeds_BTH)
        told: dict[str, Any] = {"inputs_embeds": embeds_BTH.index_put((image_BT,), rows_nH)}
        if levels := list(zip(*(each.deep for each in every.values()), strict=True)):
            told["visual_pos_masks"] = image_BT
            told["deepstack_visual_embeds"] = [torch.cat(level)[at_n] for level in levels]
        return told

    def see(self, model: PreTrainedModel) -> See:
        """Return the function that gives a second module tree the features of images. If its vision tower trains, or
        the model's does, features are computed in each forward, once for each image; otherwise they come from the
        cache."""
        if self.trains or any(parameter.requires_grad for parameter in parameters_of_eyes(model)):
            return lambda tokens, _: self._once(tokens, lambda token: self.computed(token, model))
        return lambda tokens, _: self._once(tokens, self.features)

    @property
    def trains(self) -> bool:
        """Return whether parameters of the tower or the projector train themselves, without an adapter."""
        return any(parameter.requires_grad for parameter in parameters_of_eyes(self._model))

    def changed(self) -> None:
        """Drop the features that are kept, if the tower that made them trains: it is another now."""
        with self._lock:
            if self.trains:
                self._features.clear()

    def _once(self, tokens: Sequence[int], features: Callable[[int], Features]) -> list[Features]:
        every = {image: features(token) for image, token in {token // PLACES: token for token in tokens}.items()}
        return [every[token // PLACES] for token in tokens]

    def features(self, token: int) -> Features:
        """Return the model's features of the image that a token belongs to, without a graph."""
        key = (token - FIRST) // PLACES
        with self._lock:
            if (found := self._features.get(key)) is None:
                with torch.inference_mode(False), torch.no_grad():
                    found = self._features[key] = self.computed(token, self._model)
                while len(self._features) > 1 and sum(each.nbytes for each in self._features.values()) > KEPT_BYTES:
                    self._features.popitem(last=False)
            self._features.move_to_end(key)
        return found

    def computed(self, token: int, model: PreTrainedModel) -> Features:
        """Return the features that a module tree's tower computes for the image that a token belongs to. Raises
        DataError for an image that is not known here."""
        with self._lock:
            seen = self._known(token)
            prepared = self._on_device(seen.picture)
        inputs = _accepted(_inner(model).get_image_features, prepared)
        out = _inner(model).get_image_features(**inputs, return_dict=True)
        deep = getattr(out, "deepstack_features", None) or ()
        found = Features(_flat(out.pooler_output), tuple(_flat(each) for each in deep))
        if len(found.rows) != seen.tokens:
            raise DataError(f"an image has {seen.tokens} tokens and {len(found.rows)} features", kind="image")
        return found

    def unprepared(self, ids: Sequence[int]) -> list[Picture]:
        """Return the images of a row of tokens that are still to be decoded: another process looked at them, or it is
        long ago."""
        firsts = {(token - FIRST) // PLACES: token for token in ids if token >= FIRST}
        with self._lock:
            new = [token for key, token in firsts.items() if key not in self._inputs and key not in self._features]
        return [picture for token in new if (picture := self.picture(token)) is not None]

    def prepare(self, picture: Picture) -> None:
        """Decode an image, and keep the tower's inputs for the next computation of its features. Raises ImageError."""
        self._keep_inputs(picture, {**self._prepared(picture)[0]})

    def _keep_inputs(self, picture: Picture, inputs: dict[str, Any]) -> None:
        with self._lock:
            self._inputs[key_of(picture.digest)] = inputs
            while len(self._inputs) > 1 and sum(map(_bytes_of, self._inputs.values())) > PREPARED_BYTES:
                self._inputs.popitem(last=False)

    def _on_device(self, picture: Picture) -> dict[str, Any]:
        with self._lock:
            kept = self._inputs.pop(key_of(picture.digest), None)
        kept = {**self._prepared(picture)[0]} if kept is None else kept
        self._keep_inputs(picture, kept)
        inputs = {
            name: each.to(self._model.device) if isinstance(each, Tensor) else each for name, each in kept.items()
        }
        return {**inputs, "pixel_values": inputs["pixel_values"].to(self._model.dtype)}

    def ahead(self, ids_S: Tensor) -> Tensor:
        """Return how many places of its image follow each token of packed rows, in which images are whole."""
        along = (ids_S[1:] == ids_S[:-1] + 1) & (ids_S[:-1] >= FIRST)
        ends = torch.cat([~along, along.new_ones(1)])
        at = torch.arange(len(ids_S), device=ids_S.device)
        last = torch.where(ends, at, len(ids_S)).flip(0).cummin(0).values.flip(0)
        return last - at

    def own_logits(self, ids: Sequence[int], picture: Picture) -> Tensor:
        """Return the logits [S, V] of a row with one image, by the model's own forward."""
        row = torch.tensor([self.placeholders(ids)], device=self._model.device)
        kinds = (row == self.token_id).int()
        told = {"input_ids": row, "mm_token_type_ids": kinds, "token_type_ids": kinds, **self._on_device(picture)}
        with torch.no_grad():
            return self._model(**_accepted(self._model.forward, told), use_cache=False).logits[0]

    # -- positions ----------------------------------------------------------------------------------------------------

    def positions(self, ids: Sequence[int]) -> np.ndarray:
        """Return the rotary positions of one row's tokens: [S], or [3, S] (time, height, width)."""
        if self.axes == 1:
            return np.arange(len(ids))
        parts, at, following = list[np.ndarray](), 0, 0
        while at < len(ids):
            if ids[at] < FIRST:
                end = next((i for i in range(at, len(ids)) if ids[i] >= FIRST), len(ids))
                parts.append(np.broadcast_to(following + np.arange(end - at), (3, end - at)))
                following += end - at
            else:
                seen = self._known(ids[at])
                assert seen.grid is not None
                t, h, w = seen.grid
                end = at + seen.tokens
                where = np.stack(np.meshgrid(np.arange(t), np.arange(h), np.arange(w), indexing="ij")).reshape(3, -1)
                parts.append(following + where[:, : len(ids) - at])
                following += max(h, w)
            at = min(end, len(ids))
        return np.concatenate(parts, -1) if parts else np.zeros((3, 0), int)

    def positions_of(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the positions of several rows' tokens, one row behind the other: [S], or [3, S]."""
        return torch.from_numpy(np.concatenate([self.positions(row) for row in rows], -1))

    def following(self, ids: Sequence[int]) -> int:
        """Return the position of the text token that follows a row."""
        where = self.positions(ids)
        return int(where.max()) + 1 if where.size else 0


def sees_both_ways(config: Any) -> bool:
    """Return whether tokens of an image see each other in a model of this configuration: Gemma 3's do always, Gemma 4's
    where it says so."""
    told = getattr(config.get_text_config(), "use_bidirectional_attention", None)
    return config.model_type == "gemma3" or told == "vision"


def sample_picture() -> Picture:
    """Return a small picture, of which no two parts are alike."""
    from PIL import Image

    pixels = (np.arange(96 * 64 * 3, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8).reshape(64, 96, 3)
    return read_picture(Image.fromarray(pixels))


def eyes_of(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return, by their full names, the modules that are neither of the text decoder nor the LM head; none of a model
    that reads text alone."""
    if vision_of(model) is None:
        return {}
    head, decoder = model.get_output_embeddings(), model.get_decoder()
    ours = {id(module) for module in (*decoder.modules(), head)}
    every = dict(model.named_modules())
    names = [name for name, module in every.items() if id(module) in ours]
    around = {"", *(name[:i] for name in names for i, letter in enumerate(name) if letter == ".")}
    seeing = {name: module for name, module in every.items() if id(module) not in ours and name not in around}
    return {name: module for name, module in seeing.items() if EARS.isdisjoint(name.split("."))}


def parameters_of_eyes(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Return the parameters of the vision tower and the projector."""
    head: Any = model.get_output_embeddings()
    ours = {id(parameter) for part in (model.get_decoder(), head) for parameter in part.parameters()}
    every = model.named_parameters()
    return [each for name, each in every if id(each) not in ours and EARS.isdisjoint(name.split("."))]


def linear_of_eyes(model: PreTrainedModel, *, projector: bool = False) -> tuple[str, ...]:
    """Return the names of the linear layers of a vision tower, or of the projector behind it. A pooling head, which
    makes one vector of an image, has no part in what the text decoder gets."""
    found = list[str]()
    for name, module in eyes_of(model).items():
        parts = name.split(".")
        if type(module) is torch.nn.Linear and "head" not in parts and projector != PROJECTORS.isdisjoint(parts):
            found.append(name)
    return tuple(found)


def attention_of_eyes(model: PreTrainedModel) -> str | None:
    """Return the name of the attention that the vision tower runs with; None of a model that reads text alone."""
    config: Any = model.config
    return None if vision_of(model) is None else str(config.vision_config._attn_implementation)


def set_attention_of_eyes(model: PreTrainedModel, name: str | None) -> None:
    """Have the vision tower run with this attention, whatever the text decoder runs with."""
    for module in eyes_of(model).values():
        if name is not None and getattr(module, "config", None) is not None:
            config: Any = module.config
            config._attn_implementation = name


def train_parts(model: PreTrainedModel, parts: Collection[str]) -> None:
    """Let the parameters of these parts of a model train, and no others (`config.trained`). All of a model that reads
    text alone is its `text`.

    Raises:
        FieldError: it has none of a part.
    """
    seeing = {id(parameter) for parameter in parameters_of_eyes(model)} if vision_of(model) is not None else set()
    found = set[str | None]()
    for name, parameter in model.named_parameters():
        part: str | None = TEXT
        if id(parameter) in seeing:
            part = VISION_PART if PROJECTORS.isdisjoint(name.split(".")) else PROJECTOR
        elif not EARS.isdisjoint(name.split(".")):
            part = None
        found.add(part)
        parameter.requires_grad_(part in parts)
    if lacking := [part for part in parts if part not in found]:
        message = "{field}: " + f"{type(model).__name__} reads text alone, and has no {lacking[0]}"
        raise FieldError(message, hint="leave it out", field="train.parameters", kind="target")


def open_eyes(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Let a model, and its tokenizer, see with what is in its folder (or repository): nothing happens where the model
    has no vision tower, there is no configuration of how images are prepared, or transformers has no processor here.

    Raises:
        ModelError: images need a package that is not installed.
    """
    kind: Any = PROCESSOR_MAPPING.get(type(model.config), None)
    if not hasattr(_inner(model), "get_image_features") or kind is None:
        return
    try:
        images = AutoImageProcessor.from_pretrained(path)
        told, _ = _of_images_alone(kind).get_processor_dict(path)
    except OSError:
        return  # no preprocessor_config.json, no processor_config.json
    except (ImportError, ValueError) as error:  # transformers makes no such class here: without torchvision
        log.warning("images of %s cannot be prepared, and it reads text alone: %s", path, " ".join(str(error).split()))
        return
    known = inspect.signature(kind.__init__).parameters
    options = {name: value for name, value in told.items() if name in known and not isinstance(value, dict)}
    try:
        vision = Vision(model, ProcessorOf(kind, options, images, tokenizer), settings=told)
    except ImportError as error:
        raise ModelError(
            f"images of {path} cannot be prepared: {error}", hint="pip install 'groupwise[images]'"
        ) from None
    for each in (model, tokenizer):
        setattr(each, VISION, vision)


@dataclass(frozen=True)
class ProcessorOf:
    """Makes a processor of a class of transformers' that prepares images and does without the rest."""

    kind: Any
    options: Mapping[str, Any]
    images: Any
    tokenizer: PreTrainedTokenizerBase

    def __call__(self) -> Any:
        parts = dict.fromkeys(self.kind.get_attributes(), None)
        parts |= {"image_processor": self.images, "tokenizer": self.tokenizer}
        return _of_images_alone(self.kind)(**{**self.options, **parts})


def _of_images_alone(kind: Any) -> Any:
    """Return a processor's class that does without a processor of videos, which needs torchvision."""

    class OfImages(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    OfImages.__name__ = OfImages.__qualname__ = kind.__name__
    return OfImages


def _inner(model: PreTrainedModel) -> Any:
    """Return the part of a model that has `get_image_features` and no LM head."""
    return getattr(model, "model", model)


def _accepted(function: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a processor's inputs that a family's function takes."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in inputs.items() if name in known}


def _extent(grid: Sequence[int], merge: int) -> tuple[int, int, int]:
    time, height, width = grid
    return int(time), int(height) // merge, int(width) // merge


def _bytes_of(inputs: Mapping[str, Any]) -> int:
    return sum(each.nbytes for each in inputs.values() if isinstance(each, Tensor))


def _flat(features: Any) -> Tensor:
    """[n, H] of what families give: a tensor with any number of leading dimensions, or one for each part."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
