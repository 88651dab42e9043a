"""Every command on small datasets: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
from calls import Run, failure, loaded

from ingest.lerobot.barcode import read_barcode
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import Cursor
from reelray.cli import COMMANDS
from train_integration.ledger import ORDER_SCHEMA

CAMERA = "observation.images.cam1"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("cli") / "ds"
    options = MakeOptions(episodes=6, frames="5:14", size=(32, 64), fps=10, gop=4, video_files=2, data_files=2, tasks=("a", "b"), seed=5)
    make_dataset(target, options)
    return target


def columns(path: Path) -> dict[str, list[Any]]:
    return pq.read_table(path).to_pydict()


def test_help_lists_every_command(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    assert all(f"  {name} " in out and command.summary in out for name, command in COMMANDS.items())
    assert run()[0] == 0
    status, out, _ = run("sidecar", "--help")
    assert (status, "sidecar show" in out, "inspect" in out) == (0, True, False)
    assert run("sidecar")[0] == 2
    assert run("--version")[1].startswith("reelray ")
    status, _, err = run("nonsense")
    assert (status, "unknown command 'nonsense'" in err) == (2, True)


@pytest.mark.parametrize("name", ["inspect", "doctor", "plan", "stream", "make-dataset", "sidecar build", "sidecar show", "episode export"])
def test_every_option_is_explained(run: Run, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*name.split(), "--help")
    assert ended.value.code == 0
    assert f"usage: reelray {name}" in capsys.readouterr().out


def test_light_imports() -> None:
    code = (
        "import sys, reelray, reelray.cli; reelray.cli.main(['--help']);"
        "print([name for name in ('torch', 'ray', 'pyarrow', 'av', 'huggingface_hub') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"
    code = "import sys, reelray; reelray.open_dataset; print([name for name in ('torch', 'ray') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_make_dataset(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "made"
    arguments = ["--episodes", 3, "--frames", "4:6", "--cameras", 1, "--size", 32, 64, "--fps", 12, "--gop", 3, "--bframes", 1]
    made = loaded(run("make-dataset", target, *arguments, "--files", 2, "--encode", "file", "--seed", 3, "--json"))
    assert (made["episodes"], made["cameras"], made["directory"]) == (3, ["observation.images.cam0"], str(target))
    described = loaded(run("inspect", target, "--json"))
    assert (described["frames"], described["fps"], described["cameras"][0]["files"]) == (made["frames"], 12.0, 2)
    assert run("doctor", target)[0] == 0
    assert "is not an empty folder" in failure(run("make-dataset", target))
    assert "codec 'theora' is unknown" in failure(run("make-dataset", tmp_path / "other", "--codec", "theora"))
    assert "frames is '9:3'" in failure(run("make-dataset", tmp_path / "other", "--frames", "9:3"))


def test_inspect(run: Run, root: Path) -> None:
    found = loaded(run("inspect", root, "--json"))
    assert {"version", "fps", "episodes", "frames", "features", "cameras", "tasks", "warnings"} <= set(found)
    assert (found["version"], found["fps"], found["episodes"], found["tasks"]) == ("v3.0", 10.0, 6, ["a", "b"])
    assert found["features"]["action"]["dtype"] == "float32"
    for camera in found["cameras"]:
        assert (camera["codecs"], camera["sizes"], camera["gop_median"], camera["files"]) == (["avc1"], [[32, 64]], 4.0, 2)
        assert camera["bytes"] == sum(path.stat().st_size for path in (root / "videos" / camera["camera"]).rglob("*.mp4"))
    status, out, _ = run("inspect", root, "--files", 1)
    assert status == 0
    assert all(word in out for word in ("observation.images.cam0", "32×64", "avc1", "float32", "about"))


def test_doctor(run: Run, root: Path, tmp_path: Path) -> None:
    assert run("doctor", root)[0] == 0
    report = loaded(run("doctor", root, "--json"))
    assert (report["exit_status"], report["findings"]) == (0, [])
    broken = tmp_path / "broken"
    shutil.copytree(root, broken)
    (broken / f"videos/{CAMERA}/chunk-000/file-001.mp4").unlink()
    info = json.loads((broken / "meta/info.json").read_text())
    info["total_frames"] += 1
    (broken / "meta/info.json").write_text(json.dumps(info))
    status, out, _ = run("doctor", broken, "--json")
    found = {(item["code"], item["column"]) for item in json.loads(out)["findings"]}
    assert status == 1
    assert {("video_missing", CAMERA), ("stale_info_counts", "total_frames")} <= found
    status, out, _ = run("doctor", broken, "--limit", 1)
    assert status == 1
    assert "more findings are not listed" in out
    assert len([line for line in out.splitlines() if line.startswith("error")]) == 1


def test_doctor_reports_what_nothing_can_open(run: Run, root: Path, tmp_path: Path) -> None:
    target = tmp_path / "unsafe"
    shutil.copytree(root, target)
    info = json.loads((target / "meta/info.json").read_text())
    for changes in (
        {"video_path": "../{video_key}.mp4"},
        {"features": info["features"] | {"../up": {"dtype": "video", "shape": [32, 64, 3]}}},
    ):
        (target / "meta/info.json").write_text(json.dumps(info | changes))
        status, out, _ = run("doctor", target, "--json")
        assert status == 1
        assert [finding["code"] for finding in json.loads(out)["findings"]] == ["info_unreadable"]


def test_doctor_on_other_versions(run: Run, root: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(root, old)
    info = json.loads((old / "meta/info.json").read_text())
    (old / "meta/info.json").write_text(json.dumps(info | {"codebase_version": "v2.1"}))
    status, out, _ = run("doctor", old)
    assert (status, "v2.1" in out, "convert" in out) == (1, True, True)
    assert "Convert it" in failure(run("inspect", old))
    (old / "meta/info.json").write_text(json.dumps(info | {"codebase_version": "v4.0"}))
    assert "v4.0" in failure(run("plan", old))
    assert run("inspect", old, "--allow-unknown-version")[0] == 0
    assert run("plan", old, "--allow-unknown-version")[0] == 0


def test_plan_reports_shares(run: Run, root: Path) -> None:
    found = loaded(run("plan", root, "--world-size", 2, "--workers", 2, "--batch-size", 4, "--strategy", "lanes", "--json"))
    frames = loaded(run("inspect", root, "--json"))["frames"]
    assert sum(found["consumers"]["frames"]) == found["selected_frames"] == frames
    assert len(found["steps"]) == 2
    assert found["mixing"]["batch_size"] == 4
    assert max(found["rank_peak_bytes"]) > 0
    pictures = [shape["shape"] for shape in loaded(run("inspect", root, "--json"))["features"].values() if shape["dtype"] == "video"]
    assert found["peak_decoded_bytes"] == max(found["consumers"]["peak_frames"]) * sum(int(np.prod(shape)) for shape in pictures)
    assert loaded(run("plan", root, "--no-peaks", "--json"))["peak_decoded_bytes"] is None
    status, out, _ = run("plan", root, "--world-size", 2)
    assert status == 0
    assert all(word in out for word in ("balance", "peak payload", "mixing", "rank", "worker", "frames"))


@pytest.mark.parametrize("strategy", ["lanes", "remaining", "sequential", "reservoir"])
def test_plan_and_stream_write_the_same_order(run: Run, root: Path, tmp_path: Path, strategy: str) -> None:
    arguments = [root, "--world-size", 2, "--workers", 2, "--batch-size", 3, "--strategy", strategy, "--epoch", 1, "--seed", 9]
    loaded(run("plan", *arguments, "--order", tmp_path / "plan.parquet", "--json"))
    report = loaded(run("stream", *arguments, "--engine", "local", "--order", tmp_path / "stream.parquet", "--json"))
    planned, delivered = columns(tmp_path / "plan.parquet"), columns(tmp_path / "stream.parquet")
    digests = [f"digest:{camera}" for camera in ("observation.images.cam0", CAMERA)]
    assert list(planned) == [name for name in ORDER_SCHEMA if name != "t_ns"]
    assert list(delivered) == [*ORDER_SCHEMA, *digests]
    assert all(delivered[name] == planned[name] for name in planned)
    assert sorted(delivered["index"]) == list(range(report["selected_frames"]))
    assert (report["delivered"], report["distinct"], report["duplicated"]) == (report["selected_frames"], report["selected_frames"], 0)
    assert set(planned["epoch"]) == {1}


def test_the_local_engine_keeps_to_the_decoded_budget(run: Run, root: Path, tmp_path: Path) -> None:
    arguments = [root, "--engine", "local", "--batch-size", 4, "--json"]
    peaks = []
    for gib in (2, 1e-4):
        report = loaded(run("stream", *arguments, "--decoded-budget-gb", gib, "--order", tmp_path / f"{gib}.parquet"))
        peaks.append(report["counters"]["reelray_decoded_bytes_peak"])
    whole, small = columns(tmp_path / "2.parquet"), columns(tmp_path / "0.0001.parquet")
    assert all(whole[name] == small[name] for name in whole if name != "t_ns")
    assert 0 < peaks[1] <= 1e-4 * 2**30 < peaks[0]
    assert "raise decoded_budget_gb" in failure(run("stream", *arguments, "--decoded-budget-gb", 1e-9))


@pytest.mark.parametrize("command", [["plan"], ["stream", "--engine", "local"]])
def test_cursor_chains(run: Run, root: Path, tmp_path: Path, command: list[str]) -> None:
    arguments = [root, "--world-size", 2, "--batch-size", 3, "--strategy", "lanes"]
    loaded(run(*command, *arguments, "--order", tmp_path / "whole.parquet", "--json"))
    keys = ("rank", "step", "position", "index")
    whole = sorted(zip(*(columns(tmp_path / "whole.parquet")[key] for key in keys), strict=True))
    parts: list[tuple[Any, ...]] = []
    cursor, position = tmp_path / "cursor.json", []
    for steps in (2, 0, 1, 3, 50):
        given = ["--cursor-in", cursor] if cursor.exists() else []
        limit = [] if steps == 50 else ["--max-steps", steps]
        loaded(run(*command, *arguments, *given, *limit, "--cursor-out", cursor, "--order", tmp_path / "part.parquet", "--json"))
        part = columns(tmp_path / "part.parquet")
        parts += zip(*(part[key] for key in keys), strict=True)
        position.append((Cursor.from_json(cursor.read_text()).epoch, Cursor.from_json(cursor.read_text()).batches))
    assert sorted(parts) == whole
    assert position == [(0, 2), (0, 2), (0, 3), (0, 6), (1, 0)]


def test_a_cursor_goes_on_with_other_ranks(run: Run, root: Path, tmp_path: Path) -> None:
    cursor = tmp_path / "cursor.json"
    first, second = tmp_path / "first.parquet", tmp_path / "second.parquet"
    head = ["--world-size", 3, "--batch-size", 2, "--max-steps", 3, "--cursor-out", cursor, "--order", first]
    loaded(run("stream", root, "--engine", "local", *head, "--json"))
    loaded(
        run("stream", root, "--engine", "local", "--world-size", 2, "--batch-size", 5, "--cursor-in", cursor, "--order", second, "--json")
    )
    frames = loaded(run("inspect", root, "--json"))["frames"]
    assert sorted(columns(first)["index"] + columns(second)["index"]) == list(range(frames))
    cursor.write_text("{}")
    assert "CursorError" in failure(run("plan", root, "--cursor-in", cursor))
    assert "cannot be read" in failure(run("plan", root, "--cursor-in", tmp_path / "none.json"))


def test_data_parallel_ranks(run: Run, root: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    for command in (["plan"], ["stream", "--engine", "local"]):
        parts = []
        for rank in (0, 1, 2):
            file = tmp_path / f"{command[0]}-{rank}.parquet"
            given = ["--dp-rank", rank, "--dp-size", 3, "--batch-size", 4, "--strategy", "lanes", "--order", file]
            loaded(run(*command, root, *given, "--json"))
            assert set(columns(file)["rank"]) == {rank}
            parts.append(columns(file)["index"])
        seen.append(sorted(index for part in parts for index in part))  # type: ignore[arg-type]
    assert seen[0] == seen[1] == list(range(len(seen[0])))  # type: ignore[arg-type, comparison-overlap]
    assert "dp_rank must be in 0..2" in failure(run("plan", root, "--dp-rank", 3, "--dp-size", 3))


def test_selections_and_dotted_values(run: Run, root: Path, tmp_path: Path) -> None:
    file = tmp_path / "order.parquet"
    loaded(run("plan", root, "--episodes", "3,1", "--strategy", "sequential", "--no-shuffle", "--order", file, "--json"))
    found = columns(file)["episode_index"]
    assert list(dict.fromkeys(found)) == [3, 1]
    loaded(run("plan", root, "--exclude-episodes", "0,2", "--shuffle=false", "--seed=null", "--order", file, "--json"))
    assert set(columns(file)["episode_index"]) == {1, 3, 4, 5}
    assert "is not a list of episode numbers" in failure(run("plan", root, "--episodes", "one"))
    assert "do not exist" in failure(run("plan", root, "--episodes", "77"))
    assert "max_steps must be non-negative, found -1" in failure(run("plan", root, "--max-steps", -1))
    for name, wrong, rule in (
        ("max-steps", -1, "non-negative"),
        ("step-s", -0.5, "non-negative"),
        ("max-failures", -1, "non-negative"),
        ("decode-actors", 0, "positive"),
        ("decode-cpus", -1.0, "non-negative"),
        ("tolerance-s", -1.0, "non-negative"),
        ("sidecar-lock-timeout-s", -1.0, "non-negative"),
        ("prefetch-batches", 0, "positive"),
    ):
        line = failure(run("stream", root, "--engine", "local", f"--{name}", wrong))
        assert f"{name.replace('-', '_')} must be {rule}, found {wrong:g}" in line
    assert "is not JSON" in failure(run("plan", root, "--delta-timestamps", "{"))
    window = '{"action": [0.0, 0.1]}'
    loaded(run("stream", root, "--engine", "local", "--delta-timestamps", window, "--cameras", CAMERA, "--order", file, "--json"))
    assert [name for name in columns(file) if name.startswith("digest:")] == [f"digest:{CAMERA}"]


def test_damaged_episodes_are_dropped_when_asked(run: Run, root: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(root, broken)
    path = broken / f"videos/{CAMERA}/chunk-000/file-001.mp4"
    path.unlink()
    line = failure(run("stream", broken, "--engine", "local"))
    assert "file-001.mp4 is missing" in line
    report = loaded(run("stream", broken, "--engine", "local", "--damage", "skip_episode", "--json"))
    assert report["skipped"]
    assert report["delivered"] == report["selected_frames"]
    assert report["selected_episodes"] + len(report["skipped"]) == 6
    _, out, _ = run("plan", broken, "--damage", "skip_episode")
    assert "skipped episode" in out


def test_sidecars(run: Run, root: Path, tmp_path: Path) -> None:
    file = tmp_path / "index.npz"
    built = loaded(run("sidecar", "build", root, "--output", file, "--checksums", "--workers", 2, "--json"))
    assert (built["reused"], built["files"], built["checksums"], built["repo_id"], built["revision"]) == (False, 4, True, "ds", "v3.0")
    assert loaded(run("sidecar", "build", root, "--output", file, "--json"))["reused"]
    assert loaded(run("sidecar", "build", root, "--output", file, "--force", "--json"))["reused"] is False
    loaded(run("sidecar", "build", root, "--output", file, "--checksums", "--json"))
    assert loaded(run("sidecar", "verify", file, root, "--payload", "--json"))["ok"]
    shown = loaded(run("sidecar", "show", file, "--json"))
    assert [entry["path"] for entry in shown["files"]] == sorted(entry["path"] for entry in shown["files"])
    assert loaded(run("sidecar", "show", file, "--file", shown["files"][0]["path"], "--json"))["samples"]
    cached = loaded(run("sidecar", "build", root, "--repo-id", "owner/name", "--revision", "main", "--json"))
    assert "streaming-sidecars/owner--name/mp4-v3-main-" in cached["sidecar"]
    part = loaded(run("sidecar", "build", root, "--episodes", 1, "--output", tmp_path / "part.npz", "--json"))
    assert part["files"] == 2
    moved = tmp_path / "moved"
    shutil.copytree(root, moved)
    status, out, _ = run("sidecar", "verify", file, moved)
    assert (status, "it does not describe the source" in out) == (1, True)
    assert "no dataset is named" in failure(run("sidecar", "build"))
    assert "hf://" in failure(run("sidecar", "push", root))
    assert "hf://" in failure(run("sidecar", "build", root, "--output", file, "--push"))
    assert "give --output" in failure(run("sidecar", "build", root, "--episodes", 1))
    assert "workers must be positive" in failure(run("sidecar", "build", root, "--workers", 0))


def test_showing_one_video(run: Run, root: Path, tmp_path: Path) -> None:
    video = next(iter(sorted(root.rglob("*.mp4"))))
    shown = loaded(run("sidecar", "show", video, "--json"))
    assert {"timescale", "samples", "presented"} <= set(shown)
    with av.open(str(video)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    assert [row[1] for row in shown["samples"]] == [packet.size for packet in packets]
    assert [row[4] for row in shown["samples"]] == [int(packet.is_keyframe) for packet in packets]
    assert len(shown["presented"]) == len(packets)
    status, out, _ = run("sidecar", "show", video)
    assert (status, "random access" in out) == (0, True)
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(video.read_bytes()[: video.stat().st_size // 2])
    for file in (cut, tmp_path / "none.mp4", tmp_path / "none.npz"):
        assert file.name in failure(run("sidecar", "show", file, "--json"))


def test_exported_episodes_play(run: Run, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.mp4"
    written = loaded(run("episode", "export", root, 4, "--camera", CAMERA, out, "--json"))
    with av.open(str(out)) as container:
        codes = [read_barcode(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    assert len(codes) == written["pictures"]
    assert codes == list(range(codes[0], codes[0] + len(codes)))  # type: ignore[arg-type, operator]
    assert out.stat().st_size == written["bytes"]
    assert "name one with --camera" in failure(run("episode", "export", root, 4, out))
    assert "episode 44 does not exist" in failure(run("episode", "export", root, 44, out, "--camera", CAMERA))


def test_recipes_run(run: Run, root: Path) -> None:
    assert run("recipe", "check", "subtask")[0] == 0
    assert run("recipe", "styles", root, "--json")[0] == 0
    assert run("recipe", "coverage", root, "--recipe", "subtask")[0] == 0
    assert "task: 'b'" in run("recipe", "render", root, "--recipe", "subtask", "--episode", 1, "--frame", 0)[1]
    assert "no such recipe" in failure(run("recipe", "check", "none.yaml"))


@pytest.mark.parametrize(
    "command", [["inspect"], ["doctor"], ["plan"], ["stream", "--engine", "local"], ["sidecar", "build"], ["recipe", "styles"]]
)
def test_missing_folders_are_one_line(run: Run, command: list[str], tmp_path: Path) -> None:
    assert "is not a directory" in failure(run(*command, tmp_path / "missing"))
    assert "credential" in failure(run(*command, "https://user:secret@host/ds"))
    assert "secret" not in run(*command, "https://user:secret@host/ds")[2]
    assert "scheme" in failure(run(*command, "gopher://host/ds"))


def test_output_that_cannot_be_written_is_one_line(run: Run, root: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert str(blocked) in failure(run("plan", root, "--order", blocked / "order.parquet"))


def test_wrong_usage_is_status_two(run: Run, root: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run("plan", root, "--no-such-option", 1)
    assert ended.value.code == 2


def test_a_reader_that_leaves_early_is_no_error(root: Path) -> None:
    command = f'"{sys.executable}" -m reelray.cli inspect "{root}" --json | head -c 1'
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2], env=dict(os.environ)
    )
    assert done.stdout == "{"
    assert "Traceback" not in done.stderr


def test_progress_is_silent_without_a_terminal(run: Run, root: Path) -> None:
    assert run("doctor", root)[2] == ""
    assert np.char.count(run("inspect", root)[2], "\r") == 0
