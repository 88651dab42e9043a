"""Checks of the conformance data against what their EXPECT.json says, and nothing else."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np

from ingest.engine import Dataset, open_dataset
from ingest.errors import DamagedDataError
from ingest.lerobot.barcode import read_barcode
from ingest.plan import PlanSettings, plan_epoch
from reelray.cli import main

SEQUENTIAL = PlanSettings(strategy="sequential", batch_size=32)


def expected(trial: Path) -> dict[str, Any]:
    """The right answers of a trial."""
    return json.loads((trial / "EXPECT.json").read_text())


def roots(trial: Path) -> list[Path]:
    """The datasets of a trial."""
    return sorted(path.parent.parent for path in trial.glob("*/meta/info.json"))


def barcodes(dataset: Dataset, settings: PlanSettings = SEQUENTIAL) -> dict[str, dict[int, int | None]]:
    """Barcode by index, for every camera and every row delivered; each row must come once."""
    found: dict[str, dict[int, int | None]] = {camera: {} for camera in dataset.spec.cameras}
    plan = plan_epoch(dataset.units(), settings)
    for planned, batch in dataset.iter_batches(plan):
        for camera, codes in found.items():
            for index, picture in zip(batch["index"].tolist(), batch[camera], strict=True):
                assert index not in codes, f"row {index} came twice"
                codes[index] = read_barcode(picture)
        assert not planned.is_pad.any()
    return found


def check_codes(trial: Path, root: Path, *, damage: Any = "error") -> Dataset:
    """All rows, each once, with the barcodes, counts and lengths of EXPECT.json."""
    answer = expected(trial)
    dataset = open_dataset(root, columns=["index", "action"], return_uint8=True, damage=damage)
    for camera, codes in answer["codes"].items():
        assert [code for _, code in sorted(barcodes(dataset)[camera].items())] == codes
    assert set(answer["codes"]) == set(dataset.spec.cameras)
    assert dataset.num_frames == answer.get("rows", dataset.num_frames)
    lengths = answer.get("length", answer.get("lengths", answer.get("true_lengths")))
    assert lengths is None or dataset.lengths.tolist() == lengths
    return dataset


def check_shorter(trial: Path) -> None:
    """Trial 05: refused by name; with a skip policy the good episodes whole, the others reported."""
    answer, root = expected(trial), trial / "ds"
    try:
        open_dataset(root)
    except DamagedDataError as error:
        message = str(error)
    else:
        raise AssertionError("nothing was refused")
    status, report = cli("doctor", root, "--json")
    assert status == 1
    findings = [item for item in json.loads(report)["findings"] if item["severity"] == "error"]
    assert {str(item["episode"]) for item in findings} == set(answer["bad"])
    for episode, (text,) in answer["bad"].items():
        camera, file, _, pictures, *_ = text.split()
        rows = text.split(" pictures, ")[1].split()[0]
        (finding,) = (item for item in findings if str(item["episode"]) == episode)
        assert (finding["column"], Path(finding["file"]).name) == (camera, file)
        assert (finding["found"], finding["expected"]) == (f"{pictures} pictures", f"{rows} pictures")
        for part in (camera, file, f"{pictures} pictures", f"{rows} rows", f"episode {episode}"):
            assert part in message
    dataset = open_dataset(root, damage="skip_episode", return_uint8=True)
    assert dataset.selection.tolist() == answer["good_episodes"]
    assert {str(record.episode) for record in dataset.damage.records} == set(answer["bad"])
    assert dataset.num_frames + sum(record.frames for record in dataset.damage.records) == answer["rows"]
    for number, codes in enumerate(barcodes(dataset).values()):
        assert sorted(codes) == list(range(dataset.num_frames))
        assert all(code == index + 10_000 * number for index, code in codes.items())


def check_drift(trial: Path) -> None:
    """Trial 02: positions decide, so both datasets are right; the audit measures the drift."""
    answer = expected(trial)
    for root in roots(trial):
        dataset = check_codes(trial, root)
        assert abs(1 / dataset.fps - answer["frame_s"]) < 1e-12
    findings = json.loads(cli("doctor", trial / "ds_nominal", "--json")[1])["findings"]
    (drift,) = (item for item in findings if item["code"] == "time_drift")
    assert drift["severity"] == "warning"
    assert drift["episode"] == answer["rows"] // 20 - 1
    assert abs(float(drift["found"]) - float(drift["expected"]) - answer["drift_last_episode_s"]) < 1e-3


def check_windows(trial: Path) -> None:
    """Trial 10: window pictures carry the barcodes of their rows, padding where clamped, rows in selection order."""
    answer = expected(trial)
    offsets = [delta / answer["fps"] for delta in answer["deltas_frames"]]
    for selection, rows in answer["selections"].items():
        dataset = open_dataset(
            trial / "ds", episodes=json.loads(selection), return_uint8=True, delta_timestamps=_every_camera(trial, offsets)
        )
        found: list[dict[str, Any]] = []
        for _, batch in dataset.iter_batches(plan_epoch(dataset.units(), PlanSettings(strategy="sequential", batch_size=5, shuffle=False))):
            for place, index in enumerate(batch["index"].tolist()):
                seen = [[read_barcode(picture) for picture in batch[camera][place]] for camera in dataset.spec.cameras]
                assert seen[1] == [code + 10_000 for code in seen[0]]  # type: ignore[operator]
                pads = [batch[f"{camera}_is_pad"][place].tolist() for camera in dataset.spec.cameras]
                assert pads[0] == pads[1]
                episode, frame = int(batch["episode_index"][place]), int(batch["frame_index"][place])
                found.append({"episode": episode, "frame": frame, "index": index, "window_index": seen[0], "is_pad": pads[0]})
        assert found == rows
    dataset = open_dataset(trial / "ds", cameras=[])
    tasks = [dataset.sample(int(episode), 0)["task"] for episode in dataset.selection]
    assert [task.split()[0] for task in tasks] == [text.split()[0] for text in answer["task_of_episode"]]


def _every_camera(trial: Path, offsets: list[float]) -> dict[str, list[float]]:
    return dict.fromkeys(open_dataset(trial / "ds").spec.cameras, offsets)


def check_coverage(trial: Path, world: int, workers: int, batch: int, strategy: Any) -> None:
    """Trial 11: the ranks' rows are disjoint and together all of them; another epoch, another order; the same again."""
    answer = expected(trial)
    dataset = open_dataset(trial / "ds")
    assert dataset.lengths.tolist() == answer["lengths"]
    starts = np.cumsum(dataset.lengths) - dataset.lengths
    units = dataset.units(lane_frames=8) if strategy in {"lanes", "reservoir"} else dataset.units()
    orders: list[list[int]] = []
    settings = PlanSettings(strategy=strategy, world_size=world, workers=workers, batch_size=batch, clamp_workers=True, share="frame_exact")
    if strategy in {"remaining", "round_robin"} or world == 8:
        settings = PlanSettings(strategy=strategy, world_size=world, workers=workers, batch_size=batch, clamp_workers=True)
    for epoch in (0, 0, 1):
        table = plan_epoch(units, settings, epoch=epoch).order_table()
        index = starts[table.episode_index] + table.frame_index
        assert sorted(index.tolist()) == list(range(answer["rows"]))
        assert set(table.rank.tolist()) == set(range(world))
        orders.append(index.tolist())
    assert orders[0] == orders[1]
    # Whole episodes in order leave nothing to vary where every rank has one of them.
    one_each = strategy == "episode_sequential" and world == len(answer["lengths"])
    assert (orders[0] != orders[2]) == (strategy != "sequential" and not one_each)


def cli(*arguments: object) -> tuple[int, str]:
    """Runs a command; its status and output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = main([str(argument) for argument in arguments])
    return status, out.getvalue()


def sha256(pictures: np.ndarray) -> str:
    """Digest of pictures in the layout of items."""
    return hashlib.sha256(np.ascontiguousarray(pictures).tobytes()).hexdigest()


def linear(path: Path) -> list[np.ndarray]:
    """Every picture of a file, HWC, decoded from its start with a container."""
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
