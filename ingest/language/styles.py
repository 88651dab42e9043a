"""Which styles exist, which column holds them, and which of them belong to one camera."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from ingest.errors import LanguageError

STATE_COLUMN = "language_persistent"
"""Column of rows that stay in force: the same list on every frame of an episode."""

EVENT_COLUMN = "language_events"
"""Column of rows that fire on exactly the frame that carries them."""

LANGUAGE_COLUMNS = (STATE_COLUMN, EVENT_COLUMN)

Column = Literal["language_persistent", "language_events"]


@dataclass(frozen=True, slots=True)
class Style:
    """One kind of annotation.

    Attributes:
        name: as written in the ``style`` field of a row; case matters.
        column: the column that holds rows of this style.
        view_dependent: True when a row speaks about what one camera sees and must name it.
    """

    name: str
    column: Column
    view_dependent: bool = False


_BUILT_IN = (
    Style("subtask", STATE_COLUMN),
    Style("plan", STATE_COLUMN),
    Style("memory", STATE_COLUMN),
    Style("motion", STATE_COLUMN),
    Style("task_aug", STATE_COLUMN),
    Style("interjection", EVENT_COLUMN),
    Style("vqa", EVENT_COLUMN, view_dependent=True),
    Style("trace", EVENT_COLUMN, view_dependent=True),
)


@dataclass(slots=True)
class StyleRegistry:
    """The styles known to this process: the built-in ones and what was registered.

    Register project styles at import time, in every process that renders.
    """

    _styles: dict[str, Style] = field(default_factory=lambda: {style.name: style for style in _BUILT_IN})

    def register(self, name: str, column: Column, view_dependent: bool = False) -> Style:
        """Adds a style; adding the same definition again changes nothing.

        Raises:
            LanguageError: the name is empty, the column is not a language column, or the name means something else already.
        """
        if not name or name != name.strip():
            raise LanguageError(f"style name {name!r} must be a non-empty string without outer blanks", kind="bad_style_name")
        if column not in LANGUAGE_COLUMNS:
            raise LanguageError(
                f"style {name!r}: column must be one of {LANGUAGE_COLUMNS}, found {column!r}", kind="bad_style_column", style=name
            )
        style = Style(name, column, view_dependent)
        known = self._styles.get(name)
        if known is not None and known != style:
            raise LanguageError(f"style {name!r} is already registered as {known}; choose another name", kind="style_taken", style=name)
        self._styles[name] = style
        return style

    def find(self, name: str | None) -> Style | None:
        """The style of that name, or None for the null style and for unknown names."""
        return None if name is None else self._styles.get(name)

    def column_of(self, name: str | None) -> Column:
        """The column that holds rows of a style; the null style (speech and tool rows) belongs to the events.

        Raises:
            LanguageError: unknown style.
        """
        if name is None:
            return EVENT_COLUMN
        style = self._styles.get(name)
        if style is None:
            known = ", ".join(self._styles)
            raise LanguageError(
                f"unknown style {name!r}: known are {known}; register project styles first", kind="unknown_style", style=name
            )
        return style.column

    @property
    def styles(self) -> MappingProxyType[str, Style]:
        """Read-only view by name, in order of registration."""
        return MappingProxyType(self._styles)


STYLES = StyleRegistry()
"""The registry that every function of this package uses."""


def register(name: str, column: Column, view_dependent: bool = False) -> Style:
    """Adds a style to the registry of this process; see ``StyleRegistry.register``."""
    return STYLES.register(name, column, view_dependent)


def column_for_style(style: str | None) -> Column:
    """``language_persistent`` or ``language_events`` for a style; None (speech and tool rows) is an event.

    Raises:
        LanguageError: unknown style; case matters and the empty string is unknown.
    """
    return STYLES.column_of(style)


def validate_camera_field(style: str | None, camera: str | None) -> None:
    """Checks the camera rule: rows of view-dependent styles name a camera, all others must not.

    Whether the camera exists is checked where the dataset's cameras are known (``check_staging``, ``write_annotations``).

    Raises:
        LanguageError: a camera is missing, or given where none may be (the empty string included).
    """
    known = STYLES.find(style)
    if known is not None and known.view_dependent:
        if not camera:
            raise LanguageError(
                f"style {style!r} describes one view: set camera to an observation.images.* key, found {camera!r}",
                kind="camera_required",
                style=style,
            )
    elif camera is not None:
        raise LanguageError(f"style {style!r} must leave camera null, found {camera!r}", kind="camera_forbidden", style=style)
