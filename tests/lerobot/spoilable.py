"""A dataset on disk that tests change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ingest.lerobot.source import Source, open_source
from ingest.storage.local import LocalStore


@dataclass(frozen=True)
class Dataset:
    """A dataset on disk that a test may change."""

    root: Path

    @property
    def store(self) -> LocalStore:
        return LocalStore.at(self.root)

    def open(self) -> Source:
        return open_source(self.store)

    def edit_info(self, change: Callable[[dict[str, Any]], None]) -> None:
        path = self.root / "meta/info.json"
        info = json.loads(path.read_text())
        change(info)
        path.write_text(json.dumps(info))

    def edit_rows(self, path: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        """Rewrites a parquet file row by row, keeping its schema."""
        table = pq.read_table(self.root / path)
        pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema), self.root / path)

    def edit_table(self, path: str, change: Callable[[pa.Table], pa.Table], **options: Any) -> None:
        """Rewrites a parquet file as a table."""
        pq.write_table(change(pq.read_table(self.root / path)), self.root / path, **options)

    def edit_episode(self, episode: int, **columns: Any) -> None:
        """Overwrites columns of one episode row; ``__`` in a name stands for ``/`` and ``__cam`` for the camera."""

        def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            for row in rows:
                if row["episode_index"] == episode:
                    for name, value in columns.items():
                        row[name.replace("__cam__", "videos/observation.images.cam0/").replace("__", "/")] = value
            return rows

        self.edit_rows(EPISODES, change)


EPISODES = "meta/episodes/chunk-000/file-000.parquet"
CAMERA = "observation.images.cam0"
