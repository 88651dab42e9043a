"""Options of ``reelray train`` that LeRobot has too: names, defaults, checks, and what those mean that mean nothing here."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Literal

from ingest.errors import SettingsError
from ingest.lerobot.selection import parse_episodes
from reelray.commands.common import Strategy
from train_integration.option_checks import refuse_eval_split, require_non_negative, require_positive

_LOG = logging.getLogger("reelray.train")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetArguments:
    """The dataset, with LeRobot's names."""

    repo_id: str | None = None
    """OWNER/NAME on the Hub, any location, or a mixture file (.yaml) that names several datasets."""
    root: str | None = None
    """Local dataset directory, or an hf://buckets URI."""
    revision: str | None = None
    """Hub revision."""
    repo_type: Literal["dataset", "bucket"] = "dataset"
    """Kind of Hub repository."""
    episodes: str | None = None
    """Episodes to read, for example [1,3]."""
    exclude_episodes: str | None = None
    """Episodes to leave out."""
    eval_split: float = 0.0
    """Not available when streaming: an evaluation stream is described beside the training stream."""
    streaming: bool = True
    """Off reads map-style in each rank's own process, from local roots only."""
    streaming_encoding: bool = False
    """How recordings are written; no effect on reading."""
    streaming_episode_pool_size: int | None = None
    """Episodes mixed by each worker; 32 / workers when unset."""
    streaming_sampling_strategy: Strategy = "remaining"
    """Order mode; lanes is the native one."""
    streaming_prefetch_episodes: int = 8
    """Episodes fetched ahead of each worker's pool; in the native orders, per rank, and eight runs of frames count as one."""
    streaming_byte_budget_gb: float = 8.0
    """GiB of compressed pictures per rank."""
    streaming_decode_threads: int = 2
    """Threads that decode, where a rank decodes itself; the pool's actors decode otherwise."""
    streaming_decoded_queue_size: int = 8
    """Accepted; finished batches are kept ahead instead (prefetch_factor)."""
    video_decoder_cache_size: int | None = None
    """Accepted; packets go straight into decoders, so none is kept open."""
    streaming_native_http_connections: int | None = None
    """Range reads at once in each process, from remote datasets; when unset 8, or as many as units are fetched at once if more."""
    streaming_native_http_subranges: int = 1
    """Most parts of one range of 16 MiB or more that are read at once; no part is smaller than 8 MiB."""
    streaming_sidecar_lock_timeout_s: float = 1800.0
    """Seconds to wait for another sidecar build."""
    max_num_shards: int | None = None
    """Units fetched at once by one read task; the number of workers when unset."""
    return_uint8: bool = True
    """Pictures as uint8; off delivers float32 in [0, 1]."""
    video_backend: Literal["pyav", "torchcodec", "nvdec"] = "pyav"
    """What decodes colour cameras; torchcodec and nvdec need torchcodec."""
    depth_output_unit: Literal["mm", "m"] = "mm"
    """Depth as uint16 millimetres or float32 metres."""

    def check(self) -> None:
        """Refuses what is out of range.

        Raises:
            SettingsError: names the field.
        """
        positive = (
            "streaming_episode_pool_size",
            "streaming_byte_budget_gb",
            "streaming_decode_threads",
            "streaming_decoded_queue_size",
            "video_decoder_cache_size",
            "streaming_native_http_connections",
            "streaming_native_http_subranges",
            "streaming_sidecar_lock_timeout_s",
            "max_num_shards",
        )
        require_positive({name: getattr(self, name) for name in positive}, "dataset.")
        require_non_negative({"streaming_prefetch_episodes": self.streaming_prefetch_episodes}, "dataset.")
        chosen = [] if self.episodes is None else parse_episodes(self.episodes)
        twice = sorted({number for number in chosen if chosen.count(number) > 1})
        if twice:
            raise SettingsError(f"dataset.episodes names {', '.join(map(str, twice))} more than once: name every episode once")
        refuse_eval_split(self.eval_split, "dataset.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderArguments:
    """Options of LeRobot's data loader."""

    num_workers: int = 4
    """Consumers inside each rank; more than a rank has episodes are clamped."""
    prefetch_factor: int = 4
    """Finished batches kept ahead of the training loop."""
    persistent_workers: bool = True
    """Accepted; readers and decoders always stay."""
    dataloader_multiprocessing_context: Literal["spawn", "fork", "forkserver"] = "spawn"
    """Accepted; Ray starts the processes."""

    def check(self) -> None:
        """Refuses what is out of range.

        Raises:
            SettingsError: names the field.
        """
        require_positive({"prefetch_factor": self.prefetch_factor})
        require_non_negative({"num_workers": self.num_workers})


def explain(dataset: DatasetArguments, loader: LoaderArguments) -> None:
    """Logs one line for every option that was given and has no effect."""
    if dataset.streaming_encoding:
        _LOG.info("dataset.streaming_encoding concerns recording and has no effect on reading")
    meanings = {
        "streaming_decoded_queue_size": "prefetch_factor says how many finished batches are kept ahead",
        "video_decoder_cache_size": "packets go straight into decoders, so none is kept open",
    }
    for part, prefix, reasons in (
        (dataset, "dataset.", meanings),
        (
            loader,
            "",
            {
                "persistent_workers": "readers and decoders always stay",
                "dataloader_multiprocessing_context": "Ray starts the processes",
            },
        ),
    ):
        defaults = {item.name: item.default for item in fields(part)}
        for name, reason in reasons.items():
            if getattr(part, name) != defaults[name]:
                _LOG.info("%s%s has no effect here: %s", prefix, name, reason)
