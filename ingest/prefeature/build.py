"""One worker's part of a build: cases and trajectories, skipped when complete, resumed where they stopped.

Nothing here knows about processes: the Ray actors and the single-process build call the same methods.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ingest.errors import DamagedDataError, DatasetError
from ingest.prefeature import layout
from ingest.prefeature.cases import read_image
from ingest.prefeature.config import Case, DatasetConfig, read_cases, read_config
from ingest.prefeature.durable import FileDigest, hash_file, remove_file, remove_orphans, require_space, tensors_digest, write_tensors
from ingest.prefeature.journal import JournalLine, JournalSet, JournalWriter, read_journals
from ingest.prefeature.kvmath import FrozenTeacher
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.reader import read_tensors
from ingest.prefeature.rollout import CaseTensors, ChunkResult, Trajectory, final_latents, history_sha256, run_chunk, run_context
from ingest.prefeature.scan import WholeReader, flaws
from ingest.prefeature.schedule import tensor_sha256
from ingest.prefeature.storefiles import (
    FileKind,
    case_file,
    compare_text_kv,
    context_file,
    load_case,
    load_noise,
    pad_text,
    problem_with,
    record_fields,
    record_files,
    step_file,
    text_kv_file,
    write_frozen,
    write_record,
)
from ingest.prefeature.teacher import Teacher
from ingest.prefeature.tensorfile import file_bytes, read_header
from ingest.prefeature.videos import check_video, write_video

Known = Mapping[tuple[str, int, int, int], JournalLine]
Progress = Callable[[str, int], None]
"""Called with what was done (``chunk_built``, ``chunk_kept``, ``video_built``, ...) and the bytes written."""

ORPHAN_AGE_S = 60.0
_PENDING = 2
"""Chunks that may wait for the disk while the teacher goes on."""


@dataclass(frozen=True, slots=True)
class TrajectoryReport:
    """What happened to one trajectory.

    Attributes:
        case_id, action_id: which one.
        built: chunks computed, kept: chunks found complete, registered: complete ones that no journal knew.
        video: whether the video was written.
        finished: False when a stop was asked for.
    """

    case_id: int
    action_id: int
    built: tuple[int, ...]
    kept: tuple[int, ...]
    registered: tuple[int, ...]
    video: bool
    finished: bool


@dataclass(frozen=True, slots=True)
class _Past:
    """What the journals say about a piece of work: the line that vouches for it, if any, and the number of the next attempt."""

    line: JournalLine | None
    attempt: int

    @classmethod
    def of(cls, known: Known, kind: str, case: int = -1, action: int = -1, chunk: int = -1) -> _Past:
        line = known.get((kind, case, action, chunk))
        if line is None:
            return cls(None, 0)
        return cls(None if line.void else line, line.attempt + 1)

    @property
    def files(self) -> dict[str, FileDigest] | None:
        return None if self.line is None else self.line.files


def _silent(what: str, nbytes: int) -> None:
    del what, nbytes


class Workshop:
    """A worker with its teacher loaded and its journal open.

    Args:
        root: dataset root with config and cases in place.
        teacher: must be the recorded one.
        worker: journal number.
        deep: verify contents of existing files against the journal's hashes, not only headers.
        lock_wait_s: how long to wait for a former holder of the journal.

    Raises:
        MetadataError: the teacher or the cases are not those of the dataset.
        LockTimeoutError: another build uses the journal.
    """

    def __init__(self, root: Path, teacher: Teacher, worker: int, *, deep: bool = False, lock_wait_s: float = 0.0) -> None:
        self.root = root
        self.config: DatasetConfig = read_config(root)
        self.config.require_teacher(teacher.spec)
        self.cases: list[Case] = read_cases(root, self.config)
        self.teacher = teacher
        self.frozen = FrozenTeacher(self.config.sizes, {n: t.to(torch.bfloat16) for n, t in teacher.frozen_parts().items()})
        self.noise: Tensor = load_noise(root, self.config)
        self.journal = JournalWriter(root, worker, self.config.fingerprint, lock_wait_s=lock_wait_s)
        self._deep = deep
        self._reader = WholeReader()

    def close(self) -> None:
        """Releases the journal."""
        self.journal.close()

    def build_frozen(self, known: Known) -> None:
        """Writes the frozen weights once."""
        past = _Past.of(known, "frozen")
        files = write_frozen(self.root, self.config, self.teacher)
        if past.files != files:
            self.journal.append("frozen", files, attempt=past.attempt)

    def build_case(self, case_id: int, known: Known, progress: Progress = _silent) -> None:
        """Image latent and text K/V of all blocks, from one prefill.

        Raises:
            DatasetError: a rebuild gives other text K/V than existing trajectories were made with.
            DamagedDataError: the prepared image is damaged.
        """
        kinds = [text_kv_file(self.config, case_id), case_file(self.config, case_id)]
        past = _Past.of(known, "case", case_id)
        if problem_with(self.root, self.config, kinds, past.files if self._deep else None) is None:
            if past.line is None:
                compare_text_kv(self.root, self.config, case_id)
                self._journal_case(case_id, {kind.path: hash_file(self.root / kind.path) for kind in kinds}, past.attempt)
            progress("case_kept", 0)
            return
        contents = self._case_tensors(case_id, kinds)
        attempt = past.attempt
        if past.files is not None:
            used = any(key[0] == "record" and key[1] == case_id for key in known)
            planned = {kind.path: tensors_digest(kind.specs, tensors, self._metadata(kind)) for kind, tensors in contents}
            if used and planned != past.files:
                raise DatasetError(
                    f"case {case_id} would be rebuilt with other text K/V than its trajectories were made with (another device or "
                    "driver); restore cases/ and the text K/V from the remote, or remove this case's steps, contexts and journal lines"
                )
            self.journal.void("case", attempt, case_id=case_id)
            attempt += 1
        remove_file(self.root / contents[-1][0].path)
        files = {kind.path: write_tensors(self.root / kind.path, kind.specs, held, self._metadata(kind)) for kind, held in contents}
        compare_text_kv(self.root, self.config, case_id)
        self._journal_case(case_id, files, attempt)
        progress("case_built", sum(digest.size for digest in files.values()))

    def _metadata(self, kind: FileKind) -> dict[str, str]:
        return self.config.metadata(kind.kind, kind.key)

    def _case_tensors(self, case_id: int, kinds: list[FileKind]) -> list[tuple[FileKind, dict[str, Tensor]]]:
        """Contents of the files in the order of ``kinds``, all from one prefill."""
        sizes, case = self.config.sizes, self.cases[case_id]
        inputs = self.teacher.encode_case(read_image(self.root, case), case.caption)
        text = self.teacher.text_prefill(inputs)
        valid = text.keys[0].shape[2]
        mask = torch.zeros(1, sizes.text_pad_tokens, dtype=torch.bool)
        mask[:, :valid] = True
        tensors: dict[str, Tensor] = {"text_valid_mask": mask}
        for block in range(sizes.depth):
            tensors[f"block_{block:02d}_k_txt"] = pad_text(text.keys[block], sizes)
            tensors[f"block_{block:02d}_v_txt"] = pad_text(text.values[block], sizes)
        tensors["image_condition_latent"] = inputs.image_latent.cpu()
        return [(kind, {spec.name: tensors[spec.name] for spec in kind.specs}) for kind in kinds]

    def _journal_case(self, case_id: int, files: Mapping[str, FileDigest], attempt: int) -> None:
        self.journal.append("case", files, case_id=case_id, attempt=attempt)

    def build_trajectory(
        self,
        case_id: int,
        action_id: int,
        known: Known,
        *,
        progress: Progress = _silent,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> TrajectoryReport:
        """All chunks and the video of one trajectory.

        Complete chunks are kept and their final latents taken from disk, so a trajectory resumes in its middle bit for bit.
        A chunk is kept only when it was made from exactly the latents that are there now; after a rebuilt chunk its context
        features are compared as well.

        Args:
            case_id, action_id: which trajectory.
            known: journal lines of the whole dataset.
            progress: told about every step.
            should_stop: asked before every chunk; True finishes what is under way and returns.

        Raises:
            DatasetError: the teacher contradicts itself.
            StorageError: the disk failed or is full.
        """
        trajectory = Trajectory.of(self.config, action_id)
        case = load_case(self.root, self.config, case_id)
        latents = self.noise.clone()
        built: list[int] = []
        kept: list[int] = []
        registered: list[int] = []
        stopped = False
        with _Committer() as committer:
            for chunk in range(self.config.sizes.chunks):
                if should_stop():
                    stopped = True
                    break
                key = RecordKey(case_id, action_id, chunk)
                past = _Past.of(known, "record", case_id, action_id, chunk)
                wanted = past.files if self._deep else None
                complete = problem_with(self.root, self.config, record_files(self.config, key), wanted) is None
                complete = complete and self._follows(key, trajectory, case, latents, rebuilt=bool(built))
                if complete and past.line is None:
                    complete = self._register(key, past.attempt)
                    registered += [chunk] if complete else []
                if complete:
                    final = self._stored_latents(key)
                    kept.append(chunk)
                    progress("chunk_kept", 0)
                else:
                    started = time.perf_counter()
                    context = run_context(self.teacher, trajectory, case, latents, chunk)
                    result = run_chunk(self.teacher, self.frozen, trajectory, case, latents, chunk, context)
                    final = result.final_latents
                    built.append(chunk)
                    seconds = time.perf_counter() - started
                    committer.submit(lambda k=key, r=result, p=past, s=seconds: self._commit(k, r, p, s, progress))
                frames = trajectory.chunk_frames(chunk)
                latents[:, :, frames.start : frames.stop] = final
        video = False
        if not stopped:
            video = self._build_video(case_id, action_id, latents, _Past.of(known, "video", case_id, action_id))
            progress("video_built" if video else "video_kept", 0)
        return TrajectoryReport(case_id, action_id, tuple(built), tuple(kept), tuple(registered), video, not stopped)

    def _commit(self, key: RecordKey, result: ChunkResult, past: _Past, seconds: float, progress: Progress) -> None:
        attempt = past.attempt
        if past.line is not None:
            self.journal.void("record", attempt, case_id=key.case_id, action_id=key.action_id, chunk_id=key.chunk_id)
            attempt += 1
        # without its step file a record is incomplete, so files of two attempts are never taken for one record
        remove_file(self.root / layout.step_path(key))
        files = write_record(self.root, self.config, key, result)
        fields = record_fields(self.root, self.config, key)
        self.journal.append("record", files, **fields, attempt=attempt, seconds=round(seconds, 3))
        progress("chunk_built", sum(digest.size for digest in files.values()))

    def _register(self, key: RecordKey, attempt: int) -> bool:
        """Journals a record that was completed just before a crash kept its line from being written; False when its contents are bad."""
        files: dict[str, FileDigest] = {}
        for kind in record_files(self.config, key):
            loaded = self._reader.load(self.root, kind.path)
            if any(flaws(loaded)):
                return False
            files[kind.path] = loaded.digest
        self.journal.append("record", files, **record_fields(self.root, self.config, key), attempt=attempt)
        return True

    def _stored_latents(self, key: RecordKey) -> Tensor:
        last = self.config.sizes.steps - 1
        names = [f"step_{last}_noisy_sample", f"step_{last}_velocity"]
        return final_latents(read_tensors(self.root, layout.step_path(key), names), self.config.sizes.steps)

    def _follows(self, key: RecordKey, trajectory: Trajectory, case: CaseTensors, latents: Tensor, *, rebuilt: bool) -> bool:
        """Whether a stored chunk is what the present latents of earlier chunks lead to; ``rebuilt`` asks the teacher again."""
        frames = trajectory.chunk_frames(key.chunk_id)
        header = read_header(self.root, step_file(self.config, key).path)
        if header.metadata.get("history_sha256") != history_sha256(latents, frames.start):
            return False
        if not rebuilt:
            return True
        start = read_tensors(self.root, step_file(self.config, key).path, ["step_0_noisy_sample"])["step_0_noisy_sample"]
        if not torch.equal(start, latents[:, :, frames.start : frames.stop]):
            return False
        context = run_context(self.teacher, trajectory, case, latents, key.chunk_id)
        for block in self.config.sizes.blocks:
            stored = read_tensors(self.root, context_file(self.config, key, block).path, ["img_modulated"])["img_modulated"]
            if context.frames and not torch.equal(stored, context.captured[block].cpu()):
                return False
        return True

    def _build_video(self, case_id: int, action_id: int, latents: Tensor, past: _Past) -> bool:
        """Keeps a video only when its journal line says that it shows exactly these latents."""
        name = layout.video_path(case_id, action_id)
        path = self.root / name
        shown = tensor_sha256(latents)
        if past.line is not None and past.line.fields.get("latents_sha256") == shown and self._good_video(path, name, past.line):
            return False
        write_video(path, self.teacher.decode(latents), self.config.sizes)
        fields = {"case_id": case_id, "action_id": action_id, "latents_sha256": shown}
        self.journal.append("video", {name: hash_file(path)}, **fields, attempt=past.attempt)
        return True

    def _good_video(self, path: Path, name: str, line: JournalLine) -> bool:
        if not path.is_file() or hash_file(path) != line.files.get(name):
            return False
        if self._deep:
            try:
                check_video(path, name, self.config.sizes)
            except DamagedDataError:
                return False
        return True


class _Committer:
    """Writes chunks in order on one background thread; the first failure stops the trajectory."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> _Committer:
        return self

    def submit(self, work: Callable[[], None]) -> None:
        """Queues one commit, waiting while two are under way."""
        while len(self._pending) >= _PENDING:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(work))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._pending:
                work = self._pending.popleft()
                if kind is None:
                    work.result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=kind is not None)


def remaining_bytes(root: Path, config: DatasetConfig) -> int:
    """Tensor bytes that a build still has to write, judged by which files exist."""
    missing = 0
    for case in range(config.sizes.cases):
        for kind in (text_kv_file(config, case), case_file(config, case)):
            missing += 0 if (root / kind.path).exists() else file_bytes(kind.specs)
    for action in range(len(config.actions)):
        for chunk in range(config.sizes.chunks):
            key = RecordKey(0, action, chunk)
            sizes = [(kind.path, file_bytes(kind.specs)) for kind in record_files(config, key)]
            for case in range(config.sizes.cases):
                missing += sum(size for path, size in sizes if not (root / path.replace("case_0000", f"case_{case:04d}")).exists())
    return missing


def begin_build(root: Path) -> tuple[DatasetConfig, JournalSet]:
    """Checks a dataset folder before any worker starts.

    Orphaned temporary files are removed, the disk space is checked, journals are read.

    Raises:
        MetadataError: config, cases or journals do not fit together, or journals contradict each other.
        StorageError: not enough disk space.
    """
    config = read_config(root)
    read_cases(root, config)
    remove_orphans(root, older_s=ORPHAN_AGE_S)
    require_space(root, remaining_bytes(root, config), "the rest of the build")
    return config, read_journals(root, config.fingerprint)


def build_local(
    root: Path, teacher: Teacher, *, deep: bool = False, only: Iterable[tuple[int, int]] | None = None
) -> list[TrajectoryReport]:
    """The whole build in this process, without merge.

    Args:
        root: dataset root after the cases stage.
        teacher: the recorded teacher.
        deep: verify contents of what exists.
        only: ``(case_id, action_id)`` pairs; all when None.
    """
    config, journals = begin_build(root)
    shop = Workshop(root, teacher, 0, deep=deep)
    try:
        shop.build_frozen(journals.lines)
        wanted = list(only) if only is not None else list(layout.trajectories(config.sizes, len(config.actions)))
        for case_id in sorted({case for case, _ in wanted}):
            shop.build_case(case_id, journals.lines)
        return [shop.build_trajectory(case, action, journals.lines) for case, action in wanted]
    finally:
        shop.close()
