"""Google Cloud Storage and Azure through the real client, against stand-ins that speak as much of their protocols as reading takes."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

import pytest
from servers.ranges import Fault, Reply, Request, WebServer, fail_nth, range_reply

from ingest.errors import AccessDeniedError, ObjectChangedError, ObjectNotFoundError, ShortReadError, StorageError
from ingest.storage.locations import parse_location
from ingest.storage.retry import RetryPolicy
from ingest.storage.stores import open_store

pytest.importorskip("obstore", reason="needs the extra reelray[s3]")

VIDEO = Random(3).randbytes(30_000)
DATE = "Mon, 02 Jan 2023 03:04:05 GMT"
VIDEO_PATH = "videos/cam/file-000.mp4"


class Cloud(WebServer):
    """One bucket or container. Google lists as S3 does, Azure in its own words."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.objects = {"sets/a/meta/info.json": b"{}", f"sets/a/{VIDEO_PATH}": VIDEO, "sets/ab/x": b"no"}
        super().__init__(self.reply)

    def etag(self, path: str) -> str:
        return f'"{hash(self.objects[path]) & 0xFFFFFFFF:08x}"'

    def reply(self, request: Request) -> Reply:
        inside = unquote(request.path).removeprefix(self.prefix).lstrip("/")
        if not inside:
            return Reply(200, {"content-type": "application/xml"}, self.listing(parse_qs(request.query).get("prefix", [""])[0]).encode())
        if inside not in self.objects:
            return Reply(404, {"content-type": "application/xml"}, b"<Error/>")
        tag = self.etag(inside)
        if request.headers.get("if-match", tag) != tag:
            return Reply(412, {"content-type": "application/xml"}, b"<Error/>")
        # Azure's client sends its range under a name of its own.
        request.headers.setdefault("range", request.headers.get("x-ms-range", ""))
        return range_reply(request, self.objects[inside], {"etag": tag, "last-modified": DATE, "x-ms-blob-type": "BlockBlob"})

    def listing(self, prefix: str) -> str:
        found = [path for path in sorted(self.objects) if path.startswith(prefix)]
        if self.prefix == "/robots":
            rows = "".join(
                f"<Contents><Key>{escape(path)}</Key><Size>{len(self.objects[path])}</Size><ETag>{escape(self.etag(path))}</ETag>"
                "<LastModified>2023-01-02T03:04:05.000Z</LastModified></Contents>"
                for path in found
            )
            return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        rows = "".join(
            f"<Blob><Name>{escape(path)}</Name><Properties><Last-Modified>{DATE}</Last-Modified><Content-Type>a/b</Content-Type>"
            f"<Content-Length>{len(self.objects[path])}</Content-Length><Etag>{escape(self.etag(path))}</Etag></Properties></Blob>"
            for path in found
        )
        return f"<EnumerationResults><Blobs>{rows}</Blobs><NextMarker/></EnumerationResults>"


@pytest.fixture(scope="module", autouse=True)
def _started() -> None:
    """The client library's threads start with its first request and stay, so they belong to no single test."""
    from obstore.store import GCSStore

    with Cloud("/robots") as server, pytest.raises(FileNotFoundError):
        GCSStore("robots", config={"base_url": server.url, "skip_signature": True}, client_options={"allow_http": True}).head("none")


@pytest.fixture(params=["gs", "az"])
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with Cloud("/robots" if request.param == "gs" else "/devstoreaccount1/robots") as server:
        if request.param == "gs":
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        else:
            monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
            monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", server.url)
        yield server


@pytest.fixture
def where(request: pytest.FixtureRequest) -> str:
    return f"{request.node.callspec.params['cloud']}://robots/sets/a/"


def test_reads_lists_and_identifies(cloud: Cloud, where: str, fast: RetryPolicy) -> None:
    store = open_store(parse_location(where), policy=fast)
    assert [item.path for item in store.list()] == ["meta/info.json", VIDEO_PATH]
    assert store.read_all("meta/info.json") == b"{}"
    wanted = [(5, 50), (20_000, 30_000), (0, 0)]
    assert store.read_ranges(VIDEO_PATH, wanted) == [VIDEO[start:stop] for start, stop in wanted]
    assert store.identity(VIDEO_PATH).stable
    with pytest.raises(ObjectNotFoundError):
        store.size("videos/none.mp4")
    with pytest.raises(ShortReadError, match="30000"):
        store.read_ranges(VIDEO_PATH, [(29_990, 30_001)])
    cloud.fault = fail_nth(len(cloud.requests) + 1, Fault("status", 503))
    assert store.read_ranges(VIDEO_PATH, [(0, 9)]) == [VIDEO[:9]]


def test_a_replacement_of_equal_size_is_noticed(cloud: Cloud, where: str, fast: RetryPolicy) -> None:
    store = open_store(parse_location(where), policy=fast)
    store.read_ranges(VIDEO_PATH, [(0, 9)])
    cloud.objects[f"sets/a/{VIDEO_PATH}"] = VIDEO[::-1]
    with pytest.raises(ObjectChangedError):
        store.read_ranges(VIDEO_PATH, [(0, 9)])


def test_a_refusal_says_where_credentials_are_looked_for(cloud: Cloud, where: str, fast: RetryPolicy) -> None:
    cloud.fault = lambda _: Fault("status", 403)
    with pytest.raises(AccessDeniedError, match=r"GOOGLE_APPLICATION_CREDENTIALS|AZURE_STORAGE_ACCOUNT_NAME"):
        open_store(parse_location(where), policy=fast).size(VIDEO_PATH)


def test_an_account_that_is_missing_is_asked_for(fast: RetryPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_USE_EMULATOR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AccessDeniedError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_store(parse_location("az://robots/a"), policy=fast).size("x")


@pytest.mark.parametrize(("text", "package"), [("sftp://host/x", "paramiko"), ("oss://b/x", "ossfs"), ("oci://b/x", "ocifs")])
def test_a_missing_package_is_named(text: str, package: str, fast: RetryPolicy) -> None:
    with pytest.raises(StorageError, match=f"{package}.*install that package, on every node"):
        open_store(parse_location(text), policy=fast).size("x")
