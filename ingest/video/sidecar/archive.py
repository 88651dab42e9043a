"""The sidecar file itself: a ZIP of ``.npy`` members, schema 3, equal bytes for equal input."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ingest.errors import SidecarError
from ingest.video.files import open_regular
from ingest.video.sidecar.records import LEROBOT_ARRAYS, extra_record, lerobot_arrays, mp4_record, our_arrays, table_from_record
from ingest.video.sidecar.spec import SidecarSpec, as_list, as_object, checked_path, spec_from_json, spec_to_json
from ingest.video.tables import MAX_SAMPLES, SampleTable

_T = TypeVar("_T")

MANIFEST = "manifest_json"
EXTRAS = "reelray/manifest_json"
"""Our own member, which LeRobot ignores."""

OUR_ARRAYS = ("starts", "dts", "descriptions", "gop_xxh3")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_MODE = 0o600 << 16
_LEVEL = 4  # as small as level 6 for these arrays, at a fifth of its cost
_MAX_MANIFEST_BYTES = 1 << 30
_MAX_ARRAY_BYTES = 8 * MAX_SAMPLES + 4096
_MAX_MEMBERS = 4_000_000
_DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError, OverflowError)


class ArchiveWriter:
    """Appends one source file after the other; nothing stays in memory but the manifest.

    Args:
        target: writable binary file.
    """

    def __init__(self, target: BinaryIO) -> None:
        self._zip = zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, allowZip64=True)
        self._files: list[dict[str, Any]] = []
        self._extras: list[dict[str, Any]] = []

    def add(self, table: SampleTable) -> None:
        """Appends the arrays of one file. Files come in ascending order of path.

        Raises:
            SidecarError: the path does not follow the one before it.
        """
        if self._files and self._files[-1]["file_path"] >= table.path:
            raise SidecarError(f"{table.path} comes after {self._files[-1]['file_path']}: files are written in ascending order")
        number = len(self._files)
        for name, array in lerobot_arrays(table).items():
            self._member(f"{number}/{name}", array)
        for name, array in our_arrays(table).items():
            self._member(f"reelray/{number}/{name}", array)
        self._files.append({"file_path": table.path, "file_size": table.file_size, "mp4": mp4_record(table)})
        self._extras.append(extra_record(table))

    def finish(self, spec: SidecarSpec) -> SidecarSpec:
        """Writes the manifest and closes the archive.

        Args:
            spec: of the source; sizes that it leaves open are filled in from the files.

        Returns:
            the description as written.

        Raises:
            SidecarError: the files added are not those of the source.
        """
        sizes: dict[str, int | None] = {record["file_path"]: record["file_size"] for record in self._files}
        known = {path: size for path, size in spec.sizes.items() if size is not None}
        if sizes.keys() != spec.sizes.keys() or any(sizes[path] != size for path, size in known.items()):
            raise SidecarError(f"{len(sizes)} files were indexed, the source has {len(spec.sizes)}; sizes or paths differ")
        written = replace(spec, sizes=sizes)
        document = {"version": 3, "sidecar": spec_to_json(written), "files": self._files}
        self._member(EXTRAS, _json_array({"version": 1, "files": self._extras}))
        self._member(MANIFEST, _json_array(document))
        self._zip.close()
        return written

    def abandon(self) -> None:
        """Lets go of the archive without a manifest; what was written is no sidecar."""
        with contextlib.suppress(OSError):
            self._zip.close()

    def _member(self, name: str, array: NDArray[Any]) -> None:
        buffer = io.BytesIO()
        npy.write_array(buffer, np.ascontiguousarray(array) if array.ndim else array, allow_pickle=False)
        info = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
        info.compress_type = zipfile.ZIP_DEFLATED
        info.external_attr = _MODE
        info.create_system = 3
        self._zip.writestr(info, buffer.getbuffer(), compresslevel=_LEVEL)


def _json_array(document: dict[str, Any]) -> NDArray[Any]:
    return np.array(json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode())


def write_archive(target: BinaryIO, spec: SidecarSpec, tables: Iterable[SampleTable]) -> SidecarSpec:
    """Writes a whole sidecar; ``tables`` come in ascending order of path."""
    writer = ArchiveWriter(target)
    for table in tables:
        writer.add(table)
    return writer.finish(spec)


@dataclass(frozen=True, slots=True)
class SidecarFile:
    """One source file of a sidecar: its place in the archive and its manifest records."""

    number: int
    path: str
    record: dict[str, Any]
    extra: dict[str, Any] | None


class SidecarArchive:
    """A sidecar opened for reading. Arrays are read only for the files asked for.

    Args:
        source: path of the sidecar, or its bytes.

    Raises:
        SidecarError: it is no schema 3 sidecar.
        OSError: it cannot be read.
    """

    def __init__(self, source: Path | bytes) -> None:
        self.where = str(source) if isinstance(source, Path) else "sidecar"
        stream: BinaryIO = open_regular(source) if isinstance(source, Path) else io.BytesIO(source)
        self._stream = stream
        try:
            self._open(stream)
        except BaseException:
            stream.close()
            raise

    def _open(self, stream: BinaryIO) -> None:
        self._zip = self._guard(lambda: zipfile.ZipFile(stream))
        infos = self._zip.infolist()
        if len(infos) > _MAX_MEMBERS:
            raise SidecarError(f"{self.where}: {len(infos)} members")
        self._members = {info.filename: info for info in infos}
        document = as_object(self._json(MANIFEST), f"{self.where}: manifest")
        if document.get("version") != 3:
            raise SidecarError(f"{self.where}: version {document.get('version')!r}, expected 3; older sidecars are ignored and rebuilt")
        self.spec = spec_from_json(document.get("sidecar"), self.where)
        extras = self._extras()
        self.files: dict[str, SidecarFile] = {}
        for number, row in enumerate(as_list(document.get("files"), f"{self.where}: files")):
            fields = as_object(row, f"{self.where}: file {number}")
            path = checked_path(fields.get("file_path"), self.where)
            record = as_object(fields.get("mp4"), f"{self.where}: {path}")
            if not fields.get("file_size") == record.get("file_size") == self.spec.sizes.get(path) or record.get("file_path") != path:
                raise SidecarError(f"{self.where}: {path} has contradictory paths or sizes")
            extra = None if extras is None or number >= len(extras) else as_object(extras[number], f"{self.where}: {path}")
            self.files[path] = SidecarFile(number, path, record, extra)
        if self.files.keys() != self.spec.sizes.keys():
            raise SidecarError(f"{self.where}: {len(self.files)} files are indexed, {len(self.spec.sizes)} are listed as sources")

    def __enter__(self) -> SidecarArchive:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._zip.close()
        self._stream.close()

    @property
    def made_by_us(self) -> bool:
        """Whether it has our additional members."""
        return f"{EXTRAS}.npy" in self._members

    @property
    def has_checksums(self) -> bool:
        """Whether every file has payload checksums."""
        return bool(self.files) and all(f"reelray/{file.number}/gop_xxh3.npy" in self._members for file in self.files.values())

    def content_digest(self) -> str:
        """Digest of the archive's directory: names, sizes and checksums of its members."""
        rows = sorted((info.filename, info.file_size, info.CRC) for info in self._members.values())
        return hashlib.sha256(repr(rows).encode()).hexdigest()

    def table(self, path: str) -> SampleTable:
        """The sample table of one source file.

        Raises:
            SidecarError: the file is not in the sidecar, or its arrays are missing or impossible.
        """
        file = self.files.get(path)
        if file is None:
            raise SidecarError(f"{self.where}: {path} is not among its {len(self.files)} files")
        where = f"{self.where}: {path}"
        arrays: dict[str, NDArray[Any]] = {}
        for name in LEROBOT_ARRAYS:
            member = f"{file.number}/{name}.npy"
            if member not in self._members:
                raise SidecarError(f"{where}: array {name} is missing")
            arrays[name] = self._array(member)
        ours = {name: f"reelray/{file.number}/{name}.npy" for name in OUR_ARRAYS}
        found = {name: self._array(member) for name, member in ours.items() if member in self._members} if file.extra is not None else {}
        return table_from_record(file.record, file.extra, arrays, found, where)

    def validate(self) -> None:
        """Reads and checks every array of every file.

        Raises:
            SidecarError: one is missing, damaged or impossible.
        """
        for path in self.files:
            self.table(path)

    def _extras(self) -> list[Any] | None:
        if f"{EXTRAS}.npy" not in self._members:
            return None
        document = as_object(self._json(EXTRAS), f"{self.where}: {EXTRAS}")
        return as_list(document.get("files"), f"{self.where}: {EXTRAS}") if document.get("version") == 1 else None

    def _json(self, name: str) -> object:
        raw = self._read(f"{name}.npy", _MAX_MANIFEST_BYTES)
        array = self._parse(raw, name)
        if array.dtype.kind != "S" or array.ndim != 0:
            raise SidecarError(f"{self.where}: {name} is {array.ndim}-D {array.dtype}, expected one string of bytes")
        return self._guard(lambda: json.loads(cast("bytes", array.item()).decode()))

    def _array(self, member: str) -> NDArray[Any]:
        return self._parse(self._read(member, _MAX_ARRAY_BYTES), member)

    def _read(self, member: str, limit: int) -> bytes:
        info = self._members.get(member)
        if info is None:
            raise SidecarError(f"{self.where}: member {member} is missing")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise SidecarError(f"{self.where}: member {member} is compressed with method {info.compress_type}, expected deflate")
        if info.file_size > limit:
            raise SidecarError(f"{self.where}: member {member} holds {info.file_size} bytes, more than {limit}")

        def inflate() -> bytes:
            with self._zip.open(info) as stream:
                return stream.read(info.file_size + 1)  # the declared size may lie: never inflate more than it

        return self._guard(inflate)

    def _parse(self, raw: bytes, name: str) -> NDArray[Any]:
        def parse() -> NDArray[Any]:
            stream = io.BytesIO(raw)
            version = npy.read_magic(stream)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, fortran, dtype = read(stream)
            if dtype.hasobject or (fortran and len(shape) > 1):
                raise ValueError("not a plain array")
            count = 1
            for side in shape:
                count *= side
            body = memoryview(raw)[stream.tell() :]
            if count * dtype.itemsize != len(body) or count < 0:
                raise ValueError(f"{shape} of {dtype} in {len(body)} bytes")
            return np.frombuffer(body, dtype, count).reshape(shape) if dtype.itemsize else np.zeros(shape, dtype)

        return self._guard(parse, name)

    def _guard(self, action: Callable[[], _T], name: str = "") -> _T:
        try:
            return action()
        except SidecarError:
            raise
        except _DAMAGE as error:
            raise SidecarError(f"{self.where}: {name + ': ' if name else ''}damaged or no sidecar ({error})") from error


def load_sidecar(source: Path | bytes) -> SidecarArchive:
    """Opens a sidecar, ours or LeRobot's; see ``SidecarArchive``.

    Raises:
        SidecarError: it is no schema 3 sidecar.
        OSError: it cannot be read.
    """
    return SidecarArchive(source)
