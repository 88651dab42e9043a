"""The range planner: which byte ranges to ask for, so that every wanted range can be cut from the replies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ingest.errors import StorageError
from ingest.storage.base import ByteRange


@dataclass(frozen=True, slots=True)
class RangePlan:
    """Requests and how the wanted ranges are cut from them.

    Attributes:
        wanted: the ranges asked for, in the order asked.
        requests: what to fetch, disjoint, ordered by the first wanted range that needs them.
        pieces: for each wanted range, ``(request, start, stop)`` in request-relative bytes, in order; empty for an empty range.
    """

    wanted: tuple[ByteRange, ...]
    requests: tuple[ByteRange, ...]
    pieces: tuple[tuple[tuple[int, int, int], ...], ...]

    @property
    def wanted_bytes(self) -> int:
        """Sum of the wanted ranges; bytes wanted twice count twice."""
        return sum(stop - start for start, stop in self.wanted)

    @property
    def fetched_bytes(self) -> int:
        """Bytes that the requests transfer."""
        return sum(stop - start for start, stop in self.requests)

    def assemble(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Cuts the wanted ranges from the replies.

        Args:
            payloads: one body per request, in the order of ``requests``.

        Raises:
            StorageError: another number of bodies, or a body of another length than its request.
        """
        lengths = [stop - start for start, stop in self.requests]
        if [len(payload) for payload in payloads] != lengths:
            raise StorageError(f"replies of {[len(payload) for payload in payloads]} bytes do not fit requests of {lengths} bytes")
        return [self._cut(pieces, payloads) for pieces in self.pieces]

    def _cut(self, pieces: tuple[tuple[int, int, int], ...], payloads: Sequence[bytes]) -> bytes:
        if len(pieces) == 1:
            request, start, stop = pieces[0]
            payload = payloads[request]
            return payload if start == 0 and stop == len(payload) else payload[start:stop]
        return b"".join(memoryview(payloads[request])[start:stop] for request, start, stop in pieces)


def plan_ranges(
    ranges: Sequence[ByteRange], gap: int = 0, maximum: int | None = None, split: int | None = None, parts: int | None = None
) -> RangePlan:
    """Plans the requests for some ranges of one object.

    Args:
        ranges: half-open, in order of need; they may touch, overlap and repeat.
        gap: neighbours at most this many bytes apart become one request; 0 fetches no byte that was not asked for.
        maximum: a request made by joining grows to at most this many bytes; a single larger range stays whole unless split.
        split: a request of at least twice this many bytes is cut into parts of at least this size, for several connections.
        parts: most parts of one request; None for as many as ``split`` allows.

    Raises:
        StorageError: a range that is negative or ends before it starts, or a limit that is not positive.
    """
    if gap < 0 or any(limit is not None and limit <= 0 for limit in (maximum, split, parts)):
        raise StorageError(
            f"gap must not be negative and maximum, split and parts must be positive, found {gap}, {maximum}, {split}, {parts}"
        )
    wanted = tuple((int(start), int(stop)) for start, stop in ranges)
    for start, stop in wanted:
        if not 0 <= start <= stop:
            raise StorageError(f"byte range {start}..{stop} is not 0 <= start <= stop")
    cut = [part for run in _joined(wanted, gap, maximum) for part in _cut_up(run, split, parts)]
    first_need = _first_need(wanted, cut)
    order = sorted(range(len(cut)), key=lambda number: (first_need[number], cut[number]))
    place = {number: at for at, number in enumerate(order)}
    pieces = tuple(tuple((place[number], start, stop) for number, start, stop in _cover(item, cut)) for item in wanted)
    return RangePlan(wanted, tuple(cut[number] for number in order), pieces)


def _joined(wanted: Sequence[ByteRange], gap: int, maximum: int | None) -> list[ByteRange]:
    """Disjoint runs in byte order that hold every wanted range."""
    runs: list[ByteRange] = []
    for start, stop in sorted(item for item in wanted if item[1] > item[0]):
        if runs:
            first, last = runs[-1]
            joined = max(last, stop)
            # Overlap always joins: no byte is fetched twice, whatever the maximum says.
            if start < last or (start - last <= gap and (maximum is None or joined - first <= maximum)):
                runs[-1] = (first, joined)
                continue
        runs.append((start, stop))
    return runs


def _cut_up(run: ByteRange, split: int | None, parts: int | None) -> list[ByteRange]:
    start, stop = run
    length = stop - start
    if split is None or length < 2 * split:
        return [run]
    count = length // split if parts is None else min(length // split, parts)
    edges = [start + length * number // count for number in range(count + 1)]
    return list(pairwise(edges))


def _cover(item: ByteRange, parts: Sequence[ByteRange]) -> list[tuple[int, int, int]]:
    start, stop = item
    low, high = 0, len(parts)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if parts[middle][1] <= start else (low, middle)
    found: list[tuple[int, int, int]] = []
    while start < stop:
        first, last = parts[low]
        found.append((low, start - first, min(stop, last) - first))
        start = last
        low += 1
    return found


def _first_need(wanted: Sequence[ByteRange], parts: Sequence[ByteRange]) -> list[int]:
    need = [len(wanted)] * len(parts)
    for number, item in reversed(list(enumerate(wanted))):
        for part, _, _ in _cover(item, parts):
            need[part] = number
    return need
