"""Validation of a whole dataset: files, manifests, cases and, in parallel, every trajectory."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ingest.errors import DamagedDataError, DatasetError, ReelrayError
from ingest.prefeature import layout
from ingest.prefeature.checkteacher import recheck_sample
from ingest.prefeature.checktrajectory import CheckTools, TrajectoryCheck, load_and_scan
from ingest.prefeature.config import Case, DatasetConfig, read_cases, read_config
from ingest.prefeature.durable import hash_file, write_bytes
from ingest.prefeature.findings import Report
from ingest.prefeature.jsonio import canonical_json
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.manifest import key_of, make_record, read_manifest, train_records
from ingest.prefeature.merge import listed, read_inventory
from ingest.prefeature.reader import read_tensors
from ingest.prefeature.scan import WholeReader
from ingest.prefeature.storefiles import case_file, compare_text_kv, load_frozen, load_noise, text_kv_file, valid_tokens
from ingest.prefeature.teacher import Teacher

Conditions = dict[tuple[int, int], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the check of one trajectory returns: small enough to travel between processes."""

    report: Report
    conditions: Conditions


WHOLE_CASE = -1
"""Stands for an action where a case's own files are meant."""

Mapper = Callable[[list[tuple[int, int]]], Iterable[Outcome]]
"""Runs ``check_part`` for many ``(case_id, action_id)`` and returns the outcomes in any order."""


def open_tools(root: Path, *, full: bool, report: Report | None = None) -> CheckTools:
    """Loads what trajectory checks share; what cannot be loaded becomes a finding of ``report``.

    Raises:
        MetadataError: ``dataset_config.json`` is unusable, so nothing can be checked.
    """
    config = read_config(root)
    report = report if report is not None else Report("full")
    frozen = noise = None
    inventory: Mapping[str, Any] = {}
    manifest: dict[RecordKey, Mapping[str, Any]] = {}
    for code, file, load in (
        ("header", layout.FROZEN, lambda: load_frozen(root, config)),
        ("noise", layout.NOISE, lambda: load_noise(root, config)),
        ("manifest", layout.INVENTORY, lambda: read_inventory(root)),
        ("manifest", layout.MANIFEST, lambda: {key_of(record): record for record in read_manifest(root)}),
    ):
        report.checked[code] += 1
        try:
            value: Any = load()
        except ReelrayError as error:
            report.add(code, str(error), file=file)
            continue
        if file == layout.FROZEN:
            frozen = value
        elif file == layout.NOISE:
            noise = value
        elif file == layout.INVENTORY:
            inventory = value
        else:
            manifest = value
    return CheckTools(root, config, frozen, noise, inventory, manifest, full)


@functools.lru_cache(maxsize=2)
def _shared_tools(root: Path, full: bool, stamp: tuple[int, ...]) -> CheckTools:
    del stamp  # only tells versions of the manifests apart
    return open_tools(root, full=full)


def check_part(root: Path, case_id: int, action_id: int, *, full: bool) -> Outcome:
    """Checks one trajectory, or a case's own files for ``WHOLE_CASE``; callable in any process that sees the dataset."""
    stamp = tuple(
        os.stat(root / name).st_mtime_ns if (root / name).exists() else 0
        for name in (layout.CONFIG, layout.MANIFEST, layout.INVENTORY, layout.FROZEN, layout.NOISE)
    )
    tools = _shared_tools(root, full, stamp)
    if action_id == WHOLE_CASE:
        report = Report("full" if full else "quick")
        check_case(tools, read_cases(root, tools.config)[case_id], report)
        return Outcome(report, {})
    image: Tensor | None = None
    if full:
        try:
            path = layout.case_path(case_id)
            image = read_tensors(root, path, ["image_condition_latent"])["image_condition_latent"]
        except DamagedDataError:
            image = None  # the case check reports it
    check = TrajectoryCheck(tools, case_id, action_id, image)
    check.run()
    return Outcome(check.report, check.conditions)


def check_files(root: Path, config: DatasetConfig, report: Report) -> None:
    """Exactly the expected files: missing and unexpected ones are findings."""
    expected = layout.data_files(config.sizes, len(config.actions))
    found: set[str] = set()
    for folder in layout.DATA_FOLDERS:
        for place, _, names in os.walk(root / folder):
            found.update((Path(place, name).relative_to(root)).as_posix() for name in names)
    for path in sorted(expected - found):
        report.add("files", "is missing", file=path)
    for path in sorted(found - expected):
        if layout.is_temporary(path):
            report.warnings.append(f"{path}: temporary file of an interrupted write; the next build removes it")
        else:
            report.add("files", "is not part of this dataset; move it away", file=path)
    report.checked["files"] += len(expected)


def check_inventory(tools: CheckTools, report: Report) -> None:
    """The inventory names exactly the dataset's files, sizes agree, and the files outside the data folders have their hashes."""
    if not tools.inventory:
        return
    plain = {layout.CONFIG, layout.CASES, layout.NOISE, layout.FROZEN, layout.MANIFEST, layout.TRAIN_MANIFEST}
    expected = layout.data_files(tools.config.sizes, len(tools.config.actions)) | plain
    wrong = sorted(expected ^ set(tools.inventory))
    if wrong:
        report.add("hash", f"the inventory and the layout disagree about {listed(wrong)}; merge again", file=layout.INVENTORY)
    for path, digest in tools.inventory.items():
        file = tools.root / path
        if not file.is_file():
            if path in plain:
                report.add("files", "is missing", file=path)
        elif path in plain and hash_file(file) != digest:
            report.add("hash", "content differs from the inventory; merge again", file=path)
        elif file.stat().st_size != digest.size:
            report.add("hash", f"size is {file.stat().st_size}, the inventory says {digest.size}", file=path)


def check_manifests(root: Path, config: DatasetConfig, cases: list[Case], report: Report) -> None:
    """Unique and complete keys, every field as the build would write it, and the training subset."""
    try:
        records = read_manifest(root)
        train = read_manifest(root, layout.TRAIN_MANIFEST)
    except ReelrayError as error:
        report.add("manifest", str(error), file=layout.MANIFEST)
        return
    report.checked["manifest"] += len(records)
    report.checked["train_manifest"] += len(train)
    seen: dict[RecordKey, int] = {}
    for number, record in enumerate(records, 1):
        key = key_of(record)
        where = f"line {number} ({key})"
        if key in seen:
            report.add("manifest", f"{where}: duplicate of line {seen[key]}", file=layout.MANIFEST, index=number)
            continue
        seen[key] = number
        if key.case_id >= len(cases) or key.action_id >= len(config.actions) or key.chunk_id >= config.sizes.chunks:
            report.add("manifest", f"{where}: no such record in this dataset", file=layout.MANIFEST, index=number)
            continue
        expected = make_record(
            config, cases[key.case_id], key, {"input65_sha256": record.get("input65_sha256"), "kv_check": record.get("kv_check")}
        )
        wrong = sorted(name for name in {*expected, *record} if record.get(name) != expected.get(name))
        if wrong:
            name, others = wrong[0], f"; also {wrong[1:]}" if wrong[1:] else ""
            message = f"{where}: {name} is {record.get(name)!r}, expected {expected.get(name)!r}{others}"
            report.add("manifest", message, file=layout.MANIFEST, index=number)
    missing = [str(key) for key in layout.record_keys(config.sizes, len(config.actions)) if key not in seen]
    if missing:
        report.add("manifest", f"{len(missing)} records are missing: {listed(missing)}", file=layout.MANIFEST)
    keys = [key_of(record) for record in records]
    if keys != sorted(keys):
        report.add("manifest", "records are not sorted by key", file=layout.MANIFEST)
    if train != train_records(records):
        wanted, got = {key_of(r) for r in train_records(records)}, [key_of(r) for r in train]
        problem = (
            f"{len(got)} records, expected {len(wanted)}; missing {listed([str(k) for k in sorted(wanted - set(got))])}, "
            f"unexpected {listed([str(k) for k in sorted(set(got) - wanted)])}"
        )
        report.add("train_manifest", problem, file=layout.TRAIN_MANIFEST)


def check_case(tools: CheckTools, case: Case, report: Report) -> None:
    """The image, both text files, their masks and their agreement."""
    root, config = tools.root, tools.config
    report.checked["image"] += 1
    try:
        with Image.open(root / case.input_image) as picture:
            size = picture.size
        if size != (config.sizes.width, config.sizes.height):
            report.add("image", f"{size[0]}x{size[1]}, expected {config.sizes.width}x{config.sizes.height}", file=case.input_image)
        if tools.full and hash_file(root / case.input_image).sha256 != case.image_sha256:
            report.add("image", "content changed since the cases stage", file=case.input_image)
    except (OSError, UnidentifiedImageError) as error:
        report.add("image", f"cannot be opened ({error})", file=case.input_image)
    reader = WholeReader()
    whole = True
    for kind in (text_kv_file(config, case.case_id), case_file(config, case.case_id)):
        loaded = load_and_scan(tools, kind, reader, report)
        if loaded is None:
            whole = False
            continue
        report.checked["mask"] += 1
        mask = loaded.tensors["text_valid_mask"]
        try:
            count = valid_tokens(mask, kind.path)
        except DamagedDataError as error:
            report.add_damage("mask", error, kind.path)
            continue
        for name, tensor in loaded.tensors.items():
            if not name.endswith("_txt"):
                continue
            _check_text(tensor, count, kind.path, name, report)
    if whole:
        report.checked["text"] += 1
        try:
            compare_text_kv(root, config, case.case_id)
        except DatasetError as error:
            report.add_damage("text", error, layout.case_path(case.case_id))


def _check_text(tensor: Tensor, count: int, path: str, name: str, report: Report) -> None:
    """Zero padding after ``count`` tokens and no zero token before; indices are those of the whole tensor ``[1, h, N, d]``."""
    _, _, tokens, width = tensor.shape
    bits = tensor[0].view(torch.int16)
    padding = bits[:, count:] != 0
    if bool(padding.any()):
        head, place = divmod(int(padding.flatten().to(torch.uint8).argmax()), (tokens - count) * width)
        report.add("mask", "padding is not zero", file=path, tensor=name, index=(head * tokens + count) * width + place)
    # a zero may carry a sign
    empty = ~(bits[:, :count] & 0x7FFF).any(dim=-1)
    if bool(empty.any()):
        head, token = divmod(int(empty.flatten().to(torch.uint8).argmax()), count)
        report.add("hole", "a valid token is all zero", file=path, tensor=name, index=(head * tokens + token) * width)


def _local(root: Path, full: bool) -> Mapper:
    return lambda pairs: (check_part(root, case, action, full=full) for case, action in pairs)


def validate(
    root: Path, *, full: bool = True, mapper: Mapper | None = None, teacher: tuple[Teacher, int] | None = None, mark: bool = True
) -> Report:
    """Validates a dataset.

    Args:
        root: dataset root.
        full: read every byte; False checks files, headers and manifests only.
        mapper: runs the checks of cases and trajectories; this process when None.
        teacher: the recorded teacher and how many records to recompute with it.
        mark: write ``logs/validation.json`` and ``.html`` and, after a full validation without findings, ``_SUCCESS.json``.
            An existing success mark is removed when something is wrong.

    Returns:
        The report; findings never raise.

    Raises:
        MetadataError: ``dataset_config.json`` or ``cases.jsonl`` is unusable.
    """
    started = time.perf_counter()
    report = Report("full" if full else "quick")
    config = read_config(root)
    cases = read_cases(root, config)
    tools = open_tools(root, full=full, report=report)
    check_files(root, config, report)
    check_inventory(tools, report)
    check_manifests(root, config, cases, report)
    parts = [(case.case_id, WHOLE_CASE) for case in cases]
    parts += layout.trajectories(config.sizes, len(config.actions))
    merged: Conditions = {}
    for outcome in (mapper or _local(root, full))(parts):
        report.extend(outcome.report)
        for place, (digest, file) in outcome.conditions.items():
            seen = merged.setdefault(place, (digest, file))
            if seen[0] != digest:
                step, label = place
                report.add("condition", f"label {label} differs from {seen[1]}", file=file, tensor=f"step_{step}_frame_condition")
    if teacher is not None:
        recheck_sample(root, config, *teacher, report)
    report.seconds = time.perf_counter() - started
    if mark:
        _write_marks(root, config, report, full)
    return report


def _write_marks(root: Path, config: DatasetConfig, report: Report, full: bool) -> None:
    write_bytes(root / layout.LOGS / "validation.json", report.dumps().encode())
    write_bytes(root / layout.LOGS / "validation.html", report.to_html().encode())
    if not report.ok:
        (root / layout.SUCCESS).unlink(missing_ok=True)
    elif full:
        write_bytes(root / layout.SUCCESS, success_mark(root, config))


def success_mark(root: Path, config: DatasetConfig) -> bytes:
    """Content of ``_SUCCESS.json``: it speaks for exactly one inventory."""
    inventory = read_inventory(root)
    return (
        canonical_json(
            {
                "schema": config.raw["schema"],
                "dataset": config.raw["dataset"],
                "build_fingerprint": config.fingerprint,
                "inventory_sha256": hashlib.sha256((root / layout.INVENTORY).read_bytes()).hexdigest(),
                "files": len(inventory),
                "bytes": sum(digest.size for digest in inventory.values()),
                "counts": config.raw["counts"],
            },
            indent=2,
        )
        + "\n"
    ).encode()
