"""Plain Ray Data over episodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ingest.datasource import EpisodeDatasource, ReadJob, UnitList, dump_error, in_order, load_error
from ingest.engine import open_dataset
from ingest.errors import DecodeError, SelectionError
from ingest.lerobot.barcode import read_barcode


def test_errors_cross_as_text() -> None:
    error = DecodeError("bad picture", episode=3, camera="top", file="f.mp4", byte_range=(1, 9), picture=4)
    found = load_error(dump_error(error))
    assert isinstance(found, DecodeError)
    assert (str(found), found.episode, found.camera, found.byte_range, found.picture) == ("bad picture", 3, "top", (1, 9), 4)


def test_reads_ahead_stay_within_their_credits() -> None:
    sizes = np.full(20, 10, dtype=np.int64)
    started: list[int] = []

    def read(number: int) -> int:
        started.append(number)
        return number

    for number, result in enumerate(in_order(read, sizes, threads=4, budget=30)):
        assert result == number
        assert max(started) <= number + 4
    assert sorted(started) == list(range(20))


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
class TestEpisodes:
    def test_rows_hold_decoded_episodes_in_order(self, streamed: Path) -> None:
        from ingest.datasource import read_episodes

        dataset = open_dataset(streamed)
        rows = read_episodes(streamed, episodes=[4, 1]).take_all()
        assert sorted(row["episode"] for row in rows) == [1, 4]
        for row in rows:
            lengths = dict(zip(dataset.selection.tolist(), dataset.lengths.tolist(), strict=True))
            assert row["length"] == lengths[row["episode"]] == len(row["action"])
            for number, camera in enumerate(dataset.source.cameras):
                codes = [read_barcode(np.moveaxis(picture, 0, -1)) for picture in row[camera]]
                assert codes == [(int(index) + 10000 * number) % 65536 for index in row["index"]]

    def test_columns_that_are_not_selected_are_not_read(self, streamed: Path) -> None:
        from ingest.datasource import read_episodes

        camera = open_dataset(streamed).source.cameras[1]
        dataset = read_episodes(streamed).select_columns(["episode", camera])
        row = dataset.take(1)[0]
        assert set(row) == {"episode", camera}

    def test_windows_come_with_their_masks_and_unknown_columns_are_named(self, streamed: Path) -> None:
        from ingest.datasource import read_episodes

        dataset = read_episodes(streamed, episodes=[1], cameras=(), delta_timestamps={"action": [-0.1, 0.0]})
        (row,) = dataset.take_all()
        assert row["action_is_pad"].tolist() == [[frame < 3, False] for frame in range(row["length"])]
        assert set(dataset.select_columns(["action_is_pad"]).take(1)[0]) == {"action_is_pad"}
        with pytest.raises(SelectionError, match="nope cannot be selected; rows of episodes have episode, length, task"):
            dataset.select_columns(["action", "nope"]).take(1)

    def test_read_tasks_are_pure_and_bounded(self, streamed: Path) -> None:
        import ray

        dataset = open_dataset(streamed)
        count = 600
        units = UnitList(
            np.arange(count),
            np.zeros(count, np.int32),
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.ones(count, np.int64),
            np.full(count, 100),
        )
        source = EpisodeDatasource(ray.put(ReadJob.of(dataset)), units)
        first, second = source.get_read_tasks(1), source.get_read_tasks(99)
        assert [task.metadata.num_rows for task in first] == [task.metadata.num_rows for task in second] == [256, 256, 88]
