"""Sizes of many runs at once are those of each run's own span, in every layout of a file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingest.errors import SelectionError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.source import open_source
from ingest.storage.local import LocalStore
from ingest.video.index import ProbingIndex
from ingest.video.payload import payload_sizes
from ingest.video.spans import GAP_BYTES, picture_span
from ingest.video.tables import SampleTable, read_only


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> SampleTable:
    root = tmp_path_factory.mktemp("payload") / "ds"
    make_dataset(root, MakeOptions(episodes=5, frames="9:31", cameras=1, size=(32, 64), gop=7, bframes=2, encode="file", seed=3))
    store = LocalStore.at(root)
    return ProbingIndex(store).table(open_source(store).camera_map("observation.images.cam0").paths[0])


def moved(table: SampleTable, kind: str) -> SampleTable:
    """The same pictures in a file with other contents between them, or in another order."""
    sizes, count = table.sizes.astype(np.int64), table.samples
    gap = {"near": 11, "far": GAP_BYTES + 1, "edge": GAP_BYTES}.get(kind, 0)
    order = np.random.default_rng(2).permutation(count) if kind == "disordered" else np.arange(count)
    at = np.zeros(count, dtype=np.int64)
    at[order] = 100 + np.cumsum(sizes[order] + gap) - sizes[order] - gap
    if kind == "mixed":
        at += np.cumsum(np.where(np.arange(count) % 5 == 0, GAP_BYTES * 2, 0))
    if kind == "shared":
        at[1::2] = at[:-1:2] if count % 2 == 0 else at[: count - 1 : 2]
    return replace(table, offsets=read_only(at), file_size=int((at + sizes).max()) + 5)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["plain", "near", "far", "edge", "mixed", "disordered", "shared"]),
    starts=st.sampled_from(["all", "none", "first", "some"]),
    checksums=st.booleans(),
    data=st.data(),
)
def test_sizes_are_those_of_the_spans(table: SampleTable, kind: str, starts: str, checksums: bool, data: st.DataObject) -> None:
    points = {"all": table.starts, "none": table.starts[:0], "first": table.starts[:1], "some": table.starts[::2]}[starts]
    changed = replace(moved(table, kind), starts=read_only(points.copy()))
    if checksums:
        # Runs with checksums are fetched to their end.
        changed = replace(changed, gop_xxh3=read_only(np.zeros(len(changed.gop_bounds) - 1, np.uint64)))
    first = np.array(data.draw(st.lists(st.integers(0, table.pictures - 1), min_size=1, max_size=12)))
    stop = np.array([data.draw(st.integers(int(one) + 1, table.pictures)) for one in first])
    wanted = [picture_span(changed, range(begin, end)).nbytes for begin, end in zip(first.tolist(), stop.tolist(), strict=True)]
    assert payload_sizes(changed, first, stop).tolist() == wanted


def test_runs_that_are_none_are_named(table: SampleTable) -> None:
    assert payload_sizes(table, np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
    for first, stop in ((3, 3), (-1, 2), (0, table.pictures + 1)):
        with pytest.raises(SelectionError, match=f"the file presents {table.pictures}"):
            payload_sizes(table, np.array([0, first]), np.array([1, stop]))
