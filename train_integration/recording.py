"""Order rows of delivered batches, with digests of the very bytes that were delivered."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ingest.engine.assemble import Sample
from ingest.language.stage import RenderStage
from train_integration.ledger import Rows
from train_integration.options import StreamDescription
from train_integration.producer import Delivery


def order_rows(
    description: StreamDescription,
    delivery: Delivery,
    rank: int,
    batch: Sample,
    cameras: Sequence[str],
    *,
    digests: bool = True,
    recipe: RenderStage | None = None,
) -> Rows:
    """The order rows of one batch.

    Args:
        description: the stream that the batch is of; it knows indices where the batch has none, or a window of them.
        delivery: which samples the batch holds.
        rank: data-parallel rank.
        batch: as delivered, NumPy.
        cameras: cameras to digest.
        digests: whether to add ``digest:<camera>`` columns: xxh3-64 of the picture's HWC bytes (of all window pictures,
            one after another).
        recipe: with digests, adds ``digest:messages`` of what it rendered: xxh3-64 of the JSON text of messages, streams and
            targets.
    """
    size = len(delivery.frame)
    rows: Rows = {
        "dataset": delivery.dataset.astype(np.int32),
        "epoch": np.full(size, delivery.epoch, np.int64),
        "rank": np.full(size, rank, np.int32),
        "worker": np.full(size, delivery.worker, np.int32),
        "step": np.full(size, delivery.step, np.int64),
        "position": delivery.position.astype(np.int64),
        "episode_index": delivery.episode.astype(np.int64),
        "frame_index": delivery.frame.astype(np.int64),
        "index": description.global_index(delivery.dataset, delivery.episode, delivery.frame),
        "is_pad": delivery.is_pad.copy(),
        "committed": np.ones(size, np.bool_),
        "t_ns": np.full(size, time.time_ns(), np.int64),
    }
    if digests:
        rows.update({f"digest:{camera}": picture_digests(batch[camera]) for camera in cameras})
    if digests and recipe is not None:
        rows["digest:messages"] = message_digests([batch.get(key, [None] * size) for key in recipe.keys])
    return rows


def picture_digests(pictures: Any) -> NDArray[np.uint64]:
    """xxh3-64 of each sample's pictures, HWC: uint64[B] from (B, C, H, W) or (B, T, C, H, W)."""
    channels_last = np.moveaxis(np.asarray(pictures), -3, -1)
    return np.array([xxhash.xxh3_64_intdigest(np.ascontiguousarray(one).data) for one in channels_last], dtype=np.uint64)


def message_digests(columns: Sequence[Sequence[Any]]) -> NDArray[np.uint64]:
    """xxh3-64 of each sample's rendered fields as JSON: uint64[B] from one list of B values per field."""
    return np.array([xxhash.xxh3_64_intdigest(_json_text(fields).encode()) for fields in zip(*columns, strict=True)], dtype=np.uint64)


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)


def joined(parts: Sequence[Mapping[str, NDArray[Any]]]) -> Rows:
    """Rows of several batches as one."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
