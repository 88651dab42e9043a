"""A small dataset with every kind of feature, and the pictures of its videos by linear decode."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.source import Source

DEPTH = "observation.depth"
PICTURE = "observation.picture"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"


def depth_of(index: int) -> np.ndarray:
    """The depth picture of a row, uint16[32, 64], 12 bits."""
    return ((np.arange(32 * 64, dtype=np.int64).reshape(32, 64) * 7 + 131 * index) % 4096).astype(np.uint16)


def picture_of(index: int) -> np.ndarray:
    """The stored picture of a row, uint8[6, 8, 3]."""
    return np.random.default_rng(index).integers(0, 256, (6, 8, 3), dtype=np.uint8)


def make_rich(root: Path) -> Path:
    """Makes the dataset."""
    make_dataset(root, MakeOptions(episodes=6, frames="4:19", size=(32, 64), fps=10, gop=4, bframes=1, video_files=2, seed=9))
    for path in sorted((root / "data").rglob("*.parquet")):
        table = pq.read_table(path)
        index = table.column("index").to_pylist()
        pictures = pa.array([{"bytes": _png(picture_of(row)), "path": None} for row in index])
        table = table.append_column("next.done", pa.array([row % 3 == 0 for row in index]))
        table = table.append_column("note", pa.array([None if row % 5 == 0 else f"row {row}" for row in index]))
        table = table.append_column("nothing", pa.nulls(len(index))).append_column(PICTURE, pictures)
        pq.write_table(table, path, row_group_size=17)
    table = pq.read_table(root / EPISODES)
    lengths = np.array(table.column("length").to_pylist())
    _write_depth(root / f"videos/{DEPTH}/chunk-000/file-000.mp4", int(lengths.sum()))
    starts = (np.cumsum(lengths) - lengths) / 10
    zeros = pa.array(np.zeros(len(lengths), np.int64))
    columns = {
        "chunk_index": zeros,
        "file_index": zeros,
        "from_timestamp": pa.array(starts),
        "to_timestamp": pa.array(starts + lengths / 10),
    }
    for name, values in columns.items():
        table = table.append_column(f"videos/{DEPTH}/{name}", values)
    pq.write_table(table, root / EPISODES)
    info = json.loads((root / "meta/info.json").read_text())
    info["features"] |= {
        DEPTH: {"dtype": "video", "shape": [32, 64, 1], "names": None, "info": {"video.is_depth_map": True, "video.pix_fmt": "gray12le"}},
        PICTURE: {"dtype": "image", "shape": [6, 8, 3], "names": ["height", "width", "channels"]},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        "note": {"dtype": "string", "shape": [1], "names": None},
        "nothing": {"dtype": "null", "shape": [1], "names": None},
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


def _png(picture: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(picture).save(sink, "PNG")
    return sink.getvalue()


def _write_depth(path: Path, count: int) -> None:
    path.parent.mkdir(parents=True)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx265", rate=10, options={"x265-params": "lossless=1:keyint=5:log-level=none"})
        stream.width, stream.height, stream.pix_fmt = 64, 32, "gray12le"
        for index in range(count):
            frame = av.VideoFrame.from_ndarray(depth_of(index), format="gray12le")
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


class LinearPictures:
    """Pictures of whole files, decoded from the start with a container, as no part of the package does."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._files: dict[tuple[str, str], list[np.ndarray]] = {}

    def picture(self, camera: str, episode: int, frame: int) -> np.ndarray:
        """HWC uint8, or HW1 uint16 for depth."""
        path, number = self._source.locate(episode, frame, camera)
        layout = "gray12le" if camera == DEPTH else "rgb24"
        if (path, layout) not in self._files:
            with av.open(str(Path(self._source.store.url) / path)) as container:
                found = [picture.to_ndarray(format=layout) for picture in container.decode(video=0)]
            self._files[path, layout] = [picture[..., None] if picture.ndim == 2 else picture for picture in found]
        return self._files[path, layout][number]
