from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from random import Random

import huggingface_hub
import pytest
from servers.hub import HubEmulator
from servers.ranges import Fault

from ingest.errors import AccessDeniedError, ObjectNotFoundError, SidecarError, StorageError
from ingest.storage.hub import pin
from ingest.storage.local import LocalStore
from ingest.storage.locations import parse_location
from ingest.storage.publish import SIDECAR_BRANCH, SidecarPublisher, published_store
from ingest.storage.retry import RetryPolicy
from ingest.storage.stores import open_store

NAME = "meta/mp4-sidecars/mp4-v3-abc.npz"
DATA = b"text that repeats, " * 4000 + Random(4).randbytes(100_000)


pytestmark = pytest.mark.usefixtures("native_hub_client")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubEmulator]:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with HubEmulator() as emulator:
        emulator.tokens = {"hf_PLANTEDREAD": "read", "hf_PLANTEDWRITE": "write"}
        emulator.add_dataset("o/n", {"meta/info.json": b"{}", "sub/meta/info.json": b"{}"}, private=True)
        emulator.add_bucket("o/b", {"sub/meta/info.json": b"{}"}, private=True)
        monkeypatch.setenv("HF_ENDPOINT", emulator.endpoint)
        monkeypatch.setenv("HF_TOKEN", "hf_PLANTEDWRITE")
        yield emulator
        huggingface_hub.close_session()


@pytest.mark.parametrize("as_file", [False, True])
def test_a_dataset_gets_a_branch_from_the_pinned_commit_and_one_commit(
    hub: HubEmulator, fast: RetryPolicy, tmp_path: Path, as_file: bool
) -> None:
    source = pin(parse_location("hf://datasets/o/n@main"), fast)
    (tmp_path / "s.npz").write_bytes(DATA)
    hub.add_dataset("o/n", {"later": b"x"})
    before = dict(hub.repos["o/n"].branches)
    commits = len(hub.repos["o/n"].commits)
    store = open_store(source, policy=fast)
    assert published_store(store, policy=fast) is None
    url = SidecarPublisher(source, policy=fast).publish(NAME, tmp_path / "s.npz" if as_file else DATA, "Add sidecar")
    assert url == f"hf://datasets/o/n@lerobot-sidecars/{NAME}"
    repo = hub.repos["o/n"]
    assert {name: commit for name, commit in repo.branches.items() if name != SIDECAR_BRANCH} == before
    head = repo.branches[SIDECAR_BRANCH]
    assert (repo.parents[head], repo.messages[head], len(repo.commits)) == (source.revision, "Add sidecar", commits + 1)
    published = published_store(store, policy=fast)
    assert published is not None
    assert published.read_all(NAME) == DATA


def test_a_second_sidecar_is_a_second_commit_on_the_same_branch(hub: HubEmulator, fast: RetryPolicy) -> None:
    source = pin(parse_location("hf://datasets/o/n@main"), fast)
    publisher = SidecarPublisher(source, policy=fast)
    publisher.publish(NAME, b"one", "one")
    first = hub.repos["o/n"].branches[SIDECAR_BRANCH]
    publisher.publish(NAME.replace("abc", "def"), b"two", "two")
    assert hub.repos["o/n"].parents[hub.repos["o/n"].branches[SIDECAR_BRANCH]] == first


def test_a_subfolder_keeps_its_place(hub: HubEmulator, fast: RetryPolicy) -> None:
    source = pin(parse_location("hf://datasets/o/n@main/sub"), fast)
    assert SidecarPublisher(source, policy=fast).publish(NAME, b"x", "m") == f"hf://datasets/o/n@lerobot-sidecars/sub/{NAME}"
    found = published_store(open_store(source, policy=fast), policy=fast)
    assert found is not None
    assert found.read_all(NAME) == b"x"


@pytest.mark.parametrize("as_file", [False, True])
def test_a_bucket_is_written_directly_by_the_real_client(hub: HubEmulator, fast: RetryPolicy, tmp_path: Path, as_file: bool) -> None:
    (tmp_path / "s.npz").write_bytes(DATA)
    location = parse_location("hf://buckets/o/b/sub")
    url = SidecarPublisher(location, policy=fast).publish(NAME, tmp_path / "s.npz" if as_file else DATA, "ignored")
    assert url == f"hf://buckets/o/b/sub/{NAME}"
    assert hub.buckets["o/b"].objects[f"sub/{NAME}"].data == DATA
    store = open_store(location, policy=fast)
    assert published_store(store, policy=fast) is store
    assert store.read_all(NAME) == DATA
    assert hub.leaked == []


@pytest.mark.parametrize("text", ["hf://datasets/o/n", "hf://datasets/o/n@main", "o/n"])
def test_an_unpinned_dataset_is_refused(text: str) -> None:
    with pytest.raises(SidecarError, match="pinned source commit") as caught:
        SidecarPublisher(parse_location(text))
    assert isinstance(caught.value, ValueError)


def test_a_subset_another_place_and_another_folder_are_refused(hub: HubEmulator, fast: RetryPolicy) -> None:
    with pytest.raises(SidecarError, match="complete dataset sidecar"):
        SidecarPublisher(parse_location("hf://buckets/o/b"), complete=False)
    for text in ("s3://bucket/x", "/data/x", "https://example.org/x"):
        with pytest.raises(SidecarError, match="hf://"):
            SidecarPublisher(parse_location(text))
    with pytest.raises(SidecarError, match="meta/mp4-sidecars"):
        SidecarPublisher(parse_location("hf://buckets/o/b"), policy=fast).publish("meta/info.json", b"x", "m")


@pytest.mark.parametrize("text", ["hf://datasets/o/n@main", "hf://buckets/o/b"])
@pytest.mark.parametrize("token", [None, "hf_PLANTEDREAD", "hf_PLANTEDUNKNOWN"])
def test_no_write_access_is_said_clearly_before_anything_is_sent(
    hub: HubEmulator, fast: RetryPolicy, monkeypatch: pytest.MonkeyPatch, text: str, token: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    location = parse_location(text)
    location = pin(location, fast) if location.kind == "hub" else location
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.forget()
    with caplog.at_level(logging.DEBUG), pytest.raises(AccessDeniedError, match="write permission") as caught:
        SidecarPublisher(location, policy=fast).publish(NAME, b"x", "m")
    assert "PLANTED" not in str(caught.value) + caplog.text
    assert all(request.method == "GET" for request in hub.hub.requests)
    assert SIDECAR_BRANCH not in hub.repos["o/n"].branches


def test_failures_of_the_upload_are_typed(hub: HubEmulator, fast: RetryPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    source = pin(parse_location("hf://datasets/o/n@main"), fast)
    hub.hub.fault = lambda request: Fault("status", 400) if "/commit/" in request.path else None
    with pytest.raises(StorageError, match="failed"):
        SidecarPublisher(source, policy=fast).publish(NAME, b"x", "m")
    hub.hub.fault = None
    missing = parse_location("hf://buckets/o/none")
    with pytest.raises(ObjectNotFoundError, match="does not exist"):
        SidecarPublisher(missing, policy=fast).publish(NAME, b"x", "m")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StorageError, match="HF_HUB_OFFLINE"):
        SidecarPublisher(source, policy=fast).publish(NAME, b"x", "m")


def test_other_stores_have_no_published_sidecars(tmp_path: Path) -> None:
    assert published_store(LocalStore.at(tmp_path)) is None
