"""`StreamingLeRobotDataset`: the stream by the names that LeRobot's class has, for people who come from there and have no Ray."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ingest.engine.depth import DepthUnit
from ingest.engine.indexing import IndexOptions
from ingest.engine.spec import ReadOptions
from ingest.errors import CursorError, PlanError
from ingest.lerobot.source import Source
from ingest.plan import EpochPlan, Pieces, PlanSettings, plan_epoch
from ingest.plan.settings import DEFAULT_POOL, Strategy, require_int
from ingest.plan.sharing import Division, divide
from ingest.settings import DEFAULT_STREAMING_SEED, use_hub_token
from ingest.storage.transfer import TransferOptions
from train_integration.backends import VideoBackend, open_decoder
from train_integration.iterable import EpisodeIterableDataset, checked_rank
from train_integration.option_checks import refuse_eval_split, require_non_negative, require_positive
from train_integration.options import StreamConfig, StreamDescription, open_stream, units_under_way

_LOG = logging.getLogger("reelray.lerobot")


@dataclass(frozen=True, slots=True)
class DatasetMeta:
    """What a dataset says of itself, by the names of LeRobot's metadata.

    Attributes:
        source: the description that was read.
    """

    source: Source

    @property
    def fps(self) -> float:
        """Frames per second."""
        return self.source.info.fps

    @property
    def features(self) -> dict[str, Any]:
        """Type, shape and names of every feature, by key."""
        features = self.source.info.features
        return {key: {"dtype": one.dtype, "shape": one.shape, "names": list(one.names) or None} for key, one in features.items()}

    @property
    def camera_keys(self) -> list[str]:
        """Features with pictures, in videos or in parquet."""
        return [key for key, feature in self.source.info.features.items() if feature.is_video or feature.is_image]

    @property
    def video_keys(self) -> list[str]:
        """Features with pictures in videos."""
        return list(self.source.cameras)

    @property
    def total_episodes(self) -> int:
        """Episodes of the whole dataset."""
        return len(self.source.episodes.episode_index)

    @property
    def total_frames(self) -> int:
        """Frames of the whole dataset."""
        return int(self.source.episode_frames().sum())

    @property
    def stats(self) -> Mapping[str, Any]:
        """Statistics by feature, empty where the dataset has none."""
        return self.source.stats


@dataclass(frozen=True, slots=True)
class _Offset:
    """A position in LeRobot's words: samples of an epoch that a rank has taken, in batches of a size."""

    epoch: int
    samples: int
    batch_size: int

    def __post_init__(self) -> None:
        require_int("epoch", self.epoch, least=0)
        require_int("offset", self.samples, least=0)
        require_int("batch_size", self.batch_size, least=1)

    def size(self, workers: int) -> int:
        """Samples of the batches that the offset counts.

        Raises:
            CursorError: it ends inside a batch, which workers that take turns by batches never do.
        """
        if workers < 2:
            # The order of a single consumer knows no batches, so any offset is a whole number of some size.
            return math.gcd(self.samples, self.batch_size)
        if self.samples % self.batch_size:
            raise CursorError(
                f"a resume offset of {self.samples} samples is not a whole number of batches of {self.batch_size}; "
                f"resuming with {workers} DataLoader workers needs whole batches"
            )
        return self.batch_size


class StreamingLeRobotDataset(EpisodeIterableDataset):
    """Samples of one rank in LeRobot's order, with the arguments of LeRobot's class of this name.

    Every sample equals the map-style item; each frame of the selection comes once in an epoch over all ranks and loader workers.
    Without ``repeat`` an iteration is one epoch and the next one the following epoch.

    State: that of `EpisodeIterableDataset`, which counts batches of ``batch_size``. `load_state_dict` also takes LeRobot's
    ``{"epoch": …, "offset": …, "batch_size": …}``, with the samples that the rank took in ``offset``.

    Args:
        repo_id: ``OWNER/NAME`` on the Hub, or any other location of a dataset.
        root: local directory that holds it, or ``hf://buckets/OWNER/BUCKET``.
        episodes: episodes to read; None reads all.
        image_transforms: see `StreamConfig`; a callable in torchvision's style gets uint8 tensors.
        delta_timestamps: seconds of each window by feature.
        tolerance_s: most that window offsets and picture times may deviate.
        revision: branch, tag or commit on the Hub.
        force_cache_sync: without effect: metadata is kept by commit or hash, so it is never old.
        streaming: deprecated, without effect.
        buffer_size: only sets the default pool: at most 32 episodes, and no more than this.
        max_num_shards: episodes that each worker fetches at once, at most.
        seed: order seed; None is 42.
        rng: deprecated, without effect.
        shuffle: False delivers epoch 0 in every epoch.
        return_uint8: uint8 pictures instead of float32 in [0, 1].
        depth_output_unit: ``mm`` (uint16) or ``m`` (float32).
        video_backend: ``pyav`` (None), ``torchcodec`` or ``nvdec``.
        data_root: location of rows and videos, where they are not beside the metadata.
        episode_pool_size: episodes that each worker mixes; None gives each its part of the default pool.
        prefetch_episodes: episodes that each worker fetches ahead of its pool.
        byte_budget_gb: GiB of compressed pictures of the rank, divided among its workers.
        repeat: go on for ever; each worker with its own next epoch, also inside a batch.
        exclude_episodes: episodes to leave out.
        repo_type: ``dataset`` or ``bucket``.
        token: Hub token, for this process and its loader workers; False reads without one, True asks for the one of the login.
        decode_threads: threads of each worker that decode.
        decoded_queue_size: samples of each worker kept ahead.
        video_decoder_cache_size: without effect: packets go straight into decoders, so none is kept open.
        native_http_connections: range reads at once in each process; None has 8, or as many as episodes are fetched at once.
        native_http_subranges: most parts of one range of 16 MiB or more that are read at once.
        sidecar_lock_timeout_s: longest wait for another process that builds the same index.
        sampling_strategy: ``remaining``, ``round_robin`` or one of the native orders.
        eval_split: not available: hold episodes out instead.
        batch_size: that of the loader; states count such batches, and their workers take turns by them. 1 is exact without
            loader workers, whatever the loader's is.
        rank: data-parallel rank; None asks `torch.distributed` or the environment.
        world_size: data-parallel size; give both or none.

    Raises:
        SettingsError: a value out of range; the message names it.
        PlanError: the rank owns no episode or, once iterated, fewer than loader workers.
        DatasetError: the dataset cannot be read as asked.
    """

    def __init__(
        self,
        repo_id: str,
        root: str | Path | None = None,
        episodes: Sequence[int] | None = None,
        image_transforms: Callable[..., Any] | None = None,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        tolerance_s: float = 1e-4,
        revision: str | None = None,
        force_cache_sync: bool = False,
        streaming: bool | None = None,
        buffer_size: int = 1000,
        max_num_shards: int = 16,
        seed: int | None = DEFAULT_STREAMING_SEED,
        rng: np.random.Generator | None = None,
        shuffle: bool = True,
        return_uint8: bool = False,
        depth_output_unit: DepthUnit = "mm",
        video_backend: VideoBackend | None = None,
        data_root: str | Path | None = None,
        episode_pool_size: int | None = None,
        prefetch_episodes: int = 8,
        byte_budget_gb: float = 8.0,
        repeat: bool = False,
        *,
        exclude_episodes: Sequence[int] | None = None,
        repo_type: Literal["dataset", "bucket"] = "dataset",
        token: str | bool | None = None,
        decode_threads: int = 2,
        decoded_queue_size: int = 8,
        video_decoder_cache_size: int | None = None,
        native_http_connections: int | None = None,
        native_http_subranges: int = 1,
        sidecar_lock_timeout_s: float = 1800.0,
        sampling_strategy: Strategy = "remaining",
        eval_split: float = 0.0,
        batch_size: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        for name, given in (("streaming", streaming), ("rng", rng)):
            if given is not None:
                warnings.warn(f"{name} is deprecated and has no effect", FutureWarning, stacklevel=2)
        require_positive(
            {
                "buffer_size": buffer_size,
                "max_num_shards": max_num_shards,
                "episode_pool_size": episode_pool_size,
                "byte_budget_gb": byte_budget_gb,
                "decode_threads": decode_threads,
                "decoded_queue_size": decoded_queue_size,
                "video_decoder_cache_size": video_decoder_cache_size,
                "native_http_connections": native_http_connections,
                "native_http_subranges": native_http_subranges,
                "sidecar_lock_timeout_s": sidecar_lock_timeout_s,
            }
        )
        require_non_negative({"prefetch_episodes": prefetch_episodes, "tolerance_s": tolerance_s})
        refuse_eval_split(eval_split)
        if video_decoder_cache_size is not None:
            _LOG.info("video_decoder_cache_size has no effect here: packets go straight into decoders, so none is kept open")
        if force_cache_sync:
            _LOG.info("force_cache_sync has no effect here: metadata is kept by commit or hash, so it is never old")
        if token is not None:
            use_hub_token(token)
        self.repo_id, self.repo_type, self.root, self.revision = repo_id, repo_type, root, revision
        self.episodes = None if episodes is None else list(episodes)
        self.delta_timestamps, self.tolerance_s = delta_timestamps, tolerance_s
        self.shuffle, self.repeat = shuffle, repeat
        self.prefetch_episodes, self.max_num_shards = prefetch_episodes, max_num_shards
        self.decoded_queue_size = decoded_queue_size
        self._pool = buffer_size if episode_pool_size is None and buffer_size < DEFAULT_POOL else None
        self._offset: _Offset | None = None
        plan = PlanSettings(
            strategy=sampling_strategy,
            seed=DEFAULT_STREAMING_SEED if seed is None else seed,
            batch_size=batch_size,
            pool_size=episode_pool_size,
            byte_budget=int(byte_budget_gb * 2**30),
            tail="loop" if repeat else "exact",
            shuffle=shuffle,
        )
        # States bring their batch size along; what else an order depends on stays as it is.
        plan = replace(plan, lanes=None if plan.pooled else plan.lane_count(batch_size))
        config = StreamConfig(
            plan=plan,
            read=ReadOptions(
                delta_timestamps=delta_timestamps,
                tolerance_s=tolerance_s,
                depth_output_unit=depth_output_unit,
                decoder=open_decoder(video_backend or "pyav"),
            ),
            episodes=None if episodes is None else tuple(episodes),
            exclude_episodes=None if exclude_episodes is None else tuple(exclude_episodes),
            epochs=None if repeat else 1,
            image_transforms=image_transforms,
            return_uint8=return_uint8,
            decode="inline",
            decode_threads=decode_threads,
            byte_budget_gb=byte_budget_gb,
            fetch_threads=self._fetch_threads(self._with_pool(plan, 1), 1),
        )
        description, dataset = open_stream(
            repo_id,
            config,
            revision=revision,
            repo_type=None if repo_type == "dataset" else repo_type,
            root=root,
            data_root=data_root,
            indexing=IndexOptions(lock_timeout_s=sidecar_lock_timeout_s, workers=max_num_shards),
            transfer=TransferOptions(connections=native_http_connections, subranges=native_http_subranges),
        )
        super().__init__(description, rank=rank, world_size=world_size)
        self.num_frames, self.num_episodes, self.fps = dataset.num_frames, dataset.num_episodes, dataset.fps
        if not self.num_frames_for_rank(self.rank, self.world_size):
            raise PlanError(
                f"rank {self.rank} owns no streaming episodes: {self.num_episodes} episodes over world_size {self.world_size}; "
                "reduce the data-parallel world size"
            )

    @property
    def meta(self) -> DatasetMeta:
        """What the dataset says of itself."""
        return DatasetMeta(self._description.job.source)

    @property
    def depth_output_unit(self) -> DepthUnit:
        """Unit of depth pictures."""
        return self._description.config.read.depth_output_unit

    def num_frames_for_rank(self, rank: int, world_size: int, num_workers: int = 0) -> int:
        """Frames that a rank owns.

        Raises:
            SettingsError: there is no such rank.
            PlanError: it owns fewer episodes than ``num_workers``.
        """
        rank, world_size = checked_rank(rank, world_size)
        shares = self._shares(world_size)
        if num_workers > 1 and shares.episodes[rank] < num_workers:
            raise PlanError(
                f"rank {rank} owns {shares.episodes[rank]} streaming episodes, fewer than its {num_workers} workers; reduce num_workers"
            )
        return int(shares.frames[rank])

    def num_episodes_for_rank(self, rank: int, world_size: int) -> int:
        """Episodes that a rank owns.

        Raises:
            SettingsError: there is no such rank.
        """
        rank, world_size = checked_rank(rank, world_size)
        return int(self._shares(world_size).episodes[rank])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after what a state counts, in its batches.

        Args:
            state: of `state_dict`, or LeRobot's ``epoch`` (0), ``offset`` in samples of the rank (0) and ``batch_size`` (1).

        Raises:
            CursorError: the state is malformed, or belongs to another plan.
            SettingsError: a number of LeRobot's state is out of range.
        """
        if "cursor" not in state and state.keys() <= {"epoch", "offset", "batch_size"}:
            offset = _Offset(state.get("epoch", 0), state.get("offset", 0), state.get("batch_size", 1))
            self.set_epoch(offset.epoch)
            self._offset = offset
            return
        super().load_state_dict(state)
        self._offset = None
        config = self._description.config
        for segment in () if self._cursor is None else self._cursor.segments[-1:]:
            plan = replace(config.plan, batch_size=segment.topology.batch_size)
            self._description = replace(self._description, config=replace(config, plan=plan))

    def set_epoch(self, epoch: int) -> None:
        """Begins the next iteration at the start of an epoch.

        Raises:
            SettingsError: the epoch is negative.
        """
        super().set_epoch(epoch)
        self._offset = None

    def _start(self, epoch: int, workers: int) -> EpochPlan:
        plan, offset = super()._start(epoch, workers), self._offset
        if offset is None or offset.epoch != epoch:
            return plan
        batches = offset.samples // plan.settings.batch_size
        # What lies behind the end of an epoch that does not repeat is nothing.
        cursor = plan.cursor.advance(batches if self.repeat else min(batches, plan.steps))
        return plan_epoch(plan.units, plan.settings, cursor)

    def _settings(self, workers: int) -> PlanSettings:
        settings = super()._settings(workers)
        if self._offset is not None:
            settings = replace(settings, batch_size=self._offset.size(workers))
        return self._with_pool(settings, max(1, workers))

    def _with_pool(self, settings: PlanSettings, consumers: int) -> PlanSettings:
        return settings if self._pool is None else replace(settings, pool_size=max(1, round(self._pool / consumers)))

    def _local(self, workers: int) -> StreamDescription:
        description, consumers = super()._local(workers), max(1, workers)
        plan = description.config.plan
        config = replace(
            description.config,
            prefetch_units=max(1, units_under_way(plan, self.prefetch_episodes, consumers) // consumers),
            prefetch_batches=-(-self.decoded_queue_size // plan.batch_size),
        )
        return replace(description, config=config, job=replace(description.job, threads=self._fetch_threads(plan, consumers)))

    def _fetch_threads(self, plan: PlanSettings, consumers: int) -> int:
        return min(self.max_num_shards, max(1, plan.pool_share(consumers) + self.prefetch_episodes))

    def _shares(self, world_size: int) -> Division:
        return divide(Pieces.whole(self._description.units), world_size, share="episodes", seed=0)
