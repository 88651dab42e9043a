"""The ``reelray prefeature`` commands from images to a restored copy: what they print, write, and refuse."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from calls import Answer, Run, failure, loaded
from tinydata import KEY, SHORT, STEP, make_images, tree_digest

from ingest.prefeature.build import build_local
from ingest.prefeature.config import read_config
from ingest.prefeature.reference import ReferenceTeacher

SIZES = ("--sizes.latent-frames", 12, "--sizes.memory-frames", 4, "--sizes.recent-frames", 2)


@pytest.fixture
def run(run: Run) -> Run:
    """Runs a ``prefeature`` command."""
    return partial(run, "prefeature")


def refused(result: Answer, *words: str) -> None:
    """A command that failed with one line that says why."""
    line = failure(result)
    assert line.startswith("reelray prefeature")
    for word in words:
        assert word in line


def test_cases_with_sizes_of_ones_own(run: Run, tmp_path: Path) -> None:
    images, root = make_images(tmp_path / "images", 5), tmp_path / "dataset"
    arguments = (images, "--root", root, "--preset", "tiny", "--cases", 2, *SIZES)
    assert run("cases", *arguments)[0] == 0
    assert read_config(root).sizes == SHORT
    before = tree_digest(root)
    assert run("cases", *arguments)[0] == 0
    assert tree_digest(root) == before
    refused(run("cases", *arguments, "--sample-seed", 3), "already holds another dataset", "sample_seed: recorded 0, now 3")
    refused(run("cases", *arguments, "--teacher-seed", 3), "teacher_checkpoint_sha256")
    other = tmp_path / "other"
    more = ("--sizes.depth", 6, "--sizes.blocks", 0, 5, "--sizes.hidden", 64, "--sizes.rope-dims", 8, 12, 12)
    assert run("cases", images, "--root", other, "--preset", "tiny", "--cases", 1, *more)[0] == 0
    assert (read_config(other).sizes.blocks, read_config(other).sizes.hidden) == ((0, 5), 64)
    refused(run("cases", images, "--root", other, "--preset", "tiny", "--sizes.hidden", 33), "not a multiple of heads")
    refused(run("cases", images, "--root", tmp_path / "third", "--preset", "tiny", "--cases", 9), "9 cases are wanted")
    refused(run("cases", tmp_path / "none", "--root", tmp_path / "third"), "not a folder")
    real = ("--teacher", "hy_worldplay", "--checkpoint", tmp_path / "no")
    refused(run("cases", images, "--root", tmp_path / "third", "--cases", 2, *real), "No such file")
    refused(
        run("cases", images, "--root", tmp_path / "third", "--preset", "tiny", "--cases", 2, "--noise-device", "fpga"), "--noise-device"
    )


def test_numbers_that_mean_nothing_are_refused_before_the_work(run: Run, tmp_path: Path, short_built: Path) -> None:
    images, root = make_images(tmp_path / "images", 2), tmp_path / "dataset"
    for seed in (-1, 1 << 63):
        refused(run("cases", images, "--root", root, "--preset", "tiny", "--cases", 1, "--seed", seed), f"found {seed}")
    assert not root.exists()
    for option, value in (("--workers", 0), ("--threads", 0), ("--stall-timeout-s", "nan"), ("--num-cpus", "nan"), ("--num-gpus", -1)):
        refused(run("build", short_built, option, value), f"{option[2:].replace('-', '_')} must be")
    for option, value in (("--sample", "nan"), ("--sample", 2), ("--threads", 0)):
        refused(run("ensure", short_built, "--remote", f"file://{tmp_path / 'durable'}", option, value), f"{option[2:]} must be")


def test_merge_validate_sync_and_ensure(run: Run, dataset: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'durable' / 'v4'}"
    merged = loaded(run("merge", dataset, "--verify-hashes", "--json"))
    assert (merged["records"], merged["train_records"], merged["partial"]) == (24, 16, False)
    status, out, _ = run("sync", dataset, "--remote", url)
    assert status == 0
    assert "dry run; add --execute" in out
    assert not (tmp_path / "durable").exists()
    status, out, _ = run("sync", dataset, "--remote", url, "--execute")
    assert status == 1  # nothing attests this state yet
    assert "no success mark" in out
    page = tmp_path / "page.html"
    report = loaded(run("validate", dataset, "--no-ray", "--teacher-samples", 4, "--html", page, "--json"))
    assert report["ok"]
    assert report["conditions"]["kv"]["checked"] > 0
    assert "Validation: valid" in page.read_text(encoding="utf-8")
    sent = loaded(run("sync", dataset, "--remote", url, "--execute", "--json"))
    assert sent["success"]
    assert sent["uploads"] == []
    before = tree_digest(dataset)
    shutil.rmtree(dataset)
    base = loaded(run("ensure", dataset, "--remote", url, "--json"))
    assert not base["complete"]
    refused(run("ensure", dataset, "--remote", url, "--parts", "text-kv", "--no-repair"), "2 files are missing or damaged")
    assert loaded(run("ensure", dataset, "--remote", url, "--parts", "text-kv", "--json"))["complete"]
    assert tree_digest(dataset) == before
    assert run("validate", dataset, "--no-ray", "--quick")[0] == 0
    assert loaded(run("ensure", dataset, "--remote", url, "--parts", "all", "--deep", "--json"))["restored"] == []


def test_a_dataset_with_faults(run: Run, dataset: Path, tmp_path: Path) -> None:
    (dataset / STEP).unlink()
    status, out, _ = run("validate", dataset, "--no-ray")
    assert status == 1
    assert f"files: {STEP}" in out
    refused(run("merge", dataset), "1 pieces are missing", str(KEY))
    status, out, _ = run("merge", dataset, "--allow-partial")
    assert status == 1
    assert "PARTIAL" in out
    refused(run("sync", dataset, "--remote", "memory://bucket/v4"), "_inventory.jsonl")
    build_local(dataset, ReferenceTeacher(SHORT))
    assert run("merge", dataset)[0] == 0
    assert run("validate", dataset, "--no-ray")[0] == 0


def test_wrong_places(run: Run, dataset: Path, tmp_path: Path) -> None:
    refused(run("merge", tmp_path / "nothing"), "dataset_config.json")
    refused(run("validate", tmp_path / "nothing", "--no-ray"), "dataset_config.json")
    refused(run("sync", dataset, "--remote", "s3://bucket"), "never a bucket's root")
    refused(run("sync", dataset, "--remote", str(tmp_path)), "expected one of file://")
    refused(run("ensure", tmp_path / "new", "--remote", f"file://{tmp_path / 'empty' / 'v4'}"), "_inventory.jsonl")
    assert not (tmp_path / "new").exists()
    refused(run("build", dataset, "--remote", "s3://bucket"), "never a bucket's root")
    refused(run("build", dataset, "--remote", "memory://a/b", "--no-merge"), "leave --no-merge out")
    (tmp_path / "full" / "v4").mkdir(parents=True)
    (tmp_path / "full" / "v4" / "thesis.tex").write_text("years of work", encoding="utf-8")
    refused(run("sync", dataset, "--remote", f"file://{tmp_path / 'full' / 'v4'}", "--execute"), "wrong prefix")
    refused(run("build", dataset, "--remote", f"file://{tmp_path / 'full' / 'v4'}"), "wrong prefix")
    assert [path.name for path in (tmp_path / "full" / "v4").iterdir()] == ["thesis.tex"]


def test_choosing_the_holdout(run: Run, short_built: Path, tmp_path: Path) -> None:
    images = short_built.parent / "source"
    metadata = tmp_path / "pairs.json"
    rows = [{"file_name": path.name, "caption": f"about {path.stem}"} for path in sorted(images.iterdir())]
    metadata.write_text(json.dumps(rows), encoding="utf-8")
    places = ("--metadata", metadata, "--images", images, "--root", tmp_path / "holdout", "--no-videos")
    assert run("holdout", short_built, *places, "--validation", 1, "--test", 2)[0] == 0
    split = [json.loads(line) for line in (tmp_path / "holdout" / "split.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["split"] for row in split] == ["validation", "test", "test"]
    assert all(row["caption"].startswith("about ") for row in split)
    refused(run("holdout", short_built, *places, "--validation", 2, "--test", 1), "another holdout set")
    refused(run("holdout", short_built, *places), "only 3 pairs remain, 75 are wanted")
    refused(run("holdout", short_built, *places, "--expected-overlap", 0), "2 of 5 metadata pairs belong to training, expected 0")


@pytest.mark.ray
@pytest.mark.slow
def test_the_commands_that_need_a_cluster(run: Run, tmp_path: Path, short_built: Path) -> None:
    images, root = make_images(tmp_path / "images", 5), tmp_path / "dataset"
    assert run("cases", images, "--root", root, "--preset", "tiny", "--cases", 2, *SIZES)[0] == 0
    workers = ("--workers", 2, "--num-cpus", 0.5)
    status, _, err = run("text-kv", root, *workers)
    assert status == 0
    assert "2 cases: the stored blocks equal the all-block files" in err
    assert not (root / "steps").exists()
    url = f"file://{tmp_path / 'durable' / 'v4'}"
    status, out, err = run("build", root, *workers, "--remote", url)
    assert status == 0
    assert "24 records merged, 16 for training" in err
    assert "no success mark" in out
    assert run("validate", root)[0] == 0
    assert tree_digest(root) == tree_digest(short_built)
    assert run("build", root, *workers, "--deep")[0] == 0
    refused(run("build", root, *workers, "--teacher-seed", 1), "teacher_checkpoint_sha256: recorded")
    refused(run("build", root, "--workers", 2, "--num-gpus", 1), "2 workers need 2 GPU, the cluster has 0")
    metadata = tmp_path / "pairs.json"
    metadata.write_text(json.dumps([{"file_name": path.name} for path in sorted(images.iterdir())]), encoding="utf-8")
    places = ("--metadata", metadata, "--images", images, "--root", tmp_path / "holdout", "--validation", 1, "--test", 1)
    refused(run("holdout", root, *places, "--workers", 1, "--num-gpus", 1), "1 workers need 1 GPU")
    status, _, err = run("holdout", root, *places, "--workers", 1, "--num-cpus", 0.5)
    assert status == 0
    assert "16 videos made" in err
    refused(run("holdout", root, *places, "--workers", 1, "--num-cpus", 0.5, "--teacher-seed", 2), "teacher_checkpoint_sha256")


@pytest.mark.ray
@pytest.mark.slow
def test_a_terminated_build_ends_after_its_chunks_and_goes_on_later(tmp_path: Path, run: Run) -> None:
    images, root = make_images(tmp_path / "images", 8), tmp_path / "dataset"
    assert run("cases", images, "--root", root, "--preset", "tiny", "--cases", 4)[0] == 0
    command = [sys.executable, "-m", "reelray.cli", "prefeature", "build", str(root), "--workers", "2", "--num-cpus", "0.5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not list((root / "steps").rglob("chunk_01.safetensors")):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 1
    assert "stopping after the chunks under way" in said
    assert 0 < len(list((root / "steps").rglob("*.safetensors"))) < 128
    assert not list(root.rglob("*.tmp"))
    assert "pieces are missing" in run("merge", root)[2]
    build_local(root, ReferenceTeacher(read_config(root).sizes))
    assert run("merge", root, "--verify-hashes")[0] == 0
    assert run("validate", root, "--no-ray")[0] == 0
