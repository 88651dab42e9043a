"""Measure the two frame stores: slots of a shared slab, and Ray's object store.

    python -m benchmarks.handover [--out benchmarks/results/handover.json] [--rounds 5]

First the hand-over alone: one actor decodes the same runs of H.264 pictures (640x480, GOP 30) again and again, and the rank gathers
them into one warm batch. With the slab the actor writes to slots that both have mapped; with the object store it returns an object that
the rank maps. Then whole streams to two ranks, decoded by two actors, with samples of one picture (the slab's slots are then places in
batches) and of four. CPU seconds are those of all processes; ways alternate, figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from actors.decode_pool import DecodeActor, DecodeRequest
from actors.manager import PoolSettings
from actors.slab import FrameSlab
from ingest.engine import open_dataset
from ingest.engine.fetch import UnitRequest
from ingest.engine.pictures import PictureForm, runs
from ingest.engine.spec import ReadOptions
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings
from train_integration.benchmarking import measure_stream
from train_integration.cluster import ray_session
from train_integration.options import FrameStoreName, StreamConfig, open_stream
from train_integration.process_usage import ProcessTree, machine

MADE = MakeOptions(episodes=4, frames="240", cameras=1, size=(480, 640), gop=30, pattern="noise")
STREAMED = replace(MADE, episodes=48, cameras=2, video_files=2)
WAYS: tuple[FrameStoreName, ...] = ("slab", "object_store")
RANKS, ACTORS, WINDOWS = 2, 2, (1, 4)
BUDGET_GB = 0.35
"""Decoded pictures of each rank: what a local cluster's object store holds."""


def requests_of(source: str, slab: FrameSlab, shape: tuple[int, int, int]) -> list[DecodeRequest]:
    """The dataset's pictures in runs, each with slots of its own."""
    dataset = open_dataset(source)
    camera = dataset.spec.cameras[0]
    form, reader = PictureForm.of(dataset.spec, camera), dataset.reader()
    requests: list[DecodeRequest] = []
    for episode, length in zip(dataset.selection.tolist(), dataset.lengths.tolist(), strict=True):
        track = reader.read(UnitRequest(0, episode, 0, length)).tracks[camera]
        requests += [
            DecodeRequest(source, episode, track, run, form, shape, slab.handle, slab.reserve(len(run)))
            for run in runs(track, np.arange(length, dtype=np.int64))
        ]
    return requests


def deliver(way: FrameStoreName, actor: Any, requests: list[DecodeRequest], slab: FrameSlab, batch: NDArray[np.uint8]) -> None:
    """Has every run decoded and gathers its pictures."""
    for request in requests:
        if way == "slab":
            ray.get(actor.decode.remote(request))
            pictures = [slab.view(int(slot), request.shape, np.uint8) for slot in request.slots]
        else:
            pictures = ray.get(actor.decode.remote(replace(request, slab=None, slots=request.slots[:0]))).pictures
        for place, picture in enumerate(pictures):
            batch[place % len(batch)] = picture


def hand_over(folder: Path, rounds: int) -> dict[FrameStoreName, list[float]]:
    """CPU milliseconds for each picture, by way, of every round."""
    height, width = MADE.size
    shape = (height, width, 3)
    make_dataset(folder / "calls", MADE)
    slab = FrameSlab(int(np.prod(shape)), MADE.episodes * int(MADE.frames))
    requests = requests_of(str(folder / "calls"), slab, shape)
    pictures = sum(len(request.wanted) for request in requests)
    batch = np.zeros((16, *shape), np.uint8)
    actor: Any = DecodeActor.remote()
    for way in WAYS:  # also what maps and touches memory for the first time
        deliver(way, actor, requests, slab, batch)
    costs: dict[FrameStoreName, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            tree = ProcessTree(os.getpid())
            tree.start()
            deliver(way, actor, requests, slab, batch)
            costs[way].append(1000 * tree.stop().cpu_s / pictures)
    slab.close()
    ray.kill(actor)
    return costs


def stream(source: str, window: int, rounds: int) -> dict[FrameStoreName, list[tuple[float, float]]]:
    """CPU milliseconds and pictures per second, by way, of every round."""
    dataset = open_dataset(source)
    offsets = [-step / dataset.fps for step in range(window - 1, -1, -1)]
    read = ReadOptions(delta_timestamps=dict.fromkeys(dataset.spec.cameras, offsets) if window > 1 else None)
    costs: dict[FrameStoreName, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            config = StreamConfig(
                plan=PlanSettings(strategy="lanes", world_size=RANKS, batch_size=16, lanes=3),
                read=read,
                decode="pool",
                frame_store=way,
                lane_frames=30,
                decoded_budget_gb=BUDGET_GB,
            )
            description, _ = open_stream(source, config)
            tally, usage = measure_stream(description, world_size=RANKS, max_steps=None, pool=PoolSettings(actors=ACTORS), step_s=0.0)
            costs[way].append((1000 * usage.cpu_s / tally.pictures, tally.pictures / tally.wall_s))
    return costs


def figures(costs: dict[FrameStoreName, list[float]]) -> dict[str, float]:
    """Medians of both ways and of their ratio."""
    found = {f"{way}_cpu_ms": round(statistics.median(costs[way]), 3) for way in WAYS}
    ratio = statistics.median(b / a for a, b in zip(costs["slab"], costs["object_store"], strict=True))
    return found | {"object_store_over_slab": round(ratio, 3)}


def main() -> None:
    """Measures and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/handover.json"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    report: dict[str, Any] = {"command": "python -m benchmarks.handover"}
    with TemporaryDirectory(prefix="reelray-bench-") as name, ray_session(cpus=RANKS + ACTORS + 1):
        folder = Path(name)
        report["calls"] = figures(hand_over(folder, options.rounds))
        make_dataset(folder / "streamed", STREAMED)
        for window in WINDOWS:
            runs_of = stream(str(folder / "streamed"), window, options.rounds)
            costs = {way: [cpu_ms for cpu_ms, _ in runs_of[way]] for way in WAYS}
            speeds = {f"{way}_pictures_s": round(statistics.median(speed for _, speed in runs_of[way])) for way in WAYS}
            report[f"window{window}"] = figures(costs) | speeds
            print(report, flush=True)
        report["machine"] = machine()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
