"""Sample tables to and from the plain records that sidecars and mapped indexes store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.errors import SidecarError, VideoFormatError
from ingest.video.entries import parse_sample_entries
from ingest.video.sidecar.spec import as_count, as_list, as_object, as_text, checked_path
from ingest.video.tables import MAX_SAMPLES, SampleTable, Timeline, constant, read_only
from ingest.video.timeline import present

LEROBOT_ARRAYS = (
    "sample_pts",
    "sample_durations",
    "sample_composition_offsets",
    "sample_sizes",
    "sample_offsets",
    "sync_samples",
)
"""Arrays of one file in a schema 3 sidecar, in file order."""

_HEX_LIMIT = 1 << 20
_NUMBERS = (
    "file_size",
    "moov_offset",
    "mdat_offset",
    "mdat_payload_offset",
    "mdat_payload_size",
    "timescale",
    "duration",
    "track_id",
    "width",
    "height",
)


def mp4_record(table: SampleTable) -> dict[str, Any]:
    """The ``mp4`` object of one file in the manifest: exactly the fields that LeRobot writes, in its order."""
    return {
        "file_path": table.path,
        "file_size": table.file_size,
        "ftyp": table.ftyp.hex(),
        "moov_offset": table.moov_offset,
        "mdat_offset": table.mdat_offset,
        "mdat_payload_offset": table.mdat_payload_offset,
        "mdat_payload_size": table.mdat_payload_size,
        "faststart": table.faststart,
        "codec": table.codec,
        "timescale": table.timescale,
        "duration": table.duration,
        "track_id": table.track_id,
        "width": table.width,
        "height": table.height,
        "stsd_body": table.stsd.hex(),
    }


def extra_record(table: SampleTable) -> dict[str, Any]:
    """What a sample table knows beyond LeRobot's record."""
    timeline = table.timeline
    found: dict[str, Any] = {
        "movie_timescale": table.movie_timescale,
        "fragmented": table.fragmented,
        "edit_offset_ticks": table.edit_offset_ticks,
        "timeline": [timeline.offset_ticks, timeline.empty_ticks, timeline.first_tick, timeline.stop_tick],
    }
    return found | ({"untimed": table.untimed} if table.untimed else {})


def lerobot_arrays(table: SampleTable) -> dict[str, NDArray[Any]]:
    """The six arrays of one file with the types that LeRobot writes."""
    columns = (table.sample_pts, table.durations, table.composition, table.sizes, table.offsets, table.sync)
    types = (np.float64, *[np.int64] * 5)
    return {name: column.astype(kind) for name, column, kind in zip(LEROBOT_ARRAYS, columns, types, strict=True)}


def check_lerobot_arrays(arrays: Mapping[str, NDArray[Any]], file_size: int, where: str) -> dict[str, NDArray[Any]]:
    """Checks the six arrays of one file and gives them the types of a sample table.

    Raises:
        SidecarError: an array is missing, not 1-D, not numeric, of another length, or holds impossible values.
    """
    found: dict[str, NDArray[Any]] = {}
    for name in LEROBOT_ARRAYS:
        if name not in arrays:
            raise SidecarError(f"{where}: array {name} is missing")
        array = arrays[name]
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise SidecarError(f"{where}: array {name} is {array.ndim}-D {array.dtype}, expected 1-D numbers")
        found[name] = _exact(array, name, where) if name != "sample_pts" else array.astype(np.float64)
    count = len(found["sample_pts"])
    lengths = {name: len(found[name]) for name in LEROBOT_ARRAYS[:5]}
    if len(set(lengths.values())) != 1 or count > MAX_SAMPLES:
        raise SidecarError(f"{where}: arrays have lengths {lengths}, expected equal ones of at most {MAX_SAMPLES}")
    sync, sizes, offsets = found["sync_samples"], found["sample_sizes"], found["sample_offsets"]
    if len(sync) and (bool(np.any(np.diff(sync) <= 0)) or int(sync[0]) < 0 or int(sync[-1]) >= count):
        raise SidecarError(f"{where}: sync_samples do not ascend within 0..{count - 1}")
    if count:
        if not bool(np.all(np.isfinite(found["sample_pts"]))):
            raise SidecarError(f"{where}: sample_pts holds values that are not finite")
        if min(int(sizes.min()), int(offsets.min()), int(found["sample_durations"].min())) < 0:
            raise SidecarError(f"{where}: negative sizes, offsets or durations")
        if int(sizes.max()) > 1 << 32 or int(offsets.max()) > 1 << 62:
            raise SidecarError(f"{where}: sizes or offsets are impossible for a file of {file_size} bytes")
        if max(int(found["sample_durations"].max()), int(np.abs(found["sample_composition_offsets"]).max())) > 1 << 40:
            raise SidecarError(f"{where}: durations or composition offsets are impossible")
    return found


def _exact(array: NDArray[Any], name: str, where: str) -> NDArray[np.int64]:
    if array.dtype.kind == "f" and not bool(np.all(np.isfinite(array) & (np.abs(array) < 1 << 53) & (array == np.floor(array)))):
        raise SidecarError(f"{where}: array {name} holds numbers that are not whole")
    if array.dtype.kind == "u" and len(array) and int(array.max()) >= 1 << 62:
        raise SidecarError(f"{where}: array {name} holds {int(array.max())}")
    return array.astype(np.int64)


def table_from_record(
    record: object, extra: object | None, arrays: Mapping[str, NDArray[Any]], ours: Mapping[str, NDArray[Any]], where: str
) -> SampleTable:
    """Builds the sample table of one file from its manifest record and arrays.

    Args:
        record: the ``mp4`` object.
        extra: our additional object, or None for a sidecar that LeRobot made.
        arrays: the six arrays.
        ours: additional arrays: ``starts``, and where needed ``dts``, ``descriptions``, ``gop_xxh3``.
        where: names sidecar and file in messages.

    Raises:
        SidecarError: a field or array is missing or impossible, or the record alone cannot tell what the file presents.
    """
    fields = as_object(record, where)
    numbers = {name: as_count(fields.get(name), f"{where}: {name}") for name in _NUMBERS}
    stsd, ftyp = _hex(fields, "stsd_body", where), _hex(fields, "ftyp", where)
    path = checked_path(fields.get("file_path"), where)
    found = check_lerobot_arrays(arrays, numbers["file_size"], where)
    entries = _entries(stsd, path, where)
    count = len(found["sample_pts"])
    durations, composition = found["sample_durations"], found["sample_composition_offsets"]
    dts = _checked(ours["dts"], count, "dts", where) if "dts" in ours else np.cumsum(durations) - durations
    if extra is None:
        if entries > 1:
            raise SidecarError(f"{where}: {entries} sample entries, and a sidecar made by LeRobot does not say which sample uses which")
        movie_timescale, fragmented, untimed = 0, False, 0
        offset = _edit_offset(found["sample_pts"], dts + composition, numbers["timescale"], where)
        timeline = Timeline(offset, 0, -offset if offset < 0 else None, None)
    else:
        movie_timescale, fragmented, offset, timeline = _extras(as_object(extra, where), where)
        untimed = as_count(as_object(extra, where).get("untimed", 0), f"{where}: untimed")
        if untimed and untimed >= count:
            raise SidecarError(f"{where}: {untimed} of {count} samples have no time")
    descriptions = _checked(ours["descriptions"], count, "descriptions", where) if "descriptions" in ours else constant(0, count)
    if count and not 0 <= int(descriptions.min()) <= int(descriptions.max()) < entries:
        raise SidecarError(f"{where}: descriptions name sample entries that do not exist")
    starts = ours.get("starts", found["sync_samples"])
    if len(starts) and (bool(np.any(np.diff(starts) <= 0)) or int(starts[0]) < 0 or int(starts[-1]) >= count):
        raise SidecarError(f"{where}: starts do not ascend within 0..{count - 1}")
    presented, presented_pts = present(dts + composition, timeline)
    table = SampleTable(
        path=path,
        file_size=numbers["file_size"],
        codec=as_text(fields.get("codec"), f"{where}: codec"),
        width=numbers["width"],
        height=numbers["height"],
        timescale=numbers["timescale"],
        movie_timescale=movie_timescale,
        duration=numbers["duration"],
        track_id=numbers["track_id"],
        ftyp=ftyp,
        stsd=stsd,
        moov_offset=numbers["moov_offset"],
        mdat_offset=numbers["mdat_offset"],
        mdat_payload_offset=numbers["mdat_payload_offset"],
        mdat_payload_size=numbers["mdat_payload_size"],
        faststart=fields.get("faststart") is True,
        fragmented=fragmented,
        edit_offset_ticks=offset,
        offsets=read_only(found["sample_offsets"]),
        sizes=read_only(found["sample_sizes"]),
        durations=read_only(durations),
        composition=read_only(composition),
        dts=read_only(dts),
        sync=read_only(found["sync_samples"]),
        starts=read_only(starts.astype(np.int64)),
        descriptions=read_only(descriptions),
        presented=read_only(presented),
        presented_pts=read_only(presented_pts + (offset - timeline.offset_ticks)),
        sample_pts=read_only(found["sample_pts"]),
        timeline=timeline,
        gop_xxh3=read_only(ours["gop_xxh3"].astype(np.uint64)) if "gop_xxh3" in ours else None,
        untimed=untimed,
    )
    if table.gop_xxh3 is not None and len(table.gop_xxh3) != len(table.gop_bounds) - 1:
        raise SidecarError(f"{where}: {len(table.gop_xxh3)} checksums for {len(table.gop_bounds) - 1} runs")
    return table


def our_arrays(table: SampleTable) -> dict[str, NDArray[Any]]:
    """Additional arrays of one file; those that follow from LeRobot's are left out."""
    found: dict[str, NDArray[Any]] = {"starts": table.starts.astype(np.int64)}
    if not np.array_equal(table.dts, np.cumsum(table.durations, dtype=np.int64) - table.durations):
        found["dts"] = table.dts.astype(np.int64)
    if bool(np.any(table.descriptions)):
        found["descriptions"] = table.descriptions.astype(np.int64)
    if table.gop_xxh3 is not None:
        found["gop_xxh3"] = table.gop_xxh3
    return found


def _hex(fields: dict[str, Any], name: str, where: str) -> bytes:
    text = as_text(fields.get(name), f"{where}: {name}")
    if len(text) > _HEX_LIMIT:
        raise SidecarError(f"{where}: {name} holds {len(text)} characters")
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise SidecarError(f"{where}: {name} is not hexadecimal") from None


def _entries(stsd: bytes, path: str, where: str) -> int:
    try:
        return len(parse_sample_entries(stsd, path))
    except VideoFormatError as error:
        raise SidecarError(f"{where}: {error}") from error


def _checked(array: NDArray[Any], count: int, name: str, where: str) -> NDArray[np.int64]:
    if array.ndim != 1 or array.dtype.kind not in "iu" or len(array) != count or (count and int(np.abs(array).max()) >= 1 << 62):
        raise SidecarError(f"{where}: array {name} has shape {array.shape} and type {array.dtype}, expected {count} whole numbers")
    return array.astype(np.int64)


def _extras(extra: dict[str, Any], where: str) -> tuple[int, bool, int, Timeline]:
    raw = as_list(extra.get("timeline"), f"{where}: timeline")
    if len(raw) != 4:
        raise SidecarError(f"{where}: timeline is {raw!r}")
    values = [None if value is None else as_count(value, f"{where}: timeline", signed=True) for value in raw]
    offset_ticks, empty_ticks, first_tick, stop_tick = values
    if offset_ticks is None or empty_ticks is None:
        raise SidecarError(f"{where}: timeline is {raw!r}")
    return (
        as_count(extra.get("movie_timescale"), f"{where}: movie_timescale"),
        extra.get("fragmented") is True,
        as_count(extra.get("edit_offset_ticks"), f"{where}: edit_offset_ticks", signed=True),
        Timeline(offset_ticks, empty_ticks, first_tick, stop_tick),
    )


def _edit_offset(sample_pts: NDArray[np.float64], ticks: NDArray[np.int64], timescale: int, where: str) -> int:
    """The edit offset that a LeRobot sidecar has folded into its times."""
    if timescale <= 0:
        raise SidecarError(f"{where}: timescale {timescale}")
    if not len(ticks):
        return 0
    offset = round(float(sample_pts[0]) * timescale) - int(ticks[0])
    if bool(np.any(np.abs(sample_pts * timescale - (ticks + offset)) > 0.5)):
        raise SidecarError(f"{where}: sample_pts do not follow from durations and composition offsets")
    return offset
