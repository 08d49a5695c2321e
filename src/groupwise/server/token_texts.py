"""Finds the text of each token of a completion, with the run's own tokenizer, if that is on this machine.

Only `tokenizer.json` is read, by the `tokenizers` library: from the package, a local directory, or what Hugging
Face's cache holds already. Nothing is downloaded. Characters that several tokens share (the bytes of "好") belong to
the last.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from groupwise.config.hub import model_path
from groupwise.model.image_tokens import is_first, is_of_image

log = logging.getLogger(__name__)

_FILE = "tokenizer.json"


def find_tokenizer(model: str | None) -> Tokenizer | None:
    """Return the tokenizer of a configuration's `model`; None where there is none here."""
    path = _find_file(model) if model else None
    if path is None:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        log.warning("%s cannot be read (%s); completions are shown without their tokens", path, error)
        return None


def token_texts(token_ids: Sequence[int], tokenizer: Tokenizer | None, *, text: str) -> list[str] | None:
    """Return the text of each token, "" for one whose characters end in a later token. None without a tokenizer, and
    where the ids do not give `text`: then the model on this machine is another one."""
    if tokenizer is None:
        return None
    stream = DecodeStream(skip_special_tokens=False)
    try:
        texts = [stream.step(tokenizer, token_id) or "" for token_id in token_ids]
    except Exception:  # an id that the vocabulary does not have, or an invalid one
        return None
    return texts if text.strip() in "".join(texts) else None


def text_of_ids(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of token ids, special tokens and all; [image] in the place of each image."""
    texts: list[str] = []
    for is_image, some in itertools.groupby(ids, is_of_image):
        if is_image:
            texts += ["[image]" for token in some if is_first(token)]
        else:
            texts.append(tokenizer.decode(list(some), skip_special_tokens=False))
    return "".join(texts)


def _find_file(model: str) -> Path | None:
    if (path := Path(model_path(model)) / _FILE).is_file():
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, _FILE)
    except HFValidationError:  # a path that is gone
        return None
    return Path(cached) if isinstance(cached, str) else None
