"""The files and tensors of a dataset as a Markdown table, from the schema that the code works with.

``python -m ingest.prefeature.describe`` prints the table of the documentation.
"""

from __future__ import annotations

import re
import sys
from collections import Counter

from ingest.prefeature import layout
from ingest.prefeature.actions import actions_for, cameras_of
from ingest.prefeature.history import history_table
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.schema import case_schema, context_schema, frozen_schema, noise_schema, step_schema, text_kv_schema
from ingest.prefeature.sizes import Sizes
from ingest.prefeature.tensorfile import TensorSpec, file_bytes

_KEY = RecordKey(0, 0, 0)


def _general(name: str) -> str:
    """A path or tensor name with letters for its numbers."""
    name = name.replace("case_0000", "case_XXXX").replace("action_00", "action_YY").replace("chunk_00", "chunk_ZZ")
    return re.sub(r"step_\d", "step_I", re.sub(r"block_\d\d", "block_BB", name))


def _tensors(specs: list[TensorSpec], shapes: dict[str, tuple[str, ...]] | None = None) -> list[str]:
    """One entry for each tensor, with letters for block and step numbers and their count."""
    counts = Counter(_general(spec.name) for spec in specs)
    lines: dict[str, str] = {}
    for spec in specs:
        name = _general(spec.name)
        shape = (shapes or {}).get(spec.name) or tuple(str(size) for size in spec.shape)
        times = f" × {counts[name]}" if counts[name] > 1 else ""
        lines.setdefault(name, f"`{name}` {spec.dtype} [{', '.join(shape)}]{times}")
    return list(lines.values())


def schema_table(sizes: Sizes) -> str:
    """The table: path, how many files there are, bytes of each without ``__metadata__``, and its tensors."""
    runs = sizes.cases * len(actions_for(sizes.latent_frames))
    records = runs * sizes.chunks
    views = cameras_of(actions_for(sizes.latent_frames)[0].pose, sizes.latent_frames).viewmats
    limits = {"memory_frames": sizes.memory_frames, "recent_frames": sizes.recent_frames, "chunk_frames": sizes.chunk_frames}
    frames = [len(chosen) for chosen in history_table(views, **limits, seed=0)]
    context = context_schema(sizes, 2)
    letters = {spec.name: tuple("n" if size == 2 else str(size) for size in spec.shape) for spec in context}
    letters |= {name: ("1", f"{sizes.frame_tokens} n", *letters[name][2:]) for name in ("img_modulated", "context_valid_mask")}
    rows: list[tuple[str, int, str, list[str]]] = [
        (layout.case_path(0), sizes.cases, f"{file_bytes(case_schema(sizes)):,}", _tensors(case_schema(sizes))),
        (layout.text_kv_path(0), sizes.cases, f"{file_bytes(text_kv_schema(sizes)):,}", _tensors(text_kv_schema(sizes))),
        (layout.step_path(_KEY), records, f"{file_bytes(step_schema(sizes)):,}", _tensors(step_schema(sizes))),
        (
            layout.context_path(_KEY, 0),
            records * len(sizes.blocks),
            " to ".join(f"{file_bytes(context_schema(sizes, count)):,}" for count in (min(frames), max(frames))),
            [*_tensors(context, letters), f"n = {', '.join(map(str, frames))} for the chunks"],
        ),
        (layout.FROZEN, 1, f"{file_bytes(frozen_schema(sizes)):,}", _tensors(frozen_schema(sizes))),
        (layout.NOISE, 1, f"{file_bytes(noise_schema(sizes)):,}", _tensors(noise_schema(sizes))),
    ]
    head = "| path | files | bytes of each | tensors |\n|---|---|---|---|\n"
    body = "".join(f"| `{_general(path)}` | {count:,} | {size} | {'; '.join(tensors)} |\n" for path, count, size, tensors in rows)
    pictures = f"{sizes.video_frames} pictures of {sizes.width}×{sizes.height}, {sizes.fps} per second"
    return (
        head
        + body
        + f"| `{_general(layout.image_path(0))}` | {sizes.cases:,} | | JPEG of {sizes.width}×{sizes.height} |\n"
        + f"| `{_general(layout.video_path(0, 0))}` | {runs:,} | | {pictures} |\n"
    )


if __name__ == "__main__":
    sys.stdout.write(schema_table(Sizes()))
