"""Teacher records of the real sizes without a teacher: random where only bytes matter, consistent where validation looks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ingest.prefeature import layout
from ingest.prefeature.cases import prepare_cases
from ingest.prefeature.config import DatasetConfig, read_cases, read_config
from ingest.prefeature.durable import FileDigest, hash_file, write_bytes, write_tensors
from ingest.prefeature.jsonio import json_lines
from ingest.prefeature.kvmath import FrozenTeacher, input65
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.manifest import make_record, train_records
from ingest.prefeature.merge import inventory_lines
from ingest.prefeature.rollout import NO_CONTEXT, ChunkResult, Trajectory, check_kv, context_tensors, history_sha256
from ingest.prefeature.schedule import euler_step, tensor_sha256, timesteps
from ingest.prefeature.schema import frozen_schema
from ingest.prefeature.sizes import Sizes
from ingest.prefeature.storefiles import FileKind, case_file, frozen_file, load_noise, record_fields, text_kv_file, write_record
from ingest.prefeature.teacher import EXACT_FLAGS, ContextState, TeacherSpec
from ingest.prefeature.videos import write_video

VALID_TOKENS = 745
"""Text tokens of the one case; the real ones have 739 to 751."""


def dense(shape: tuple[int, ...], seed: int) -> Tensor:
    """bf16 values of either sign between 1 and 2: dense like features, and faster to make than a normal distribution."""
    bits = np.random.default_rng(seed).integers(0, 1 << 16, int(np.prod(shape)), dtype=np.uint16)
    return torch.from_numpy((bits & 0x807F) | 0x3F80).view(torch.bfloat16).reshape(shape)


class RealSizeWriter:
    """Writes one case and one trajectory of the real dataset's sizes.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "dataset"
        self.sizes = Sizes(cases=1)
        images = folder / "images"
        images.mkdir()
        Image.effect_noise((900, 500), 60).convert("RGB").save(images / "a scene.png")
        self.root.mkdir()
        spec = TeacherSpec("reference", self.sizes, "random values", "0" * 64, dict(EXACT_FLAGS), False, "cpu")
        prepare_cases(images, self.root, self.sizes, spec)
        self.config: DatasetConfig = read_config(self.root)
        self.noise = load_noise(self.root, self.config)
        self.files: dict[str, FileDigest] = {}
        self.keys: list[RecordKey] = []
        self._image = dense((1, self.sizes.latent_channels, 1, *self.sizes.grid), 1)
        self._frozen = self._write_frozen()
        self._hidden = dense((1, self.sizes.chunk_frames * self.sizes.frame_tokens, self.sizes.hidden), 2)
        self._features = dense((1, self.sizes.latent_frames * self.sizes.frame_tokens, self.sizes.hidden), 3)
        self._velocities: dict[tuple[int, ...], Tensor] = {}
        self._write_case()

    def _store(self, kind: FileKind, tensors: Mapping[str, Tensor]) -> None:
        metadata = self.config.metadata(kind.kind, kind.key)
        self.files[kind.path] = write_tensors(self.root / kind.path, kind.specs, tensors, metadata)

    def _write_frozen(self) -> FrozenTeacher:
        specs = frozen_schema(self.sizes)
        scale = self.sizes.hidden**-0.5
        tensors = {spec.name: dense(spec.shape, number) * scale for number, spec in enumerate(specs)}
        self._store(frozen_file(self.config), tensors)
        return FrozenTeacher(self.sizes, tensors)

    def _write_case(self) -> None:
        kind = text_kv_file(self.config, 0)
        mask = torch.zeros(1, self.sizes.text_pad_tokens, dtype=torch.bool)
        mask[:, :VALID_TOKENS] = True
        tensors: dict[str, Tensor] = {"text_valid_mask": mask, "image_condition_latent": self._image}
        for number, spec in enumerate(kind.specs):
            if spec.name.endswith("_txt"):
                tensors[spec.name] = dense(spec.shape, number)
                tensors[spec.name][:, :, VALID_TOKENS:] = 0
        for file in (kind, case_file(self.config, 0)):
            self._store(file, {spec.name: tensors[spec.name] for spec in file.specs})

    def _velocity(self, labels: Tensor, step: int, condition: Tensor) -> Tensor:
        key = (step, *labels.flatten().tolist())
        if key not in self._velocities:
            self._velocities[key] = self._frozen.final_layer(self._hidden, condition)
        return self._velocities[key]

    def chunk(self, latents: Tensor, chunk: int) -> ChunkResult:
        """What a teacher would have given for one chunk of trajectory 0."""
        sizes, trajectory = self.sizes, Trajectory.of(self.config, 0)
        frames = trajectory.chunk_frames(chunk)
        views, history = trajectory.views(frames), trajectory.history[chunk]
        sample = latents[:, :, frames.start : frames.stop].clone()
        step_tensors: dict[str, Tensor] = {
            "action_labels": views.labels,
            "target_viewmats": views.viewmats,
            "target_Ks": views.intrinsics,
            "rope_temporal_size": torch.tensor([len(history) + sizes.chunk_frames]),
            "start_rope_start_idx": torch.tensor([len(history)]),
        }
        hashes: list[str] = []
        for step, timestep in enumerate(timesteps(sizes.steps)):
            rows = [dense((sizes.hidden,), 1000 * step + label) for label in views.labels.flatten().tolist()]
            condition = torch.stack(rows)[None]
            velocity = self._velocity(views.labels, step, condition)
            step_tensors |= {
                f"step_{step}_timestep": torch.tensor([timestep], dtype=torch.float32),
                f"step_{step}_noisy_sample": sample,
                f"step_{step}_frame_condition": condition,
                f"step_{step}_final_hidden": self._hidden,
                f"step_{step}_velocity": velocity,
            }
            hashes.append(tensor_sha256(input65(sample, self._image, frames.start)))
            sample = euler_step(sample, velocity, step, sizes.steps)
        window = torch.cat([self._frame(frame) for frame in history], dim=1) if history else torch.empty(1, 0, sizes.hidden)
        context = ContextState(len(history), (), dict.fromkeys(sizes.blocks, window))
        checks = check_kv(self._frozen, trajectory, NO_CONTEXT, chunk)
        tensors = context_tensors(trajectory, context, chunk)
        return ChunkResult(step_tensors, tensors, tuple(hashes), checks, history_sha256(latents, frames.start), sample)

    def _frame(self, frame: int) -> Tensor:
        tokens = self.sizes.frame_tokens
        return self._features[:, frame * tokens : (frame + 1) * tokens]

    def chunks(self) -> list[tuple[RecordKey, ChunkResult]]:
        """Every chunk of trajectory 0, in memory; their features share one tensor."""
        latents = self.noise.clone()
        made: list[tuple[RecordKey, ChunkResult]] = []
        for chunk in range(self.sizes.chunks):
            result = self.chunk(latents, chunk)
            frames = range(chunk * self.sizes.chunk_frames, (chunk + 1) * self.sizes.chunk_frames)
            latents[:, :, frames.start : frames.stop] = result.final_latents
            made.append((RecordKey(0, 0, chunk), result))
        return made

    def write(self, key: RecordKey, result: ChunkResult) -> int:
        """Writes one record as a build does and returns its bytes."""
        written = write_record(self.root, self.config, key, result)
        self.files |= written
        self.keys.append(key)
        return sum(digest.size for digest in written.values())

    def finish(self) -> None:
        """Writes the video and manifests of exactly the records that are there."""
        sizes, case = self.sizes, read_cases(self.root, self.config)[0]
        picture = np.zeros((sizes.height, sizes.width, 3), np.uint8)
        name = layout.video_path(0, 0)
        write_video(self.root / name, (picture for _ in range(sizes.video_frames)), sizes)
        for path in (name, case.input_image, layout.NOISE, layout.CONFIG, layout.CASES):
            self.files[path] = hash_file(self.root / path)
        fields = {key: record_fields(self.root, self.config, key) for key in self.keys}
        records = [make_record(self.config, case, key, checks) for key, checks in fields.items()]
        self.files[layout.MANIFEST] = write_bytes(self.root / layout.MANIFEST, json_lines(records))
        self.files[layout.TRAIN_MANIFEST] = write_bytes(self.root / layout.TRAIN_MANIFEST, json_lines(train_records(records)))
        write_bytes(self.root / layout.INVENTORY, inventory_lines(self.files))

    def drop_cache(self) -> None:
        """Asks the kernel to forget the pages of the dataset, so that the next reads come from the disk."""
        for path in self.root.rglob("*.safetensors"):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
