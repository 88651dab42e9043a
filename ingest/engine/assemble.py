"""From rows and decoded pictures to batches: windows, masks, tasks, and the form that samples have.

Both the single-process engine and the Ray stream assemble with this code; they differ only in where pictures come from.
"""

# pyarrow has no stubs.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.engine.depth import depth_table
from ingest.engine.spec import SampleSpec
from ingest.engine.unit import Records, UnitData
from ingest.errors import RowsError, SettingsError
from ingest.language.styles import LANGUAGE_COLUMNS
from ingest.lerobot.columns import item_value
from ingest.lerobot.images import decode_cell
from ingest.storage.base import Store

Sample = dict[str, Any]
"""One sample or one batch, by feature key."""

PictureOf = Callable[[int, str, int], NDArray[Any]]
"""``(unit number, camera, episode frame)`` → the decoded picture, HWC."""


@dataclass(frozen=True, slots=True)
class SampleKey:
    """What a random transform of one picture may depend on, so that it is the same in every topology and after a resume.

    Attributes:
        seed: order seed.
        epoch: epoch number.
        index: global frame index of the anchor.
        camera: feature key.
    """

    seed: int
    epoch: int
    index: int
    camera: str


Transform = Callable[[NDArray[Any], SampleKey], NDArray[Any]]
"""An injected picture transform: HWC uint8 in, HWC out (same shape for every sample)."""


@dataclass(frozen=True, slots=True)
class PlannedSamples:
    """Which samples a batch holds.

    Attributes:
        unit: int64[B], unit numbers of the plan.
        frame: int64[B], episode frame numbers of the anchors.
        is_pad: bool[B], true for masked repeats.
        seed: order seed.
        epoch: epoch number.
    """

    unit: NDArray[np.int64]
    frame: NDArray[np.int64]
    is_pad: NDArray[np.bool_]
    seed: int
    epoch: int

    def __len__(self) -> int:
        return len(self.unit)


class BufferPool:
    """Arrays for batches, used again once nobody refers to them any more: fresh memory costs more than the copy into it."""

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._arrays: dict[tuple[tuple[int, ...], np.dtype[Any]], list[NDArray[Any]]] = {}

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array with undefined content that nothing else refers to."""
        pool = self._arrays.setdefault((shape, dtype), [])
        for array in pool:
            # The list, the loop variable and getrefcount's argument; views and tensors made from it would add to that.
            if sys.getrefcount(array) == 3:
                return array
        array: NDArray[Any] = np.empty(shape, dtype)
        if len(pool) < self._keep:
            pool.append(array)
        return array


class BatchAssembler:
    """Gathers batches.

    Args:
        spec: what a sample consists of.
        stores: where pictures that parquet cells name by path are read from, by dataset number.
        as_uint8: deliver pictures as uint8 instead of float32 in [0, 1].
        transform: applied to every colour picture.
        buffers: where batch memory comes from; None allocates each batch anew.
    """

    def __init__(
        self,
        spec: SampleSpec,
        stores: Sequence[Store],
        *,
        as_uint8: bool,
        transform: Transform | None = None,
        buffers: BufferPool | None = None,
    ) -> None:
        self.spec = spec
        self._stores = tuple(stores)
        self._as_uint8 = as_uint8
        self._transform = transform
        self._buffers = buffers
        unit = spec.options.depth_output_unit
        depth = (key for key in (*spec.cameras, *spec.images) if spec.features[key].is_depth)
        self._distances = {key: table for key in depth if (table := depth_table(spec.features[key], unit)) is not None}

    @property
    def takes_decoded(self) -> bool:
        """Whether pictures of cameras are delivered as they are decoded, one for each sample."""
        spec = self.spec
        return self._transform is None and not any(key in self._distances or key in spec.windows for key in spec.cameras)

    def batch(
        self,
        planned: PlannedSamples,
        units: Mapping[int, UnitData],
        picture_of: PictureOf,
        decoded: Mapping[str, NDArray[Any]] | None = None,
    ) -> Sample:
        """One batch.

        Args:
            planned: which samples.
            units: fetched units, at least those that ``planned`` names.
            picture_of: decoded pictures.
            decoded: (B, H, W, C) by camera: pictures that are in their places already; only where `takes_decoded`.

        Returns:
            Per feature an array of shape (B, *item shape), a list of B values for features that are no numbers, bool
            (B, T) ``<key>_is_pad`` for each window, ``task`` as a list of texts, and ``is_pad``, bool (B,), true for
            masked repeats. Pictures are (B, C, H, W) or (B, T, C, H, W) views whose memory is channels-last.
        """
        groups = _groups(planned.unit)
        out: Sample = {}
        numbers = _numbers(planned, groups, units)
        index = numbers["index"] if "index" in numbers else self._index(planned, groups, units)
        for camera in self.spec.cameras:
            if decoded is None:
                self._pictures(out, camera, planned, groups, units, picture_of, index)
            else:
                out[camera] = self._shown(camera, decoded[camera][:, None])[:, 0]
        for key in self.spec.images:
            self._pictures(out, key, planned, groups, units, self._stored_picture(key, units), index)
        for key in self.spec.columns:
            if key in numbers and key not in self.spec.windows:
                out[key] = numbers[key]
            else:
                self._column(out, key, planned, groups, units)
        out["task"] = self._tasks(planned, units, numbers.get("task_index"))
        out["is_pad"] = planned.is_pad
        return out

    def sample(self, unit: UnitData, frame: int, picture_of: PictureOf, *, seed: int, epoch: int) -> Sample:
        """One sample with the keys, shapes and dtypes of the map-style item (no leading batch axis, no ``is_pad``)."""
        planned = PlannedSamples(np.zeros(1, np.int64), np.array([frame], np.int64), np.zeros(1, np.bool_), seed, epoch)
        batch = self.batch(planned, {0: unit}, picture_of)
        del batch["is_pad"]
        return {key: value[0] for key, value in batch.items()}

    def _pictures(
        self,
        out: Sample,
        key: str,
        planned: PlannedSamples,
        groups: Sequence[tuple[int, NDArray[np.intp]]],
        units: Mapping[int, UnitData],
        picture_of: PictureOf,
        index: NDArray[np.int64],
    ) -> None:
        memory: NDArray[Any] | None = None
        pad: NDArray[np.bool_] | None = None
        windowed = key in self.spec.windows
        distances = self._distances.get(key)
        for number, places in groups:
            length = units[number].episode_length
            frames = self.spec.picture_frames(key, planned.frame[places], length)
            if windowed:
                pad = np.empty((len(planned), frames.shape[1]), np.bool_) if pad is None else pad
                pad[places] = self.spec.windows.indices_many(key, planned.frame[places], length)[1]
            for place, row in zip(places.tolist(), frames.tolist(), strict=True):
                for moment, frame in enumerate(row):
                    picture = picture_of(number, key, frame)
                    if self._transform is not None and picture.ndim == 3 and picture.shape[2] == 3:
                        # A copy: transforms may write to what they get, and other samples show the same picture.
                        picture = self._transform(picture.copy(), SampleKey(planned.seed, planned.epoch, int(index[place]), key))
                    if memory is None:
                        dtype = picture.dtype if distances is None else distances.dtype
                        memory = self._take((len(planned), frames.shape[1], *picture.shape), dtype)
                    elif self._transform is not None and distances is None:
                        refuse_other_form(key, picture, memory.shape[2:], memory.dtype)
                    if distances is None:
                        memory[place, moment] = picture
                    else:
                        np.take(distances, picture, out=memory[place, moment], mode="clip")
        assert memory is not None  # a batch holds at least one sample
        shown = self._shown(key, memory)
        out[key] = shown if windowed else shown[:, 0]
        if pad is not None:
            out[f"{key}_is_pad"] = pad

    def _shown(self, key: str, memory: NDArray[Any]) -> NDArray[Any]:
        """Pictures (B, T, H, W, C) or distances (B, T, H, W) in the form in which they are delivered."""
        shown = memory if memory.ndim == 4 else np.moveaxis(memory, -1, -3)
        planar = self.spec.options.pixel_format == "yuv420p" and key in self.spec.cameras
        if not self._as_uint8 and memory.dtype == np.uint8 and not planar:
            # Division, not multiplication with the reciprocal, gives the very floats of the map-style reader.
            return np.ascontiguousarray(shown).astype(np.float32) / np.float32(255)
        return shown

    def _take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.empty(shape, dtype) if self._buffers is None else self._buffers.take(shape, dtype)

    def _stored_picture(self, key: str, units: Mapping[int, UnitData]) -> PictureOf:
        def picture(number: int, _camera: str, frame: int) -> NDArray[Any]:
            unit = units[number]
            store = self._stores[unit.dataset]

            def fail(message: str) -> RowsError:
                return RowsError(f"{store.url}: episode {unit.episode}, frame {frame}: {message}", episode=unit.episode, camera=key)

            cell = unit.rows.others.column(key)[frame - unit.rows.first].as_py()
            return decode_cell(cell, self.spec.features[key], store, fail)

        return picture

    def _column(
        self,
        out: Sample,
        key: str,
        planned: PlannedSamples,
        groups: Sequence[tuple[int, NDArray[np.intp]]],
        units: Mapping[int, UnitData],
    ) -> None:
        windowed = key in self.spec.windows
        values: NDArray[Any] | None = None
        loose: list[Any] = [None] * len(planned)
        pad: NDArray[np.bool_] | None = None
        for number, places in groups:
            unit = units[number]
            anchors = planned.frame[places]
            frames = anchors
            if windowed:
                frames, clipped = self.spec.windows.indices_many(key, anchors, unit.episode_length)
                pad = np.empty((len(planned), frames.shape[1]), np.bool_) if pad is None else pad
                pad[places] = clipped
            local = frames - unit.rows.first
            if unit.rows.language is not None and key in LANGUAGE_COLUMNS:
                for place, row in zip(places.tolist(), local.tolist(), strict=True):
                    loose[place] = unit.rows.language.raw(row)[key]
            elif key in unit.rows.numbers:
                gathered = unit.rows.numbers[key][local]
                if values is None:
                    values = np.empty((len(planned), *gathered.shape[1:]), gathered.dtype)
                values[places] = gathered
            else:
                column = unit.rows.others.column(key)
                for place, rows in zip(places.tolist(), local.tolist(), strict=True):
                    loose[place] = [item_value(column[row].as_py()) for row in rows] if windowed else item_value(column[rows].as_py())
        if values is None:
            out[key] = loose
        elif any(key in units[number].rows.others.column_names for number, _ in groups):
            # One episode has nulls where another has numbers: values of a mixed batch are delivered one by one.
            numeric = {place for number, places in groups if key in units[number].rows.numbers for place in places.tolist()}
            out[key] = [values[place] if place in numeric else loose[place] for place in range(len(planned))]
        else:
            out[key] = values
        if pad is not None:
            out[f"{key}_is_pad"] = pad

    def _index(
        self, planned: PlannedSamples, groups: Sequence[tuple[int, NDArray[np.intp]]], units: Mapping[int, UnitData]
    ) -> NDArray[np.int64]:
        index = np.zeros(len(planned), dtype=np.int64)
        for number, places in groups:
            rows = units[number].rows
            index[places] = rows.numbers["index"][planned.frame[places] - rows.first]
        return index

    def _tasks(self, planned: PlannedSamples, units: Mapping[int, UnitData], task_index: NDArray[Any] | None) -> list[str]:
        if task_index is not None:
            return [units[number].rows.tasks[task] for number, task in zip(planned.unit.tolist(), task_index.tolist(), strict=True)]
        texts: list[str] = []
        for number, frame in zip(planned.unit.tolist(), planned.frame.tolist(), strict=True):
            rows = units[number].rows
            texts.append(rows.tasks[int(rows.numbers["task_index"][frame - rows.first])] if "task_index" in rows.numbers else "")
        return texts


def refuse_other_form(key: str, picture: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuses a transformed picture that would be cast or repeated to fit beside the others of its batch.

    Raises:
        SettingsError: it has another shape or dtype than they have.
    """
    if (picture.shape, picture.dtype) != (shape, dtype):
        raise SettingsError(
            f"{key}: image_transforms returned a picture {list(picture.shape)} {picture.dtype} beside one {list(shape)} {dtype}: "
            "all pictures of a camera must come out in one shape and dtype"
        )


def _groups(unit: NDArray[np.int64]) -> list[tuple[int, NDArray[np.intp]]]:
    """The places of each unit in a batch."""
    order = np.argsort(unit, kind="stable")
    numbers: list[int] = unit[order].tolist()
    edges = [0, *(place for place in range(1, len(numbers)) if numbers[place] != numbers[place - 1]), len(numbers)]
    return [(numbers[first], order[first:stop]) for first, stop in pairwise(edges)]


def _numbers(
    planned: PlannedSamples, groups: Sequence[tuple[int, NDArray[np.intp]]], units: Mapping[int, UnitData]
) -> dict[str, NDArray[Any]]:
    """The anchors' numbers, (B, *item shape) by feature; nothing where units differ in what is a number."""
    layout = units[groups[0][0]].rows.records.layout
    parts: list[NDArray[np.uint8]] = []
    for number, places in groups:
        rows = units[number].rows
        if rows.records.layout != layout:
            return {}
        parts.append(rows.records.rows[planned.frame[places] - rows.first])
    found = np.concatenate(parts)
    order = np.concatenate([places for _, places in groups])
    gathered = np.empty_like(found)
    gathered[order] = found
    return Records.apart(layout, gathered)
