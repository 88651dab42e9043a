"""Decoded pictures of the single-process engine: groups that decode together, kept within a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.engine.counters import Counters
from ingest.engine.pictures import PictureForm, decode_run, groups, located
from ingest.engine.spec import SampleSpec
from ingest.engine.unit import UnitData
from ingest.errors import BudgetError, DamagedDataError

DECODED_CACHE_BYTES = 2 << 30
"""Bytes of decoded pictures that the single-process engine keeps where nothing else is said, at most."""


class DecodedUnits:
    """Decoded groups of pictures, the least recently used dropped first. Of a group beyond the budget as much as fits is held.

    Args:
        spec: what samples consist of.
        where: location of each dataset by its number, for messages.
        counters: receives totals.
        budget_bytes: pictures held at a time, at most.
    """

    def __init__(self, spec: SampleSpec, where: Sequence[str], counters: Counters, budget_bytes: int = DECODED_CACHE_BYTES) -> None:
        self._where = tuple(where)
        self._forms = {camera: PictureForm.of(spec, camera) for camera in spec.cameras}
        self._counters = counters
        self._budget = budget_bytes
        self._used = 0
        self._groups: OrderedDict[tuple[int, str, int], tuple[int, NDArray[Any]]] = OrderedDict()
        self._edges: dict[tuple[int, str], NDArray[np.int64]] = {}
        self._damaged: set[tuple[int, str, int]] = set()

    def bind(self, units: Mapping[int, UnitData]) -> Any:
        """A `PictureOf` over some fetched units."""

        def picture(number: int, camera: str, frame: int) -> NDArray[Any]:
            return self._picture(number, units[number], camera, frame)

        return picture

    def drop(self, number: int) -> None:
        """Forgets everything about one unit."""
        for key in [key for key in self._groups if key[0] == number]:
            self._forget(key)
        self._damaged = {key for key in self._damaged if key[0] != number}
        for edge in [edge for edge in self._edges if edge[0] == number]:
            del self._edges[edge]

    def _picture(self, number: int, unit: UnitData, camera: str, frame: int) -> NDArray[Any]:
        track = unit.tracks[camera]
        local = frame - track.first
        if (number, camera) not in self._edges:
            everything = np.arange(track.pictures, dtype=np.int64)
            self._edges[number, camera] = np.array([group[0] for group in groups(track, everything)], dtype=np.int64)
        edges = self._edges[number, camera]
        group = int(np.searchsorted(edges, local, side="right")) - 1
        key = (number, camera, group)
        first, pictures = self._groups.get(key, (0, None))
        if pictures is None or not first <= local < first + len(pictures):
            stop = int(edges[group + 1]) if group + 1 < len(edges) else track.pictures
            self._forget(key)
            first, pictures = self._decode_whole(unit, camera, key, int(edges[group]), stop, local)
            self._groups[key] = (first, pictures)
            self._used += pictures.nbytes
            self._counters.at_least("reelray_decoded_bytes_peak", self._used)
        self._groups.move_to_end(key)
        return pictures[local - first]

    def _decode_whole(
        self, unit: UnitData, camera: str, key: tuple[int, str, int], first: int, stop: int, local: int
    ) -> tuple[int, NDArray[Any]]:
        """As `_decode`, but the picture ``local`` alone where another of its group is damaged."""
        if key not in self._damaged:
            try:
                return self._decode(unit, camera, first, stop, local)
            except DamagedDataError:
                self._damaged.add(key)
        return self._decode(unit, camera, local, local + 1, local)

    def _decode(self, unit: UnitData, camera: str, first: int, stop: int, local: int) -> tuple[int, NDArray[Any]]:
        """Pictures ``first`` to ``stop`` of a track, or those from ``local`` on that the budget holds; and which is the first."""
        track, form = unit.tracks[camera], self._forms[camera]
        writer = form.writer()
        shape = writer.shape(track.table)
        nbytes = int(np.prod(shape)) * writer.dtype.itemsize
        most = self._budget // nbytes
        if most < 1:
            raise BudgetError(
                f"{self._where[unit.dataset]}: a decoded picture of {camera} takes {nbytes} bytes, more than the decoded budget of "
                f"{self._budget} bytes: raise decoded_budget_gb"
            )
        if stop - first > most:
            first, stop = local, min(stop, local + most)
        wanted = np.arange(first, stop, dtype=np.int64)
        while self._used + len(wanted) * nbytes > self._budget:
            self._forget(next(iter(self._groups)))
        pictures = np.empty((len(wanted), *shape), writer.dtype)
        try:
            decoded = decode_run(track, wanted, form, list(pictures))
        except DamagedDataError as error:
            raise located(error, self._where[unit.dataset], unit.episode, track) from error
        self._counters.add("reelray_pictures_decoded", decoded)
        return first, pictures

    def _forget(self, key: tuple[int, str, int]) -> None:
        if key in self._groups:
            self._used -= self._groups.pop(key)[1].nbytes
