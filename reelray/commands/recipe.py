"""``reelray recipe check | coverage | render | styles``: language recipes and annotations before training."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import tyro

from ingest.storage.atomic import write_atomic
from reelray.commands.common import Flat, PlaceArguments, check_outputs

if TYPE_CHECKING:
    from ingest.language.preview import Picture
    from ingest.lerobot.source import Source

Positional = tyro.conf.Positional


class Report(Protocol):
    """What every report of this module offers."""

    def to_text(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class RecipeCheck:
    """Lint a language recipe. Status 1: it does not load, or has warnings and --strict was given."""

    file: Annotated[str, Positional, tyro.conf.arg(metavar="FILE")]
    """Recipe file, or the name of a shipped recipe (subtask, subtask_joint, subtask_mem, subtask_mem_vqa_speech)."""
    source: str | None = None
    """Dataset whose cameras the recipe must match."""
    place: Flat[PlaceArguments] = field(default_factory=PlaceArguments)
    json: bool = False
    """Print JSON."""
    html: Path | None = None
    """Also write a page here."""
    strict: bool = False
    """Count warnings as failures."""

    def run(self) -> int:
        """Prints the findings."""
        from ingest.language.lint import check_recipe
        from ingest.language.recipe_file import read_recipe

        check_outputs(html=self.html)
        cameras = None if self.source is None else _cameras(_open(self.source, self.place))
        report = check_recipe(read_recipe(self.file), cameras)
        _show(report, self.json, self.html, report.to_html)
        return 1 if self.strict and report.warnings else 0


@dataclass(frozen=True, slots=True)
class RecipeCoverage:
    """Which branch of a recipe each frame takes. Status 1: some frames are ambiguous."""

    source: Annotated[str, Positional, tyro.conf.arg(metavar="SRC")]
    """Dataset."""
    recipe: str
    """Recipe file or the name of a shipped recipe."""
    episodes: tuple[int, ...] = ()
    """Episodes to look at; all by default."""
    place: Flat[PlaceArguments] = field(default_factory=PlaceArguments)
    policy: Literal["error", "fallback", "drop"] = "fallback"
    """What becomes of annotated frames on which the recipe does not apply."""
    on_ambiguous: Literal["error", "fallback", "drop"] = "fallback"
    """What becomes of frames whose rows are ambiguous; they are listed either way."""
    json: bool = False
    """Print JSON."""
    html: Path | None = None
    """Also write a page here."""

    def run(self) -> int:
        """Prints the coverage."""
        from ingest.language.coverage import plan_language
        from ingest.language.coverage_report import CoverageReport
        from ingest.language.episode import read_language
        from ingest.language.recipe_file import load_recipe
        from ingest.language.stage import RenderStage

        check_outputs(html=self.html)
        stage = RenderStage(load_recipe(self.recipe), self.policy, self.on_ambiguous)
        report = CoverageReport(plan_language(stage, read_language(_open(self.source, self.place), self.episodes or None)))
        _show(report, self.json, self.html, report.to_html)
        return 1 if report.plan.faults else 0


@dataclass(frozen=True, slots=True)
class RecipeRender:
    """The chat that one frame becomes."""

    source: Annotated[str, Positional, tyro.conf.arg(metavar="SRC")]
    """Dataset."""
    recipe: str
    """Recipe file or the name of a shipped recipe."""
    episode: int
    """Episode index."""
    frame: int
    """Frame number in the episode."""
    place: Flat[PlaceArguments] = field(default_factory=PlaceArguments)
    json: bool = False
    """Print JSON."""
    html: Path | None = None
    """Also write a page with the pictures here."""

    def run(self) -> int:
        """Prints the chat."""
        from ingest.language.episode import read_language
        from ingest.language.preview import preview_frame
        from ingest.language.recipe_file import load_recipe
        from ingest.language.stage import RenderStage

        check_outputs(html=self.html)
        source = _open(self.source, self.place)
        (language,) = read_language(source, [self.episode])
        stage = RenderStage(load_recipe(self.recipe), on_ambiguous="fallback")
        preview = preview_frame(stage, language, self.frame, _cameras(source))
        _show(preview, self.json, self.html, lambda: preview.to_html(_pictures(source)))
        return 1 if preview.verdict.error is not None else 0


@dataclass(frozen=True, slots=True)
class RecipeStyles:
    """The distinct annotation texts of a dataset, with counts and spans. Status 1: rows that no recipe can use."""

    source: Annotated[str, Positional, tyro.conf.arg(metavar="SRC")]
    """Dataset."""
    episodes: tuple[int, ...] = ()
    """Episodes to look at; all by default."""
    place: Flat[PlaceArguments] = field(default_factory=PlaceArguments)
    json: bool = False
    """Print JSON."""
    html: Path | None = None
    """Also write a page here."""

    def run(self) -> int:
        """Prints the vocabulary."""
        from ingest.language.episode import read_language
        from ingest.language.inventory import style_report

        check_outputs(html=self.html)
        source = _open(self.source, self.place)
        report = style_report(read_language(source, self.episodes or None), _cameras(source))
        _show(report, self.json, self.html, report.to_html)
        return 1 if any(finding.severity == "error" for finding in report.findings) else 0


def _open(location: str, place: PlaceArguments) -> Source:
    from ingest.lerobot.source import open_source

    return open_source(place.store(location), allow_unknown_version=place.allow_unknown_version)


def _cameras(source: Source) -> Sequence[str]:
    return [*source.cameras, *source.info.images]


def _pictures(source: Source) -> Picture:
    """Single pictures by position, decoded from the file or parquet cell that holds them."""
    from ingest.lerobot.rows import read_rows
    from ingest.video.fetch import read_pictures
    from ingest.video.index import ProbingIndex
    from ingest.video.pixels import PictureWriter

    index = ProbingIndex(source.store)

    def picture(episode: int, frame: int, camera: str) -> Any:
        if camera in source.info.images:
            return read_rows(source, episode, [camera]).image(camera, frame)
        path, number = source.locate(episode, frame, camera)
        ((_, decoded),) = read_pictures(source.store, index.table(path), [number])
        return PictureWriter().picture(decoded)

    return picture


def _show(report: Report, as_json: bool, html: Path | None, make_page: Any) -> None:
    if html is not None:
        write_atomic(html, make_page().encode())
        print(f"wrote {html}", file=sys.stderr)
    print(json.dumps(report.to_json(), ensure_ascii=False, indent=2) if as_json else report.to_text())
