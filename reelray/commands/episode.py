"""``reelray episode export``: one camera of one episode as a video of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from ingest.errors import SelectionError
from ingest.lerobot.source import open_source
from ingest.video.index import ProbingIndex
from reelray.commands.common import Flat, PlaceArguments, Source, check_outputs, human_bytes, print_facts, print_json


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeExport:
    """Write one camera of one episode as an MP4 of its own, without encoding again."""

    src: Source
    """Location of the dataset."""
    episode: Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="EPISODE")]
    """Episode index."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT.mp4")]
    """File to create or replace."""
    camera: str | None = None
    """Camera; may be left out where the dataset has one."""
    place: Flat[PlaceArguments] = field(default_factory=PlaceArguments)
    json: bool = False
    """Print what was written as JSON."""

    def run(self) -> int:
        """Exports and says what was written."""
        from ingest.video.mini import export_episode

        output = self.output.expanduser()
        check_outputs(output=output)
        source = open_source(self.place.store(self.src), allow_unknown_version=self.place.allow_unknown_version)
        camera = self.camera
        if camera is None:
            if len(source.cameras) != 1:
                raise SelectionError(f"{source.store.url} has the cameras {', '.join(source.cameras) or 'none'}: name one with --camera")
            (camera,) = source.cameras
        path, first, count = source.pictures(self.episode, camera)
        if not count:
            raise SelectionError(f"{source.store.url}: episode {self.episode} has no frames to export")
        table = ProbingIndex(source.store).table(path)
        source.check_pictures(path, camera, table.pictures)
        nbytes = export_episode(source.store, table, first, count, output)
        facts = {"output": str(output), "episode": self.episode, "camera": camera, "source": path, "pictures": count, "bytes": nbytes}
        if self.json:
            print_json(facts)
        else:
            print_facts(facts | {"episode": str(self.episode), "bytes": human_bytes(nbytes)})
        return 0
