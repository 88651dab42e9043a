"""Merge: journals in, manifests and inventory out; nothing incomplete ever looks complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingest.errors import DamagedDataError, MetadataError
from ingest.prefeature import layout
from ingest.prefeature.config import Case, DatasetConfig, read_cases, read_config
from ingest.prefeature.durable import FileDigest, hash_file, write_bytes
from ingest.prefeature.journal import JournalSet, read_journals
from ingest.prefeature.jsonio import json_lines, read_json_lines
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.manifest import make_record, train_records
from ingest.prefeature.storefiles import FileKind, case_file, check_header, frozen_file, noise_file, record_files, text_kv_file
from ingest.storage.paths import check_relative

MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge wrote.

    Attributes:
        records, train_records: lines of the two manifests; 0 train records for a partial merge.
        missing: keys and files that are not there, as text.
        warnings: what was tolerated.
        partial: whether only ``manifest.partial.jsonl`` was written.
        inventory_bytes: bytes of all files in the inventory.
    """

    records: int
    train_records: int
    missing: tuple[str, ...]
    warnings: tuple[str, ...]
    partial: bool
    inventory_bytes: int


def listed(items: list[str]) -> str:
    """The first items of a long list as text."""
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return "; ".join(items[:MAX_LISTED]) + more


class _Collector:
    """Verifies what journal lines claim and gathers the inventory."""

    def __init__(self, root: Path, config: DatasetConfig, journals: JournalSet, verify_hashes: bool) -> None:
        self._root, self._config, self._journals, self._hashes = root, config, journals, verify_hashes
        self.inventory: dict[str, FileDigest] = {}
        self.missing: list[str] = []
        self.damaged: list[str] = []

    def tensors(self, label: str, key: tuple[str, int, int, int], kinds: list[FileKind]) -> Mapping[str, Any] | None:
        """The journal line of a piece of work once all of its files check out."""
        line = self._journals.live(key)
        if line is None:
            self.missing.append(f"{label}: no journal line")
            return None
        digests, good = line.files, True
        for kind in kinds:
            good = self._file(label, kind.path, digests.get(kind.path), kind) and good
        return line.fields if good else None

    def plain(self, label: str, path: str, digest: FileDigest | None) -> None:
        """A file that is not a tensor file."""
        self._file(label, path, digest, None)

    def journaled(self, path: str, key: tuple[str, int, int, int]) -> None:
        """A file that is not a tensor file, with its own journal line."""
        line = self._journals.live(key)
        if line is None:
            self.missing.append(f"{path}: no journal line")
        else:
            self._file(path, path, line.files.get(path), None)

    def _file(self, label: str, path: str, digest: FileDigest | None, kind: FileKind | None) -> bool:
        if not (self._root / path).is_file():
            self.missing.append(f"{label}: {path} does not exist")
            return False
        try:
            if kind is not None:
                check_header(self._root, self._config, kind)
            size = (self._root / path).stat().st_size
            if digest is None:
                raise DamagedDataError(f"{path}: not named by its journal line", file=path)
            if size != digest.size or (self._hashes and hash_file(self._root / path) != digest):
                raise DamagedDataError(f"{path}: content is not what its journal line recorded; rebuild it with --deep", file=path)
        except DamagedDataError as error:
            self.damaged.append(str(error))
            return False
        self.inventory[path] = digest
        return True


def merge(root: Path, *, allow_partial: bool = False, verify_hashes: bool = False) -> MergeReport:
    """Writes ``manifest.jsonl``, ``train_eval_manifest.jsonl`` and ``_inventory.jsonl``.

    A success mark of an earlier state is removed first, because it does not speak for the new one.

    Args:
        root: dataset root.
        allow_partial: write ``manifest.partial.jsonl`` with what is complete instead of refusing; the real manifests are
            then removed.
        verify_hashes: re-read every file and compare its hash with the journal.

    Raises:
        MetadataError: journals contradict each other, or keys or files are missing (all named).
        DamagedDataError: files are damaged.
    """
    config = read_config(root)
    cases = read_cases(root, config)
    journals = read_journals(root, config.fingerprint)
    (root / layout.SUCCESS).unlink(missing_ok=True)
    if journals.conflicts:
        raise MetadataError(
            f"{len(journals.conflicts)} conflicting journal lines: {listed(journals.conflicts)}; "
            "the same work gave different bytes: delete the files of these keys and both lines, then build again"
        )
    collector = _Collector(root, config, journals, verify_hashes)
    records = _collect(root, config, cases, collector)
    if collector.damaged:
        raise DamagedDataError(f"{len(collector.damaged)} damaged files: {listed(collector.damaged)}; run the build again")
    if collector.missing and not allow_partial:
        raise MetadataError(
            f"{len(collector.missing)} pieces are missing: {listed(collector.missing)}; run the build again, or merge with --allow-partial"
        )
    if collector.missing:
        for name in (layout.MANIFEST, layout.TRAIN_MANIFEST, layout.INVENTORY):
            (root / name).unlink(missing_ok=True)
        write_bytes(root / layout.PARTIAL_MANIFEST, json_lines(records))
        return MergeReport(len(records), 0, tuple(collector.missing), tuple(journals.warnings), True, 0)
    train = train_records(records)
    inventory = collector.inventory
    inventory[layout.MANIFEST] = write_bytes(root / layout.MANIFEST, json_lines(records))
    inventory[layout.TRAIN_MANIFEST] = write_bytes(root / layout.TRAIN_MANIFEST, json_lines(train))
    write_bytes(root / layout.INVENTORY, inventory_lines(inventory))
    (root / layout.PARTIAL_MANIFEST).unlink(missing_ok=True)
    total = sum(digest.size for digest in inventory.values())
    return MergeReport(len(records), len(train), (), tuple(journals.warnings), False, total)


def _collect(root: Path, config: DatasetConfig, cases: list[Case], collector: _Collector) -> list[dict[str, Any]]:
    for path in (layout.CONFIG, layout.CASES):
        collector.plain("dataset", path, hash_file(root / path))
    noise = noise_file(config)
    check_header(root, config, noise)
    collector.plain("dataset", noise.path, hash_file(root / noise.path))
    collector.tensors("frozen weights", ("frozen", -1, -1, -1), [frozen_file(config)])
    records: list[dict[str, Any]] = []
    for case in cases:
        image = root / case.input_image
        size = image.stat().st_size if image.is_file() else 0
        collector.plain(f"case {case.case_id}", case.input_image, FileDigest(size, case.image_sha256))
        label, kinds = f"case {case.case_id}", [text_kv_file(config, case.case_id), case_file(config, case.case_id)]
        collector.tensors(label, ("case", case.case_id, -1, -1), kinds)
        for action in range(len(config.actions)):
            for chunk in range(config.sizes.chunks):
                key = RecordKey(case.case_id, action, chunk)
                found = collector.tensors(str(key), ("record", *_ids(key)), record_files(config, key))
                if found is not None:
                    records.append(make_record(config, case, key, found))
            video = layout.video_path(case.case_id, action)
            collector.journaled(video, ("video", case.case_id, action, -1))
    return records


def _ids(key: RecordKey) -> tuple[int, int, int]:
    return key.case_id, key.action_id, key.chunk_id


def inventory_lines(inventory: Mapping[str, FileDigest]) -> bytes:
    """``_inventory.jsonl``: path, size and hash of every data file, sorted by path."""
    return json_lines({"path": path, "size": digest.size, "sha256": digest.sha256} for path, digest in sorted(inventory.items()))


def parse_inventory(rows: list[dict[str, Any]], where: str) -> dict[str, FileDigest]:
    """Digests by path from inventory rows.

    Raises:
        MetadataError: a row is malformed or a path occurs twice.
        UnsafeInputError: a path leaves the dataset root.
    """
    found: dict[str, FileDigest] = {}
    for number, row in enumerate(rows, 1):
        path, size, sha256 = row.get("path"), row.get("size"), row.get("sha256")
        if not isinstance(path, str) or not isinstance(sha256, str) or type(size) is not int or path in found:
            raise MetadataError(f"{where} line {number}: expected a new path with size and sha256, found {row!r}")
        found[check_relative(path)] = FileDigest(size, sha256)
    return found


def read_inventory(root: Path) -> dict[str, FileDigest]:
    """Digests by path from ``_inventory.jsonl``."""
    return parse_inventory(read_json_lines(root / layout.INVENTORY), layout.INVENTORY)
