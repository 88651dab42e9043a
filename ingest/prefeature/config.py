"""``dataset_config.json`` and ``cases.jsonl``: what a build is, and the fingerprint that every file of it carries."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingest.errors import MetadataError, SettingsError
from ingest.prefeature import layout
from ingest.prefeature.actions import Action, Cameras, actions_for, cameras_of
from ingest.prefeature.history import history_table
from ingest.prefeature.jsonio import canonical_json, read_json, read_json_lines
from ingest.prefeature.schedule import FLOW_SHIFT, sigmas, timesteps
from ingest.prefeature.sizes import CONTEXT_PREFILL, CONTEXT_TIMESTEP, DATASET_NAME, SCHEMA, Sizes
from ingest.prefeature.teacher import EXACT_FLAGS, TeacherSpec

CODE_SCHEMA_VERSION = 2
"""Raised whenever the code would write other bytes for the same configuration."""

JPEG = {"quality": 95, "subsampling": "4:4:4", "resize": "lanczos_cover_center_crop", "exif_transpose": True}
_NOT_IDENTITY = ("fingerprint", "offloading", "teacher_checkpoint")
"""Recorded, but not part of the fingerprint: they do not change any byte of the data."""


@dataclass(frozen=True, slots=True)
class Case:
    """One image-text pair as recorded in ``cases.jsonl``."""

    case_id: int
    source_image: str
    source_index: int
    source_sha256: str
    caption: str
    input_image: str
    image_sha256: str
    width: int
    height: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """A parsed and checked ``dataset_config.json``.

    Attributes:
        sizes: all dimensions.
        actions: the trajectories.
        seed: of noise and overlap points.
        raw: the whole JSON object.
        fingerprint: ``sha256:...`` over everything that decides the bytes of the data.
    """

    sizes: Sizes
    actions: tuple[Action, ...]
    seed: int
    raw: Mapping[str, Any]
    fingerprint: str

    def cameras(self, action: int) -> Cameras:
        """Cameras of one trajectory."""
        return cameras_of(self.actions[action].pose, self.sizes.latent_frames)

    def history(self, action: int) -> tuple[tuple[int, ...], ...]:
        """Selected history frames of every chunk of one trajectory."""
        sizes = self.sizes
        return history_table(
            self.cameras(action).viewmats,
            memory_frames=sizes.memory_frames,
            recent_frames=sizes.recent_frames,
            chunk_frames=sizes.chunk_frames,
            seed=self.seed,
        )

    def metadata(self, kind: str, key: str) -> dict[str, str]:
        """``__metadata__`` that every tensor file carries."""
        return {"schema": SCHEMA, "kind": kind, "key": key, "build_fingerprint": self.fingerprint}

    def require_teacher(self, spec: TeacherSpec) -> None:
        """Refuses a teacher other than the recorded one.

        Raises:
            MetadataError: the message names every field that differs.
        """
        found = {"teacher": spec.name, "teacher_checkpoint_sha256": spec.checkpoint_sha256, "sizes": spec.sizes.to_json()}
        wrong = [f"{name}: recorded {self.raw[name]!r}, found {value!r}" for name, value in found.items() if self.raw[name] != value]
        if wrong:
            raise MetadataError("this teacher did not make this dataset and may not continue it; " + "; ".join(wrong))
        spec.require_exact()


def fingerprint_of(raw: Mapping[str, Any]) -> str:
    """Fingerprint of a configuration object."""
    identity = {name: value for name, value in raw.items() if name not in _NOT_IDENTITY}
    return "sha256:" + hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def cases_sha256(cases: list[Case]) -> str:
    """Hash of the canonical ``cases.jsonl`` content."""
    return hashlib.sha256("".join(canonical_json(case.to_json()) + "\n" for case in cases).encode()).hexdigest()


def check_seed(seed: int) -> int:
    """The seed, if noise and overlap points can be drawn from it.

    Raises:
        SettingsError: it is negative, or has more than 63 bits.
    """
    if not 0 <= seed < 1 << 63:
        raise SettingsError(f"seed must be in 0..{(1 << 63) - 1}, found {seed}")
    return seed


def make_config(
    sizes: Sizes,
    spec: TeacherSpec,
    cases: list[Case],
    *,
    seed: int,
    noise_device: str,
    noise_sha256: str,
    listing_sha256: str,
    listing_count: int,
    sample_seed: int,
    dataset: str = DATASET_NAME,
) -> dict[str, Any]:
    """The JSON object of ``dataset_config.json``, fingerprint included."""
    actions = actions_for(sizes.latent_frames)
    records = sizes.cases * len(actions) * sizes.chunks
    raw: dict[str, Any] = {
        "schema": SCHEMA,
        "dataset": dataset,
        "code_schema_version": CODE_SCHEMA_VERSION,
        "counts": {
            "cases": sizes.cases,
            "trajectories": sizes.cases * len(actions),
            "records": records,
            "train_records": records - sizes.cases * len(actions),
        },
        "sizes": sizes.to_json(),
        "seed": seed,
        "actions": [action.to_json() for action in actions],
        "context_blocks": list(sizes.blocks),
        "flow_shift": FLOW_SHIFT,
        "sigmas": list(sigmas(sizes.steps)),
        "timesteps": list(timesteps(sizes.steps)),
        "context_timestep": CONTEXT_TIMESTEP,
        "context_prefill": CONTEXT_PREFILL,
        "precision": "bf16",
        "exactness_flags": dict(EXACT_FLAGS),
        "offloading": spec.offloading,
        "teacher": spec.name,
        "teacher_checkpoint": spec.checkpoint,
        "teacher_checkpoint_sha256": spec.checkpoint_sha256,
        "text_pad_tokens": sizes.text_pad_tokens,
        "listing_sha256": listing_sha256,
        "listing_count": listing_count,
        "sample_seed": sample_seed,
        "cases_sha256": cases_sha256(cases),
        "noise_device": noise_device,
        "noise_sha256": noise_sha256,
        "fps": sizes.fps,
        "jpeg": JPEG,
    }
    raw["fingerprint"] = fingerprint_of(raw)
    return raw


def describe_changes(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Every field that differs, as text."""
    names = sorted(set(recorded) | set(wanted))
    missing = object()
    found: list[str] = []
    for name in names:
        old, new = recorded.get(name, missing), wanted.get(name, missing)
        if old != new and name not in _NOT_IDENTITY:
            found.append(f"{name}: recorded {'nothing' if old is missing else repr(old)}, now {'nothing' if new is missing else repr(new)}")
    return found


def parse_config(raw: Mapping[str, Any]) -> DatasetConfig:
    """Checks a configuration object.

    Raises:
        MetadataError: a field is missing, of another schema, or the fingerprint does not match the content.
    """
    try:
        if raw["schema"] != SCHEMA:
            raise MetadataError(f"{layout.CONFIG}: schema is {raw['schema']!r}, this reader knows {SCHEMA!r}")
        sizes = Sizes.from_json(raw["sizes"])
        actions = tuple(Action(int(item["action_id"]), str(item["name"]), str(item["pose"])) for item in raw["actions"])
        seed = check_seed(int(raw["seed"]))
        recorded = str(raw["fingerprint"])
        for name in ("teacher", "teacher_checkpoint", "teacher_checkpoint_sha256", "noise_sha256", "cases_sha256", "dataset"):
            str(raw[name])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, MetadataError):
            raise
        raise MetadataError(f"{layout.CONFIG}: field missing or malformed ({error!r})") from error
    if [action.action_id for action in actions] != list(range(len(actions))) or not actions:
        raise MetadataError(f"{layout.CONFIG}: action ids are not 0..{len(actions) - 1}")
    computed = fingerprint_of(raw)
    if recorded != computed:
        raise MetadataError(
            f"{layout.CONFIG}: fingerprint is {recorded}, its fields give {computed}; the file was edited: "
            "restore it, or start a new dataset in another folder"
        )
    return DatasetConfig(sizes, actions, seed, dict(raw), recorded)


def read_config(root: Path) -> DatasetConfig:
    """The configuration of a dataset folder.

    Raises:
        MetadataError: missing or inconsistent.
    """
    return parse_config(read_json(root / layout.CONFIG))


def read_cases(root: Path, config: DatasetConfig) -> list[Case]:
    """The cases, which are the authority on ids.

    Raises:
        MetadataError: unreadable, ids out of order, or not those that the configuration was made for.
    """
    rows = read_json_lines(root / layout.CASES)
    try:
        cases = [Case(**row) for row in rows]
    except TypeError as error:
        raise MetadataError(f"{layout.CASES}: {error}") from error
    if [case.case_id for case in cases] != list(range(config.sizes.cases)):
        raise MetadataError(f"{layout.CASES}: case ids are not 0..{config.sizes.cases - 1} in order")
    found = cases_sha256(cases)
    if found != config.raw["cases_sha256"]:
        raise MetadataError(
            f"{layout.CASES}: content hash {found} differs from cases_sha256 {config.raw['cases_sha256']} in {layout.CONFIG}; "
            "cases were changed or reordered after the build began: restore the file, or start a new dataset"
        )
    return cases
