"""A planted token is looked for in everything that storage writes, prints or pickles."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from servers.hub import HubEmulator
from servers.ranges import Fault

from ingest import settings
from ingest.errors import StorageError
from ingest.storage.disk_cache import CachedStore, PayloadCache
from ingest.storage.locations import parse_location
from ingest.storage.publish import SidecarPublisher
from ingest.storage.retry import RetryPolicy
from ingest.storage.secrets import redact
from ingest.storage.stores import open_store

pytestmark = pytest.mark.usefixtures("native_hub_client")

TOKEN = "hf_PLANTEDcanary0123456789"
FILES = {"meta/info.json": b"{}", "videos/a.mp4": bytes(5000)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubEmulator]:
    with HubEmulator() as emulator:
        emulator.tokens = {TOKEN: "read"}
        emulator.add_dataset("o/n", FILES, private=True)
        emulator.add_bucket("o/b", FILES, private=True)
        monkeypatch.setenv("HF_ENDPOINT", emulator.endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("REELRAY_HTTP_FAILURE_LOG", str(tmp_path / "failures.jsonl"))
        yield emulator
        huggingface_hub.close_session()


@pytest.mark.parametrize("text", ["hf://datasets/o/n@main", "hf://buckets/o/b"])
def test_the_token_appears_nowhere(
    hub: HubEmulator, fast: RetryPolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    artefacts: list[bytes] = []
    for name in ("httpx", "httpcore.http11", "httpx2", "httpcore2.http11"):
        caplog.set_level(logging.DEBUG, name)
    with caplog.at_level(logging.DEBUG):
        store = CachedStore(open_store(parse_location(text), policy=fast), PayloadCache(tmp_path / "cache", 10**6))
        store.list()
        store.read_all("meta/info.json")
        store.read_ranges("videos/a.mp4", [(0, 100)])
        artefacts += [pickle.dumps(store), pickle.dumps(store.store), repr(store).encode(), str(store.url).encode()]
        for kind, status in (
            ("status", 401),
            ("status", 403),
            ("status", 404),
            ("status", 418),
            ("status", 503),
            ("reset", 0),
            ("html", 0),
        ):
            # Hub and storage host fail in turn; the reads differ so that the cache does not answer them.
            for server in (hub.hub, hub.storage):
                server.fault = lambda _, kind=kind, status=status: Fault(kind, status, (("x-error-message", f"no {TOKEN} here"),))
                fresh = (
                    open_store(parse_location("hf://buckets/o/b" if server is hub.storage else text), policy=fast)
                    if server is hub.storage
                    else store
                )
                actions = _actions(fresh, text, fast)
                # The Hub client waits for real between tries of its own, so it only meets the faults that it does not retry.
                for action in actions if 400 < status < 500 else actions[:-1]:
                    try:
                        action()
                    except StorageError as error:
                        artefacts += ["".join(traceback.format_exception(error)).encode(), pickle.dumps(error), repr(error).encode()]
                server.fault = None
    files = [path for root in (tmp_path, settings.hf_home()) for path in root.rglob("*") if path.is_file()]
    assert any(path.name == "failures.jsonl" for path in files)
    artefacts += [path.read_bytes() for path in files]
    artefacts += [str(path).encode() for path in files]
    captured = capsys.readouterr()
    assert "HTTP Request: GET" in caplog.text
    artefacts += [caplog.text.encode(), captured.out.encode(), captured.err.encode()]
    for planted in (TOKEN, "planted-signature"):
        assert not [artefact[:500] for artefact in artefacts if planted.encode() in artefact]
    assert hub.leaked == []


def _actions(store: object, text: str, fast: RetryPolicy) -> list[Callable[[], object]]:
    location = parse_location("hf://buckets/o/b")
    return [
        lambda: store.read_ranges("videos/a.mp4", [(200, 300)]),  # type: ignore[attr-defined]
        lambda: store.read_ranges("videos/none.mp4", [(200, 300)]),  # type: ignore[attr-defined]
        lambda: open_store(parse_location(text), policy=fast).list(),
        lambda: SidecarPublisher(location, policy=fast).publish("meta/mp4-sidecars/x.npz", b"x", "m"),
    ]


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("https://user:pa55@host/x", "pa55"),
        ("GET https://host/x?X-Amz-Signature=abcdef&y=1 failed", "abcdef"),
        ("Authorization: Bearer abc.def", "abc.def"),
        ("token=abcdef", "abcdef"),
        ("see hf_abcdefghijk", "hf_abcdefghijk"),
    ],
)
def test_redaction(text: str, gone: str) -> None:
    assert gone not in redact(text)
    assert redact("https://host/path is fine") == "https://host/path is fine"


def test_the_login_files_token_is_redacted_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("oddly-shaped-secret\n")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    assert "oddly-shaped" not in redact("the server said oddly-shaped-secret")
