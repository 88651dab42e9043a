"""Parquet files of strangers: opened with causes named, sizes bounded, and nothing executed from their metadata."""

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingest.errors import DatasetError, MetadataError, ObjectNotFoundError, PlaceholderError, ReelrayError, UnsafeInputError
from ingest.lerobot.footer import GroupTable, parse_footer
from ingest.storage.base import Store

MAX_READ_BYTES = 8 << 30
"""Most bytes (uncompressed, as the footer states them) that one read may ask for."""

MAX_FOOTER_BYTES = 256 << 20

_MAGIC = b"PAR1"
_TAIL_BYTES = 1 << 16
_ARROW_FAULTS = (pa.ArrowException, OSError, ValueError, OverflowError)

MakeError = Callable[[str], DatasetError]
"""Builds the error for a message, so that the caller chooses the class and its fields."""


def plain_error(message: str) -> DatasetError:
    """The error of a metadata file."""
    return MetadataError(message)


@dataclass(frozen=True, slots=True)
class Footer:
    """A parquet footer.

    Attributes:
        metadata: as pyarrow needs it for opening; its column chunks are never asked for (see ``footer.py``).
        groups: what it says about row groups.
    """

    metadata: pq.FileMetaData
    groups: GroupTable

    @property
    def num_rows(self) -> int:
        return int(self.groups.rows.sum())


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """One parquet file of a store.

    Attributes:
        store: where the file is.
        path: relative to the store's root.
        make_error: builds errors about this file.
    """

    store: Store
    path: str
    make_error: MakeError = plain_error

    @property
    def where(self) -> str:
        return f"{self.store.url}: {self.path}"

    def footer(self) -> Footer:
        """Reads the footer alone.

        Raises:
            DatasetError: the file is missing or has no footer; the message names the likely cause.
        """
        try:
            raw = self._footer_bytes()
        except ObjectNotFoundError as error:
            raise self.make_error(f"{self.where} is missing") from error
        except PlaceholderError as refused:
            raise self.make_error(f"{self.store.url}: {refused}") from refused
        try:
            groups = parse_footer(raw)
            whole = b"".join((_MAGIC, raw, len(raw).to_bytes(4, "little"), _MAGIC))
            return Footer(pq.read_metadata(pa.BufferReader(whole)), groups)
        except _ARROW_FAULTS as error:
            raise self.make_error(f"{self.where} is damaged: {error}") from error

    def _footer_bytes(self) -> bytes:
        size = self.store.size(self.path)
        if not size:
            raise self.make_error(f"{self.where} is empty: the recording was not finalised or the copy was interrupted")
        start = max(0, size - _TAIL_BYTES)
        ranges = [(0, min(size, 256)), (start, size)] if start else [(0, size)]
        parts = self.store.read_ranges(self.path, ranges)
        head, tail = parts[0], parts[-1]
        if not head.startswith(_MAGIC):
            raise self.make_error(f"{self.where} is not a parquet file (it starts with {head[:4]!r})")
        if size < 12 or tail[-4:] != _MAGIC:
            raise self.make_error(
                f"{self.where} has no parquet footer ({size} bytes): the recording was not finalised (killed before finalize()) "
                "or the file was cut; record or copy it again, or drop its episodes"
            )
        length = int.from_bytes(tail[-8:-4], "little")
        if length > min(size - 12, MAX_FOOTER_BYTES):
            raise self.make_error(f"{self.where} is damaged: its footer of {length} bytes does not fit a file of {size} bytes")
        if length + 8 <= len(tail):
            return tail[len(tail) - 8 - length : -8]
        return self.store.read_ranges(self.path, [(size - 8 - length, size - 8)])[0]

    @contextmanager
    def faults(self) -> Generator[None]:
        """Turns Arrow faults inside the block into typed errors that name the file; the block should hold Arrow calls only."""
        try:
            yield
        except ReelrayError:
            raise
        except _ARROW_FAULTS as error:
            raise self.make_error(f"{self.where} is damaged: {error}") from error

    @contextmanager
    def opened(self, footer: Footer | None = None) -> Generator[pq.ParquetFile]:
        """The open file.

        Args:
            footer: a footer read before, which saves reading it again.

        Raises:
            DatasetError: the file is missing or damaged.
        """
        known = footer or self.footer()
        try:
            handle = self.store.open(self.path)
        except ObjectNotFoundError as error:
            raise self.make_error(f"{self.where} is missing") from error
        with handle:
            with self.faults():
                file = pq.ParquetFile(handle, metadata=known.metadata)
            yield file

    def column_names(self, file: pq.ParquetFile) -> list[str]:
        """Top-level column names.

        Raises:
            DatasetError: two columns have the same name, so that neither can be chosen.
        """
        with self.faults():
            names = list(file.schema_arrow.names)
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise self.make_error(f"{self.where} has columns of the same name: {', '.join(twice[:5])}; write the file again without them")
        return names

    def check_columns(self, names: Sequence[str], wanted: Sequence[str]) -> None:
        """Raises when a wanted column is not there; the message lists what is."""
        missing = [name for name in wanted if name not in names]
        if missing:
            listed = ", ".join(names[:40]) + (" …" if len(names) > 40 else "")
            raise self.make_error(f"{self.where} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; it has {listed}")

    def batches(self, file: pq.ParquetFile, group: int, columns: Sequence[str], rows: int) -> Generator[pa.Table]:
        """The rows of one row group in tables of at most ``rows`` rows, so that memory stays bounded.

        Raises:
            DatasetError: the file is damaged.
        """
        with self.faults():
            iterator = iter(file.iter_batches(rows, row_groups=[group], columns=list(columns), use_threads=False))
        while True:
            with self.faults():
                batch = next(iterator, None)
            if batch is None:
                return
            yield pa.Table.from_batches([batch])


def check_read_size(footer: Footer, groups: Sequence[int], columns: Sequence[str], where: str, batch_rows: int | None = None) -> None:
    """Refuses reads whose stated size could exhaust memory.

    Args:
        footer: the file's footer.
        groups: row groups to read.
        columns: columns to read.
        where: names the file in the error.
        batch_rows: rows that are in memory at once, when the groups are walked in batches.

    Raises:
        UnsafeInputError: names the size and the limit.
    """
    total = footer.groups.read_bytes(list(groups), list(columns), batch_rows)
    if total > MAX_READ_BYTES:
        raise UnsafeInputError(f"{where}: the footer announces {total} bytes for one read; the limit is {MAX_READ_BYTES}")


def read_columns(source: ParquetSource, columns: Sequence[str], optional: Sequence[str] = ()) -> pa.Table:
    """The named columns of the whole file, in the order named, and those of ``optional`` that are there.

    Raises:
        DatasetError: the file cannot be read, or lacks a column; the message lists what it has.
    """
    footer = source.footer()
    with source.opened(footer) as file:
        names = source.column_names(file)
        source.check_columns(names, columns)
        wanted = [*columns, *(name for name in optional if name in names)]
        check_read_size(footer, range(len(footer.groups)), wanted, source.where)
        with source.faults():
            return file.read(columns=wanted, use_threads=False).select(wanted)


def _no_nulls(table: pa.Table, name: str, source: ParquetSource) -> pa.ChunkedArray:
    column = table.column(name)
    if column.null_count:
        row = int(np.flatnonzero(np.asarray(column.is_null()))[0])
        raise source.make_error(f"{source.where}: column {name} has no value in row {row}")
    return column


def integer_column(table: pa.Table, name: str, source: ParquetSource) -> NDArray[np.int64]:
    """A column as int64; whole floats are accepted, since pandas writes them when a column ever had a gap.

    Raises:
        DatasetError: a null, a fraction or another type; the message names row and value.
    """
    column = _no_nulls(table, name, source)
    if pa.types.is_integer(column.type):
        values = np.asarray(column.to_numpy())
        if values.dtype == np.uint64 and values.size and int(values.max()) > np.iinfo(np.int64).max:
            raise source.make_error(f"{source.where}: column {name} holds {int(values.max())}, which is not a count or an index")
        return values.astype(np.int64)
    if pa.types.is_floating(column.type):
        floats = np.asarray(column.to_numpy(), dtype=np.float64)
        bad = np.flatnonzero(~(np.isfinite(floats) & (floats == np.floor(floats)) & (np.abs(floats) < 2.0**53)))
        if bad.size:
            raise source.make_error(f"{source.where}: column {name} holds {floats[bad[0]]} in row {bad[0]}, expected a whole number")
        return floats.astype(np.int64)
    raise source.make_error(f"{source.where}: column {name} has type {column.type}, expected whole numbers")


def float_column(table: pa.Table, name: str, source: ParquetSource) -> NDArray[np.float64]:
    """A column as float64.

    Raises:
        DatasetError: a null, a value that is not finite, or another type; the message names row and value.
    """
    column = _no_nulls(table, name, source)
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise source.make_error(f"{source.where}: column {name} has type {column.type}, expected numbers")
    values = np.asarray(column.to_numpy(), dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise source.make_error(f"{source.where}: column {name} holds {values[bad[0]]} in row {bad[0]}, expected a finite number")
    return values


def python_values(column: pa.ChunkedArray, name: str, fail: MakeError) -> list[object]:
    """A column as Python values.

    Raises:
        DatasetError: text that is not UTF-8, or values that Python cannot hold.
    """
    try:
        return column.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:
        raise fail(f"column {name} holds a value that cannot be read: {error}") from error
