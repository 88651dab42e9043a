"""Measure two ways from a decode actor to the rank: slots of a shared slab, and Ray's object store.

    python -m benchmarks.handover [--out benchmarks/results/handover.json] [--rounds 5]

One actor decodes the same runs of H.264 pictures (640x480, GOP 30) again and again, and the rank gathers them into one warm batch. With the
slab the actor writes to slots that both have mapped. With the object store, which is what decoders on other nodes use, the actor returns an
object and the rank copies out of it. CPU seconds are those of driver, actor and Ray's processes; ways alternate, figures are medians.
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
from actors.slab import FrameSlab
from ingest.engine import open_dataset
from ingest.engine.fetch import UnitRequest
from ingest.engine.pictures import PictureForm, runs
from ingest.lerobot.make import MakeOptions, make_dataset
from train_integration.cluster import ray_session
from train_integration.process_usage import ProcessTree, machine

MADE = MakeOptions(episodes=4, frames="240", cameras=1, size=(480, 640), gop=30, pattern="noise")
WAYS = ("slab", "object_store")


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


def deliver(way: str, actor: Any, requests: list[DecodeRequest], slab: FrameSlab, batch: NDArray[np.uint8]) -> None:
    """Has every run decoded and gathers its pictures."""
    for request in requests:
        if way == "slab":
            ray.get(actor.decode.remote(request))
            pictures = [slab.view(int(slot), request.shape, np.uint8) for slot in request.slots]
        else:
            pictures = ray.get(actor.decode.remote(replace(request, slab=None, slots=request.slots[:0]))).pictures
        for place, picture in enumerate(pictures):
            batch[place % len(batch)] = picture


def main() -> None:
    """Measures and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/handover.json"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    height, width = MADE.size
    shape = (height, width, 3)
    costs: dict[str, list[float]] = {way: [] for way in WAYS}
    with TemporaryDirectory(prefix="reelray-bench-") as folder, ray_session(cpus=2):
        make_dataset(Path(folder) / "set", MADE)
        slab = FrameSlab(int(np.prod(shape)), MADE.episodes * int(MADE.frames))
        requests = requests_of(str(Path(folder) / "set"), slab, shape)
        pictures = sum(len(request.wanted) for request in requests)
        batch = np.zeros((16, *shape), np.uint8)
        actor: Any = DecodeActor.remote()
        for way in WAYS:  # also what maps and touches memory for the first time
            deliver(way, actor, requests, slab, batch)
        for _ in range(options.rounds):
            for way in WAYS:
                tree = ProcessTree(os.getpid())
                tree.start()
                deliver(way, actor, requests, slab, batch)
                costs[way].append(1000 * tree.stop().cpu_s / pictures)
        slab.close()
    figures = {f"{way}_cpu_ms": round(statistics.median(costs[way]), 3) for way in WAYS}
    ratio = round(statistics.median(b / a for a, b in zip(costs["slab"], costs["object_store"], strict=True)), 3)
    report = {
        "machine": machine(),
        "command": "python -m benchmarks.handover",
        "pictures": pictures,
        **figures,
        "object_store_over_slab": ratio,
    }
    print(report)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
