"""What a running stream tells about itself, for metrics and for the message of a stall."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from streams import described, opened

from actors.stream_metrics import PoolLoad, StreamReading, describe_wait, waiting_on
from ingest.errors import StreamClosedError
from ingest.lerobot.make import MakeOptions, make_dataset


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reading") / "ds"
    make_dataset(root, MakeOptions(episodes=4, frames="10:14", cameras=1, size=(32, 64), gop=4))
    return root


def test_position_and_holdings_follow_the_stream(root: Path) -> None:
    description, _ = described(root, strategy="lanes", batch_size=4, epochs=2)
    with opened(description) as stream:
        before = stream.reading()
        assert (before.step, before.waiting_since, before.slots, before.pool) == (0, None, 0, PoolLoad())
        batches = iter(stream)
        next(batches)
        next(batches)
        reading = stream.reading()
        assert (reading.epoch, reading.step, reading.steps) == (0, 2, stream.steps)
        assert reading.waiting_since is None
        assert waiting_on(reading) is None
        assert reading.pool.actors == 2
        assert reading.budget_limit_bytes == 8 << 30
        assert 0 <= reading.slots_used <= reading.slots
        assert reading.totals["reelray_samples_delivered"] == 8
        for _ in batches:
            pass
        assert (stream.reading().epoch, stream.reading().step) == (1, 0)
    assert stream.reading().pool == PoolLoad()


def test_a_stream_that_waits_says_since_when_and_for_what(root: Path) -> None:
    description, _ = described(root, strategy="lanes", batch_size=2, stall_s=30)
    release = threading.Event()

    class Silent:
        def units(self, wanted: Any, counters: Any, credits: Any) -> Iterator[Any]:
            credits.wait(0)
            release.wait(20)
            yield from ()

        def await_readers(self, timeout_s: float) -> bool:
            return True

    stream = opened(description, feed=Silent())
    ended: list[BaseException] = []

    def take() -> None:
        try:
            next(iter(stream), None)
        except StreamClosedError as error:
            ended.append(error)

    taking = threading.Thread(target=take, daemon=True)
    started = time.monotonic()
    taking.start()
    deadline = time.monotonic() + 10
    while (reading := stream.reading()).waiting_since is None or not reading.units_under_way:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert started <= reading.waiting_since <= time.monotonic()
    assert waiting_on(reading) == "fetch"
    assert "it waits for fetch" in describe_wait(reading)
    assert f"{reading.units_under_way} units under way" in describe_wait(reading)
    release.set()
    stream.close()
    taking.join(timeout=10)
    assert not taking.is_alive(), "closing a stream ends the wait of another thread"
    assert len(ended) == 1


def test_whoever_waits_for_a_unit_learns_that_its_feeder_was_closed(root: Path) -> None:
    """Closed memory ends the feeder first; the thread that waits for its units must not wait until it is found stalled."""
    description, _ = described(root, strategy="sequential", batch_size=2, stall_s=5)

    class Closed:
        def units(self, wanted: Any, counters: Any, credits: Any) -> Iterator[Any]:
            credits.wait(0)
            raise StreamClosedError("the slots were closed")
            yield

        def await_readers(self, timeout_s: float) -> bool:
            return True

    with opened(description, feed=Closed()) as stream, pytest.raises(StreamClosedError, match="the slots were closed"):
        next(iter(stream))


def test_words_for_a_wait() -> None:
    reading = StreamReading(totals={}, waiting_since=0.0, pool=PoolLoad(4, 4, 2), budget_limit_bytes=10, budget_used_bytes=7, slots=9)
    assert describe_wait(reading) == (
        "it waits for decoders_down; 0 units under way, 2 decode calls, 4 of 4 decoders down, 7 of 10 compressed bytes and "
        "0 of 9 frame slots in use"
    )
