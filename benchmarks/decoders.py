"""Measure the decoders against each other: CPU milliseconds per picture of the same files, in one thread.

    python -m benchmarks.decoders [--out benchmarks/results/decoders.json] [--rounds 5] [--dataset NAME=DIR ...]

Decodes whole episodes of one camera into ``rgb24`` arrays with each decoder in turn, and compares the pictures. Decoders alternate;
figures are those of the median round. torchcodec needs the extra of that name, and FFmpeg's libraries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ingest.engine import open_dataset
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.video.backends import PictureDecoder
from ingest.video.pixels import PictureWriter
from ingest.video.spans import picture_span
from train_integration.backends import open_decoder
from train_integration.process_usage import machine

DECODERS = ("pyav", "torchcodec")
EPISODES = 2
MADE = {
    f"{codec}_g{gop}_640x480": MakeOptions(
        episodes=EPISODES, frames="250", cameras=1, size=(480, 640), codec=codec, gop=gop, pattern="noise"
    )
    for codec, gop in (("h264", 2), ("h264", 30), ("h264", 250))
}


def measure(source: str, rounds: int) -> dict[str, Any]:
    """CPU milliseconds per picture of every decoder, and how far pictures differ from those of the first."""
    dataset = open_dataset(source)
    camera = dataset.spec.cameras[0]
    writer, store = PictureWriter(), dataset.source.store
    spans = []
    for episode in range(EPISODES):
        path, first, count = dataset.source.pictures(episode, camera)
        table = dataset.index.table(path)
        span = picture_span(table, range(first, first + count))
        spans.append((table, span, store.read_ranges(path, span.ranges), np.zeros((count, *writer.shape(table)), np.uint8)))

    def once(decoder: PictureDecoder) -> float:
        started = time.process_time()
        for table, span, payload, out in spans:
            for _ in decoder.decode_into(table, span, payload, span.wanted, writer, out):
                pass
        return 1000 * (time.process_time() - started) / sum(len(out) for *_, out in spans)

    decoders = [open_decoder(name) for name in DECODERS]
    pictures = []
    for decoder in decoders:  # also what loads libraries and touches memory for the first time
        once(decoder)
        pictures.append([out.astype(np.int16) for *_, out in spans])
    costs = [[once(decoder) for decoder in decoders] for _ in range(rounds)]
    difference = max(int(np.abs(a - b).max()) for a, b in zip(*pictures, strict=True))
    figures: dict[str, Any] = {"pictures": sum(len(out) for *_, out in spans), "largest_difference": difference}
    for number, name in enumerate(DECODERS):
        figures[f"{name}_cpu_ms"] = round(statistics.median(cost[number] for cost in costs), 3)
    figures["torchcodec_over_pyav"] = round(statistics.median(cost[1] / cost[0] for cost in costs), 3)
    return figures


def main() -> None:
    """Measures and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decoders.json"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dataset", nargs="*", default=[], metavar="NAME=DIR", help="datasets to measure as well")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with TemporaryDirectory(prefix="reelray-bench-") as folder:
        places = dict(text.split("=", 1) for text in options.dataset)
        for name, made in MADE.items():
            make_dataset(Path(folder) / name, made)
            places[name] = str(Path(folder) / name)
        for name, place in places.items():
            figures[name] = measure(place, options.rounds)
            print(name, figures[name], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(), "command": "python -m benchmarks.decoders", "sets": figures}
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
