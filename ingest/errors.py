"""The one exception tree. Every class is also a builtin, so callers may catch either.

A message says what happened, where, what was expected against what was found, and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence


class ReelrayError(Exception):
    """Root of every error that reelray raises on purpose."""


class SettingsError(ReelrayError, ValueError):
    """A setting, option or environment variable has no usable value."""


class UnsafeInputError(ReelrayError, ValueError):
    """Input tried to leave its sandbox: a path, template, URL scheme, pickle or oversized structure."""


class LocationError(ReelrayError, ValueError):
    """A dataset location cannot be parsed, or is not one of the allowed kinds."""


# --- the dataset itself -------------------------------------------------------------------------


class DatasetError(ReelrayError, ValueError):
    """The dataset as written cannot be used as asked."""


class UnsupportedVersionError(DatasetError):
    """The dataset has a codebase version that this reader does not read."""


class MetadataError(DatasetError):
    """Metadata is missing, unreadable, or contradicts itself or the files."""


class SelectionError(DatasetError):
    """The selection names episodes, cameras or columns that do not exist."""


class DamagedDataError(DatasetError):
    """Bytes or rows that should be there are missing or wrong.

    Attributes:
        dataset: location of the dataset without credentials, or None.
        episode: episode index, or None when the damage concerns a whole file.
        episodes: every episode index that the damage touches.
        camera: camera feature key, or None.
        file: path relative to the dataset root, or None.
        byte_range: half-open byte range in ``file``, or None.
        picture: picture number (0-based, in presentation order of the file), or None.
        tensor: tensor name, or None.
        element: flat index in ``tensor``, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        dataset: str | None = None,
        episode: int | None = None,
        episodes: Sequence[int] = (),
        camera: str | None = None,
        file: str | None = None,
        byte_range: tuple[int, int] | None = None,
        picture: int | None = None,
        tensor: str | None = None,
        element: int | None = None,
    ) -> None:
        super().__init__(message)
        self.dataset = dataset
        self.episode = episode
        self.episodes = tuple(episodes) if episodes else (() if episode is None else (episode,))
        self.camera = camera
        self.file = file
        self.byte_range = byte_range
        self.picture = picture
        self.tensor = tensor
        self.element = element

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only fields do not pickle by default; these cross process borders.
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(cls: type[ReelrayError], args: tuple[object, ...], fields: dict[str, object]) -> ReelrayError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class RowsError(DamagedDataError):
    """The parquet rows of an episode are missing, foreign, unreadable or out of order."""


class VideoFormatError(DamagedDataError):
    """A video file cannot be indexed: damaged, hostile, or of an unsupported kind."""


class UnsupportedTimelineError(VideoFormatError):
    """An edit list that cannot be followed exactly: several media edits, or a rate other than 1."""


class PictureCountError(DamagedDataError):
    """A video file holds another number of pictures than rows map to it."""


class DecodeError(DamagedDataError):
    """A picture could not be decoded, or the decoder returned another one than was asked for."""


class LeadInError(DecodeError):
    """Decoding has to begin earlier: the random-access point is none, or its pictures need a lead-in."""


class ChecksumError(DamagedDataError):
    """Payload bytes differ from the checksum recorded in the sidecar."""


class TimeDriftError(DamagedDataError):
    """Picture times deviate from row times by more than the tolerance, and strict time was asked for."""


# --- storage ------------------------------------------------------------------------------------


class StorageError(ReelrayError, OSError):
    """Reading or writing an object failed."""

    # OSError with one argument keeps ``str(error) == message`` and pickles as is.


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """The object does not exist."""


class AccessDeniedError(StorageError, PermissionError):
    """The object exists but may not be read or written with the present credentials."""


class ShortReadError(StorageError):
    """A range read returned another number of bytes than was asked for."""


class PlaceholderError(StorageError):
    """Something else stands where the object should be: a Git LFS pointer, or a web page. Trying again does not help."""


class ObjectChangedError(StorageError):
    """The object is no longer the one that was indexed; the message names both identities."""


class TransientStorageError(StorageError):
    """A fault that may pass: reset, time-out, 429, 5xx. Retries have been used up."""


class LockTimeoutError(ReelrayError, TimeoutError):
    """Another process held a lock for too long; the message names the lock."""


# --- sidecar ------------------------------------------------------------------------------------


class SidecarError(ReelrayError, ValueError):
    """A sidecar is invalid, stale, of another schema, or may not be published."""


# --- planning and streaming ---------------------------------------------------------------------


class PlanError(ReelrayError, ValueError):
    """No plan can be made from the units and settings given."""


class BudgetError(ReelrayError, MemoryError, ValueError):
    """One unit is larger than the byte budget; the message names the unit, both sizes and the setting."""


class ReservationError(BudgetError):
    """A unit needs more bytes than are reserved for it, because decoding has to begin further back than the index says.

    Attributes:
        leads: what reading it took so far: (name of a camera or file, random-access points further back).
    """

    def __init__(self, message: str, leads: Sequence[tuple[str, int]] = ()) -> None:
        super().__init__(message)
        self.leads = tuple(leads)


class CursorError(ReelrayError, ValueError):
    """A cursor cannot be read, or belongs to another plan; the message names the field that differs."""


class RecipeError(ReelrayError, ValueError):
    """A recipe is invalid; the message names the line and the name at fault.

    Attributes:
        kind: short name of the rule that was broken, for programs.
        path: keys and list positions from the top of the recipe to the fault.
        line: 1-based line in ``source``, or None when the recipe did not come from text.
        source: file name, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "invalid_recipe",
        path: Sequence[str | int] = (),
        line: int | None = None,
        source: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.path = tuple(path)
        self.line = line
        self.source = source

    def __str__(self) -> str:
        place = [part for part in (self.source, None if self.line is None else f"line {self.line}") if part]
        dotted = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path).lstrip(".")
        lead = ", ".join(place)
        return ": ".join(part for part in (lead, dotted, str(self.args[0]) if self.args else "") if part)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


class RecipeTypeError(RecipeError, TypeError):
    """A recipe field is unknown, missing, or has a value of the wrong type."""


class LanguageError(DatasetError):
    """Language rows break a rule; the message names episode, frame, style and column.

    Attributes:
        kind: short name of the rule that was broken, for programs.
        episode: episode index, or None where the caller does not know it.
        frame: frame index in the episode, or None.
        style: style of the rows concerned, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "invalid_language",
        episode: int | None = None,
        frame: int | None = None,
        style: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.episode = episode
        self.frame = frame
        self.style = style

    def __str__(self) -> str:
        # Also keeps KeyError from quoting the message of the subclass below.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


class LanguageTypeError(LanguageError, TypeError):
    """A language row or query has a value of the wrong type."""


class LanguageKeyError(LanguageError, KeyError):
    """A sample or row lacks a key that rendering needs."""


class StreamClosedError(ReelrayError, RuntimeError):
    """The stream was closed or cancelled while something still waited on it."""


class IngestStalledError(ReelrayError, TimeoutError):
    """No batch for too long; the message gives plan position, pending work and actor states."""


class ResourceUnavailableError(ReelrayError, RuntimeError):
    """The cluster cannot schedule what is needed; the message names the resource."""


class BenchmarkError(ReelrayError, RuntimeError):
    """A measurement did not come to its end."""


class VersionSkewError(ReelrayError, RuntimeError):
    """Driver and actor run different versions of reelray."""


class PoisonedWorkError(DamagedDataError):
    """The same piece of work killed its worker repeatedly and is quarantined."""
