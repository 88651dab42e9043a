"""The trials: small datasets after public bug reports. What is right comes from each one's EXPECT.json."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import barcodes, check_codes, check_coverage, check_drift, check_shorter, check_windows, cli, expected, linear, roots

from ingest.engine import open_dataset
from ingest.errors import DatasetError, MetadataError, PictureCountError, RowsError, TimeDriftError, UnsupportedVersionError

pytestmark = pytest.mark.shared

STRATEGIES = ("lanes", "remaining", "round_robin", "sequential", "episode_sequential", "reservoir")


@pytest.fixture
def trial(shared_dir: Path) -> Callable[[str], Path]:
    def find(name: str) -> Path:
        (folder,) = (shared_dir / "data/trials").glob(f"{name}_*")
        return folder

    return find


def check_all_codes(folder: Path) -> None:
    found = roots(folder)
    assert found
    for root in found:
        check_codes(folder, root)


def check_stale(folder: Path) -> None:
    for root in roots(folder):
        check_codes(folder, root)
        status, report = cli("doctor", root, "--json")
        assert status == 1
        assert any(item["repairable"] for item in json.loads(report)["findings"])


def check_small_grid(folder: Path) -> None:
    check_coverage(folder, 2, 1, 4, "lanes")


CHECKS: dict[str, Callable[[Path], None]] = {
    "01": check_all_codes,
    "02": check_drift,
    "05": check_shorter,
    "07": check_stale,
    "09": check_all_codes,
    "10": check_windows,
    "11": check_small_grid,
    "14": check_all_codes,
}


@pytest.mark.parametrize("name", CHECKS)
def test_right_answers(trial: Callable[[str], Path], name: str) -> None:
    CHECKS[name](trial(name))


def changes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """One change per kind of value: a path into the answer and the wrong value to put there."""
    if isinstance(value, dict):
        for key in value:
            yield from changes(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from changes(value[len(value) // 2], (*path, len(value) // 2))
    elif isinstance(value, bool):
        yield path, not value
    elif isinstance(value, int | float):
        yield path, value + 1
    elif isinstance(value, str):
        other = value.translate(str.maketrans("0123456789", "1234567890"))
        yield path, other if other != value else f"{value}x"


@pytest.mark.parametrize("name", CHECKS)
def test_one_changed_value_is_noticed(trial: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    folder = tmp_path / trial(name).name
    folder.mkdir()
    for entry in trial(name).iterdir():
        if entry.is_dir():
            (folder / entry.name).symlink_to(entry)
    answer = expected(trial(name))
    tried = 0
    for path, wrong in changes(answer):
        changed = copy.deepcopy(answer)
        place = changed
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = wrong
        (folder / "EXPECT.json").write_text(json.dumps(changed))
        with pytest.raises((AssertionError, DatasetError, ValueError, IndexError)):
            CHECKS[name](folder)
        tried += 1
    assert tried
    shutil.copy(trial(name) / "EXPECT.json", folder / "EXPECT.json")
    if name in {"05", "10", "14"}:
        CHECKS[name](folder)


def test_drift_is_a_warning_or_an_error_never_a_neighbour(trial: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = trial("02")
    open_dataset(folder / "ds_nominal")
    (warning,) = (record.message for record in caplog.records if "picture times differ" in record.message)
    assert "file-000.mp4" in warning
    assert "1.49 frames" in warning
    with pytest.raises(TimeDriftError, match=r"file-000\.mp4.*1\.49 frames"):
        open_dataset(folder / "ds_nominal", strict_time=True)
    open_dataset(folder / "ds_probed", strict_time=True)


@pytest.mark.parametrize("episode", [0, 1, 2])
def test_an_episode_alone_equals_a_linear_decode(trial: Callable[[str], Path], episode: int) -> None:
    for root in roots(trial("09")):
        (path,) = root.rglob("*.mp4")
        whole = linear(path)
        dataset = open_dataset(root, episodes=[episode], return_uint8=True)
        (camera,) = dataset.spec.cameras
        first = int(dataset.source.episodes.dataset_from[episode])
        for frame in (0, 1, int(dataset.lengths[0]) // 2, int(dataset.lengths[0]) - 1):
            picture = np.moveaxis(dataset.sample(episode, frame)[camera], 0, -1)
            np.testing.assert_array_equal(picture, whole[first + frame])


def test_other_versions_are_refused_before_any_row_is_read(trial: Callable[[str], Path]) -> None:
    for root in sorted(path for path in trial("13").iterdir() if path.is_dir()):
        with pytest.raises(UnsupportedVersionError) as error:
            open_dataset(root)
        version = json.loads((root / "meta/info.json").read_text()).get("codebase_version")
        assert str(root) in str(error.value)
        assert "v3.0" in str(error.value)
        assert version is None or version in str(error.value)
        for command in (["inspect"], ["plan"], ["doctor"]):
            assert cli(*command, root)[0] == 1


def test_interrupted_recordings_are_named(trial: Callable[[str], Path], tmp_path: Path) -> None:
    folder = trial("08")
    for name in ("b_no_footer_meta", "c_meta_missing"):
        with pytest.raises(MetadataError, match="meta/episodes"):
            open_dataset(folder / name)
        status, out = cli("doctor", folder / name)
        assert status == 1
        assert "meta/episodes" in out
        assert "not finalised" in out
    # 35 pictures of the file belong to no listed row: which ones, nobody can tell, so nothing is guessed.
    with pytest.raises(PictureCountError, match=r"70 pictures, but 35 rows map to it \(episodes 0, 1\)"):
        open_dataset(folder / "d_info_ahead_of_meta")
    rows = open_dataset(folder / "d_info_ahead_of_meta", cameras=[])
    assert (rows.selection.tolist(), rows.num_frames) == ([0, 1], 35)
    assert cli("doctor", folder / "d_info_ahead_of_meta")[0] == 1
    # The variant whose second data file was never closed, made from one whose rows are in two files.
    source = trial("07") / "a_stale_data_file_index"
    root = tmp_path / "a"
    shutil.copytree(source, root)
    cut = root / "data/chunk-000/file-001.parquet"
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(RowsError, match="file-001"):
        open_dataset(root)
    good = open_dataset(root, damage="skip_episode", return_uint8=True)
    assert good.selection.tolist() == [0, 1]
    assert [record.episode for record in good.damage.records] == [2, 3]
    (camera,) = good.spec.cameras
    assert barcodes(good)[camera] == {index: index for index in range(good.num_frames)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_coverage_of_every_topology(trial: Callable[[str], Path], world: int, strategy: str) -> None:
    for workers in (1, 3):
        for batch in (1, 4, 7):
            check_coverage(trial("11"), world, workers, batch, strategy)
