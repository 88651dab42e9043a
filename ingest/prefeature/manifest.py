"""Manifest records: one JSON object per chunk, sorted by key, byte for byte the same however the build went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingest.errors import MetadataError
from ingest.prefeature import layout
from ingest.prefeature.config import Case, DatasetConfig
from ingest.prefeature.jsonio import read_json_lines
from ingest.prefeature.layout import RecordKey
from ingest.storage.paths import check_relative


def key_of(record: Mapping[str, Any]) -> RecordKey:
    """The primary key of a record.

    Raises:
        MetadataError: an id is missing or not a whole number.
    """
    ids = [record.get(name) for name in ("case_id", "action_id", "chunk_id")]
    if not all(type(value) is int and value >= 0 for value in ids):
        raise MetadataError(f"manifest record without whole case_id, action_id and chunk_id: {ids}")
    return RecordKey(*ids)  # type: ignore[arg-type]


def make_record(config: DatasetConfig, case: Case, key: RecordKey, checks: Mapping[str, Any]) -> dict[str, Any]:
    """One manifest record.

    Args:
        config: the configuration.
        case: the case of the record.
        key: its primary key.
        checks: ``input65_sha256`` and ``kv_check`` as journaled.
    """
    sizes, action = config.sizes, config.actions[key.action_id]
    selected = list(config.history(key.action_id)[key.chunk_id])
    record: dict[str, Any] = {
        "schema": config.raw["schema"],
        "dataset": config.raw["dataset"],
        "case_id": key.case_id,
        "action_id": key.action_id,
        "chunk_id": key.chunk_id,
        "action_name": action.name,
        "pose": action.pose,
        "caption": case.caption,
        "source_image": case.source_image,
        "input_image": case.input_image,
        "seed": config.seed,
        "height": sizes.height,
        "width": sizes.width,
        "num_frames": sizes.video_frames,
        "latent_frames": sizes.latent_frames,
        "chunk_latent_frames": sizes.chunk_frames,
        "denoise_steps": sizes.steps,
        "teacher_checkpoint": config.raw["teacher_checkpoint"],
        "teacher_checkpoint_sha256": config.raw["teacher_checkpoint_sha256"],
        "build_fingerprint": config.fingerprint,
        "context_blocks": list(sizes.blocks),
        "context_frames": len(selected),
        "selected_frame_indices": selected,
        "case_tensor_file": layout.case_path(key.case_id),
        "text_kv_all54_file": layout.text_kv_path(key.case_id),
        "step_tensor_file": layout.step_path(key),
        "context_prefeature_files": {f"{block:02d}": layout.context_path(key, block) for block in sizes.blocks},
        "video_file": layout.video_path(key.case_id, key.action_id),
        "input65_sha256": checks["input65_sha256"],
        "kv_check": checks["kv_check"],
    }
    if key.chunk_id > 0:
        record["previous_chunk_id"] = key.chunk_id - 1
        record["previous_step_tensor_file"] = layout.step_path(RecordKey(key.case_id, key.action_id, key.chunk_id - 1))
    return record


def train_records(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records that training uses: every chunk that has a previous one."""
    return [record for record in records if record["chunk_id"] != 0]


def referenced_files(record: Mapping[str, Any]) -> list[str]:
    """Every path that a record names.

    Raises:
        MetadataError: a path field is missing.
        UnsafeInputError: a path leaves the dataset root.
    """
    try:
        found = [record[name] for name in ("case_tensor_file", "text_kv_all54_file", "step_tensor_file", "video_file", "input_image")]
        found += list(record["context_prefeature_files"].values())
    except (KeyError, AttributeError, TypeError) as error:
        raise MetadataError(
            f"manifest record {record.get('case_id')}/{record.get('action_id')}/{record.get('chunk_id')}: {error!r}"
        ) from error
    if "previous_step_tensor_file" in record:
        found.append(record["previous_step_tensor_file"])
    return [check_relative(str(path)) for path in found]


def read_manifest(root: Path, name: str = layout.MANIFEST) -> list[dict[str, Any]]:
    """The records of a manifest.

    Raises:
        MetadataError: unreadable, or a record without a key.
    """
    records = read_json_lines(root / name)
    for number, record in enumerate(records, 1):
        try:
            key_of(record)
        except MetadataError as error:
            raise MetadataError(f"{name} line {number}: {error}") from error
    return records
