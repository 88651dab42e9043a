"""Mutated heads and flipped payload bits: typed errors only, quickly, in little memory."""

from __future__ import annotations

import os
import resource
import time

import numpy as np
import pytest
from video.forge import MemoryStore, Movie, encode, linear, pictures

from ingest.errors import ChecksumError, ReelrayError, VideoFormatError
from ingest.video.boxes import read_sample_table
from ingest.video.checksums import add_checksums
from ingest.video.decode import decode_pictures
from ingest.video.fetch import read_pictures
from ingest.video.mini import mini_mp4_sizes
from ingest.video.pixels import PictureWriter
from ingest.video.span_table import episode_spans
from ingest.video.spans import gop_starts, picture_span
from ingest.video.tables import SampleTable

INTERESTING = [0, 1, 2, 7, 8, 15, 16, 255, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]


def heads() -> list[bytes]:
    """Sound files of every layout that the reader knows; payload included, so that decoding can be tried."""
    count = 24
    base = {"composition": [1024, 2048, 512] * 8, "sync": [0, 8, 16], "edits": [(500, -1, 1 << 16), (700, 1024, 1 << 16)]}
    return [
        encode(pictures(16), options={"g": "6", "bf": "2"}),
        encode(pictures(16), options={"g": "6", "bf": "0"}, mux_options={"movflags": "frag_keyframe+empty_moov+default_base_moof"}),
        Movie(list(range(9, 9 + count)), [512] * count, per_chunk=[5, 7, 3, 9], **base).build()[0],
        Movie([9] * count, list(range(count)), wide_moov=True, use_co64=True, wide_edits=True, faststart=False, **base).build()[0],
        Movie([n % 15 for n in range(count)], [512] * count, size_bits=4, ctts_version=1, **base).build()[0],
    ]


def mutate(rng: np.random.Generator, data: bytes) -> bytes:
    """One of several kinds of damage, aimed at the index rather than the payload."""
    moov = data.find(b"moov")
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        kind = int(rng.integers(0, 6))
        if not out:
            break
        low = max(0, min(moov - 8, len(out) - 1)) if rng.random() < 0.8 else 0
        at = int(rng.integers(low, len(out)))
        if kind == 0:
            out[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1:
            out[at] = int(rng.integers(0, 256))
        elif kind == 2:
            width = int(rng.choice([4, 8]))
            value = int(rng.choice(INTERESTING))
            out[at : at + width] = (value if width == 4 else value << int(rng.integers(0, 32))).to_bytes(width, "big")
        elif kind == 3:
            del out[at : at + int(rng.integers(1, 40))]
        elif kind == 4:
            out[at:at] = out[at : at + int(rng.integers(1, 40))]
        else:
            del out[int(rng.integers(at, len(out))) :]
    return bytes(out)


def use(data: bytes, *, decode: bool) -> str:
    """Does everything that a stream does with a file; returns how it ended."""
    try:
        table = read_sample_table(lambda start, stop: data[start:stop], len(data), "a.mp4")
    except VideoFormatError as error:
        return "refused" if "a.mp4" in str(error) else "nameless"
    try:
        gop_starts(table)
        assert table.gop_bounds[-1] == table.samples
        if table.samples:
            spans = episode_spans(table, np.array([0.0, 0.2]), np.array([0.2, 0.9]))
            mini_mp4_sizes(table, spans)
        if table.pictures:
            picture_span(table, [table.pictures - 1])
            if decode:
                for _ in read_pictures(MemoryStore({"a.mp4": data}), table, range(min(table.pictures, 8))):
                    pass
    except ReelrayError:
        return "unreadable"
    return "read"


def run_mutations(count: int, seed: int) -> dict[str, int]:
    rng, ends = np.random.default_rng(seed), dict.fromkeys(("refused", "unreadable", "read", "nameless"), 0)
    sound = heads()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        data = mutate(rng, sound[number % len(sound)])
        began = time.process_time()
        ends[use(data, decode=number % 7 == 0)] += 1
        assert time.process_time() - began < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10
    assert not ends.pop("nameless")
    return ends


def test_twenty_thousand_mutations_end_in_typed_errors() -> None:
    """``REELRAY_FUZZ_MUTATIONS`` and ``REELRAY_FUZZ_SEED`` ask for more, or for others."""
    count = int(os.environ.get("REELRAY_FUZZ_MUTATIONS", "20000"))
    ends = run_mutations(count, seed=int(os.environ.get("REELRAY_FUZZ_SEED", "2")))
    assert sum(ends.values()) == count
    assert min(ends.values()) > 0


def with_checksums(data: bytes) -> SampleTable:
    table = read_sample_table(lambda start, stop: data[start:stop], len(data), "a.mp4")
    table, nbytes = add_checksums(MemoryStore({"a.mp4": data}), table)
    assert nbytes == int(table.sizes.sum())
    return table


def test_a_thousand_of_a_thousand_flipped_bits_are_found() -> None:
    data = encode(pictures(48), options={"g": "8", "bf": "2"})
    table = with_checksums(data)
    rng = np.random.default_rng(11)
    found = 0
    for _ in range(1000):
        sample = int(rng.integers(0, table.samples))
        at = int(table.offsets[sample]) + int(rng.integers(0, int(table.sizes[sample])))
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        picture = int(np.flatnonzero(table.presented == sample)[0])
        span = picture_span(table, [picture])
        with pytest.raises(ChecksumError, match=r"a\.mp4: samples .* have checksum .* the sidecar recorded") as caught:
            next(decode_pictures(table, span, [bytes(damaged[a:b]) for a, b in span.ranges]))
        low, high = caught.value.byte_range or (0, 0)
        assert low <= at < high
        found += 1
    assert found == 1000


def test_sound_payload_passes_and_decodes_as_without_checksums() -> None:
    data = encode(pictures(48), options={"g": "8", "bf": "2"})
    table, expected, writer = with_checksums(data), linear(data), PictureWriter()
    for first in range(0, 48, 5):
        for picture, frame in read_pictures(MemoryStore({"a.mp4": data}), table, range(first, min(first + 5, 48))):
            np.testing.assert_array_equal(writer.picture(frame), expected[picture])


def test_checksums_follow_scattered_and_interleaved_samples() -> None:
    movie = Movie([50] * 30, [512] * 30, sync=[0, 7, 20], per_chunk=[4, 9, 2, 15], chunk_order=[2, 0, 3, 1], chunk_gap=70_000)
    data = movie.build()[0]
    table = with_checksums(data)
    assert table.gop_xxh3 is not None
    assert len(table.gop_xxh3) == 3
    import xxhash

    for run in range(3):
        low, high = table.gop_bounds[run : run + 2].tolist()
        payload = b"".join(data[o : o + s] for o, s in zip(table.offsets[low:high].tolist(), table.sizes[low:high].tolist(), strict=True))
        assert xxhash.xxh3_64_intdigest(payload) == int(table.gop_xxh3[run])
