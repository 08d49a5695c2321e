"""Publish -> load -> activate -> let go: how a trained adapter becomes the policy that samples.

The order makes every crash harmless: a version is on disk, whole, before any engine loads it; it is loaded before the
alias points to it; and the version before it is forgotten last, by an engine that finishes the requests using it.
"""

from __future__ import annotations

from collections.abc import Collection

from groupwise.adapter_files import Provenance
from groupwise.adapters import AdapterStore
from groupwise.engine.base import Sampler
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion


def publish_and_swap(
    learner: Learner,
    store: AdapterStore,
    sampler: Sampler,
    *,
    name: str,
    info: Provenance,
    keep: int,
    protect: Collection[PolicyVersion] = (),
) -> PolicyVersion:
    """Make the learner's adapter the next version of `name` and the active policy; return it.

    Without an adapter (full-parameter training) engine and learner share the weights, and only the name changes.
    Of older versions the newest `keep` and those in `protect` stay on disk.

    Raises:
        AdapterError, StorageError: the version could not be published; the policy is the one it was.
    """
    if learner.lora is None:  # the engine samples from the very weights that were trained; nothing is to be moved
        version = PolicyVersion(name, info.step)
        sampler.adopt(version)
        sampler.unload(info.parent)
        return version
    version = store.publish(name, learner.save_adapter, info=info)
    sampler.load(version, store.path(version))
    store.activate(version)
    if not info.parent.is_base and info.parent.name == name:
        sampler.unload(info.parent)
    store.prune(name, keep=keep, protect=protect)
    return version
