"""Says which key corresponds to another system's key, for a user who writes the other key in a configuration of
ours."""

from __future__ import annotations

from groupwise.config.formats.format import config_formats

_BY_USE = ("plain", "made", "older", "idle", "absent")  # where several systems have the name, what leads on comes first


def known_elsewhere(name: str, value: str = "") -> str:
    """Return what becomes of a key of this name, or of one that is called so in a section, by the tables of the
    installed formats: the end of an error, or "" where no system has it. `value` is "=VALUE" where it was given in an
    override, and is repeated where a key of ours takes it as it is.

    >>> known_elsewhere("report_to")
    'did you mean tracking? (wandb, trackio, mlflow, tensorboard)'
    """
    found = [
        (_BY_USE.index(key.fate), key.name != name, each.name, key)
        for each in config_formats()
        for key in each.keys
        if name in (key.name, key.name.rpartition(".")[2])
    ]
    if not found:
        return ""
    _, _, system, key = min(found, key=lambda each: each[:2])
    if key.here:
        how = "" if not key.what or key.what.startswith("see ") else f" ({key.what})"  # "see" a section of the page
        return f"did you mean {' and '.join(key.here)}{value if key.fate == 'plain' else ''}?{how}"
    if key.now:
        return known_elsewhere(key.now.rpartition(".")[2], value)
    return f"{system}'s {name} {'needs nothing here' if key.fate == 'idle' else 'is not here'}: {key.what}"
