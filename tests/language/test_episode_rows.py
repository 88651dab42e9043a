"""Rows of episodes that are read in parts: the same as read at once, and read about once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.engine import episodes as module
from ingest.engine.episodes import EpisodeReader
from ingest.language.episode import AnnotationRows
from ingest.language.rows import StateRows
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.rows import RowReader
from ingest.lerobot.source import open_source
from ingest.storage.local import LocalStore


@st.composite
def annotation_rows(draw):
    frames = draw(st.integers(1, 12))
    states = tuple(StateRows([{"content": str(number), "timestamp": 0.0}]) for number in range(draw(st.integers(0, 3))))
    state_of = draw(st.lists(st.integers(-1, len(states) - 1), min_size=frames, max_size=frames))
    events = draw(st.dictionaries(st.integers(0, frames - 1), st.just([{"content": "x"}])))
    return AnnotationRows(states, np.array(state_of, np.int32), events)


@given(annotation_rows(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_part_has_the_rows_of_its_frames(rows, data):
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    part = AnnotationRows.unpack(rows.part(start, stop).pack())
    assert len(part) == stop - start
    assert [part.raw(frame - start) for frame in range(start, stop)] == [rows.raw(frame) for frame in range(start, stop)]
    assert len(part.states) == len({int(position) for position in rows.state_of[start:stop] if position >= 0})


class TestEpisodeReader:
    @pytest.fixture
    def source(self, tmp_path):
        made = make_dataset(tmp_path / "ds", MakeOptions(episodes=4, frames="8", cameras=1, size=(32, 64), gop=4))
        return open_source(LocalStore.at(made.root))

    @pytest.fixture
    def reads(self, monkeypatch):
        episodes = []
        plain = RowReader.read

        def counted(self, episode, columns=None):
            episodes.append(episode)
            return plain(self, episode, columns)

        monkeypatch.setattr(RowReader, "read", counted)
        return episodes

    def test_parts_of_an_episode_are_read_once_and_whole_ones_are_not_kept(self, source, reads):
        reader = EpisodeReader(source, ("index",))
        first = reader.read(1, keep=True)
        assert reader.read(1, keep=True) is first
        assert reader.read(1, keep=False) is first
        reader.read(2, keep=False)
        reader.read(2, keep=False)
        assert reads == [1, 2, 2]

    def test_what_is_kept_stays_within_the_budget(self, source, reads, monkeypatch):
        monkeypatch.setattr(module, "HELD_BYTES", 2 * 8 * 8)
        reader = EpisodeReader(source, ("index",))
        for episode in (0, 1, 2, 2, 1, 0):
            reader.read(episode, keep=True)
        assert reads == [0, 1, 2, 0]
        monkeypatch.setattr(module, "HELD_BYTES", 8)
        small = EpisodeReader(source, ("index",))
        small.read(0, keep=True)
        small.read(0, keep=True)
        assert reads == [0, 1, 2, 0, 0, 0]
