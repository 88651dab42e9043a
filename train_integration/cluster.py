"""Starting or joining Ray for a command, with the settings that streams rely on."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import psutil
import ray

_LOG = logging.getLogger("reelray.cluster")


@contextlib.contextmanager
def ray_session(*, cpus: float | None = None, address: str | None = None) -> Iterator[None]:
    """Connects to the cluster of ``address`` or ``RAY_ADDRESS``, or starts a local one and stops it at the end.

    Args:
        cpus: logical CPUs of a local cluster, at least; they may exceed the machine's, since trainers and decoders mostly wait
            for each other.
        address: cluster to join; None joins ``RAY_ADDRESS`` or an initialised session, and else starts a local one.
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
    if target is not None:
        ray.init(address=target, log_to_driver=False, logging_level=logging.WARNING)
    else:
        present = os.cpu_count() or 1
        store = int(min(2 << 30, max(256 << 20, psutil.virtual_memory().total * 0.1)))
        ray.init(
            address="local",
            num_cpus=max(present, int(cpus or 0)),
            object_store_memory=store,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    try:
        yield
    finally:
        if target is None:
            ray.shutdown()
