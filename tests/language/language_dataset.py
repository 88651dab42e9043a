"""Small datasets of rows alone, for the annotation tests."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ingest.language.episode import read_language
from ingest.lerobot.source import open_source
from ingest.storage.local import LocalStore

CAM0, CAM1 = "observation.images.cam0", "observation.images.cam1"
LENGTHS = (12, 9, 14)


def say(text, **place):
    call = {"type": "function", "function": {"name": "say", "arguments": {"text": text}}}
    return {"role": "assistant", "content": None, "style": None, "tool_calls": [call], **place}


def vqa(role, content, camera, **place):
    return {"role": role, "content": content, "style": "vqa", "camera": camera, **place}


def write_shard(path: Path, episodes, first_index, lengths, **extra):
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = [frame for episode in episodes for frame in range(lengths[episode])]
    numbers = [episode for episode in episodes for _ in range(lengths[episode])]
    columns = {
        "action": pa.array([[float(frame), 0.0] for frame in frames], pa.list_(pa.float32())),
        "timestamp": pa.array(np.asarray(frames, np.float32) / np.float32(10)),
        "frame_index": pa.array(frames, pa.int64()),
        "episode_index": pa.array(numbers, pa.int64()),
        "index": pa.array(range(first_index, first_index + len(frames)), pa.int64()),
        "task_index": pa.array([min(number, 1) for number in numbers], pa.int64()),
        **{
            name: pa.array([values[number][frame] for number, frame in zip(numbers, frames, strict=True)]) for name, values in extra.items()
        },
    }
    pq.write_table(pa.table(columns).replace_schema_metadata({"huggingface": "{}"}), path)


def make(root: Path, features=None, lengths=LENGTHS, **extra) -> Path:
    """Three episodes in two shards, without pictures (nothing here decodes)."""
    write_shard(root / "data/chunk-000/file-000.parquet", (0, 1), 0, lengths, **extra)
    write_shard(root / "data/chunk-000/file-001.parquet", (2,), lengths[0] + lengths[1], lengths, **extra)
    meta = root / "meta"
    (meta / "episodes/chunk-000").mkdir(parents=True)
    pq.write_table(pa.table({"task_index": [0, 1], "task": ["make tea", "wipe"]}), meta / "tasks.parquet")
    bounds = [0, *itertools.accumulate(lengths)]
    table = {
        "episode_index": [0, 1, 2],
        "length": list(lengths),
        "dataset_from_index": bounds[:-1],
        "dataset_to_index": bounds[1:],
        "data/chunk_index": [0, 0, 0],
        "data/file_index": [0, 0, 1],
        "tasks": [["make tea"], ["wipe"], ["wipe"]],
    }
    pq.write_table(pa.table(table), meta / "episodes/chunk-000/file-000.parquet")
    scalar = {name: {"dtype": "int64", "shape": [1], "names": None} for name in ("frame_index", "episode_index", "index", "task_index")}
    declared = {
        "action": {"dtype": "float32", "shape": [2], "names": None},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        **scalar,
        **(features or {}),
    }
    info = {
        "codebase_version": "v3.0",
        "fps": 10,
        "total_episodes": 3,
        "total_frames": sum(lengths),
        "total_tasks": 2,
        "chunks_size": 1000,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": declared,
    }
    (meta / "info.json").write_text(json.dumps(info), encoding="utf-8")
    return root


def source_of(root):
    return open_source(LocalStore.at(root))


def times_of(root):
    return {language.episode: language.timestamps for language in read_language(source_of(root))}
