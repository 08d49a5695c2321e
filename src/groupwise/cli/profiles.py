"""`groupwise profiles`: the hardware profiles, and which of them this machine holds.

    groupwise profiles           # name, device, memory, what it trains, and whether it fits here
    groupwise profiles --json

Their names are what `infra.training_shape_id` and `infra.ref_training_shape_id` take (docs/sdk.md).
"""

from __future__ import annotations

from dataclasses import asdict

import typer

from groupwise.cli.frame import AsJson, Debug, examples, print_table
from groupwise.cli.output import print_json, say

HEAD = ("profile", "device", "memory", "weights", "trains", "longest", "rows", "here")

TRAINS = {"any": "both", "lora": "adapter", "full": "all parameters"}


def add_profiles(app: typer.Typer) -> None:
    """Make the command part of `groupwise`."""
    app.command(epilog=examples("groupwise profiles", "groupwise profiles --json"))(profiles)


def profiles(as_json: AsJson = False, debug: Debug = False) -> None:
    """Print the hardware profiles that a loop of your own can name, and which fit this machine."""
    from groupwise.sdk.profiles import PROFILES, Machine, choose_profile

    machine = Machine.here()
    chosen = {"lora": choose_profile(lora=True, machine=machine).name}
    chosen["full"] = choose_profile(lora=False, machine=machine).name
    if as_json:
        listed = [asdict(profile) | {"fits": profile.fits(machine)} for profile in PROFILES.values()]
        return print_json({"profiles": listed, "machine": dict(machine.memory_gb), "default": chosen})
    rows = [
        (
            profile.name,
            profile.device,
            f"{profile.memory_gb} GB",
            profile.dtype,
            TRAINS[profile.trains],
            f"{profile.max_seq_len} tokens",
            str(profile.batch_rows),
            "yes" if profile.fits(machine) else "no",
        )
        for profile in PROFILES.values()
    ]
    print_table([HEAD, *rows])
    say(f"without a name: {chosen['lora']} for an adapter, {chosen['full']} for all parameters")
