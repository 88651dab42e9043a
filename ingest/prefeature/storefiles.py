"""Writing and re-reading the files of cases and records, and deciding what is complete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingest.errors import DamagedDataError, DatasetError
from ingest.prefeature import layout
from ingest.prefeature.config import DatasetConfig
from ingest.prefeature.durable import FileDigest, hash_file, write_tensors
from ingest.prefeature.jsonio import canonical_json
from ingest.prefeature.kvmath import FrozenTeacher
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.reader import read_tensors
from ingest.prefeature.rollout import CaseTensors, ChunkResult
from ingest.prefeature.schedule import tensor_sha256
from ingest.prefeature.schema import case_schema, context_schema, frozen_schema, noise_schema, step_schema, text_kv_schema
from ingest.prefeature.sizes import Sizes
from ingest.prefeature.teacher import Teacher, TextKv
from ingest.prefeature.tensorfile import Header, TensorSpec, describe_difference, read_header, require_metadata


@dataclass(frozen=True, slots=True)
class FileKind:
    """What one tensor file must hold.

    Attributes:
        path: relative path.
        kind: value of ``kind`` in ``__metadata__``.
        key: value of ``key`` in ``__metadata__``.
        specs: its tensors.
    """

    path: str
    kind: str
    key: str
    specs: list[TensorSpec]


def step_file(config: DatasetConfig, key: RecordKey) -> FileKind:
    """The step file of a record."""
    return FileKind(layout.step_path(key), "step", str(key), step_schema(config.sizes))


def context_file(config: DatasetConfig, key: RecordKey, block: int) -> FileKind:
    """The context file of a record at one block."""
    frames = len(config.history(key.action_id)[key.chunk_id])
    return FileKind(layout.context_path(key, block), "context", f"{key}/block_{block:02d}", context_schema(config.sizes, frames))


def case_file(config: DatasetConfig, case: int) -> FileKind:
    """The case tensor file."""
    return FileKind(layout.case_path(case), "case", f"case_{case:04d}", case_schema(config.sizes))


def text_kv_file(config: DatasetConfig, case: int) -> FileKind:
    """The all-block text K/V file."""
    return FileKind(layout.text_kv_path(case), "text_kv", f"case_{case:04d}", text_kv_schema(config.sizes))


def frozen_file(config: DatasetConfig) -> FileKind:
    """The frozen teacher weights."""
    return FileKind(layout.FROZEN, "frozen", "frozen", frozen_schema(config.sizes))


def noise_file(config: DatasetConfig) -> FileKind:
    """The recorded noise."""
    return FileKind(layout.NOISE, "noise", "noise", noise_schema(config.sizes))


def record_files(config: DatasetConfig, key: RecordKey) -> list[FileKind]:
    """Every file of a record in commit order."""
    return [*(context_file(config, key, block) for block in config.sizes.blocks), step_file(config, key)]


def check_header(root: Path, config: DatasetConfig, kind: FileKind) -> Header:
    """The cheap check: size, names, shapes, dtypes, key and fingerprint; no payload is read.

    Raises:
        DamagedDataError: anything differs; the message says what.
    """
    header = check_structure(root, kind)
    require_metadata(header, config.metadata(kind.kind, kind.key), kind.path)
    return header


def check_structure(root: Path, kind: FileKind) -> Header:
    """Size, names, shapes and dtypes of a file.

    Raises:
        DamagedDataError: anything differs; the message says what.
    """
    header = read_header(root, kind.path)
    difference = describe_difference(header, kind.specs)
    if difference is not None:
        tensor, text = difference
        raise DamagedDataError(f"{kind.path}: {text}", file=kind.path, tensor=tensor)
    return header


def problem_with(root: Path, config: DatasetConfig, kinds: list[FileKind], digests: Mapping[str, FileDigest] | None = None) -> str | None:
    """The first reason why some files are not complete, or None.

    Args:
        root: dataset root.
        config: the configuration.
        kinds: the files.
        digests: when given, contents must have these hashes as well.
    """
    for kind in kinds:
        try:
            check_header(root, config, kind)
        except DamagedDataError as error:
            return str(error)
        if digests is not None:
            wanted, found = digests.get(kind.path), hash_file(root / kind.path)
            if wanted != found:
                return f"{kind.path}: content is {found}, the journal recorded {wanted}"
    return None


def write_record(root: Path, config: DatasetConfig, key: RecordKey, result: ChunkResult) -> dict[str, FileDigest]:
    """Writes the context files, then the step file; what the journal needs is also kept in their metadata."""
    written: dict[str, FileDigest] = {}
    for block in config.sizes.blocks:
        kind = context_file(config, key, block)
        metadata = config.metadata(kind.kind, kind.key) | {"kv_check": canonical_json(result.kv_check[block])}
        written[kind.path] = write_tensors(root / kind.path, kind.specs, result.context[block], metadata)
    kind = step_file(config, key)
    metadata = config.metadata(kind.kind, kind.key) | {
        "input65_sha256": canonical_json(list(result.input65_sha256)),
        "history_sha256": result.history_sha256,
    }
    written[kind.path] = write_tensors(root / kind.path, kind.specs, result.step, metadata)
    return written


def record_fields(root: Path, config: DatasetConfig, key: RecordKey) -> dict[str, Any]:
    """The journal fields of a complete record, taken from its files' headers.

    Raises:
        DamagedDataError: a header is damaged or lacks the recorded checks.
    """
    blocks: dict[str, Any] = {}
    for block in config.sizes.blocks:
        header = check_header(root, config, context_file(config, key, block))
        blocks[f"{block:02d}"] = _recorded(header, "kv_check", layout.context_path(key, block), dict)
    header = check_header(root, config, step_file(config, key))
    selected = list(config.history(key.action_id)[key.chunk_id])
    return {
        "case_id": key.case_id,
        "action_id": key.action_id,
        "chunk_id": key.chunk_id,
        "context_frames": len(selected),
        "selected_frame_indices": selected,
        "input65_sha256": _recorded(header, "input65_sha256", layout.step_path(key), list),
        "kv_check": blocks,
    }


def _recorded(header: Header, name: str, path: str, kind: type) -> Any:
    try:
        value = json.loads(header.metadata[name])
    except (KeyError, ValueError) as error:
        raise DamagedDataError(f"{path}: __metadata__ {name} is missing or not JSON", file=path) from error
    if not isinstance(value, kind):
        raise DamagedDataError(f"{path}: __metadata__ {name} is not a {kind.__name__}", file=path)
    return value


def load_checked(root: Path, config: DatasetConfig, kind: FileKind, names: list[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a file after the cheap check.

    Raises:
        DamagedDataError: the file is not what it should be.
    """
    check_header(root, config, kind)
    return read_tensors(root, kind.path, names)


def write_frozen(root: Path, config: DatasetConfig, teacher: Teacher) -> dict[str, FileDigest]:
    """Writes ``teacher_frozen.safetensors`` unless an equal one is there."""
    kind = frozen_file(config)
    if problem_with(root, config, [kind]) is None:
        return {kind.path: hash_file(root / kind.path)}
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in teacher.frozen_parts().items()}
    return {kind.path: write_tensors(root / kind.path, kind.specs, tensors, config.metadata(kind.kind, kind.key))}


def load_frozen(root: Path, config: DatasetConfig) -> FrozenTeacher:
    """The frozen weights of a dataset."""
    return FrozenTeacher(config.sizes, load_checked(root, config, frozen_file(config)))


def load_noise(root: Path, config: DatasetConfig) -> Tensor:
    """The recorded noise bf16 ``[1, C, T, H, W]``; used on every device, so no generator has to be reproduced.

    Raises:
        DamagedDataError: missing or not the noise that the configuration records.
    """
    noise = load_checked(root, config, noise_file(config))["noise"]
    found = tensor_sha256(noise)
    if found != config.raw["noise_sha256"]:
        raise DamagedDataError(
            f"{layout.NOISE}: hash is {found}, {layout.CONFIG} records {config.raw['noise_sha256']}; restore the file", file=layout.NOISE
        )
    return noise


def pad_text(tensor: Tensor, sizes: Sizes) -> Tensor:
    """``[1, h, n, d]`` zero-padded to ``text_pad_tokens``.

    Raises:
        DatasetError: more valid tokens than the padded length.
    """
    valid = tensor.shape[2]
    if valid > sizes.text_pad_tokens:
        raise DatasetError(f"{valid} text tokens do not fit text_pad_tokens={sizes.text_pad_tokens}; shorten the caption or raise it")
    padded = torch.zeros(1, sizes.heads, sizes.text_pad_tokens, sizes.head_dim, dtype=torch.bfloat16)
    padded[:, :, :valid] = tensor.cpu()
    return padded


def valid_tokens(mask: Tensor, path: str) -> int:
    """Length of the True prefix of a text mask ``[1, n]``.

    Raises:
        DamagedDataError: the mask is empty or not a prefix.
    """
    flags = mask.reshape(-1)
    count = int(flags.sum())
    if count == 0 or not bool(flags[:count].all()):
        at = int(flags.to(torch.uint8).argmin())
        message = f"{path}: text_valid_mask is not a non-empty prefix of True"
        raise DamagedDataError(message, file=path, tensor="text_valid_mask", element=at)
    return count


def strip_text(tensors: Mapping[str, Tensor], blocks: range | tuple[int, ...], path: str) -> TextKv:
    """Text K/V without padding."""
    count = valid_tokens(tensors["text_valid_mask"], path)
    keys = tuple(tensors[f"block_{block:02d}_k_txt"][:, :, :count] for block in blocks)
    return TextKv(keys, tuple(tensors[f"block_{block:02d}_v_txt"][:, :, :count] for block in blocks))


def load_case(root: Path, config: DatasetConfig, case: int) -> CaseTensors:
    """Image latent and all-block text K/V of a case, for the rollout."""
    kind = text_kv_file(config, case)
    text = strip_text(load_checked(root, config, kind), range(config.sizes.depth), kind.path)
    return CaseTensors(load_checked(root, config, case_file(config, case), ["image_condition_latent"])["image_condition_latent"], text)


def compare_text_kv(root: Path, config: DatasetConfig, case: int) -> None:
    """Compares the stored blocks of the case file with the all-block file, element by element.

    Raises:
        DamagedDataError: they differ; both came from one prefill, so one of the files is wrong.
    """
    whole, part = text_kv_file(config, case), case_file(config, case)
    names = [spec.name for spec in part.specs if spec.name != "image_condition_latent"]
    left, right = load_checked(root, config, part, names), load_checked(root, config, whole, names)
    for name in names:
        if not torch.equal(left[name], right[name]):
            at = int((left[name] != right[name]).flatten().nonzero()[0])
            message = f"{part.path}: {name} differs from {whole.path} at element {at}; rebuild the case"
            raise DamagedDataError(message, file=part.path, tensor=name, element=at)
