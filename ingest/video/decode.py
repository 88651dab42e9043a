"""Packets straight into a decoder, pictures out, each known by its number."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import av
import numpy as np
from av.codec.context import ThreadType
from av.error import FFmpegError
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.reformatter import ColorRange
from numpy.typing import NDArray

from ingest.errors import DecodeError, LeadInError, ShortReadError, VideoFormatError
from ingest.video.checksums import verify_payload
from ingest.video.entries import MAX_PIXELS, SampleEntry, parse_sample_entries
from ingest.video.keys import HEAD_BYTES, can_start
from ingest.video.pixels import PictureWriter
from ingest.video.spans import PictureSpan
from ingest.video.tables import SampleTable

Payload = Sequence[bytes | bytearray | memoryview] | bytes | bytearray | memoryview
"""Contents of a span's ranges: one buffer per range, or a single buffer when there is one range."""

_MAX_PACKET_BYTES = (1 << 31) - 65
_MIN_PIXELS_ALLOWED = 1 << 20


def decode_pictures(
    table: SampleTable, span: PictureSpan, payload: Payload, *, wanted: NDArray[np.integer] | Sequence[int] | None = None
) -> Iterator[tuple[int, av.VideoFrame]]:
    """Decodes a span and yields its wanted pictures in presentation order.

    Every packet carries its sample number as its time, so a decoded picture is known by number; one that is missing, comes
    twice or was never asked for is an error, never a neighbour. Runs in one thread and stops at the last wanted picture.

    Args:
        table: of the file.
        span: which samples, from ``picture_span``.
        payload: contents of ``span.ranges``.
        wanted: picture numbers to yield, a subset of ``span.wanted``; all of them by default.

    Yields:
        (picture number, frame). The frame is valid until the next one is taken, unless the caller keeps it.

    Raises:
        DecodeError: damaged data; names the file and the picture.
        ChecksumError: the payload differs from the checksums of the index, where it has them.
        LeadInError: the decoder found no fault, but the span begins too late to show a picture.
        ShortReadError: the payload is not as long as the ranges.
        VideoFormatError: the codec cannot be decoded.
    """
    numbers = span.wanted if wanted is None else np.unique(np.asarray(wanted, np.int64))
    order = table.presented[numbers].tolist()
    picture_of = dict(zip(order, numbers.tolist(), strict=True))
    held: dict[int, av.VideoFrame] = {}
    due = 0
    late = span.first + table.samples_before > 0
    buffers = payload_buffers(table, span, payload)
    verify_payload(table, span, buffers)
    decoders = _Decoders()
    for frame in _frames(table, span, buffers, _hidden_lead(table, span), decoders):
        sample = frame.pts
        if sample is None or not span.first <= sample < span.stop:
            raise _damaged(table, int(numbers[min(due, len(order) - 1)]), f"the decoder returned picture {sample}, which it was not fed")
        picture = picture_of.get(sample)
        if picture is None:
            continue
        if sample in held or picture < int(numbers[due]):
            raise _damaged(table, picture, "the decoder returned the picture twice")
        if frame.is_corrupt:
            raise _damaged(table, picture, "the decoder marks the picture as damaged", late_start=late)
        held[sample] = frame
        while due < len(order) and order[due] in held:
            yield int(numbers[due]), held.pop(order[due])
            due += 1
        if due == len(order):
            decoders.give_back()
            return
    what = f"the decoder returned no such picture from samples {span.first}..{span.stop - 1}"
    raise _damaged(table, int(numbers[due]), what, late_start=late)


def decode_into(
    table: SampleTable,
    span: PictureSpan,
    payload: Payload,
    wanted: NDArray[np.integer] | Sequence[int],
    writer: PictureWriter,
    out_slots: Sequence[NDArray[Any]] | NDArray[Any],
) -> Iterator[tuple[int, int]]:
    """Decodes wanted pictures straight into arrays of the caller.

    Args:
        table: of the file.
        span: which samples.
        payload: contents of ``span.ranges``.
        wanted: picture numbers, ascending and unique; ``wanted[i]`` goes into ``out_slots[i]``.
        writer: converts; ``writer.shape(table)`` is the shape of a slot.
        out_slots: arrays [height, width, channels], one per wanted picture.

    Yields:
        (position in ``wanted``, picture number) as soon as that slot is filled, in presentation order.

    Raises:
        DecodeError: damaged data, or a picture of another size than its slot; names the file and the picture.
        ShortReadError: the payload is not as long as the ranges.
        VideoFormatError: the codec cannot be decoded.
    """
    for position, (picture, frame) in enumerate(decode_pictures(table, span, payload, wanted=wanted)):
        try:
            writer.write(frame, out_slots[position])
        except DecodeError as error:
            raise _damaged(table, picture, str(error)) from error
        except FFmpegError as error:
            what = f"libswscale does not convert it from {frame.format.name}, colour space {int(frame.colorspace)} ({error})"
            raise _damaged(table, picture, what) from error
        yield position, picture


def _damaged(table: SampleTable, picture: int, what: str, *, late_start: bool = False) -> DecodeError:
    sample = int(table.presented[picture])
    start = int(table.offsets[sample])
    stop = start + int(table.sizes[sample])
    return (LeadInError if late_start else DecodeError)(
        f"{table.path}: picture {picture} (sample {sample}, bytes {start}..{stop}) cannot be decoded: {what}",
        file=table.path,
        byte_range=(start, stop),
        picture=picture,
    )


def payload_buffers(table: SampleTable, span: PictureSpan, payload: Payload) -> list[memoryview]:
    """One buffer per range of the span.

    Raises:
        ShortReadError: the payload is not as long as the ranges.
    """
    buffers = [memoryview(payload)] if isinstance(payload, bytes | bytearray | memoryview) else [memoryview(part) for part in payload]
    found, expected = [len(buffer) for buffer in buffers], [stop - start for start, stop in span.ranges]
    if found != expected:
        raise ShortReadError(f"{table.path}: payload of {found[:8]} bytes, expected {expected[:8]} for bytes {list(span.ranges[:8])}")
    return buffers


def _hidden_lead(table: SampleTable, span: PictureSpan) -> NDArray[np.bool_]:
    """[span] which samples are shown before the picture that decoding starts with: they may lack references."""
    ticks = table.dts[span.first : span.stop].astype(np.int64) + table.composition[span.first : span.stop]
    return ticks < ticks[0] if span.first + table.samples_before else np.zeros(len(ticks), np.bool_)


class _Decoders:
    """The decoders of one span. Those of a span that was decoded without fault serve the next one of the thread.

    A new decoder allocates its pictures anew, and fresh memory costs as much as a fifth of what a short span takes.
    """

    _KEPT = 4
    _idle = threading.local()

    def __init__(self) -> None:
        self._taken: list[tuple[tuple[bytes, int, int], VideoCodecContext]] = []

    def take(self, table: SampleTable, entries: Sequence[SampleEntry], description: int, depth: int) -> VideoCodecContext:
        key = (table.stsd, description, depth)
        found = self._kept().pop(key, None)
        decoder = found if found is not None else open_decoder(entries[description], table.path, depth)
        self._taken.append((key, decoder))
        return decoder

    def give_back(self) -> None:
        kept = self._kept()
        for key, decoder in self._taken:
            decoder.flush_buffers()
            kept[key] = decoder
            while len(kept) > self._KEPT:
                del kept[next(iter(kept))]
        self._taken = []

    def _kept(self) -> dict[tuple[bytes, int, int], VideoCodecContext]:
        return self._idle.__dict__.setdefault("decoders", {})


def _frames(
    table: SampleTable, span: PictureSpan, buffers: list[memoryview], lead: NDArray[np.bool_], decoders: _Decoders
) -> Iterator[av.VideoFrame]:
    entries = parse_sample_entries(table.stsd, table.path)
    descriptions: list[int] = table.descriptions[span.first : span.stop].tolist()
    chunk_of, offset_in = span.chunks_of(table)
    chunk: list[int] = chunk_of.tolist()
    at: list[int] = offset_in.tolist()
    sizes: list[int] = table.sizes[span.first : span.stop].tolist()
    lead_in: list[bool] = lead.tolist()
    keys = np.zeros(len(sizes), np.bool_)
    keys[table.sync[slice(*np.searchsorted(table.sync, (span.first, span.stop)))].astype(np.int64) - span.first] = True
    depth = _reorder_depth(table, span)
    head = buffers[chunk[0]][at[0] : at[0] + min(sizes[0], HEAD_BYTES)]
    if span.first + table.samples_before and can_start(entries[descriptions[0]], bytes(head)) is False:
        raise _damaged(table, int(span.wanted[0]), f"sample {span.first} is declared a key picture and is none", late_start=True)
    current = -1
    decoder: VideoCodecContext | None = None
    for index, size in enumerate(sizes):
        if descriptions[index] != current:
            if decoder is not None:
                yield from _drain(decoder, table, span)
            current = descriptions[index]
            decoder = decoders.take(table, entries, current, depth)
        sample = span.first + index
        assert decoder is not None  # no description is -1
        if size > _MAX_PACKET_BYTES:
            raise _damaged(table, int(span.wanted[0]), f"sample {sample} declares {size} bytes")
        packet = Packet(size)
        if size:
            packet.update(cast("bytes", buffers[chunk[index]][at[index] : at[index] + size]))
        packet.pts = packet.dts = sample
        packet.is_keyframe = bool(keys[index])  # some decoders take a picture without the flag for a difference to the one before
        try:
            frames = _decode(decoder, packet) if size else []
        except (FFmpegError, ValueError) as error:
            if lead_in[index]:
                continue
            raise _failed(table, span, sample, error) from error
        yield from frames
    if decoder is not None:
        yield from _drain(decoder, table, span)


def _decode(decoder: VideoCodecContext, packet: Packet[Any] | None) -> list[av.VideoFrame]:
    return cast("list[av.VideoFrame]", cast("Any", decoder).decode(packet))


def _drain(decoder: VideoCodecContext, table: SampleTable, span: PictureSpan) -> Iterator[av.VideoFrame]:
    try:
        yield from _decode(decoder, None)
    except (FFmpegError, ValueError) as error:
        raise _failed(table, span, span.stop - 1, error) from error


def _failed(table: SampleTable, span: PictureSpan, sample: int, error: Exception) -> DecodeError:
    """Names the first wanted picture that the damaged sample can affect."""
    later = [picture for picture in span.wanted.tolist() if int(table.presented[picture]) >= sample]
    return _damaged(table, later[0] if later else int(span.wanted[-1]), f"sample {sample} is damaged ({type(error).__name__})")


def _reorder_depth(table: SampleTable, span: PictureSpan) -> int:
    """Most pictures that precede another in decode order and follow it in presentation order."""
    ticks = table.dts[span.first : span.stop].astype(np.int64) + table.composition[span.first : span.stop]
    if bool(np.all(ticks[1:] >= ticks[:-1])):
        return 0
    rank = np.argsort(np.argsort(ticks, kind="stable"), kind="stable")
    return int(min(16, max(0, (np.arange(len(rank)) - rank).max())))


def open_decoder(entry: SampleEntry, path: str, reorder_depth: int = 0) -> VideoCodecContext:
    """A decoder for one sample entry: one thread, pictures in presentation order.

    Args:
        entry: how the samples are coded.
        path: for messages.
        reorder_depth: how far decode order departs from presentation order; H.264 streams need not say so themselves.

    Raises:
        VideoFormatError: there is no decoder for the codec.
    """
    if not entry.decoder:
        raise VideoFormatError(f"{path}: no decoder for sample entry {entry.fourcc!r}", file=path)
    if entry.width * entry.height > MAX_PIXELS:
        raise VideoFormatError(f"{path}: {entry.width}x{entry.height} pixels are more than {MAX_PIXELS}", file=path)
    name = "libdav1d" if entry.decoder == "av1" else entry.decoder
    try:
        context = cast("VideoCodecContext", av.CodecContext.create(name, "r"))
    except (FFmpegError, ValueError) as error:
        raise VideoFormatError(f"{path}: this FFmpeg has no decoder {name!r} for {entry.fourcc!r}", file=path) from error
    context.thread_count = 1
    context.thread_type = ThreadType.NONE
    context.codec_tag = entry.fourcc
    context.width, context.height = entry.width, entry.height
    # A stream may be larger than its sample entry says, within reason: memory is spent on what the stream says.
    context.options = {"max_pixels": str(max(4 * entry.width * entry.height, _MIN_PIXELS_ALLOWED))}
    if entry.depth:
        context.bits_per_coded_sample = entry.depth
    if entry.extradata:
        context.extradata = entry.extradata
    if entry.colour is not None:
        context.color_primaries, context.color_trc, context.colorspace = entry.colour[:3]
        if entry.colour[3] is not None:
            context.color_range = ColorRange.JPEG if entry.colour[3] else ColorRange.MPEG
    if entry.decoder == "h264":
        context.reorder_depth = reorder_depth
    return context
