"""``reelray train``: the training job, with LeRobot's option names."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ingest.errors import SettingsError
from ingest.plan import PlanSettings
from ingest.settings import DEFAULT_STREAMING_SEED, DEFAULT_TRAIN_SEED
from ingest.storage.transfer import TransferOptions
from reelray.commands.common import (
    Flat,
    RecipeArguments,
    Share,
    Strategy,
    check_outputs,
    decoder_of,
    index_options,
    language_report,
    parse_windows,
    print_facts,
    print_json,
    print_language,
)
from reelray.commands.train_options import DatasetArguments, LoaderArguments, explain
from train_integration.option_checks import require_non_negative, require_positive

if TYPE_CHECKING:
    from ingest.language.stage import RenderStage

_CONFIG = "train_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyArguments:
    """The policy."""

    type: str = "bc"
    """bc: behaviour cloning of action chunks from cameras and state."""
    chunk: int = 8
    """Actions predicted per sample."""
    learning_rate: float = 1e-3
    """Of AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train a policy through Ray Train, every frame exactly once per epoch, through losses of workers."""

    dataset: DatasetArguments = field(default_factory=DatasetArguments)
    policy: PolicyArguments = field(default_factory=PolicyArguments)
    output_dir: Path = Path("outputs/train")
    """Checkpoints, order of delivery, log and report."""
    config: Path | None = None
    """YAML file with options, by the same names; what the command line says beside it wins."""
    language: Flat[RecipeArguments] = field(default_factory=RecipeArguments)
    resume: bool = False
    """Go on with the run in output_dir; seed, order and recipe are those stored there."""
    other_recipe: bool = False
    """With --resume and --recipe: go on with another recipe; weights are kept, the epoch begins again."""
    batch_size: int = 8
    """Samples of a batch, per rank."""
    steps: int = 1000
    """Optimiser steps."""
    loader: Flat[LoaderArguments] = field(default_factory=LoaderArguments)
    seed: int | None = DEFAULT_TRAIN_SEED
    """Order and weights; null is 42 for the order."""
    tolerance_s: float = 1e-4
    """Most that a picture time or window offset may deviate."""
    delta_timestamps: str | None = None
    """Windows as JSON, seconds by feature; the action's default is the policy's chunk."""
    image_crop: tuple[int, int, int, int] | None = None
    """Top row, left column, height and width of the part of every video picture to deliver; cut out before resizing."""
    image_size: tuple[int, int] | None = None
    """Height and width to which pictures are resized while they are decoded."""
    save_freq: int = 200
    """Steps between checkpoints."""
    log_freq: int = 10
    """Steps between log lines."""
    world_size: int = 1
    """Train workers."""
    max_world_size: int | None = None
    """Most Train workers of an elastic group; world_size is then the least."""
    share: Share = "episodes"
    """How ranks share the episodes."""
    lanes: int | None = None
    """Lanes of the native order."""
    use_gpu: bool = False
    """One GPU per worker."""
    node_wait_s: float = 0.0
    """Seconds to wait for nodes that an autoscaler starts for the Train workers; 0 asks for none."""
    decode_actors: int | None = None
    """Decode actors per node; the node's free CPUs when unset."""
    decode_cpus: float = 1.0
    """Logical CPUs that each decode actor reserves; a part of one where decoders share."""
    decode_on_cpu_nodes: bool = False
    """Decode on the nodes without GPUs instead of those of the ranks; pictures then cross the network."""
    frame_store: Literal["slab", "object_store"] = "slab"
    """Where decode actors leave pictures: in memory that they share with their ranks, or in Ray's object store."""
    decode_mode: Literal["auto", "once", "on_demand"] = "auto"
    """Decode units whole within the decoded budget and the rest sample by sample, all of them whole, or none."""
    decoded_budget_gb: float | None = None
    """GiB of decoded pictures per rank."""
    payload_cache_gb: float | None = None
    """GiB of fetched payload kept on each node's disk, so that later epochs need no network; none is kept when unset."""
    payload_cache_dir: Path | None = None
    """Where it is kept; streaming-payload in HF_LEROBOT_HOME when unset. Safe to delete at any time."""
    damage: Literal["error", "skip_episode"] = "error"
    """What to do about damaged episodes."""
    max_failures: int = 8
    """Worker groups that may be lost."""
    step_s: float = 0.0
    """Least seconds of a step, to imitate a larger model."""
    digests: bool = False
    """Digest every picture in the recorded order (slow)."""
    address: str | None = None
    """Ray cluster to join; a local one is started when unset."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Trains and reports."""
        from train_integration.cluster import ray_session
        from train_integration.job import POLICIES, JobSettings, check_start, coverage, make_plan, run_training
        from train_integration.mixtures import open_described
        from train_integration.preemption import EXIT_STOPPED

        if self.policy.type not in POLICIES:
            raise SettingsError(f"policy.type {self.policy.type!r} is not known; there is {', '.join(POLICIES)}")
        self.check()
        check_outputs(output_dir=self.output_dir / _CONFIG)
        seed, strategy = self._stored_order() if self.resume else (self.seed, self.dataset.streaming_sampling_strategy)
        stage = self._resumed_recipe() if self.resume else self.language.stage()
        explain(self.dataset, self.loader)
        config = replace(self.stream_config(seed, strategy), recipe=stage)
        description, dataset = open_described(self.location(), config, **self.dataset_options())
        plan = make_plan(
            dataset,
            steps=self.steps,
            chunk=self.policy.chunk,
            seed=DEFAULT_STREAMING_SEED if seed is None else seed,
            save_every=self.save_freq,
            learning_rate=self.policy.learning_rate,
            log_every=self.log_freq,
            digests=self.digests,
            step_s=self.step_s,
            other_recipe=self.other_recipe,
        )
        from actors.manager import PoolSettings

        most = self.max_world_size or self.world_size
        settings = JobSettings(
            output_dir=self.output_dir,
            world_size=self.world_size if self.max_world_size is None else (self.world_size, self.max_world_size),
            use_gpu=self.use_gpu,
            node_wait_s=self.node_wait_s,
            max_failures=self.max_failures,
            pool=PoolSettings(actors=self.decode_actors, cpus=self.decode_cpus, cpu_nodes=self.decode_on_cpu_nodes),
            resume=self.resume,
        )
        check_start(description, settings)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        described = None if stage is None else stage.describe()
        if not self.resume:
            stored = asdict(self) | {"seed": seed, "language": described}
            (self.output_dir / _CONFIG).write_text(json.dumps(stored, indent=1, default=str), encoding="utf-8")
        elif self.other_recipe:
            (self.output_dir / _CONFIG).write_text(json.dumps(self._stored() | {"language": described}, indent=1), encoding="utf-8")
        with ray_session(cpus=most + (self.decode_actors or 2), address=self.address):
            result = run_training(description, plan, settings)
        losses = [entry["loss"] for entry in result.log]
        report: dict[str, Any] = {
            "dataset": dataset.location,
            "frames_selected": dataset.num_frames,
            "steps": result.steps,
            "worker_groups": result.attempts,
            "world_sizes": list(result.world_sizes),
            "loss_first": losses[0] if losses else None,
            "loss_last": losses[-1] if losses else None,
            "first_batch_s": result.first_batch_s,
            "checkpoint": result.checkpoint,
            "stopped": result.stopped,
            "epochs": [asdict(one) for one in coverage(description, result.rows, self.world_size if self.max_world_size is None else None)],
            "skipped": description.damage.to_json(),
            "language": language_report(dataset),
        }
        if self.json:
            print_json(report)
        else:
            print_facts(
                {
                    key.replace("_", " "): "none" if value is None else value
                    for key, value in report.items()
                    if key not in {"epochs", "skipped", "language"}
                }
            )
            print_language(report["language"])
            for epoch in report["epochs"]:
                print(", ".join(f"{name} {value}" for name, value in epoch.items()))
        return EXIT_STOPPED if result.stopped else 0

    def check(self) -> None:
        """Refuses what is out of range, before anything is opened.

        Raises:
            SettingsError: names the option.
        """
        from ingest.storage.locations import parse_location
        from train_integration.mixture_file import is_mixture_file

        self.dataset.check()
        self.loader.check()
        names = (
            "batch_size",
            "steps",
            "save_freq",
            "log_freq",
            "world_size",
            "max_world_size",
            "decode_actors",
            "decoded_budget_gb",
            "lanes",
        )
        require_positive({name: getattr(self, name) for name in names})
        require_positive({name: getattr(self.policy, name) for name in ("chunk", "learning_rate")}, "policy.")
        require_non_negative(
            {name: getattr(self, name) for name in ("tolerance_s", "decode_cpus", "step_s", "max_failures", "node_wait_s")}
        )
        if self.max_world_size is not None and self.max_world_size < self.world_size:
            raise SettingsError(f"max_world_size is {self.max_world_size}, less than world_size {self.world_size}, which is the least")
        if not self.dataset.streaming and not is_mixture_file(self.location()):
            place = parse_location(
                self.location(), repo_type=self.dataset.repo_type, root=self.dataset.root if self.dataset.repo_id else None
            )
            if place.kind != "local":
                raise SettingsError(f"{place.url} is not a local directory: map-style reading (dataset.streaming=false) needs one")

    def location(self) -> str:
        """Where the dataset is: its repository, or its root alone."""
        found = self.dataset.repo_id or self.dataset.root
        if found is None:
            raise SettingsError("give --dataset.repo_id or --dataset.root")
        return found

    def dataset_options(self) -> dict[str, Any]:
        """Arguments of `open_dataset` beside the location."""
        given = {
            "revision": self.dataset.revision,
            "repo_type": self.dataset.repo_type if self.dataset.repo_type != "dataset" else None,
            "root": self.dataset.root if self.dataset.repo_id is not None else None,
        }
        indexing = index_options(True, self.dataset.streaming_sidecar_lock_timeout_s, max(1, self.loader.num_workers))
        transfer = TransferOptions(
            connections=self.dataset.streaming_native_http_connections,
            subranges=self.dataset.streaming_native_http_subranges,
            cache_gb=self.payload_cache_gb,
            cache_dir=self.payload_cache_dir,
        )
        return {name: value for name, value in given.items() if value is not None} | {"indexing": indexing, "transfer": transfer}

    def stream_config(self, seed: int | None, strategy: Strategy) -> Any:
        """As the stream's configuration."""
        from ingest.engine.spec import ReadOptions
        from ingest.lerobot.selection import parse_episodes
        from train_integration.options import StreamConfig, units_under_way

        data = self.dataset
        windows = parse_windows(self.delta_timestamps)
        plan = PlanSettings(
            strategy=strategy,
            seed=DEFAULT_STREAMING_SEED if seed is None else seed,
            world_size=self.world_size,
            workers=self.loader.num_workers,
            batch_size=self.batch_size,
            pool_size=data.streaming_episode_pool_size,
            byte_budget=int(data.streaming_byte_budget_gb * 2**30),
            lanes=self.lanes,
            share=self.share,
            tail="pad",
            clamp_workers=True,
        )
        return StreamConfig(
            plan=plan,
            read=ReadOptions(
                delta_timestamps=windows,
                tolerance_s=self.tolerance_s,
                image_crop=self.image_crop,
                image_size=self.image_size,
                action_chunk=self.policy.chunk,
                depth_output_unit=data.depth_output_unit,
                decoder=decoder_of(data.video_backend),
            ),
            episodes=None if data.episodes is None else tuple(parse_episodes(data.episodes)),
            exclude_episodes=None if data.exclude_episodes is None else tuple(parse_episodes(data.exclude_episodes)),
            epochs=None,
            damage=self.damage,
            decode="auto" if data.streaming else "inline",
            decode_threads=data.streaming_decode_threads,
            frame_store=self.frame_store,
            decode_mode=self.decode_mode,
            decoded_budget_gb=self.decoded_budget_gb,
            byte_budget_gb=data.streaming_byte_budget_gb,
            return_uint8=data.return_uint8,
            prefetch_batches=self.loader.prefetch_factor,
            prefetch_units=units_under_way(plan, data.streaming_prefetch_episodes, plan.consumers),
            fetch_threads=data.max_num_shards or max(1, self.loader.num_workers),
        )

    def _stored(self) -> dict[str, Any]:
        path = self.output_dir / _CONFIG
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            return stored | {"order": (stored["seed"], stored["dataset"]["streaming_sampling_strategy"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(f"{path} cannot be read ({error}): there is no run to resume in {self.output_dir}") from error

    def _stored_order(self) -> tuple[int | None, Strategy]:
        return self._stored()["order"]

    def _resumed_recipe(self) -> RenderStage | None:
        """The run's own recipe, which is stored with it, or the one given where it is the same or another one is asked for.

        Raises:
            SettingsError: another recipe is given; the difference is named.
        """
        from ingest.language.stage import RenderStage, stage_differences

        described = self._stored().get("language")
        given = self.language.stage()
        if given is None and not self.other_recipe:
            return None if described is None else RenderStage.described(described)
        differences = stage_differences(described, None if given is None else json.loads(json.dumps(given.describe())))
        if differences and not self.other_recipe:
            raise SettingsError(
                f"the run in {self.output_dir} has another recipe ({'; '.join(differences)}): leave --recipe out, or ask for --other_recipe"
            )
        return given
