"""Showing and verifying indexes."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from video.forge import Movie, encode, pictures

from ingest.errors import ObjectNotFoundError, SidecarError, VideoFormatError
from ingest.storage.local import LocalStore
from ingest.video.sidecar.build import build_sidecar
from ingest.video.sidecar.report import show_index, verify_sidecar


def test_a_video_file_is_shown_as_plain_data(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    movie = Movie([3, 4, 5, 6], [512] * 4, composition=[512, 1024, 0, 0], sync=[0, 2], edits=[(250, -1, 1 << 16), (1000, 512, 1 << 16)])
    data, offsets = movie.build()
    path.write_bytes(data)
    shown = json.loads(json.dumps(show_index(path)))
    assert shown["timescale"] == 15360
    assert shown["samples"] == [
        [offsets[0], 3, 0, 512, 1],
        [offsets[1], 4, 512, 1536, 0],
        [offsets[2], 5, 1024, 1024, 1],
        [offsets[3], 6, 1536, 1536, 0],
    ]
    assert shown["presented"] == [[3840, 0], [4352, 2], [4864, 1], [4864, 3]]


def test_what_a_file_leaves_untimed_is_shown_as_untimed_and_presented_as_players_do(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(Movie([3, 4, 5, 6], [512, 256, 256, 256], untimed=2).build()[0])
    shown = show_index(tmp_path / "a.mp4")
    assert [row[2:4] for row in shown["samples"]] == [[0, 0], [512, 512], [768, 768], [768, 768]]
    assert shown["presented"] == [[0, 0], [512, 1], [768, 2], [1024, 3]]


def test_files_that_cannot_be_shown_say_why(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with pytest.raises(ObjectNotFoundError):
        show_index(path)
    path.write_bytes(b"nothing")
    with pytest.raises(VideoFormatError, match="no moov box") as caught:
        show_index(path)
    assert "\n" not in str(caught.value)
    path.write_bytes(Movie([9, 9, 9], [1, 1, 1]).build()[0][:-10])
    data = encode(pictures(6), options={"g": "6", "bf": "0"})
    path.write_bytes(data)
    offset, size = show_index(path)["samples"][4][:2]
    path.write_bytes(data[:offset] + bytes(size) + data[offset + size :])
    with pytest.raises(VideoFormatError, match="sample 4 does not hold avc1 data"):
        show_index(path)
    path.write_bytes(Movie([9, 9, 9], [1, 1, 1]).build()[0][:-10])
    with pytest.raises(VideoFormatError, match="2 of 3 samples lie beyond the end of the file"):
        show_index(path)


def test_a_sidecar_is_shown_in_short_or_file_by_file(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    sidecar = tmp_path / "s.npz"
    build_sidecar(source, paths, sidecar, repo_id="a/b", revision="v3.0", data_root="here")
    shown = show_index(sidecar)
    assert (shown["schema_version"], shown["data_root"], shown["checksums"]) == (3, "here", False)
    assert [row["path"] for row in shown["files"]] == paths
    assert show_index(sidecar, file=paths[1])["samples"] == show_index(source.root / paths[1])["samples"]
    with pytest.raises(SidecarError, match="not among its 3 files"):
        show_index(sidecar, file="none.mp4")


def test_a_sidecar_of_another_name_is_one_all_the_same(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    build_sidecar(source, paths, tmp_path / "index", repo_id="a/b", revision="v3.0")
    assert show_index(tmp_path / "index")["repo_id"] == "a/b"
    assert show_index(tmp_path / "index", file=paths[0])["pictures"] == 20


def test_verifying_finds_what_changed(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    sidecar = tmp_path / "s.npz"
    build_sidecar(source, paths, sidecar, repo_id="a/b", revision="v3.0", checksums=True)
    seen: list[tuple[int, int]] = []
    report = verify_sidecar(sidecar, source, paths, payload=True, progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    assert (report.files, report.samples, seen[-1]) == (3, 75, (3, 3))
    assert report.runs > 9
    assert verify_sidecar(sidecar).ok
    target = source.root / paths[1]
    stat, data = target.stat(), bytearray(target.read_bytes())
    position = show_index(target)["samples"][3][0]
    data[position] ^= 1
    target.write_bytes(data)
    os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    report = verify_sidecar(sidecar, source, paths, payload=True)
    assert [finding.file for finding in report.findings] == [None, paths[1]]
    assert "another fingerprint" in report.findings[0].message
    assert "the payload of 1 of" in report.findings[1].message
    target.write_bytes(encode(pictures(31)))
    report = verify_sidecar(sidecar, source, paths)
    assert any("offsets differs from the file" in finding.message for finding in report.findings)
    (source.root / paths[2]).unlink()
    with pytest.raises(ObjectNotFoundError):
        verify_sidecar(sidecar, source, paths)
    sidecar.write_bytes(b"junk")
    with pytest.raises(SidecarError):
        verify_sidecar(sidecar)


@pytest.mark.shared
def test_the_comparison_tool_agrees(
    shared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = shared_dir / "tools" / "compare_index.py"
    checked = refused = 0
    for truth in sorted((shared_dir / "data" / "mp4").glob("*.truth.json")):
        video = truth.with_suffix("").with_suffix("")
        try:
            shown = show_index(video)
        except VideoFormatError:
            refused += 1
            continue
        index = tmp_path / "index.json"
        index.write_text(json.dumps(shown))
        monkeypatch.setattr(sys, "argv", ["compare_index.py", str(index), str(video)])
        spec = importlib.util.spec_from_file_location("compare_index", tool)
        assert spec is not None
        assert spec.loader is not None
        with pytest.raises(SystemExit) as ended:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        said = capsys.readouterr().out
        assert not ended.value.code, (video.name, said)
        checked += 1
    assert checked >= 90
    assert refused <= 23
