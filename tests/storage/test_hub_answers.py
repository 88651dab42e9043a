"""Answers that no hub gives end in a typed error, soon, and are asked of nobody else."""

from __future__ import annotations

import pytest
from servers.ranges import Reply, Request, WebServer

from ingest.errors import StorageError, UnsafeInputError
from ingest.storage.retry import RetryPolicy
from ingest.storage.stores import open_store


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        (b"[" * 100_000, StorageError, "nests deeper"),
        (b"null", StorageError, "expected a list"),
        (b"[7]", StorageError, "expected an object"),
        (b'[{"type": "file", "path": "meta/info.json", "size": -1}]', StorageError, "no usable path and size"),
        (b'[{"type": "file", "path": "meta/info.json", "size": "5"}]', StorageError, "no usable path and size"),
        (b'[{"type": "file", "path": "meta/info.json", "size": 1000000000000000000}]', UnsafeInputError, "cannot be read whole"),
        (b"[]", StorageError, "leads back to an earlier one"),
    ],
)
def test_answers_that_no_hub_gives(
    monkeypatch: pytest.MonkeyPatch, fast: RetryPolicy, tree: bytes, error: type[Exception], message: str
) -> None:
    def answer(request: Request) -> Reply:
        link = {"link": f'<{request.path}?more>; rel="next"'} if tree == b"[]" else {}
        return Reply(200, {"content-type": "application/json", **link}, tree)

    with WebServer(answer) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(error, match=message):
            open_store("hf://datasets/o/n@" + "a" * 40, policy=fast).read_all("meta/info.json")
        assert len(server.requests) < 10


@pytest.mark.parametrize("link", ["http://[", "http://h:99999/", "mailto:x", "//", "http://other.example/api?page=2"])
def test_pages_of_a_listing_are_asked_of_the_hub_alone_and_bad_links_are_typed(
    monkeypatch: pytest.MonkeyPatch, fast: RetryPolicy, link: str
) -> None:
    def answer(_: Request) -> Reply:
        return Reply(200, {"content-type": "application/json", "link": f'<{link}>; rel="next"'}, b"[]")

    with WebServer(answer) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(StorageError):
            open_store("hf://datasets/o/n@" + "a" * 40, policy=fast).list("meta")
        assert len(server.requests) < 10
