"""Removes keys, tokens and passwords from text before it leaves this machine, and personal data if requested.

A secret is the value of an environment variable whose name says so (HF_TOKEN, OPENAI_API_KEY, DB_PASSWORD), text in a
form that only keys have, a password in an address, and a configuration's value under such a name. `SECRETS` has the
forms of keys, and `PERSONAL` those of personal data. Text without such a form is not found; names and postal addresses
have none. Look through what you publish.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

MASK = "[masked]"
SHORTEST = 8  # characters of an environment variable's value: "true" under DEBUG_TOKEN is not a secret
SMALLEST_CARD = 10**12  # of JSON, a number with 13 digits

_NAMES = re.compile(r"(?:^|_)(?:KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:$|_)", re.IGNORECASE)
_KEYS = re.compile(
    r"(?:^|_)(?:api_?key|(?:access|secret|private)_key|secret|password|passwd|credentials?)$"
    r"|^(?:(?:access|auth|bearer|hf|hub|api)_)?token$",
    re.IGNORECASE,
)


class Rule(NamedTuple):
    """A rule of masking: of a text that matches the pattern `shape`, which has no groups that capture, the first
    `found(text)` characters (0: none) are replaced by `mask`."""

    name: str
    says: str
    shape: str
    mask: str = MASK
    found: Callable[[str], int] = len


def _card(text: str) -> int:
    """Return the length if the digits are those of a payment card: its first digit, and Luhn's sum, fit.

    >>> _card("4111 1111 1111 1111"), _card("4111 1111 1111 1112")
    (19, 0)
    """
    digits = [int(each) for each in text if each.isdigit()]
    total = sum(digits[-1::-2]) + sum(sum(divmod(2 * each, 10)) for each in digits[-2::-2])
    return len(text) if digits[0] in (2, 3, 4, 5, 6) and total % 10 == 0 else 0


def _iban(text: str) -> int:
    """Return how much of the text is an account's number whose check digits fit (ISO 13616).

    >>> _iban("DE89 3704 0044 0532 0130 00 BIC"), _iban("DE88 3704 0044 0532 0130 00")
    (27, 0)
    """
    while len(plain := text.replace(" ", "")) >= 15:
        if int("".join(str(int(each, 36)) for each in plain[4:] + plain[:4])) % 97 == 1:
            return len(text)
        text = text.rpartition(" ")[0]
    return 0


def _address(text: str) -> int:
    """Return the length if the text is an address of the internet, and of another machine than this one.

    >>> _address("203.0.113.7"), _address("2001:db8:0:1::7"), _address("300.1.1.1"), _address("127.0.0.1")
    (11, 15, 0, 0)
    """
    if ":" in text and len(text.replace("::", ":").strip(":").split(":")) < 4:
        return 0  # 1::2 is a slice of a list
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return 0
    return 0 if found.is_loopback or found.is_unspecified else len(text)


def _phone(text: str) -> int:
    return len(text) if 8 <= sum(map(str.isdigit, text)) <= 15 else 0


SECRETS = (
    Rule("hugging_face_token", "hf_ and 30 characters", r"hf_[A-Za-z0-9]{30,}"),
    Rule("groupwise_key", "gwk_ and 40 characters: a key of our server", r"gwk_[A-Za-z0-9_-]{40,}"),
    Rule("sk_key", "sk- and 20 characters: OpenAI, Anthropic and others", r"sk-[A-Za-z0-9_-]{20,}"),
    Rule("github_token", "ghp_, gho_, ..., github_pat_", r"gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{40,}"),
    Rule("gitlab_token", "glpat- and 20 characters", r"glpat-[A-Za-z0-9_-]{20,}"),
    Rule("aws_key", "AKIA or ASIA and 16 characters", r"A[KS]IA[0-9A-Z]{16}"),
    Rule("google_key", "AIza and 35 characters", r"AIza[0-9A-Za-z_-]{35}"),
    Rule("slack_token", "xoxb-, xoxp-, ...", r"xox[abprs]-[0-9A-Za-z-]{10,}"),
    Rule(
        "json_web_token",
        "eyJ...: three parts",
        r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    ),
    Rule("bearer_token", "20 characters behind Bearer", r"(?<=Bearer )[A-Za-z0-9._~+/-]{20,}"),
    Rule("password_in_address", "user and password in a URL", r"(?<=://)[^/\s:@]+:[^/\s:@]+(?=@)"),
    Rule(
        "private_key",
        "BEGIN PRIVATE KEY to its end",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    ),
)

PERSONAL = (
    Rule("email", "addresses of e-mail", r"[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})+", "[email]"),
    Rule(
        "iban",
        "numbers of bank accounts whose check digits fit",
        r"[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Za-z0-9])",
        "[iban]",
        _iban,
    ),
    Rule(
        "ip_address",
        "IPv4 and IPv6, but this machine's own",
        r"(?<![.:])(?:(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\w)|(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:]))",
        "[ip]",
        _address,
    ),
    Rule(
        "phone",
        "with + and a country's code, or as (555) 123-4567, 555-123-4567",
        r"(?<![+.-])(?:\+[1-9]\d{0,2}(?:[ ./-]?\(?\d{1,4}\)?){2,6}|(?:\(\d{3}\) ?|\d{3}[-.])\d{3}[-.]\d{4})(?![\w-])",
        "[phone]",
        _phone,
    ),
    Rule(
        "us_social_security",
        "as 123-45-6789",
        r"(?<!-)(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\w-])",
        "[ssn]",
    ),
    Rule(
        "card",
        "13 to 19 digits that begin and add up as a payment card's do (Luhn)",
        r"(?<![.-])\d(?:[ -]?\d){12,18}(?![\w.-]*\d)",
        "[card]",
        _card,
    ),
)

ENVIRONMENT = "environment"  # the rule of the values of environment variables


class Masking:
    """Masks text and configurations; `counts` is how often each rule took something out so far, `count` all together.

    Args:
        environ: environment variables, whose values are secrets if their names say so.
        rules: further masks; the first one that fits applies.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, *, rules: Sequence[Rule] = SECRETS):
        named = {value for name, value in environ.items() if _NAMES.search(name) and len(value) >= SHORTEST}
        known = sorted(map(re.escape, named), key=len, reverse=True)
        shapes = [rf"(?P<{ENVIRONMENT}>{'|'.join(known)})"] if known else []
        shapes += [rf"(?<![A-Za-z0-9])(?P<{rule.name}>{rule.shape})" for rule in rules]
        self._shapes = re.compile("|".join(shapes))
        self.rules = tuple(rules)
        self._rule = {rule.name: rule for rule in rules}
        self.counts = Counter[str]()

    @property
    def count(self) -> int:
        return self.counts.total()

    def text(self, text: str) -> str:
        """Return the text with a mask in the place of each secret."""
        return self._shapes.sub(self._masked, text)

    def _masked(self, match: re.Match[str]) -> str:
        name, text = match.lastgroup or ENVIRONMENT, match[0]
        rule = self._rule.get(name)
        length = len(text) if rule is None else rule.found(text)
        if not length:
            return text
        self.counts[name] += 1
        return (MASK if rule is None else rule.mask) + text[length:]

    def value(self, value: Any) -> Any:
        """Return a value as JSON has it, with every text in it masked, and a number that is what a text would be masked
        for."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, int) and abs(value) >= SMALLEST_CARD:
            masked = self.text(str(value))
            return value if masked == str(value) else masked
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
            self.counts["named"] += 1
            return MASK
        return self.config(value)
