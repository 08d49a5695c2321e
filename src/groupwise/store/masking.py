"""Takes keys, tokens and passwords out of text before it leaves this machine.

A secret is the value of an environment variable whose name says so (HF_TOKEN, OPENAI_API_KEY, DB_PASSWORD), text in a
shape that only keys have, a password in an address, and a configuration's value under such a name. What has none of
these marks is not found: look through what you publish.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "[masked]"
SHORTEST = 8  # characters of an environment variable's value: "true" under DEBUG_TOKEN is no secret

_NAMES = re.compile(r"(?:^|_)(?:KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:$|_)", re.IGNORECASE)
_KEYS = re.compile(
    r"(?:^|_)(?:api_?key|(?:access|secret|private)_key|secret|password|passwd|credentials?)$"
    r"|^(?:(?:access|auth|bearer|hf|hub|api)_)?token$",
    re.IGNORECASE,
)
_SHAPES = (
    r"hf_[A-Za-z0-9]{30,}",
    r"gwk_[A-Za-z0-9_-]{40,}",  # ours
    r"sk-[A-Za-z0-9_-]{20,}",  # OpenAI, Anthropic and others
    r"gh[pousr]_[A-Za-z0-9]{30,}",
    r"github_pat_[A-Za-z0-9_]{40,}",
    r"glpat-[A-Za-z0-9_-]{20,}",
    r"A[KS]IA[0-9A-Z]{16}",
    r"AIza[0-9A-Za-z_-]{35}",
    r"xox[abprs]-[0-9A-Za-z-]{10,}",
    r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",  # a JSON web token
    r"(?<=Bearer )[A-Za-z0-9._~+/-]{20,}",
    r"(?<=://)[^/\s:@]+:[^/\s:@]+(?=@)",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
)


class Masking:
    """Masks text and configurations; `count` is how many secrets it took out so far."""

    def __init__(self, environ: Mapping[str, str] = os.environ):
        named = {value for name, value in environ.items() if _NAMES.search(name) and len(value) >= SHORTEST}
        known = sorted(map(re.escape, named), key=len, reverse=True)
        self._secret = re.compile("|".join((*known, *(rf"(?<![A-Za-z0-9])(?:{shape})" for shape in _SHAPES))))
        self.count = 0

    def text(self, text: str) -> str:
        """Return the text with `MASK` in the place of each secret."""
        masked, found = self._secret.subn(MASK, text)
        self.count += found
        return masked

    def value(self, value: Any) -> Any:
        """Return a value as JSON has it, with every text in it masked."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(each) for key, each in value.items()}
        return [self.value(each) for each in value] if isinstance(value, list | tuple) else value

    def config(self, values: Any) -> Any:
        """Return a configuration masked, a text under the name of a secret (`api_key`, `token`) as a whole."""
        if isinstance(values, Mapping):
            return {key: self._named(str(key), each) for key, each in values.items()}
        return [self.config(each) for each in values] if isinstance(values, list | tuple) else self.value(values)

    def _named(self, key: str, value: Any) -> Any:
        if isinstance(value, str) and value and _KEYS.search(key):
            self.count += 1
            return MASK
        return self.config(value)
