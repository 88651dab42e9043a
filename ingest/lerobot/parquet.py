"""Parquet files of strangers: opened with causes named, sizes bounded, and nothing executed from their metadata."""

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingest.errors import DatasetError, MetadataError, ObjectNotFoundError, ReelrayError, StorageError, UnsafeInputError
from ingest.storage.base import Store

MAX_READ_BYTES = 8 << 30
"""Most bytes (uncompressed, as the footer states them) that one read may ask for."""

MakeError = Callable[[str], DatasetError]
"""Builds the error for a message, so that the caller chooses the class and its fields."""


def plain_error(message: str) -> DatasetError:
    """The error of a metadata file."""
    return MetadataError(message)


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

    @contextmanager
    def opened(self, footer: pq.FileMetaData | None = None) -> Generator[pq.ParquetFile]:
        """The open file; every Arrow fault inside the block becomes a typed error that names the file.

        Args:
            footer: a footer read before, which saves reading it again.
        """
        try:
            with self.store.open(self.path) as handle:
                yield pq.ParquetFile(handle, metadata=footer)
        except ObjectNotFoundError as error:
            raise self.make_error(f"{self.where} is missing") from error
        except ReelrayError:
            raise
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise self.make_error(self._cause(error)) from error

    def _cause(self, error: Exception) -> str:
        size = self.store.size(self.path)
        if not size:
            return f"{self.where} is empty: the recording was not finalised or the copy was interrupted"
        try:
            head, tail = self.store.read_ranges(self.path, [(0, min(size, 64)), (max(0, size - 4), size)])
        except StorageError as refused:
            # Stores refuse Git LFS pointers and web pages by their first bytes; any narrower class is a fault of the transport.
            if type(refused) is not StorageError:
                raise
            return f"{self.store.url}: {refused}"
        if not head.startswith(b"PAR1"):
            return f"{self.where} is not a parquet file (it starts with {head[:4]!r})"
        if tail != b"PAR1":
            return (
                f"{self.where} has no parquet footer ({size} bytes): the recording was not finalised (killed before finalize()) "
                "or the file was cut; record or copy it again, or drop its episodes"
            )
        return f"{self.where} is damaged: {error}"

    def footer(self) -> pq.FileMetaData:
        """The footer alone."""
        with self.opened() as file:
            return file.metadata


def column_names(file: pq.ParquetFile, source: ParquetSource) -> list[str]:
    """Top-level column names.

    Raises:
        DatasetError: two columns have the same name, so that neither can be chosen.
    """
    names = list(file.schema_arrow.names)
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise source.make_error(f"{source.where} has columns of the same name: {', '.join(twice[:5])}; write the file again without them")
    return names


def check_read_size(footer: pq.FileMetaData, groups: Iterable[int], columns: Sequence[str], where: str) -> None:
    """Refuses reads whose stated size could exhaust memory.

    Raises:
        UnsafeInputError: names the size and the limit.
    """
    wanted = set(columns)
    total = 0
    for number in groups:
        group = footer.row_group(number)
        for position in range(group.num_columns):
            column = group.column(position)
            if column.path_in_schema.split(".", 1)[0] in wanted:
                total += max(0, column.total_uncompressed_size)
    if total > MAX_READ_BYTES:
        raise UnsafeInputError(f"{where}: the footer announces {total} bytes for one read; the limit is {MAX_READ_BYTES}")


def read_columns(source: ParquetSource, columns: Sequence[str]) -> pa.Table:
    """The named columns of the whole file, in the order named.

    Raises:
        DatasetError: the file cannot be read, or lacks a column; the message lists what it has.
    """
    with source.opened() as file:
        check_columns(column_names(file, source), columns, source)
        check_read_size(file.metadata, range(file.metadata.num_row_groups), columns, source.where)
        return file.read(columns=list(columns), use_threads=False).select(list(columns))


def check_columns(names: Sequence[str], wanted: Sequence[str], source: ParquetSource) -> None:
    """Raises when a wanted column is not there."""
    missing = [name for name in wanted if name not in names]
    if missing:
        listed = ", ".join(names[:40]) + (" …" if len(names) > 40 else "")
        raise source.make_error(f"{source.where} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; it has {listed}")


def integer_column(table: pa.Table, name: str, source: ParquetSource) -> NDArray[np.int64]:
    """A column as int64; whole floats are accepted, since pandas writes them when a column ever had a gap.

    Raises:
        DatasetError: a null, a fraction or another type; the message names row and value.
    """
    column = table.column(name)
    if column.null_count:
        row = int(np.flatnonzero(np.asarray(column.is_null()))[0])
        raise source.make_error(f"{source.where}: column {name} has no value in row {row}")
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
    column = table.column(name)
    if column.null_count:
        row = int(np.flatnonzero(np.asarray(column.is_null()))[0])
        raise source.make_error(f"{source.where}: column {name} has no value in row {row}")
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise source.make_error(f"{source.where}: column {name} has type {column.type}, expected numbers")
    values = np.asarray(column.to_numpy(), dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise source.make_error(f"{source.where}: column {name} holds {values[bad[0]]} in row {bad[0]}, expected a finite number")
    return values
