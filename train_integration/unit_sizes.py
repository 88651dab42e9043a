"""Units short enough, and lanes few enough, for a decoded budget to hold every unit whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from ingest.engine.assemble import BatchAssembler
from ingest.engine.dataset import Dataset
from ingest.engine.pictures import PictureForm
from ingest.plan import plan_epoch
from train_integration.direct import batches_at_once
from train_integration.fits import peak_pictures
from train_integration.options import StreamDescription, describe_stream
from train_integration.stretches import FIRST_STRETCH_SAMPLES, Stretch
from train_integration.worklist import WorkList, work_list

LONGEST_UNIT = 128
"""Frames beyond which longer units save nothing that is worth their memory."""

_FRAMES = (*range(LONGEST_UNIT, 32, -8), *range(32, 16, -4), 16, 8, 4, 2, 1)
_SHORT = 16
"""Frames of a unit below which fewer lanes are better: what a unit costs is then paid for a handful of pictures."""

_REACHES = 8
"""How many times as long as its windows a unit is at least: what windows reach into beyond it is decoded again."""


def that_fits(dataset: Dataset, description: StreamDescription, *, world_size: int, decoded_bytes: int) -> StreamDescription:
    """The same stream with the longest units, at most as long as it has them, that the decoded budget of a rank holds whole.

    A unit is never shorter than a group of pictures, so where groups are long there are fewer lanes. Units that are not
    held whole are decoded sample by sample, some groups of pictures many times. The order is another one than that of the
    stream given, so this is for measuring, and to find out which settings to train with.

    Args:
        dataset: the opened dataset.
        description: the stream; returned as it is where its order has no lanes or nothing is decoded.
        world_size: ranks.
        decoded_bytes: decoded pictures that one rank may hold.
    """
    config = description.config
    if config.plan.strategy != "lanes" or not dataset.spec.cameras or config.decode_mode == "on_demand":
        return description
    most = config.lane_frames if config.lane_frames is not None else max(1, int(description.units.frames.max()))
    every = config.plan.lane_count(config.plan.batch_size)
    frames = [most, *(one for one in _FRAMES if one < most)]
    lanes = [every, *(one for one in range(every - 1, 0, -1) if every % one == 0 or one in (3, 6, 12))]
    least = max(_SHORT, _REACHES * _reach(dataset))
    short = [one for one in frames if one < least]
    tried = description
    for count, longest in [*product(lanes, frames[: len(frames) - len(short)] or frames[:1]), *product([1], short)]:
        plan = config.plan if count == every else replace(config.plan, lanes=count)
        tried = describe_stream(dataset, replace(config, plan=plan, lane_frames=longest))
        if _holds(dataset, tried, world_size, decoded_bytes):
            break
    return tried


def _reach(dataset: Dataset) -> int:
    """Frames that the pictures' windows reach beyond an anchor, to both sides together."""
    middle = 1 << 20
    start, stop = dataset.spec.reach(dataset.spec.cameras, middle, middle + 1, 2 * middle)
    return stop - start - 1


def _holds(dataset: Dataset, description: StreamDescription, world_size: int, decoded_bytes: int) -> bool:
    """Whether each rank's budget holds whatever is open at a time when every unit is decoded whole."""
    spec = dataset.spec
    sizes = [PictureForm.of(spec, camera).nbytes(spec.features[camera]) for camera in spec.cameras]
    direct = BatchAssembler(spec, (dataset.source.store,), as_uint8=True, transform=description.config.image_transforms).takes_decoded
    plan = plan_epoch(description.units, description.with_topology(world_size=world_size))
    for rank in range(world_size):
        stretch = Stretch.begin(plan, rank, None, FIRST_STRETCH_SAMPLES)
        work = work_list(plan, stretch.ranked, spec, description.lengths, description.unit_bytes, start=stretch.start, stop=stretch.stop)
        needed = batches_at_once(work) * work.batch_size * sum(sizes) if direct else _pictures(work) * max(sizes)
        if needed > decoded_bytes:
            return False
    return True


def _pictures(work: WorkList) -> int:
    return peak_pictures(work.first_step, work.last_step, work.pictures)
