"""A page on which to chat with what was pushed, for the hub's Spaces: the folder `cli/templates/space`, and settings.

It is Gradio's chat over transformers, and needs no Groupwise. `python app.py` in the folder shows it on any machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from groupwise.cli.push.card import GGUF, PEFT
from groupwise.cli.push.facts import Facts
from groupwise.config.run import PACKAGED
from groupwise.errors import ConfigError

TEMPLATE = Path(__file__).parents[1] / "templates" / "space"


def check_space(facts: Facts, *, format: str) -> None:
    """Raise ConfigError where transformers cannot load from the hub what is pushed."""
    if format == GGUF:
        raise ConfigError(
            "--space chats by transformers, which the Space cannot do with a GGUF file alone",
            hint="push it with --format peft or merged",
            field="--space",
        )
    if format == PEFT and facts.base.hub is None:
        where = "only in the package groupwise" if facts.base.name in PACKAGED else "from a directory of this machine"
        raise ConfigError(
            f"--space loads the base from the hub, and {facts.base.name!r} is {where}",
            hint="add --format merged, which pushes the whole model"
            + ("" if facts.base.name in PACKAGED else ", or name the base there with --base-model OWNER/NAME"),
            field="--space",
        )


def space_files(facts: Facts, *, repo: str, format: str) -> dict[str, bytes]:
    """Return the files of the Space by name."""
    manner = facts.policy.manner
    rollout: dict[str, Any] = dict(facts.values.get("rollout") or {})
    settings = {
        "model": repo,
        "loaded_by": facts.loaded_by,
        "base": facts.base.hub if format == PEFT else None,
        "system": manner.get("system"),
        "template_kwargs": manner.get("chat", {}).get("template_kwargs") or {},
        "max_tokens": rollout.get("max_tokens", 512),
        "temperature": 0.0,
    }
    head = ["---", f"title: {repo.rpartition('/')[2]}", "sdk: gradio", "app_file: app.py", f"models: [{repo}]", "---"]
    words = [f"A chat with [`{repo}`](https://huggingface.co/{repo}), trained with Groupwise."]
    words += ["While that repository is private, add a secret `HF_TOKEN` with a token that may read it."]
    files = {path.name: path.read_bytes() for path in TEMPLATE.iterdir() if path.is_file()}
    files["settings.json"] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    return files | {"README.md": ("\n".join((*head, "", *words)) + "\n").encode()}
