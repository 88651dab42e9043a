"""Worker journals (``manifests/worker_W.jsonl``): one fsynced line per committed piece of work.

A line is the commit point: it is written after every file it names is durable. Lines carry sizes and hashes, so merge
and resume trust nothing that is not verified.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingest.errors import LockTimeoutError, MetadataError
from ingest.prefeature import layout
from ingest.prefeature.durable import FileDigest, storage_error
from ingest.prefeature.jsonio import MAX_JSON_BYTES, as_object, canonical_json, parse_object

VOLATILE = frozenset({"worker_id", "seconds", "attempt"})
"""Fields that may differ between two lines about the same, identical work."""

_LOCK_POLL_S = 0.1
KINDS = frozenset({"frozen", "case", "record", "video"})


@dataclass(frozen=True, slots=True)
class JournalLine:
    """One committed piece of work and where it was written down."""

    fields: Mapping[str, Any]
    file: str
    number: int

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Kind and ids; -1 where an id does not apply."""
        ids = [int(self.fields.get(name, -1)) for name in ("case_id", "action_id", "chunk_id")]
        return str(self.fields["kind"]), ids[0], ids[1], ids[2]

    @property
    def attempt(self) -> int:
        """How often this work had been redone on purpose when the line was written."""
        return int(self.fields.get("attempt", 0))

    @property
    def void(self) -> bool:
        """Whether the line only says that earlier lines no longer hold, because the work is being redone."""
        return bool(self.fields.get("void", False))

    @property
    def files(self) -> dict[str, FileDigest]:
        """Digests by path."""
        where = f"{self.file} line {self.number}"
        try:
            return {
                path: FileDigest(int(item["size"]), str(item["sha256"])) for path, item in as_object(self.fields["files"], where).items()
            }
        except (KeyError, TypeError, ValueError) as error:
            raise MetadataError(f"{where}: files are malformed ({error!r})") from error

    @property
    def where(self) -> str:
        """File and line number for messages."""
        return f"{self.file} line {self.number}"

    def content(self) -> dict[str, Any]:
        """Everything that must agree between duplicates."""
        return {name: value for name, value in self.fields.items() if name not in VOLATILE}


@dataclass(slots=True)
class JournalSet:
    """All journals of a dataset.

    Attributes:
        lines: the line that counts, by key.
        warnings: torn tails, duplicates, lines of other builds.
        conflicts: pairs of lines that contradict each other, as text.
    """

    lines: dict[tuple[str, int, int, int], JournalLine] = field(default_factory=dict[tuple[str, int, int, int], JournalLine])
    warnings: list[str] = field(default_factory=list[str])
    conflicts: list[str] = field(default_factory=list[str])

    def live(self, key: tuple[str, int, int, int]) -> JournalLine | None:
        """The line that vouches for finished work, or None."""
        line = self.lines.get(key)
        return None if line is None or line.void else line

    def add(self, line: JournalLine) -> None:
        """Keeps the later attempt; equal attempts must agree."""
        known = self.lines.get(line.key)
        if known is None or line.attempt > known.attempt:
            self.lines[line.key] = line
        elif line.attempt == known.attempt:
            if line.content() == known.content():
                self.warnings.append(f"{known.where} and {line.where} both record {line.key}; they agree, one is kept")
            else:
                names = sorted(
                    name for name in {*line.content(), *known.content()} if line.content().get(name) != known.content().get(name)
                )
                self.conflicts.append(f"{known.where} and {line.where} disagree about {line.key} in {', '.join(names)}")


class JournalWriter:
    """Appends to the journal of one worker; holds a lock so that two builds cannot share it.

    Args:
        root: dataset root.
        worker: journal number.
        fingerprint: of the build.
        lock_wait_s: how long to wait for a former holder, for example a worker that is just being killed.

    Raises:
        LockTimeoutError: another process holds the journal.
    """

    def __init__(self, root: Path, worker: int, fingerprint: str, *, lock_wait_s: float = 0.0) -> None:
        self._worker = worker
        self._fingerprint = fingerprint
        path = self._path = root / layout.journal_path(worker)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        deadline = time.monotonic() + lock_wait_s
        while not self._locked():
            if time.monotonic() >= deadline:
                os.close(self._descriptor)
                raise LockTimeoutError(f"{path} is in use: another build of this dataset is running; wait for it or stop it")
            time.sleep(_LOCK_POLL_S)
        self._drop_torn_tail()

    def _locked(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _drop_torn_tail(self) -> None:
        """A crash may leave half a line at the end; later lines must not be glued to it."""
        size = os.fstat(self._descriptor).st_size
        keep = size
        while keep > 0:
            start = max(0, keep - 65_536)
            at = os.pread(self._descriptor, keep - start, start).rfind(b"\n")
            keep = start + at + 1 if at >= 0 else start
            if at >= 0:
                break
        if keep != size:
            os.ftruncate(self._descriptor, keep)
            os.fsync(self._descriptor)
        os.lseek(self._descriptor, 0, os.SEEK_END)

    def append(self, kind: str, files: Mapping[str, FileDigest], **fields: Any) -> None:
        """Writes and fsyncs one line.

        Raises:
            StorageError: the file system failed; the journal is as it was.
        """
        row: dict[str, Any] = {
            "kind": kind,
            "files": {path: {"size": digest.size, "sha256": digest.sha256} for path, digest in files.items()},
            "build_fingerprint": self._fingerprint,
            "worker_id": self._worker,
            **fields,
        }
        data = (canonical_json(row) + "\n").encode()
        end = os.fstat(self._descriptor).st_size
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end)
                os.lseek(self._descriptor, 0, os.SEEK_END)
            raise storage_error(error, self._path) from error

    def void(self, kind: str, attempt: int, **ids: int) -> None:
        """Withdraws earlier lines about a piece of work, before its files are replaced.

        A crash during the replacement then leaves no line that describes bytes which are gone.
        """
        self.append(kind, {}, **ids, attempt=attempt, void=True)

    def close(self) -> None:
        """Releases the journal."""
        os.close(self._descriptor)


def _require_fields(line: JournalLine) -> None:
    kind = line.fields.get("kind")
    if kind not in KINDS or not isinstance(line.fields.get("files"), dict):
        raise MetadataError(f"{line.where}: not a journal line of kind {', '.join(sorted(KINDS))}")
    numbers = [line.fields.get(name, 0) for name in ("case_id", "action_id", "chunk_id", "attempt")]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise MetadataError(f"{line.where}: case_id, action_id, chunk_id and attempt must be whole numbers, found {numbers}")
    checks = line.fields.get("input65_sha256"), line.fields.get("kv_check")
    if kind == "record" and not line.void and not (isinstance(checks[0], list) and isinstance(checks[1], dict)):
        raise MetadataError(f"{line.where}: a record without its recorded checks input65_sha256 and kv_check")


def read_journals(root: Path, fingerprint: str) -> JournalSet:
    """Reads every worker journal.

    Raises:
        MetadataError: a line other than a torn last one cannot be read, or a line belongs to another build.
    """
    found = JournalSet()
    folder = root / layout.JOURNALS
    paths = sorted(folder.glob("worker_*.jsonl"), key=lambda path: (len(path.name), path.name)) if folder.is_dir() else []
    for path in paths:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise MetadataError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        rows = path.read_bytes().split(b"\n")
        name = f"{layout.JOURNALS}/{path.name}"
        torn = rows.pop()
        if torn:
            found.warnings.append(f"{name} line {len(rows) + 1}: torn by a crash, ignored")
        for number, raw in enumerate(rows, 1):
            line = JournalLine(parse_object(raw, f"{name} line {number}"), name, number)
            _require_fields(line)
            if line.fields.get("build_fingerprint") != fingerprint:
                raise MetadataError(
                    f"{line.where}: belongs to build {line.fields.get('build_fingerprint')}, this dataset is {fingerprint}; "
                    "move the files of the other build away"
                )
            found.add(line)
    return found
