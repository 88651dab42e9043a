from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.errors import LocationError
from ingest.storage.locations import Location, parse_location

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "kind", "url", "repo_id", "revision", "path"),
    [
        ("/data/pusht", "local", "/data/pusht", None, None, ""),
        ("/data/pusht/", "local", "/data/pusht", None, None, ""),
        ("~/pusht", "local", "~/pusht", None, None, ""),
        ("./a/b", "local", "./a/b", None, None, ""),
        ("/", "local", "/", None, None, ""),
        ("file:///data/pusht/", "local", "/data/pusht", None, None, ""),
        ("lerobot/pusht", "hub", "hf://datasets/lerobot/pusht", "lerobot/pusht", None, ""),
        ("hf://datasets/lerobot/pusht", "hub", "hf://datasets/lerobot/pusht", "lerobot/pusht", None, ""),
        ("hf://datasets/lerobot/pusht/", "hub", "hf://datasets/lerobot/pusht", "lerobot/pusht", None, ""),
        ("hf://datasets/pusht", "hub", "hf://datasets/pusht", "pusht", None, ""),
        ("hf://datasets/pusht@main", "hub", "hf://datasets/pusht@main", "pusht", "main", ""),
        (f"hf://datasets/o/n@{COMMIT}/sub/dir", "hub", f"hf://datasets/o/n@{COMMIT}/sub/dir", "o/n", COMMIT, "sub/dir"),
        ("hf://datasets/o/n@refs/pr/3/sub", "hub", "hf://datasets/o/n@refs/pr/3/sub", "o/n", "refs/pr/3", "sub"),
        ("hf://datasets/o/n@my%2Fbranch/sub", "hub", "hf://datasets/o/n@my%2Fbranch/sub", "o/n", "my/branch", "sub"),
        ("hf://buckets/o/b", "bucket", "hf://buckets/o/b", "o/b", None, ""),
        ("hf://buckets/o/b/x/y/", "bucket", "hf://buckets/o/b/x/y", "o/b", None, "x/y"),
        ("s3://bucket/a/b/", "object", "s3://bucket/a/b", None, None, "a/b"),
        ("gs://bucket", "object", "gs://bucket", None, None, ""),
        ("abfss://container@account.dfs.core.windows.net/x", "object", "abfss://container@account.dfs.core.windows.net/x", None, None, "x"),
        ("https://Example.org/data/pusht/", "http", "https://example.org/data/pusht", None, None, "data/pusht"),
        ("http://127.0.0.1:8000/", "http", "http://127.0.0.1:8000", None, None, ""),
        ("https://example.org/with%20blank", "http", "https://example.org/with%20blank", None, None, "with blank"),
        ("memory://pusht/", "memory", "memory://pusht", None, None, "pusht"),
        ("sftp://host/data", "fsspec", "sftp://host/data", None, None, "data"),
    ],
)
def test_every_spelling(text: str, kind: str, url: str, repo_id: str | None, revision: str | None, path: str) -> None:
    assert parse_location(text) == Location(kind, url, repo_id, revision, path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "/data/no utf-8: \udcff",
        "hf://lerobot/pusht",
        "hf://models/lerobot/pusht",
        "hf://spaces/a/b",
        "hf://datasets/",
        "hf://datasets/o/n@",
        "hf://datasets/o/n@/x",
        "hf://datasets/o/n/../x",
        "hf://datasets/o/n@a b",
        "hf://buckets/o",
        "hf://buckets/",
        "hf://buckets/o/b/../c",
        "zip::http://example.org/a.zip",
        "simplecache::s3://bucket/x",
        "s3://",
        "s3://bucket/../other",
        "s3://key:secret@bucket/x",
        "s3://anonymous@bucket/x",
        "https://user:pass@example.org/x",
        "https://example.org/x?X-Amz-Signature=abc",
        "https://example.org/x#frag",
        "https:///x",
        "https://example.org:port/x",
        "http://169.254.169.254/latest",
        "http://[fe80::1]/",
        "https://metadata.google.internal/x",
        "github://o:r@main/x",
        "gopher://host/x",
        "file://host/x",
        "https://example.org/a\nb",
        "/data/a\0b",
    ],
)
def test_refused_with_a_message(text: str) -> None:
    with pytest.raises(LocationError) as caught:
        parse_location(text)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) > 20


def test_credentials_are_never_printed() -> None:
    for text in ("https://user:planted@example.org/x", "s3://AKIA:planted@bucket/x", "https://example.org/x?token=planted"):
        with pytest.raises(LocationError) as caught:
            parse_location(text)
        assert "planted" not in str(caught.value)


def test_a_directory_that_exists_wins_over_a_dataset_of_the_same_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_location("sets/pusht").kind == "hub"
    (tmp_path / "sets" / "pusht").mkdir(parents=True)
    assert parse_location("sets/pusht").kind == "local"
    assert parse_location(Path("a/b")).kind == "local"


class TestRepoType:
    def test_a_bare_name_with_repo_type_bucket(self) -> None:
        assert parse_location("o/b", repo_type="bucket") == parse_location("hf://buckets/o/b")

    @pytest.mark.parametrize("text", ["/data/x", "hf://datasets/o/n", "s3://bucket/x", "name"])
    def test_bucket_refuses_other_kinds(self, text: str) -> None:
        with pytest.raises(LocationError, match="bucket"):
            parse_location(text, repo_type="bucket")

    def test_dataset_refuses_a_bucket(self) -> None:
        with pytest.raises(LocationError, match="repo_type"):
            parse_location("hf://buckets/o/b", repo_type="dataset")

    def test_unknown_type(self) -> None:
        with pytest.raises(LocationError, match="'dataset' or 'bucket'"):
            parse_location("o/n", repo_type="model")


class TestRoot:
    def test_local_root_keeps_the_name(self, tmp_path: Path) -> None:
        found = parse_location("lerobot/pusht", root=tmp_path, revision="v3.0")
        assert (found.kind, found.url, found.repo_id, found.revision) == ("local", str(tmp_path), "lerobot/pusht", "v3.0")

    @pytest.mark.parametrize("text", ["o/b", "hf://buckets/o/b"])
    @pytest.mark.parametrize("repo_type", [None, "bucket"])
    def test_bucket_root_means_bucket_mode(self, text: str, repo_type: str | None) -> None:
        assert parse_location(text, root="hf://buckets/o/b/", repo_type=repo_type) == parse_location("hf://buckets/o/b")

    @pytest.mark.parametrize(
        ("text", "root", "repo_type", "match"),
        [
            ("o/other", "hf://buckets/o/b", None, "different buckets"),
            ("o/b", "hf://buckets/o/b/sub", None, "folder inside"),
            ("o/b", "hf://buckets/o/b", "dataset", "repo_type"),
            ("o/b", "hf://datasets/o/b", None, "neither"),
            ("o/b", "s3://bucket", None, "neither"),
            ("o/b", "/data/x", "bucket", "local directory"),
            ("hf://buckets/o/b", "/data/x", None, "local directory"),
        ],
    )
    def test_contradictions(self, text: str, root: str, repo_type: str | None, match: str) -> None:
        with pytest.raises(LocationError, match=match):
            parse_location(text, root=root, repo_type=repo_type)


class TestRevision:
    def test_enters_the_location(self) -> None:
        assert parse_location("o/n", revision=COMMIT).pinned
        assert not parse_location("o/n", revision="main").pinned
        assert parse_location("hf://datasets/o/n@main/sub", revision="main").url == "hf://datasets/o/n@main/sub"

    def test_two_that_differ(self) -> None:
        with pytest.raises(LocationError, match="give one of them"):
            parse_location("hf://datasets/o/n@a", revision="b")

    @pytest.mark.parametrize("text", ["hf://buckets/o/b", "s3://bucket/x", "https://example.org/x", "memory://x"])
    def test_only_datasets_have_one(self, text: str) -> None:
        with pytest.raises(LocationError, match="no revisions"):
            parse_location(text, revision="main")

    @pytest.mark.parametrize("revision", ["a b", "../x", "-x", "a/", "x?y"])
    def test_odd_names(self, revision: str) -> None:
        with pytest.raises(LocationError, match="branch or tag"):
            parse_location("o/n", revision=revision)

    def test_pinning(self) -> None:
        pinned = parse_location("hf://datasets/o/n@main/sub").at(COMMIT)
        assert (pinned.url, pinned.pinned) == (f"hf://datasets/o/n@{COMMIT}/sub", True)
        with pytest.raises(LocationError):
            parse_location("/data").at(COMMIT)
        with pytest.raises(LocationError):
            parse_location("o/n").at("main")


@given(st.text(max_size=60))
def test_any_text_is_a_location_or_a_typed_error(text: str) -> None:
    try:
        location = parse_location(text)
    except LocationError:
        return
    assert pickle.loads(pickle.dumps(location)) == location


@given(
    st.sampled_from(["hf://datasets/o/n", "hf://buckets/o/b", "s3://bucket", "https://example.org", "memory://m"]),
    st.text("ab.-_/", max_size=12),
)
def test_canonical_urls_parse_to_themselves(base: str, tail: str) -> None:
    try:
        location = parse_location(f"{base}/{tail}")
    except LocationError:
        return
    assert parse_location(location.url) == location
