"""The resumable position: a small JSON document from which a plan recomputes everything that was delivered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from ingest.errors import CursorError, SettingsError
from ingest.plan.settings import PlanSettings, Topology, require_int
from ingest.plan.units import Units

VERSION = 1
MAX_CURSOR_CHARACTERS = 1 << 20
MAX_SEGMENTS = 1000
_MAX_NUMBER = 1 << 38
MAX_EPOCH = _MAX_NUMBER
"""Largest epoch number."""
EVERY_EPOCH = -1
"""Segment number of an episode that was skipped in an earlier epoch and is left out from the start."""

Fingerprint = Mapping[str, "str | int | bool | None"]


def plan_fingerprint(units: Units, settings: PlanSettings) -> dict[str, str | int | bool | None]:
    """What decides an order, beside the topology: one short value for each field, so that a mismatch has a name."""
    columns = [units.dataset, units.episode, units.lo, units.hi]
    fields: dict[str, str | int | bool | None] = {
        "dataset": hashlib.sha256(settings.dataset.encode()).hexdigest()[:16],
        "units": _digest(columns),
        "seed": settings.seed,
        "strategy": settings.strategy,
        "share": settings.share,
        "tail": settings.tail,
        "shuffle": settings.shuffle,
        "clamp_workers": settings.clamp_workers,
    }
    if settings.pooled:
        fields |= {"pool_size": settings.pool_size, "byte_budget": settings.byte_budget}
        if settings.byte_budget is not None:
            fields["bytes"] = _digest([units.bytes])
    else:
        fields["lanes"] = settings.lanes
    if settings.share == "cost":
        fields["cost"] = _digest([units.cost])
    if settings.weights is not None:
        named = settings.weights == "frames"
        fields["weights"] = "frames" if named else _digest([np.array(settings.weights, dtype=np.float64)])
        fields["mixture_block"] = settings.mixture_block
    return fields


def _digest(columns: Sequence[np.ndarray[Any, Any]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for column in columns:
        little = column.astype(column.dtype.newbyteorder("<"), copy=False)
        digest.update(np.ascontiguousarray(little).data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of an epoch with one topology.

    Attributes:
        topology: world size, workers and batch size.
        batches: batches that every rank committed; a rank that has fewer is finished.
    """

    topology: Topology
    batches: int = 0


@dataclass(frozen=True, slots=True)
class SkippedRange:
    """Neighbouring episodes that a damage policy dropped at one point.

    Attributes:
        dataset: dataset number.
        first: first episode index.
        last: last episode index, inclusive.
        segment: number of the segment in which it happened; ``EVERY_EPOCH`` for one that is left out altogether.
        step: batch number inside the segment from which on nothing of the episodes is delivered.
    """

    dataset: int
    first: int
    last: int
    segment: int
    step: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """What was committed of an epoch. Immutable: every change is a new cursor.

    Attributes:
        fingerprint: ``plan_fingerprint`` of the plan.
        epoch: epoch number.
        segments: stretches of the epoch, oldest first.
        skipped: episodes dropped by the damage policy, sorted.
    """

    fingerprint: Fingerprint
    epoch: int = 0
    segments: tuple[Segment, ...] = ()
    skipped: tuple[SkippedRange, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", MappingProxyType(dict(self.fingerprint)))

    def __reduce__(self) -> tuple[object, ...]:
        # The read-only view of the fingerprint does not pickle.
        return (type(self), (dict(self.fingerprint), self.epoch, self.segments, self.skipped))

    @property
    def batches(self) -> int:
        """Batches committed in the present segment."""
        return self.segments[-1].batches if self.segments else 0

    def advance(self, batches: int) -> Cursor:
        """After ``batches`` more committed batches per rank.

        Raises:
            CursorError: when the number is negative or no segment is open.
        """
        _require("batches", batches)
        if not self.segments:
            raise CursorError("the cursor has no segment: call resume with a topology before advance")
        last = self.segments[-1]
        return replace(self, segments=(*self.segments[:-1], replace(last, batches=last.batches + batches)))

    def resume(self, *, world_size: int, workers: int = 0, batch_size: int = 1) -> Cursor:
        """Continue with a topology: the same one extends the last segment, another one opens a segment.

        No workers and one worker are the same topology, and are written as one.

        Raises:
            SettingsError: when a number is out of range.
        """
        topology = Topology(world_size=world_size, workers=workers, batch_size=batch_size).with_consumers()
        kept = self.segments
        if kept and kept[-1].topology == topology:
            return self
        if kept and not kept[-1].batches and not any(one.segment == len(kept) - 1 for one in self.skipped):
            kept = kept[:-1]
            if kept and kept[-1].topology == topology:
                return replace(self, segments=kept)
        return replace(self, segments=(*kept, Segment(topology=topology)))

    def skip(self, dataset: int, episode: int, at_step: int) -> Cursor:
        """Drop the remaining samples of an episode from a batch number of the present segment on.

        Raises:
            CursorError: when a number is negative or no segment is open.
        """
        for name, value in (("dataset", dataset), ("episode", episode), ("at_step", at_step)):
            _require(name, value)
        if not self.segments:
            raise CursorError("the cursor has no segment: call resume with a topology before skip")
        if any(one.dataset == dataset and one.first <= episode <= one.last for one in self.skipped):
            return self
        added = SkippedRange(dataset, episode, episode, len(self.segments) - 1, at_step)
        return replace(self, skipped=_merged((*self.skipped, added)))

    def next_epoch(self) -> Cursor:
        """The beginning of the following epoch; skipped episodes stay left out, from its start."""
        kept = tuple(replace(one, segment=EVERY_EPOCH, step=0) for one in self.skipped)
        return replace(self, epoch=self.epoch + 1, segments=(), skipped=_merged(kept))

    def check(self, fingerprint: Fingerprint) -> None:
        """Refuse another plan's cursor.

        Raises:
            CursorError: naming every field that differs, with both values.
        """
        names = [name for name in {**self.fingerprint, **fingerprint} if self.fingerprint.get(name) != fingerprint.get(name)]
        if names:
            parts = [f"{name}: cursor has {self.fingerprint.get(name)!r}, plan has {fingerprint.get(name)!r}" for name in names]
            raise CursorError(f"the cursor belongs to another plan ({'; '.join(parts)}); restore the setting, or start without the cursor")

    def to_json(self) -> str:
        """The cursor as JSON text without spaces."""
        document: dict[str, Any] = {
            "version": VERSION,
            "epoch": self.epoch,
            "fingerprint": dict(self.fingerprint),
            "segments": [
                {
                    "world_size": one.topology.world_size,
                    "workers": one.topology.workers,
                    "batch_size": one.topology.batch_size,
                    "batches": one.batches,
                }
                for one in self.segments
            ],
        }
        if self.skipped:
            document["skipped"] = [[one.dataset, one.first, one.last, one.segment, one.step] for one in self.skipped]
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Cursor:
        """Read a cursor.

        Raises:
            CursorError: when the text is not a cursor of this version, or a value is out of range.
        """
        if len(text) > MAX_CURSOR_CHARACTERS:
            raise CursorError(f"a cursor has at most {MAX_CURSOR_CHARACTERS} characters, found {len(text)}")
        try:
            loaded = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CursorError(f"the cursor is not JSON: {error}") from None
        document = _object("cursor", loaded, {"version", "epoch", "fingerprint", "segments"}, {"skipped"})
        if type(document["version"]) is not int or document["version"] != VERSION:
            raise CursorError(f"cursor version must be {VERSION}, found {document['version']!r}")
        fingerprint = document["fingerprint"]
        if not isinstance(fingerprint, dict) or not all(
            value is None or isinstance(value, str | int) for value in cast("dict[str, object]", fingerprint).values()
        ):
            raise CursorError("cursor.fingerprint must be an object of plain values")
        if len(_list("segments", document["segments"])) > MAX_SEGMENTS:
            raise CursorError(f"a cursor has at most {MAX_SEGMENTS} segments, found {len(document['segments'])}")
        segments = tuple(_segment(number, one) for number, one in enumerate(_list("segments", document["segments"])))
        ranges = tuple(_skipped(one, len(segments)) for one in _list("skipped", document.get("skipped", [])))
        _require("epoch", document["epoch"])
        return cls(cast("Fingerprint", fingerprint), document["epoch"], segments, _merged(ranges))


def _merged(ranges: Sequence[SkippedRange]) -> tuple[SkippedRange, ...]:
    merged: list[SkippedRange] = []
    for one in sorted(ranges, key=lambda one: (one.segment, one.step, one.dataset, one.first)):
        last = merged[-1] if merged else None
        same = last is not None and (last.segment, last.step, last.dataset) == (one.segment, one.step, one.dataset)
        if last is not None and same and one.first <= last.last + 1:
            merged[-1] = replace(last, last=max(last.last, one.last))
        else:
            merged.append(one)
    return tuple(merged)


def _require(name: str, value: Any) -> None:
    try:
        require_int(name, value, least=0, most=_MAX_NUMBER)
    except SettingsError as error:
        raise CursorError(f"cursor: {error}") from None


def _object(name: str, value: Any, needed: set[str], optional: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CursorError(f"{name} must be a JSON object, found {type(value).__name__}")
    found = cast("dict[str, Any]", value)
    missing, unknown = needed - found.keys(), found.keys() - needed - optional
    if missing or unknown:
        raise CursorError(f"{name}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    return found


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CursorError(f"cursor.{name} must be a list, found {type(value).__name__}")
    return cast("list[Any]", value)


def _segment(number: int, value: Any) -> Segment:
    found = _object(f"cursor.segments[{number}]", value, {"world_size", "workers", "batch_size", "batches"}, set())
    _require(f"segments[{number}].batches", found["batches"])
    try:
        topology = Topology(world_size=found["world_size"], workers=found["workers"], batch_size=found["batch_size"]).with_consumers()
    except SettingsError as error:
        raise CursorError(f"cursor.segments[{number}]: {error}") from None
    return Segment(topology=topology, batches=found["batches"])


def _skipped(value: Any, segments: int) -> SkippedRange:
    row = _list("skipped[]", value)
    if len(row) != 5:
        raise CursorError(f"cursor.skipped must hold [dataset, first, last, segment, step], found {row!r}")
    dataset, first, last, segment, step = row
    for name, number in (("dataset", dataset), ("first", first), ("last", last), ("step", step)):
        _require(f"skipped {name}", number)
    if segment != EVERY_EPOCH:
        _require("skipped segment", segment)
    if last < first or segment >= segments:
        raise CursorError(f"cursor.skipped {row!r}: expected first <= last and segment < {segments}")
    return SkippedRange(dataset, first, last, segment, step)
