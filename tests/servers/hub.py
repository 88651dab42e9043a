"""An emulator of the Hugging Face Hub for tests: datasets with commits, branches and tags, and buckets.

The real ``huggingface_hub`` client talks to it through ``HF_ENDPOINT``. Content is served by a second server on another port, under signed
addresses that expire on demand, as the Hub does with its storage hosts; an Authorization header that reaches that server is recorded.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, quote, unquote

from servers.ranges import FaultRule, Reply, Request, WebServer, range_reply
from servers.xet import XetStore

PAGE = 1000
_CAS_TOKEN = "Bearer planted-cas-token"
_INLINE_SUFFIXES = (".json", ".md", ".txt", ".gitattributes", ".jsonl")


@dataclass
class Repo:
    """A dataset repository: commits are whole trees, which is all that reading needs."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    parents: dict[str, str | None] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision) or self.tags.get(revision) or (revision if revision in self.commits else None)


@dataclass
class BucketObject:
    data: bytes
    xet_hash: str


@dataclass
class Bucket:
    objects: dict[str, BucketObject] = field(default_factory=dict)
    private: bool = False


class _Refused(Exception):
    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def _error(status: int, code: str, message: str) -> Reply:
    headers = {"content-type": "application/json", "x-error-code": code, "x-error-message": message}
    return Reply(status, headers, json.dumps({"error": message}).encode())


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(status, {"content-type": "application/json", **(headers or {})}, json.dumps(value).encode())


class HubEmulator:
    """State of the emulated Hub and its two servers.

    ``tokens`` maps a token to ``read`` or ``write``. ``signature`` is part of every signed address; raising it expires all earlier ones.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.buckets: dict[str, Bucket] = {}
        self.tokens: dict[str, str] = {}
        self.blobs: dict[str, bytes] = {}
        self.page = PAGE
        self.signature = 1
        self.uploads: dict[str, bytes] = {}
        self.xet = XetStore(self.uploads)
        self._numbers = itertools.count(1)
        self.hub = WebServer(self._answer)
        self.storage = WebServer(self._answer_storage)

    @property
    def endpoint(self) -> str:
        return self.hub.url

    @property
    def leaked(self) -> list[str]:
        """Authorization headers that reached the storage host."""
        return [
            request.headers["authorization"]
            for request in self.storage.requests
            if request.headers.get("authorization", _CAS_TOKEN) != _CAS_TOKEN
        ]

    def set_fault(self, rule: FaultRule | None) -> None:
        self.hub.fault = self.storage.fault = rule

    def forget(self) -> None:
        self.hub.forget()
        self.storage.forget()

    def close(self) -> None:
        self.hub.close()
        self.storage.close()

    def __enter__(self) -> HubEmulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_dataset(self, repo_id: str, files: Mapping[str, bytes], *, branch: str = "main", **options: bool) -> str:
        """Creates a dataset, or commits ``files`` on top of it; returns the commit."""
        repo = self.repos.setdefault(repo_id, Repo(**options))
        return self._commit(repo, branch, dict(files), [], "add files")

    def add_bucket(self, bucket_id: str, files: Mapping[str, bytes], **options: bool) -> None:
        """Creates a bucket, or puts ``files`` into it."""
        bucket = self.buckets.setdefault(bucket_id, Bucket(**options))
        for path, data in files.items():
            bucket.objects[path] = BucketObject(data, xet_hash_of(data))

    def expire_signatures(self) -> None:
        """Every signed address handed out so far is refused from now on."""
        self.signature += 1

    def _commit(self, repo: Repo, branch: str, added: Mapping[str, bytes], deleted: list[str], message: str) -> str:
        parent = repo.branches.get(branch)
        tree = dict(repo.commits[parent]) if parent else {}
        for path in deleted:
            tree.pop(path, None)
        tree.update(added)
        sha = hashlib.sha1(f"{next(self._numbers)}{parent}{sorted(tree)}".encode(), usedforsecurity=False).hexdigest()
        repo.commits[sha], repo.parents[sha], repo.messages[sha] = tree, parent, message
        repo.branches[branch] = sha
        return sha

    # --- the Hub's own host ---------------------------------------------------------------------

    def _answer(self, request: Request) -> Reply:
        try:
            parts = [part for part in request.path.split("/") if part]
            if parts[:2] == ["api", "datasets"] and len(parts) >= 4:
                return self._dataset_api(request, f"{parts[2]}/{parts[3]}", parts[4:])
            if parts[:2] == ["api", "buckets"] and len(parts) >= 4:
                return self._bucket_api(request, f"{parts[2]}/{parts[3]}", parts[4:])
            if parts[:1] == ["datasets"] and len(parts) >= 4 and parts[3] == "resolve":
                return self._resolve(request, f"{parts[1]}/{parts[2]}", parts[4:])
            if parts[:1] == ["buckets"] and len(parts) >= 4 and parts[3] == "resolve":
                return self._resolve_bucket(request, f"{parts[1]}/{parts[2]}", "/".join(parts[4:]))
            if parts[:1] == ["datasets"] and request.path.endswith("/info/lfs/objects/batch"):
                return self._lfs_batch(request)
            if parts[:2] == ["api", "whoami-v2"]:
                return _json({"name": "tester", "type": "user", "auth": {"accessToken": {"role": self._role(request) or "none"}}})
            return _error(404, "", f"no route for {request.method} {request.path}")
        except _Refused as refused:
            return refused.reply

    def _role(self, request: Request) -> str | None:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.tokens:
            raise _Refused(_error(401, "", "Invalid credentials in Authorization header"))
        return self.tokens.get(token)

    def _repo(self, request: Request, repo_id: str, *, write: bool = False) -> Repo:
        role, repo = self._role(request), self.repos.get(repo_id)
        if repo is None or (repo.private and role is None):
            raise _Refused(_error(404 if role else 401, "RepoNotFound", "Repository not found"))
        if repo.gated and role is None:
            raise _Refused(_error(401, "GatedRepo", f"Access to dataset {repo_id} is restricted"))
        if write and role != "write":
            raise _Refused(_error(403 if role else 401, "", "You don't have the required permissions to write here"))
        return repo

    def _tree_of(self, repo: Repo, revision: str) -> tuple[str, dict[str, bytes]]:
        sha = repo.resolve(revision)
        if sha is None:
            raise _Refused(_error(404, "RevisionNotFound", f"Invalid rev id: {revision}"))
        return sha, repo.commits[sha]

    def _dataset_api(self, request: Request, repo_id: str, rest: list[str]) -> Reply:
        verb = rest[0] if rest else ""
        revision = unquote(rest[1]) if len(rest) > 1 else "main"
        if request.method == "POST" and verb in {"branch", "tag", "commit", "preupload"}:
            return self._dataset_write(request, repo_id, verb, "/".join(rest[1:]))
        if verb == "xet-write-token":
            self._repo(request, repo_id, write=True)
            return self._xet_token()
        if verb == "auth-check":
            self._repo(request, repo_id, write="write" in rest)
            return _json({})
        repo = self._repo(request, repo_id)
        if verb in {"", "revision"}:
            sha, tree = self._tree_of(repo, "/".join(rest[1:]) or "main")
            siblings = [{"rfilename": path} for path in sorted(tree)]
            return _json({"id": repo_id, "sha": sha, "private": repo.private, "tags": [], "downloads": 0, "siblings": siblings})
        if verb == "refs":
            listed = {"branches": repo.branches, "tags": repo.tags}
            prefix = {"branches": "refs/heads/", "tags": "refs/tags/"}
            return _json(
                {
                    kind: [{"name": name, "ref": prefix[kind] + name, "targetCommit": sha} for name, sha in refs.items()]
                    for kind, refs in listed.items()
                }
                | {"converts": []}
            )
        _, tree = self._tree_of(repo, revision)
        if verb == "tree":
            return self._page(request, _entries({path: (data, None) for path, data in tree.items()}, "/".join(rest[2:]), request))
        if verb == "paths-info":
            wanted = _wanted_paths(request)
            return _json([_file_entry(path, tree[path], None) for path in wanted if path in tree])
        return _error(404, "", f"no route for {request.method} {request.path}")

    def _page(self, request: Request, entries: list[dict[str, object]] | None) -> Reply:
        if entries is None:
            return _error(404, "EntryNotFound", "does not exist on this revision")
        query = parse_qs(request.query)
        start = int(query.get("cursor", ["0"])[0])
        chunk = entries[start : start + self.page]
        headers: dict[str, str] = {}
        if start + self.page < len(entries):
            kept = "&".join(part for part in request.query.split("&") if part and not part.startswith("cursor="))
            headers["link"] = f'<{self.endpoint}{quote(request.path)}?{kept}&cursor={start + self.page}>; rel="next"'
        return _json(chunk, headers=headers)

    def _dataset_write(self, request: Request, repo_id: str, verb: str, tail: str) -> Reply:
        repo = self._repo(request, repo_id, write=True)
        if verb == "branch":
            if tail in repo.branches:
                return _error(409, "", f"Reference already exists: {tail}")
            sha, _ = self._tree_of(repo, json.loads(request.body or b"{}").get("startingPoint", "main"))
            repo.branches[tail] = sha
            return _json({})
        if verb == "tag":
            sha, _ = self._tree_of(repo, tail)
            repo.tags[json.loads(request.body)["tag"]] = sha
            return _json({})
        if verb == "preupload":
            files = json.loads(request.body)["files"]
            modes = [
                {"path": item["path"], "uploadMode": "regular" if item["path"].endswith(_INLINE_SUFFIXES) else "lfs", "shouldIgnore": False}
                for item in files
            ]
            return _json({"files": modes})
        if tail not in repo.branches:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {tail}")
        added, deleted, message = self._operations(request)
        sha = self._commit(repo, tail, added, deleted, message)
        return _json({"success": True, "commitOid": sha, "commitUrl": f"{self.endpoint}/datasets/{repo_id}/commit/{sha}", "hookOutput": ""})

    def _operations(self, request: Request) -> tuple[dict[str, bytes], list[str], str]:
        added: dict[str, bytes] = {}
        deleted: list[str] = []
        message = ""
        for line in request.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                added[value["path"]] = self.uploads[value["oid"]]
            elif item["key"] == "deletedFile":
                deleted.append(value["path"])
        return added, deleted, message

    def _lfs_batch(self, request: Request) -> Reply:
        repo_id = request.path.removeprefix("/datasets/").partition(".git/")[0]
        self._repo(request, repo_id, write=True)
        objects = [
            {"oid": item["oid"], "size": item["size"], "actions": {"upload": {"href": f"{self.storage.url}/upload/{item['oid']}"}}}
            for item in json.loads(request.body)["objects"]
        ]
        return _json({"transfer": "basic", "objects": objects})

    def _resolve(self, request: Request, repo_id: str, rest: list[str]) -> Reply:
        repo = self._repo(request, repo_id)
        sha, tree = self._tree_of(repo, unquote(rest[0]))
        path = "/".join(rest[1:])
        if path not in tree:
            return _error(404, "EntryNotFound", f"Entry not found: {path}")
        data = tree[path]
        headers = {"x-repo-commit": sha}
        if path.endswith(_INLINE_SUFFIXES):
            digest = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
            return range_reply(request, data, {**headers, "etag": f'"{digest}"'})
        digest = hashlib.sha256(data).hexdigest()
        return self._signed(data, digest, {**headers, "x-linked-etag": f'"{digest}"'})

    def _signed(self, data: bytes, name: str, headers: dict[str, str]) -> Reply:
        self.blobs[name] = data
        location = f"{self.storage.url}/blob/{name}?X-Amz-Signature=planted-signature-{self.signature}&generation={self.signature}"
        return Reply(302, {**headers, "location": location, "x-linked-size": str(len(data))}, b"")

    # --- buckets --------------------------------------------------------------------------------

    def _bucket(self, request: Request, bucket_id: str, *, write: bool = False) -> Bucket:
        role, bucket = self._role(request), self.buckets.get(bucket_id)
        if bucket is None or (bucket.private and role is None):
            raise _Refused(_error(404 if role else 401, "RepoNotFound", "Bucket not found"))
        if write and role != "write":
            raise _Refused(_error(403 if role else 401, "", "You don't have the required permissions to write here"))
        return bucket

    def _bucket_api(self, request: Request, bucket_id: str, rest: list[str]) -> Reply:
        verb = rest[0] if rest else ""
        if verb in {"batch", "xet-write-token"}:
            bucket = self._bucket(request, bucket_id, write=True)
            return self._bucket_write(request, bucket, verb)
        bucket = self._bucket(request, bucket_id)
        if verb == "tree":
            found = {path: (item.data, item.xet_hash) for path, item in bucket.objects.items()}
            return self._page(request, _entries(found, "/".join(rest[1:]), request) or [])
        if verb == "paths-info":
            wanted = json.loads(request.body)["paths"]
            return _json(
                [_file_entry(path, bucket.objects[path].data, bucket.objects[path].xet_hash) for path in wanted if path in bucket.objects]
            )
        if verb == "":
            size = sum(len(item.data) for item in bucket.objects.values())
            created = "2026-01-01T00:00:00.000Z"
            return _json(
                {"id": bucket_id, "private": bucket.private, "createdAt": created, "size": size, "totalFiles": len(bucket.objects)}
            )
        return _error(404, "", f"no route for {request.method} {request.path}")

    def _bucket_write(self, request: Request, bucket: Bucket, verb: str) -> Reply:
        if verb == "xet-write-token":
            return self._xet_token()
        failed: list[dict[str, str]] = []
        for line in request.body.splitlines():
            item = json.loads(line)
            if item["type"] == "deleteFile":
                bucket.objects.pop(item["path"], None)
            elif item["xetHash"] in self.uploads:
                bucket.objects[item["path"]] = BucketObject(self.uploads[item["xetHash"]], item["xetHash"])
            else:
                failed.append({"path": item["path"], "error": "unknown xet hash"})
        return _json({"success": not failed, "processed": 1, "succeeded": 1, "failed": failed})

    def _xet_token(self) -> Reply:
        headers = {"x-xet-cas-url": self.storage.url, "x-xet-access-token": "planted-cas-token", "x-xet-token-expiration": "4102444800"}
        return _json({"casUrl": self.storage.url, "accessToken": "planted-cas-token", "exp": 4102444800}, headers=headers)

    def _resolve_bucket(self, request: Request, bucket_id: str, path: str) -> Reply:
        item = self._bucket(request, bucket_id).objects.get(unquote(path))
        if item is None:
            return _error(404, "EntryNotFound", f"Entry not found: {path}")
        link = f'<{self.endpoint}/api/buckets/{bucket_id}/xet-read-token>; rel="xet-auth"'
        return self._signed(item.data, item.xet_hash, {"x-xet-hash": item.xet_hash, "link": link, "etag": f'"{item.xet_hash}"'})

    # --- the storage host -----------------------------------------------------------------------

    def _answer_storage(self, request: Request) -> Reply:
        if request.method == "PUT" and request.path.startswith("/upload/"):
            self.uploads[request.path.removeprefix("/upload/")] = request.body
            return Reply(200)
        stored = self.xet.answer(request)
        if stored is not None:
            return stored
        name = request.path.removeprefix("/blob/")
        if name not in self.blobs:
            return Reply(404, {"content-type": "application/xml"}, b"<Error><Code>NoSuchKey</Code></Error>")
        if parse_qs(request.query).get("generation") != [str(self.signature)]:
            return Reply(
                403, {"content-type": "application/xml"}, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
            )
        return range_reply(request, self.blobs[name], {"etag": f'"{hashlib.md5(self.blobs[name], usedforsecurity=False).hexdigest()}"'})


def xet_hash_of(data: bytes) -> str:
    """Stands for a Xet hash: 64 hex digits that differ when the content does."""
    return hashlib.blake2s(data, person=b"xethash").hexdigest()


def _wanted_paths(request: Request) -> list[str]:
    if "json" in request.headers.get("content-type", ""):
        return list(json.loads(request.body)["paths"])
    return parse_qs(request.body.decode()).get("paths", [])


def _file_entry(path: str, data: bytes, xet_hash: str | None) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(data)}
    if xet_hash is not None:
        return {**entry, "xetHash": xet_hash, "mtime": "2026-01-01T00:00:00.000Z"}
    entry["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    if not path.endswith(_INLINE_SUFFIXES):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


def _entries(files: Mapping[str, tuple[bytes, str | None]], folder: str, request: Request) -> list[dict[str, object]] | None:
    """Listing of a folder; None when the folder does not exist."""
    recursive = parse_qs(request.query).get("recursive", ["false"])[0].lower() in {"true", "1"}
    inside = f"{unquote(folder)}/" if folder else ""
    found: dict[str, dict[str, object]] = {}
    for path, (data, xet_hash) in files.items():
        if not path.startswith(inside):
            continue
        parts = path[len(inside) :].split("/")
        for depth in range(1, len(parts)):
            name = inside + "/".join(parts[:depth])
            if recursive or depth == 1:
                found[name] = {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
        if recursive or len(parts) == 1:
            found[path] = _file_entry(path, data, xet_hash)
    if not found and inside:
        return None
    return [found[name] for name in sorted(found)]
