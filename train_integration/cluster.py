"""Starting or joining Ray for a command, with the settings that streams rely on."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import ray

from ingest.errors import ResourceUnavailableError
from ingest.storage.processes import usable_cpus, usable_memory

_LOG = logging.getLogger("reelray.cluster")


@contextlib.contextmanager
def ray_session(*, cpus: float | None = None, address: str | None = None) -> Iterator[None]:
    """Connects to the cluster of ``address`` or ``RAY_ADDRESS``, or starts a local one and stops it at the end.

    Args:
        cpus: logical CPUs of a local cluster, at least; they may exceed the machine's, since trainers and decoders mostly wait
            for each other.
        address: cluster to join; None joins ``RAY_ADDRESS`` or an initialised session, and else starts a local one.

    Raises:
        ResourceUnavailableError: Ray does not start, or no cluster answers.
    """
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    # Ray's own threads print warnings to standard output, which belongs to the report of the command.
    with contextlib.redirect_stdout(sys.stderr):
        if ray.is_initialized():
            yield
            return
        with _connected(cpus, address):
            yield


@contextlib.contextmanager
def _connected(cpus: float | None, address: str | None) -> Iterator[None]:
    target = address or os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {
        "num_cpus": max(usable_cpus(), int(cpus or 0)),
        "object_store_memory": int(min(2 << 30, max(256 << 20, usable_memory() * 0.1))),
        "include_dashboard": False,
    }
    try:
        ray.init(address=target or "local", log_to_driver=False, logging_level=logging.WARNING, **({} if target is not None else local))
    # Ray raises plain exceptions of many kinds here.
    except Exception as error:
        what = "a local Ray cluster cannot be started" if target is None else f"the Ray cluster at {target} cannot be joined"
        raise ResourceUnavailableError(f"{what}: {error}") from error
    try:
        yield
    finally:
        if target is None:
            ray.shutdown()
