"""Parquet footers, parsed here: sizes and ``episode_index`` ranges of row groups.

pyarrow ends the process when it is asked for the column chunks of some damaged footers, so what strangers wrote about
chunks is read with a small decoder of the Thrift compact protocol instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 11, 12
_MAX_DEPTH = 24
_MAX_COUNT = 1 << 48
_INTEGER_BYTES = {1: 4, 2: 8}
"""Bytes of a statistics value by physical type: INT32 and INT64."""


class FooterError(ValueError):
    """The footer is not what its length says, or not Thrift."""


@dataclass(frozen=True, slots=True)
class GroupTable:
    """What a footer says about its row groups; arrays have one entry per row group.

    Attributes:
        rows: int64[G].
        low, high: int64[G], smallest and largest ``episode_index``; only valid where ``known``.
        known: bool[G], whether the footer states the range.
        column_bytes: uncompressed bytes by top-level column name, int64[G] each.
        column_values: values (leaves of lists counted) by top-level column name, int64[G] each.
    """

    rows: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    known: NDArray[np.bool_]
    column_bytes: dict[str, NDArray[np.int64]]
    column_values: dict[str, NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.rows)

    def candidates(self, episode: int) -> list[int]:
        """Row groups that may hold ``episode``; groups without a stated range stay candidates."""
        inside = ~self.known | ((self.low <= episode) & (episode <= self.high))
        return np.flatnonzero(inside & (self.rows > 0)).tolist()

    def rows_by_episode(self) -> dict[int, int] | None:
        """Rows of each episode when every row group holds one episode and says so; else None."""
        filled = self.rows > 0
        if not bool(np.all(self.known[filled] & (self.low[filled] == self.high[filled]))):
            return None
        counts: dict[int, int] = {}
        for episode, rows in zip(self.low[filled].tolist(), self.rows[filled].tolist(), strict=True):
            counts[episode] = counts.get(episode, 0) + rows
        return counts

    def read_bytes(self, groups: list[int], columns: list[str], batch_rows: int | None = None) -> int:
        """Bytes in memory after reading some columns of some row groups.

        Run-length coding makes pages smaller than what they decode to, so values count with eight bytes at least.

        Args:
            groups: row groups.
            columns: top-level columns.
            batch_rows: rows that are in memory at once, when the groups are walked in batches.
        """
        rows = np.maximum(self.rows[groups], 1)
        share = np.ones(len(groups)) if batch_rows is None else np.minimum(1.0, batch_rows / rows)
        total = 0.0
        for column in set(columns) & set(self.column_bytes):
            size = np.maximum(self.column_bytes[column][groups].astype(np.float64), 8.0 * self.column_values[column][groups])
            total += float((size * share).sum())
        return int(total)


def parse_footer(data: bytes) -> GroupTable:
    """Parses the Thrift part of a footer.

    Args:
        data: the bytes between the last data page and the footer's length.

    Raises:
        FooterError: not a footer.
    """
    reader = _Compact(data)
    groups: list[_Group] = []
    try:
        for field, kind in reader.fields():
            if field == 4 and kind == _LIST:
                groups = [_read_group(reader) for _ in reader.elements(_STRUCT)]
            else:
                reader.skip(kind)
    except (IndexError, UnicodeDecodeError) as error:
        raise FooterError(f"the footer ends too early or holds odd bytes ({error})") from error
    names = list(dict.fromkeys(name for group in groups for name in group.sizes))
    return GroupTable(
        rows=np.array([group.rows for group in groups], dtype=np.int64),
        low=np.array([group.span[0] if group.span else 0 for group in groups], dtype=np.int64),
        high=np.array([group.span[1] if group.span else 0 for group in groups], dtype=np.int64),
        known=np.array([group.span is not None for group in groups], dtype=np.bool_),
        column_bytes={name: np.array([group.sizes.get(name, (0, 0))[0] for group in groups], dtype=np.int64) for name in names},
        column_values={name: np.array([group.sizes.get(name, (0, 0))[1] for group in groups], dtype=np.int64) for name in names},
    )


@dataclass(slots=True)
class _Group:
    rows: int
    span: tuple[int, int] | None
    sizes: dict[str, tuple[int, int]]


def _read_group(reader: _Compact) -> _Group:
    group = _Group(0, None, {})
    for field, kind in reader.fields():
        if field == 1 and kind == _LIST:
            for _ in reader.elements(_STRUCT):
                _read_chunk(reader, group)
        elif field == 3:
            group.rows = reader.count(kind)
        else:
            reader.skip(kind)
    return group


def _read_chunk(reader: _Compact, group: _Group) -> None:
    for field, kind in reader.fields():
        if field == 3 and kind == _STRUCT:
            _read_chunk_metadata(reader, group)
        else:
            reader.skip(kind)


def _read_chunk_metadata(reader: _Compact, group: _Group) -> None:
    path: list[str] = []
    physical, size, count = -1, 0, 0
    bounds: tuple[bytes | None, bytes | None] = (None, None)
    for field, kind in reader.fields():
        if field == 1:
            physical = reader.integer(kind)
        elif field == 3 and kind == _LIST:
            path = [reader.binary().decode() for _ in reader.elements(_BINARY)]
        elif field == 5:
            count = reader.count(kind)
        elif field == 6:
            size = reader.count(kind)
        elif field == 12 and kind == _STRUCT:
            bounds = _read_bounds(reader)
        else:
            reader.skip(kind)
    if not path:
        return
    bytes_before, values_before = group.sizes.get(path[0], (0, 0))
    group.sizes[path[0]] = (bytes_before + size, values_before + count)
    width = _INTEGER_BYTES.get(physical)
    low, high = bounds
    if path == ["episode_index"] and low is not None and high is not None and len(low) == len(high) == width:
        group.span = (int.from_bytes(low, "little", signed=True), int.from_bytes(high, "little", signed=True))


def _read_bounds(reader: _Compact) -> tuple[bytes | None, bytes | None]:
    values: dict[int, bytes] = {}
    for field, kind in reader.fields():
        if field in (1, 2, 5, 6) and kind == _BINARY:
            values[field] = reader.binary()
        else:
            reader.skip(kind)
    # 5 and 6 supersede 1 and 2; for signed integers both pairs mean the same.
    return values.get(6, values.get(2)), values.get(5, values.get(1))


class _Compact:
    """A cursor over Thrift compact protocol bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._depth = 0

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise FooterError("a number has more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        number = (value >> 1) ^ -(value & 1)
        if not -(2**63) <= number < 2**63:
            raise FooterError("a number has more than 64 bits")
        return number

    def integer(self, kind: int) -> int:
        """An integer of a field of type ``kind``."""
        if not _BYTE < kind < _DOUBLE:
            raise FooterError(f"expected a number, found Thrift type {kind}")
        return self._zigzag()

    def count(self, kind: int) -> int:
        """An integer that counts bytes, rows or values."""
        number = self.integer(kind)
        if not 0 <= number < _MAX_COUNT:
            raise FooterError(f"a count is {number}")
        return number

    def binary(self) -> bytes:
        """A length and that many bytes."""
        size = self._varint()
        start = self._at
        if size > len(self._data) - start:
            raise FooterError("a text is longer than the footer")
        self._at = start + size
        return self._data[start : self._at]

    def fields(self) -> Iterator[tuple[int, int]]:
        """(field number, type) of a struct; the caller consumes each value before it goes on."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise FooterError("structures are nested too deeply")
        number = 0
        while True:
            head = self._data[self._at]
            self._at += 1
            kind = head & 15
            if kind == _STOP:
                break
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            yield number, kind
        self._depth -= 1

    def elements(self, expected: int) -> range:
        """One number for each element of a list whose elements have the type ``expected``."""
        size, kind = self._list_head()
        if size and kind != expected:
            raise FooterError(f"expected a list of Thrift type {expected}, found {kind}")
        return range(size)

    def _list_head(self) -> tuple[int, int]:
        head = self._data[self._at]
        self._at += 1
        size = self._varint() if head >> 4 == 15 else head >> 4
        if size > len(self._data) - self._at:
            raise FooterError("a list is longer than the footer")
        return size, head & 15

    def skip(self, kind: int) -> None:
        """Passes over a value of type ``kind``."""
        if kind in (_TRUE, _FALSE):
            return
        if kind == _BYTE:
            self._at += 1
        elif _BYTE < kind < _DOUBLE:
            self._varint()
        elif kind == _DOUBLE:
            self._at += 8
        elif kind == _BINARY:
            self.binary()
        elif kind in (_LIST, _SET):
            size, inner = self._list_head()
            for _ in range(size):
                # Booleans take a byte each inside a list, unlike in a field.
                self.skip(_BYTE if inner in (_TRUE, _FALSE) else inner)
        elif kind == _MAP:
            size = self._varint()
            if size > len(self._data) - self._at:
                raise FooterError("a map is longer than the footer")
            kinds = self._data[self._at] if size else 0
            self._at += 1 if size else 0
            for _ in range(size):
                for inner in (kinds >> 4, kinds & 15):
                    self.skip(_BYTE if inner in (_TRUE, _FALSE) else inner)
        elif kind == _STRUCT:
            for _number, inner in self.fields():
                self.skip(inner)
        else:
            raise FooterError(f"unknown Thrift type {kind}")
