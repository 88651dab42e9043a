"""Everything that is checked about one trajectory: the unit of parallel validation."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (torch leaves some of its own signatures untyped)
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ingest.errors import DamagedDataError
from ingest.prefeature import layout
from ingest.prefeature.config import DatasetConfig
from ingest.prefeature.durable import FileDigest, hash_file
from ingest.prefeature.findings import Report
from ingest.prefeature.kvmath import FrozenTeacher, compare, input65, kv_accepted
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.rollout import Trajectory, final_latents
from ingest.prefeature.scan import DENSE, Loaded, WholeReader, flaws
from ingest.prefeature.schedule import euler_step, tensor_bytes, tensor_sha256, timesteps
from ingest.prefeature.schema import CONTEXT_SHARED
from ingest.prefeature.storefiles import FileKind, check_structure, context_file, record_files, step_file
from ingest.prefeature.tensorfile import require_metadata
from ingest.prefeature.videos import check_video


@dataclass(frozen=True, slots=True)
class CheckTools:
    """What every check of a dataset shares.

    Attributes:
        root, config: the dataset.
        frozen: final layer and K/V weights.
        noise: the recorded noise.
        inventory: digests by path; empty when there is none.
        manifest: manifest records by key; empty when there is none.
        full: read and check contents, not only headers.
    """

    root: Path
    config: DatasetConfig
    frozen: FrozenTeacher | None
    noise: Tensor | None
    inventory: Mapping[str, FileDigest]
    manifest: Mapping[RecordKey, Mapping[str, Any]]
    full: bool


def first_difference(found: Tensor, expected: Tensor) -> int | None:
    """Flat index of the first element that differs in its bits, or None; 0 for different shapes."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return 0
    a, b = np.frombuffer(tensor_bytes(found), np.uint8), np.frombuffer(tensor_bytes(expected), np.uint8)
    if np.array_equal(a, b):
        return None
    return int((a != b).argmax()) // found.element_size()


def load_and_scan(tools: CheckTools, kind: FileKind, reader: WholeReader, report: Report) -> Loaded | None:
    """Header, hash, finite and hole checks of one file; None when its tensors are not those of the schema.

    A file that calls itself something else is a finding, and its contents are looked at all the same.
    """
    path = kind.path
    report.checked["header"] += 1
    try:
        header = check_structure(tools.root, kind)
        try:
            require_metadata(header, tools.config.metadata(kind.kind, kind.key), path)
        except DamagedDataError as error:
            report.add_damage("header", error, path)
        if not tools.full:
            return None
        loaded = reader.load(tools.root, path)
    except DamagedDataError as error:
        report.add_damage("header", error, path)
        return None
    report.bytes_read += loaded.digest.size
    if tools.inventory:
        report.checked["hash"] += 1
        wanted = tools.inventory.get(path)
        if wanted != loaded.digest:
            report.add("hash", f"content is {loaded.digest}, the inventory says {wanted}", file=path)
    report.checked["finite"] += len(loaded.tensors)
    report.checked["hole"] += sum(name.endswith(DENSE) for name in loaded.tensors)
    for flaw in flaws(loaded):
        report.add(flaw.code, flaw.message, file=path, tensor=flaw.tensor, index=flaw.index)
    return loaded


class TrajectoryCheck:
    """Checks the records of one trajectory; see ``CONDITIONS`` for what."""

    def __init__(self, tools: CheckTools, case_id: int, action_id: int, image_latent: Tensor | None) -> None:
        self._tools = tools
        self._case, self._action = case_id, action_id
        self._image = image_latent
        self._trajectory = Trajectory.of(tools.config, action_id)
        self._reader = WholeReader()
        self._windows: dict[int, tuple[Tensor, str]] = {}
        self._finals: list[Tensor] = []
        self._rebuilt: set[int] = set()
        self.report = Report("full" if tools.full else "quick")
        self.conditions: dict[tuple[int, int], tuple[str, str]] = {}
        """Hash of the frame condition and the file it was seen in, by (step, label)."""

    def run(self) -> None:
        """Checks every chunk and the video."""
        for chunk in range(self._tools.config.sizes.chunks):
            self._chunk(RecordKey(self._case, self._action, chunk))
        name = layout.video_path(self._case, self._action)
        self._guard("video", name, lambda: self._video(name))

    def _guard(self, code: str, file: str, check: Callable[[], None]) -> None:
        """A broken file becomes a finding, never a crash of the validator."""
        self.report.checked[code] += 1
        try:
            check()
        except Exception as error:
            self.report.add_damage(code, error, file)

    def _video(self, name: str) -> None:
        path = self._tools.root / name
        if not path.is_file():
            raise DamagedDataError(f"{name}: does not exist", file=name)
        if self._tools.full:
            found, wanted = hash_file(path), self._tools.inventory.get(name)
            if wanted is not None and wanted != found:
                self.report.add("hash", f"content is {found}, the inventory says {wanted}", file=name)
            check_video(path, name, self._tools.config.sizes)

    def _chunk(self, key: RecordKey) -> None:
        tools, config = self._tools, self._tools.config
        if not tools.full:
            for kind in record_files(config, key):
                load_and_scan(tools, kind, self._reader, self.report)
            return
        step_kind = step_file(config, key)
        step = load_and_scan(tools, step_kind, self._reader, self.report)
        if step is not None:
            self._guard("camera", step_kind.path, lambda: self._cameras(key, step))
            self._guard("rope", step_kind.path, lambda: self._step_rope(key, step))
            self._guard("timestep", step_kind.path, lambda: self._timesteps(step, step_kind.path))
            self._guard("noise", step_kind.path, lambda: self._noise(key, step, step_kind.path))
            self._guard("chain", step_kind.path, lambda: self._chain(step, step_kind.path))
            self._guard("history", step_kind.path, lambda: self._history(key, step, step_kind.path))
            self._guard("velocity", step_kind.path, lambda: self._velocity(step, step_kind.path))
            self._guard("condition", step_kind.path, lambda: self._frame_conditions(step, step_kind.path))
            self._guard("input65", step_kind.path, lambda: self._input65(key, step, step_kind.path))
        shared: dict[str, Tensor] = {}
        for block in config.sizes.blocks:
            self._context_file(key, block, shared)

    def _context_file(self, key: RecordKey, block: int, shared: dict[str, Tensor]) -> None:
        kind = context_file(self._tools.config, key, block)
        context = load_and_scan(self._tools, kind, self._reader, self.report)
        if context is None:
            return
        self._guard("context_frames", kind.path, lambda: self._context(key, context, kind.path))
        self._guard("shared", kind.path, lambda: self._shared(shared, context, kind.path))
        self._guard("kv", kind.path, lambda: self._kv(key, block, context, kind.path))
        if block == 0:
            self._guard("window", kind.path, lambda: self._window(key, context, kind.path))

    def _equal(self, code: str, file: str, loaded: Loaded, name: str, expected: Tensor) -> None:
        at = first_difference(loaded.tensors[name], expected)
        if at is not None:
            found = loaded.tensors[name].flatten()
            value = found[at].item() if at < found.numel() else "nothing"
            wanted = expected.flatten()[at].item() if at < expected.numel() else "nothing"
            self.report.add(code, f"found {value}, expected {wanted}", file=file, tensor=name, index=at)

    def _cameras(self, key: RecordKey, step: Loaded) -> None:
        views = self._trajectory.views(self._trajectory.chunk_frames(key.chunk_id))
        path = layout.step_path(key)
        for name, wanted in (("action_labels", views.labels), ("target_viewmats", views.viewmats), ("target_Ks", views.intrinsics)):
            self._equal("camera", path, step, name, wanted)

    def _step_rope(self, key: RecordKey, step: Loaded) -> None:
        frames = len(self._trajectory.history[key.chunk_id])
        path = layout.step_path(key)
        self._equal("rope", path, step, "rope_temporal_size", torch.tensor([frames + self._tools.config.sizes.chunk_frames]))
        self._equal("rope", path, step, "start_rope_start_idx", torch.tensor([frames]))

    def _timesteps(self, step: Loaded, path: str) -> None:
        for number, value in enumerate(timesteps(self._tools.config.sizes.steps)):
            self._equal("timestep", path, step, f"step_{number}_timestep", torch.tensor([value], dtype=torch.float32))

    def _noise(self, key: RecordKey, step: Loaded, path: str) -> None:
        if self._tools.noise is not None:
            frames = self._trajectory.chunk_frames(key.chunk_id)
            self._equal("noise", path, step, "step_0_noisy_sample", self._tools.noise[:, :, frames.start : frames.stop])

    def _chain(self, step: Loaded, path: str) -> None:
        steps = self._tools.config.sizes.steps
        for number in range(steps - 1):
            tensors = step.tensors
            expected = euler_step(tensors[f"step_{number}_noisy_sample"], tensors[f"step_{number}_velocity"], number, steps)
            self._equal("chain", path, step, f"step_{number + 1}_noisy_sample", expected)

    def _history(self, key: RecordKey, step: Loaded, path: str) -> None:
        """Compares with the chunks before; a chunk whose predecessor cannot be read is not judged."""
        sizes = self._tools.config.sizes
        if len(self._finals) != key.chunk_id:
            return
        before = torch.cat(self._finals, dim=2) if self._finals else torch.empty(1, sizes.latent_channels, 0, *sizes.grid)
        recorded, found = step.header.metadata.get("history_sha256"), tensor_sha256(before)
        if recorded != found:
            self.report.add("history", f"made from latents {recorded}, the chunks before end with {found}", file=path)
        self._finals.append(final_latents(step.tensors, sizes.steps))

    def _velocity(self, step: Loaded, path: str) -> None:
        if self._tools.frozen is None:
            return
        for number in range(self._tools.config.sizes.steps):
            tensors = step.tensors
            again = self._tools.frozen.final_layer(tensors[f"step_{number}_final_hidden"], tensors[f"step_{number}_frame_condition"])
            agreement = compare(again, tensors[f"step_{number}_velocity"])
            if not agreement.accepted:
                worst = int((again.float() - tensors[f"step_{number}_velocity"].float()).abs().flatten().argmax())
                message = f"final layer gives relative L2 {agreement.rel_l2:.2e}, cosine {agreement.cosine:.6f}"
                self.report.add("velocity", message, file=path, tensor=f"step_{number}_velocity", index=worst)

    def _frame_conditions(self, step: Loaded, path: str) -> None:
        labels: list[int] = step.tensors["action_labels"].flatten().tolist()
        for number in range(self._tools.config.sizes.steps):
            name = f"step_{number}_frame_condition"
            for frame, label in enumerate(labels):
                row = step.tensors[name][0, frame]
                digest = tensor_sha256(row)
                seen = self.conditions.setdefault((number, label), (digest, path))
                if seen[0] != digest:
                    index = frame * row.numel()
                    self.report.add("condition", f"differs from {seen[1]} for action label {label}", file=path, tensor=name, index=index)

    def _input65(self, key: RecordKey, step: Loaded, path: str) -> None:
        record = self._tools.manifest.get(key)
        if self._image is None or record is None:
            return
        recorded: Any = record.get("input65_sha256")
        steps = self._tools.config.sizes.steps
        if not (isinstance(recorded, list) and len(cast("list[Any]", recorded)) == steps):
            self.report.add("input65", f"the manifest holds {recorded!r}, expected {steps} hashes", file=path)
            return
        start = self._trajectory.chunk_frames(key.chunk_id).start
        for number in range(self._tools.config.sizes.steps):
            name = f"step_{number}_noisy_sample"
            if tensor_sha256(input65(step.tensors[name], self._image, start)) != recorded[number]:
                self.report.add("input65", "the rebuilt input is not what the teacher received", file=path, tensor=name)

    def _context(self, key: RecordKey, context: Loaded, path: str) -> None:
        selected = self._trajectory.history[key.chunk_id]
        self._equal("context_frames", path, context, "selected_frame_indices", torch.tensor(selected, dtype=torch.int64))
        indices: list[int] = context.tensors["selected_frame_indices"].tolist()
        if indices != sorted(set(indices)) or any(index >= key.chunk_id * self._tools.config.sizes.chunk_frames for index in indices):
            self.report.add(
                "context_frames", f"indices {indices} are not ascending frames before the chunk", file=path, tensor="selected_frame_indices"
            )
        self.report.checked["mask"] += 1
        mask = context.tensors["context_valid_mask"].flatten()
        if not bool(mask.all()):
            self.report.add(
                "mask", "context masks are all true on disk", file=path, tensor="context_valid_mask", index=int((~mask).nonzero()[0])
            )
        views = self._trajectory.views(selected)
        self._equal("camera", path, context, "context_viewmats", views.viewmats)
        self._equal("camera", path, context, "context_Ks", views.intrinsics)
        self._equal("rope", path, context, "rope_temporal_size", torch.tensor([len(selected)]))
        self._equal("rope", path, context, "start_rope_start_idx", torch.tensor([0]))

    def _shared(self, shared: dict[str, Tensor], context: Loaded, path: str) -> None:
        for name in CONTEXT_SHARED:
            first = shared.setdefault(name, context.tensors[name].clone())
            at = first_difference(context.tensors[name], first)
            if at is not None:
                self.report.add("shared", "differs from the first block of the record", file=path, tensor=name, index=at)

    def _kv(self, key: RecordKey, block: int, context: Loaded, path: str) -> None:
        record = self._tools.manifest.get(key)
        if record is not None:
            checks: Any = record.get("kv_check")
            found: Any = cast("dict[str, Any]", checks).get(f"{block:02d}") if isinstance(checks, dict) else None
            if not (isinstance(found, dict) and kv_accepted(cast("dict[str, float]", found))):
                self.report.add("kv", f"recorded K/V check is missing or misses the thresholds: {found!r}", file=path)
        tokens = self._tools.config.sizes.frame_tokens
        if self._tools.frozen is not None and context.tensors["img_modulated"].shape[1] and block not in self._rebuilt:
            # one frame of each block: a whole trajectory takes minutes of a CPU, and training rebuilds every frame anyway
            self._rebuilt.add(block)
            frame = context.tensors["img_modulated"][:, :tokens]
            cameras = context.tensors["context_viewmats"][:, :1], context.tensors["context_Ks"][:, :1]
            rebuilt = self._tools.frozen.rebuild_kv(block, frame, *cameras)
            for name, tensor in zip(rebuilt._fields, rebuilt, strict=True):
                if not bool(torch.isfinite(tensor).all()):
                    self.report.add("kv", f"rebuilt {name} is not finite", file=path, tensor="img_modulated")

    def _window(self, key: RecordKey, context: Loaded, path: str) -> None:
        sizes = self._tools.config.sizes
        for place, frame in enumerate(self._trajectory.history[key.chunk_id]):
            feature = context.tensors["img_modulated"][:, place * sizes.frame_tokens : (place + 1) * sizes.frame_tokens]
            if frame not in self._windows:
                self._windows[frame] = (feature.clone(), path)
            elif not torch.equal(feature, self._windows[frame][0]) and not compare(feature, self._windows[frame][0]).accepted:
                index = place * sizes.frame_tokens * sizes.hidden
                message = f"latent frame {frame} differs from {self._windows[frame][1]}"
                self.report.add("window", message, file=path, tensor="img_modulated", index=index)
