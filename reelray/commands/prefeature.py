"""``reelray prefeature …``: the v4 teacher-tensor dataset from images to a verified, durable, trainable copy."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ingest.errors import SettingsError
from ingest.storage.atomic import write_atomic
from reelray.commands.common import check_outputs
from reelray.commands.prefeature_arguments import ClusterArguments, SizeArguments, TeacherArguments, amount, note, show
from train_integration.option_checks import require_positive

if TYPE_CHECKING:
    from actors.prefeature_build import BuildState
    from ingest.prefeature.remote import Remote
    from ingest.prefeature.sync import Runner, SyncReport

Positional = tyro.conf.Positional


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefeatureCases(TeacherArguments):
    """Choose and prepare the images; writes cases.jsonl and dataset_config.json. A rerun that would differ is refused."""

    source: Annotated[Path, Positional, tyro.conf.arg(metavar="IMAGES")]
    """Folder of the source images; the file names are the captions."""
    root: Path
    """Dataset folder on a local disk."""
    preset: Literal["full", "tiny"] = "full"
    """Sizes: the real ones, or a rehearsal of seconds."""
    cases: int | None = None
    """Number of pairs, when it differs from the preset's."""
    sizes: SizeArguments = field(default_factory=SizeArguments)
    """Other dimensions, for small runs."""
    seed: int = 0
    """Seed of the noise and of the history selection."""
    sample_seed: int = 0
    """Seed of the choice of images."""
    noise_device: str = ""
    """Device whose generator draws the noise; the teacher's by default. The tensor itself is kept in the dataset."""
    name: str = ""
    """Dataset name to record."""

    def run(self) -> int:
        """Prepares the cases."""
        from ingest.prefeature.cases import choose, list_images, prepare_cases
        from ingest.prefeature.config import check_seed
        from ingest.prefeature.durable import hash_file
        from ingest.prefeature.sizes import DATASET_NAME, preset, resized
        from ingest.prefeature.teacher import EXACT_FLAGS, TeacherSpec

        check_seed(self.seed)
        sizes = resized(preset(self.preset), **self.sizes.changes(), **({} if self.cases is None else {"cases": self.cases}))
        choose(list_images(self.source), sizes.cases, self.sample_seed)  # before a teacher is loaded for nothing
        choice = self.choice(sizes.to_json())
        if self.teacher == "reference":
            spec = choice.make().spec
        else:
            # the weights are hashed here; the model itself is loaded by the workers only
            sha256 = hash_file(Path(self.checkpoint)).sha256
            spec = TeacherSpec(self.teacher, sizes, self.checkpoint, sha256, dict(EXACT_FLAGS), False, choice.device)
        self.root.mkdir(parents=True, exist_ok=True)
        made = prepare_cases(
            self.source,
            self.root,
            sizes,
            spec,
            seed=self.seed,
            sample_seed=self.sample_seed,
            noise_device=self.noise_device or choice.device,
            dataset=self.name or DATASET_NAME,
        )
        note(f"{len(made)} cases in {self.root}")
        return 0


@contextmanager
def _graceful() -> Iterator[Callable[[], bool]]:
    """SIGTERM and Ctrl-C ask for an end after the present chunks."""
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        del number, frame
        note("stopping after the chunks under way; run the command again to go on")
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ticker:
    """One progress line every few seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, state: BuildState) -> None:
        if state.elapsed_s >= self._next:
            self._next = state.elapsed_s + 10.0
            left = "" if state.eta_s is None else f", about {state.eta_s / 60:.0f} min left"
            done = f"{state.done}/{state.total} trajectories, {state.chunks} chunks, {amount(state.nbytes)}"
            note(f"{done}, {state.restarts} restarts{left}")


def _checked_root(root: Path, warn: bool = True) -> dict[str, Any]:
    from ingest.prefeature.config import read_config
    from ingest.prefeature.reader import network_warning

    warning = network_warning(root)
    if warn and warning:
        note(f"warning: {warning}")
    return read_config(root).sizes.to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefeatureBuild(ClusterArguments):
    """Build what is missing: text K/V, trajectories and videos, then merge, then sync when a remote is given."""

    root: Annotated[Path, Positional, tyro.conf.arg(metavar="ROOT")]
    """Dataset folder after the cases stage."""
    remote: str | None = None
    """Durable copy to sync to after the merge, e.g. s3://bucket/datasets/NAME."""
    deep: bool = False
    """Verify contents of existing files against the journals, not only their headers."""
    merge: bool = True
    """Merge at the end."""

    def run(self) -> int:
        """Builds; status 1 when stopped before the end."""
        from actors.prefeature_build import run_build
        from actors.prefeature_transfer import ray_runner
        from ingest.prefeature.merge import merge
        from ingest.prefeature.sync import sync

        sizes = _checked_root(self.root)
        remote = self._checked_remote()
        sent = None
        with self.cluster():
            with _graceful() as should_stop:
                settings = self.settings(self.deep)
                state, _, finished = run_build(self.root, self.choice(sizes), settings, should_stop=should_stop, on_progress=_Ticker())
            note(f"{state.done}/{state.total} trajectories complete, {state.chunks} chunks built, {amount(state.nbytes)} written")
            if not finished:
                return 1
            if self.merge:
                report = merge(self.root)
                for warning in report.warnings:
                    note(f"warning: {warning}")
                note(f"{report.records} records merged, {report.train_records} for training")
            if remote is not None:
                sent = sync(self.root, remote, execute=True, runner=ray_runner(tasks=self.workers))
        if sent is not None:
            _show_sync(sent, as_json=False)
        return 0

    def _checked_remote(self) -> Remote | None:
        """The durable copy, refused now rather than after days of building."""
        from ingest.errors import SettingsError
        from ingest.prefeature.config import read_config
        from ingest.prefeature.remote import Remote
        from ingest.prefeature.sync import require_same_dataset

        if self.remote is None:
            return None
        if not self.merge:
            raise SettingsError("--remote sends what was merged: leave --no-merge out, or the remote")
        remote = Remote(self.remote)
        require_same_dataset(remote, read_config(self.root), remote.list())
        return remote


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefeatureTextKv(ClusterArguments):
    """Build the text K/V of all blocks with the case tensors, and compare both element by element."""

    root: Annotated[Path, Positional, tyro.conf.arg(metavar="ROOT")]
    """Dataset folder after the cases stage."""
    deep: bool = False
    """Verify contents of existing files against the journals."""

    def run(self) -> int:
        """Builds and compares."""
        from actors.prefeature_build import run_build
        from ingest.prefeature.config import read_config
        from ingest.prefeature.storefiles import compare_text_kv

        sizes = _checked_root(self.root)
        with self.cluster(), _graceful() as should_stop:
            _, _, finished = run_build(self.root, self.choice(sizes), self.settings(self.deep), cases_only=True, should_stop=should_stop)
        if not finished:
            return 1
        config = read_config(self.root)
        for case in range(config.sizes.cases):
            compare_text_kv(self.root, config, case)
        note(f"{config.sizes.cases} cases: the stored blocks equal the all-block files")
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefeatureMerge:
    """Write the manifests from the workers' journals; refuses anything missing, damaged or contradictory."""

    root: Annotated[Path, Positional, tyro.conf.arg(metavar="ROOT")]
    """Dataset folder."""
    allow_partial: bool = False
    """Write manifest.partial.jsonl of what is complete instead of refusing."""
    verify_hashes: bool = False
    """Read every file again and compare its hash with the journal."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Merges; status 1 for a partial result."""
        from dataclasses import asdict

        from ingest.prefeature.merge import listed, merge

        report = merge(self.root, allow_partial=self.allow_partial, verify_hashes=self.verify_hashes)
        text = f"{report.records} records, {report.train_records} for training, {amount(report.inventory_bytes)}"
        if report.partial:
            text += f"; PARTIAL, {len(report.missing)} pieces missing: {listed(list(report.missing))}"
        show(asdict(report), self.json, "\n".join([text, *(f"warning: {warning}" for warning in report.warnings)]))
        return 1 if report.partial else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefeatureValidate(TeacherArguments):
    """Check every acceptance condition; writes _SUCCESS.json after a full validation without findings."""

    root: Annotated[Path, Positional, tyro.conf.arg(metavar="ROOT")]
    """Dataset folder after merge."""
    quick: bool = False
    """Files, headers and manifests only."""
    ray: bool = True
    """Check trajectories as Ray tasks; otherwise in this process."""
    address: str | None = None
    """Ray cluster to join; RAY_ADDRESS, else a local one."""
    teacher_samples: int = 0
    """Records to recompute with the teacher: context, K/V and one denoise step."""
    json: bool = False
    """Print JSON."""
    html: Path | None = None
    """Also write a page here."""

    def run(self) -> int:
        """Validates; status 1 when something is wrong."""
        from ingest.prefeature.config import read_config
        from ingest.prefeature.validate import validate
        from train_integration.cluster import ray_session

        check_outputs(html=self.html)
        samples = None
        if self.teacher_samples:
            choice = self.choice(read_config(self.root).sizes.to_json())
            samples = (choice.make(), self.teacher_samples)
        if self.ray:
            from actors.prefeature_validate import ray_mapper

            with ray_session(address=self.address):
                report = validate(self.root, full=not self.quick, mapper=ray_mapper(self.root, full=not self.quick), teacher=samples)
        else:
            report = validate(self.root, full=not self.quick, teacher=samples)
        if self.html is not None:
            write_atomic(self.html, report.to_html().encode())
        show(report.to_json(), self.json, report.to_text())
        return 0 if report.ok else 1


@contextmanager
def _runner(tasks: int) -> Iterator[Runner | None]:
    """Ray tasks for transfers, or None for threads of this process."""
    if tasks < 1:
        yield None
        return
    from actors.prefeature_transfer import ray_runner
    from train_integration.cluster import ray_session

    with ray_session(cpus=tasks):
        yield ray_runner(tasks=tasks)


def _show_sync(report: SyncReport, as_json: bool) -> int:
    """Prints what a sync did; status 1 when the remote does not carry a success mark for this state."""
    from dataclasses import asdict

    verb = "sent" if report.executed else "would be sent (dry run; add --execute)"
    lines = [f"{len(report.uploads)} files, {amount(report.nbytes)} {verb}"]
    if report.changed:
        lines.append(f"warning: {len(report.changed)} files changed since the merge ({report.changed[0]}, ...); merge and validate again")
    if report.unknown:
        lines.append(f"warning: {len(report.unknown)} remote objects are unknown and were left alone ({report.unknown[0]}, ...)")
    if not report.success:
        lines.append("warning: no success mark for this state; run 'reelray prefeature validate', then sync again")
    show(asdict(report), as_json, "\n".join(lines))
    return 0 if report.success or not report.executed else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefeatureSync:
    """Send what the durable copy lacks or holds differently, by hash. Never deletes; a dry run unless --execute is given."""

    root: Annotated[Path, Positional, tyro.conf.arg(metavar="ROOT")]
    """Dataset folder after merge and validate."""
    remote: str
    """Durable copy, e.g. s3://bucket/datasets/NAME."""
    execute: bool = False
    """Really send."""
    read_back: bool = True
    """Verify every upload by reading it again."""
    threads: int = 8
    """Concurrent transfers."""
    ray_tasks: int = 0
    """Hash and send in this many Ray tasks with 4 transfers each, instead of in threads of this process."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Syncs; status 1 when the remote does not carry a success mark for this state."""
        require_positive({"threads": self.threads})
        from ingest.prefeature.remote import Remote
        from ingest.prefeature.sync import sync

        remote = Remote(self.remote)
        with _runner(self.ray_tasks) as runner:
            report = sync(self.root, remote, execute=self.execute, read_back=self.read_back, threads=self.threads, runner=runner)
        return _show_sync(report, self.json)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefeatureEnsure:
    """Make a local copy complete before training: fetch what is missing or damaged from the durable copy, then check again."""

    root: Annotated[Path, Positional, tyro.conf.arg(metavar="ROOT")]
    """Local dataset folder, on NVMe."""
    remote: str
    """Durable copy."""
    parts: Literal["base", "text-kv", "all"] = "base"
    """base leaves the all-block text K/V alone (37 GiB); rollout training needs text-kv too."""
    deep: bool = False
    """Compare the hash of every file instead of a sample."""
    sample: float = 0.02
    """Share of files hashed when not deep."""
    repair: bool = True
    """Fetch; otherwise only complain."""
    threads: int = 8
    """Concurrent transfers."""
    ray_tasks: int = 0
    """Hash and fetch in this many Ray tasks with 4 transfers each, instead of in threads of this process."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Restores."""
        if not 0 <= self.sample <= 1:
            raise SettingsError(f"sample must be a share in 0..1, found {self.sample}")
        require_positive({"threads": self.threads})
        from dataclasses import asdict

        from ingest.prefeature.remote import Remote
        from ingest.prefeature.sync import ensure

        with _runner(self.ray_tasks) as runner:
            report = ensure(
                self.root,
                Remote(self.remote),
                parts=self.parts,
                deep=self.deep,
                sample=self.sample,
                repair=self.repair,
                threads=self.threads,
                runner=runner,
            )
        whole = "the whole dataset is here" if report.complete else f"part {self.parts} is complete"
        restored = f"{len(report.restored)} restored ({amount(report.nbytes)})"
        text = f"{report.checked} files checked, {report.hashed} by content, {restored}; {whole}"
        show(asdict(report), self.json, text)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefeatureHoldout(ClusterArguments):
    """Choose the evaluation pairs (nothing of training, by stem and by content) and make Full and Reuse videos of them."""

    train: Annotated[Path, Positional, tyro.conf.arg(metavar="TRAIN_ROOT")]
    """Training dataset, whose cases are excluded and whose settings are used."""
    metadata: Path
    """JSON array or JSON lines with one entry per pair."""
    images: Path
    """Folder of the images that the metadata names."""
    root: Path
    """Folder of the holdout set."""
    seed: int = 20260718
    """Seed of the choice."""
    validation: int = 25
    """Pairs for validation."""
    test: int = 50
    """Pairs for the test."""
    expected_overlap: int | None = None
    """Metadata pairs that must belong to training; the number of training cases when unset."""
    image_field: str = "file_name"
    """Field of the image path."""
    caption_field: str = "caption"
    """Field of the caption."""
    policy: Literal["reuse_hidden", "reuse_velocity"] = "reuse_hidden"
    """What the reused steps 1 and 2 reuse of step 0."""
    videos: bool = True
    """Make the videos; otherwise only write split.jsonl."""

    def run(self) -> int:
        """Chooses, then builds."""
        from actors.prefeature_holdout import run_holdout
        from ingest.prefeature.config import read_cases, read_config
        from ingest.prefeature.holdout import choose_holdout, read_pairs, write_split

        config = read_config(self.train)
        items = choose_holdout(
            read_pairs(self.metadata, image_field=self.image_field, caption_field=self.caption_field),
            self.images,
            read_cases(self.train, config),
            seed=self.seed,
            validation=self.validation,
            test=self.test,
            expected_overlap=self.expected_overlap,
        )
        self.root.mkdir(parents=True, exist_ok=True)
        write_split(self.root, items, config, self.policy, self.seed)
        note(f"{len(items)} pairs chosen")
        if self.videos:
            settings = self.settings(False)
            with self.cluster():
                made = run_holdout(
                    self.root,
                    self.images,
                    items,
                    self.train,
                    self.choice(config.sizes.to_json()),
                    policy=self.policy,
                    workers=self.workers,
                    num_gpus=settings.num_gpus,
                    num_cpus=self.num_cpus,
                    threads=self.threads,
                    runtime_env=dict(settings.runtime_env) or None,
                )
            note(f"{made} videos made")
        return 0
