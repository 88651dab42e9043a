"""Recomputing sampled records with the teacher: the check that stored features are the teacher's own."""

from __future__ import annotations

import random
from pathlib import Path

from ingest.errors import DatasetError
from ingest.prefeature import layout
from ingest.prefeature.config import DatasetConfig
from ingest.prefeature.findings import Report
from ingest.prefeature.kvmath import FrozenTeacher, compare, input65
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.reader import read_tensors
from ingest.prefeature.rollout import Trajectory, check_kv, final_latents, run_context
from ingest.prefeature.schedule import timesteps
from ingest.prefeature.storefiles import load_case, load_frozen, load_noise
from ingest.prefeature.teacher import Teacher


def sample_keys(config: DatasetConfig, count: int, seed: int = 0) -> list[RecordKey]:
    """``count`` records, chunk 0 of some trajectory always among them."""
    every = list(layout.record_keys(config.sizes, len(config.actions)))
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    if all(key.chunk_id for key in chosen):
        chosen[0] = RecordKey(chosen[0].case_id, chosen[0].action_id, 0)
    return sorted(set(chosen))


def recheck_record(root: Path, config: DatasetConfig, teacher: Teacher, frozen: FrozenTeacher, key: RecordKey, report: Report) -> None:
    """Runs context and the first denoise step of one record again from stored latents.

    Context features, direct against rebuilt K/V, the real 65-channel input and the final hidden state are compared.
    """
    sizes = config.sizes
    trajectory, case = Trajectory.of(config, key.action_id), load_case(root, config, key.case_id)
    latents = load_noise(root, config).clone()
    for chunk in range(key.chunk_id):
        frames = trajectory.chunk_frames(chunk)
        earlier = layout.step_path(RecordKey(key.case_id, key.action_id, chunk))
        latents[:, :, frames.start : frames.stop] = final_latents(read_tensors(root, earlier), sizes.steps)
    context = run_context(teacher, trajectory, case, latents, key.chunk_id)
    for block, feature in context.captured.items():
        path = layout.context_path(key, block)
        report.checked["kv"] += 1
        agreement = compare(read_tensors(root, path, ["img_modulated"])["img_modulated"], feature.cpu())
        if not agreement.accepted:
            report.add("kv", f"the teacher computes other features ({agreement})", file=path, tensor="img_modulated")
    try:
        check_kv(frozen, trajectory, context, key.chunk_id)
    except DatasetError as error:
        report.add("kv", str(error), file=layout.step_path(key))
    path = layout.step_path(key)
    stored = read_tensors(root, path)
    frames = trajectory.chunk_frames(key.chunk_id)
    rebuilt = input65(stored["step_0_noisy_sample"], case.image_latent, frames.start)
    out = teacher.denoise(rebuilt, timesteps(sizes.steps)[0], trajectory.views(frames), case.text, context)
    report.checked["input65"] += 1
    if not bool((out.input65.cpu() == rebuilt).all()):
        report.add("input65", "the teacher received another input than was rebuilt", file=path, tensor="step_0_noisy_sample")
    agreement = compare(stored["step_0_final_hidden"], out.final_hidden.cpu())
    if not agreement.accepted:
        report.add("velocity", f"the teacher computes another hidden state ({agreement})", file=path, tensor="step_0_final_hidden")


def recheck_sample(root: Path, config: DatasetConfig, teacher: Teacher, count: int, report: Report) -> None:
    """Rechecks a fixed sample of records.

    Raises:
        MetadataError: the teacher is not the recorded one.
    """
    config.require_teacher(teacher.spec)
    frozen = load_frozen(root, config).to(teacher.spec.device)
    for key in sample_keys(config, count):
        try:
            recheck_record(root, config, teacher, frozen, key, report)
        except DatasetError as error:
            report.add("kv", str(error), file=layout.step_path(key))
