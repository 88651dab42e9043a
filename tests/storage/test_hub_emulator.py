"""The emulator is believed because the Hub's own client, reached through HF_ENDPOINT, agrees with it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from servers.hub import HubEmulator
from servers.ranges import Fault

FILES = {"meta/info.json": b"{}", "README.md": b"# hi", "videos/cam/file-000.mp4": Random(3).randbytes(30_000), "data/a.parquet": b"PAR1"}

SCRIPT = """
import hashlib
import json
import huggingface_hub as hub
from huggingface_hub import HfApi, HfFileSystem, hf_hub_download, snapshot_download

api = HfApi()
found = {}
info = api.dataset_info("o/n")
found["sha"] = info.sha
found["tag"] = api.dataset_info("o/n", revision="v3.0").sha
found["tree"] = sorted(item.path for item in api.list_repo_tree("o/n", repo_type="dataset", recursive=True) if hasattr(item, "size"))
found["paths"] = [item.size for item in api.get_paths_info("o/n", ["videos/cam/file-000.mp4"], repo_type="dataset")]
found["refs"] = sorted(item.name for item in api.list_repo_refs("o/n", repo_type="dataset").branches)
path = hf_hub_download("o/n", "videos/cam/file-000.mp4", repo_type="dataset")
found["video"] = hashlib.sha256(open(path, "rb").read()).hexdigest()
folder = snapshot_download("o/n", repo_type="dataset", allow_patterns="meta/*")
found["info"] = open(folder + "/meta/info.json").read()
files = HfFileSystem()
found["part"] = files.open("datasets/o/n/videos/cam/file-000.mp4", cache_type="none", mode="rb").read(10).hex()
listed = [item for item in api.list_bucket_tree("o/b", recursive=True) if item.type == "file"]
found["bucket"] = sorted((item.path, item.size, item.xet_hash) for item in listed)
found["bucket_paths"] = [item.size for item in api.get_bucket_paths_info("o/b", ["meta/info.json", "none"])]
found["bucket_info"] = api.bucket_info("o/b").total_files
found["bucket_size"] = api.get_bucket_file_metadata("o/b", "videos/cam/file-000.mp4").size
api.create_branch("o/n", branch="side", repo_type="dataset", revision=info.sha)
api.create_commit("o/n", [hub.CommitOperationAdd("note.txt", b"hello")], commit_message="note", repo_type="dataset", revision="side")
found["note"] = open(hf_hub_download("o/n", "note.txt", repo_type="dataset", revision="side")).read()
try:
    api.dataset_info("o/none")
except Exception as error:
    found["missing"] = type(error).__name__
print(json.dumps(found))
"""


@pytest.mark.parametrize("faulty", [False, True])
def test_the_real_client_agrees(tmp_path: Path, faulty: bool) -> None:
    with HubEmulator() as emulator:
        emulator.tokens = {"hf_PLANTEDWRITE": "write"}
        commit = emulator.add_dataset("o/n", FILES, private=True)
        emulator.repos["o/n"].tags["v3.0"] = commit
        emulator.add_bucket("o/b", FILES)
        if faulty:
            emulator.hub.fault = lambda request: (
                Fault("status", 503) if request.method == "GET" and "/tree" in request.path and request.number % 2 else None
            )
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": emulator.endpoint,
            "HF_TOKEN": "hf_PLANTEDWRITE",
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout.splitlines()[-1])
        video = FILES["videos/cam/file-000.mp4"]
        assert found["sha"] == found["tag"] == commit
        assert found["tree"] == sorted(FILES)
        assert found["paths"] == [len(video)]
        assert found["refs"] == ["main"]
        assert found["video"] == hashlib.sha256(video).hexdigest()
        assert found["info"] == "{}"
        assert found["part"] == video[:10].hex()
        assert [entry[:2] for entry in found["bucket"]] == sorted([path, len(data)] for path, data in FILES.items())
        assert (found["bucket_paths"], found["bucket_info"], found["bucket_size"]) == ([2], len(FILES), len(video))
        assert found["note"] == "hello"
        assert found["missing"] == "RepositoryNotFoundError"
        assert emulator.leaked == []
