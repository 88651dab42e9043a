"""Fixtures of the storage suites: servers, a fast retry policy, and a check that nothing is left open."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from random import Random

import huggingface_hub
import pytest
from servers.clock import no_sleep
from servers.hub import HubEmulator
from servers.ranges import RangeServer

from ingest.storage.executor import close_executor
from ingest.storage.http import close_connections
from ingest.storage.retry import RetryPolicy


@pytest.fixture
def fast() -> RetryPolicy:
    """Retries that never sleep for real."""
    return RetryPolicy(sleep=no_sleep, random=Random(0))


@pytest.fixture
def ranges() -> Iterator[RangeServer]:
    with RangeServer() as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    """Descriptors and threads after a test equal those before it."""
    close_executor()
    close_connections()
    before = _resources()
    yield
    close_executor()
    close_connections()
    after = _resources()
    assert after[0] <= before[0] + 2, f"descriptors before {before[0]}, after {after[0]}"
    assert after[1] <= before[1] | {name for name in after[1] if name.startswith(("fsspecIO", "asyncio_"))}


def _resources() -> tuple[int, set[str]]:
    return len(os.listdir("/proc/self/fd")), {thread.name for thread in threading.enumerate() if "test-web-server" not in thread.name}


@pytest.fixture(scope="session")
def native_hub_client() -> None:
    """Starts the native runtime of the Hub client's uploads, which stays for the process and so belongs to no single test."""
    with HubEmulator() as emulator:
        emulator.tokens = {"hf_PLANTEDWRITE": "write"}
        emulator.add_bucket("o/b", {})
        huggingface_hub.HfApi(endpoint=emulator.endpoint, token="hf_PLANTEDWRITE").batch_bucket_files("o/b", add=[(b"x", "x")])
    huggingface_hub.close_session()
    # It goes on opening descriptors for a while on a busy machine.
    counts = [-1]
    while len(counts) < 4 or len(set(counts[-4:])) > 1:
        time.sleep(0.1)
        counts.append(_resources()[0])
