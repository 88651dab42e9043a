"""Tables of the documents, made from ``benchmarks/results/*.json``.

A table stands in a document between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``; ``python -m benchmarks`` writes all of
them anew, and a test compares them with the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

Figures = Mapping[str, Any]


def table(heads: str, rows: Iterable[Iterable[object]]) -> str:
    """A table of the document's kind: heads are separated by ``|``, the first column is text and the others are numbers."""
    names = heads.split("|")
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- |", "|---|", 1).replace(" ---: |", "---:|")


def number(value: float | None) -> str:
    """Three digits that count, thousands separated."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def seconds(value: float | None) -> str:
    """Seconds."""
    return "–" if value is None else f"{number(value)} s"


def network(case: Figures) -> str:
    """What a server keeps to."""
    speed = "loopback" if case["bandwidth_mb_per_s"] is None else f"{case['bandwidth_mb_per_s']:.0f} MB/s"
    return f"{speed}, {case['latency_ms']:.0f} ms"


def _by_network(cases: list[Any]) -> list[Any]:
    return sorted(cases, key=lambda case: (case["bandwidth_mb_per_s"] is None, case["latency_ms"]))


def compare(found: Figures) -> str:
    """Loaders on the same files."""
    rows = [
        (
            f"{loader}, {name}",
            number(row["camera_frames_per_s"]),
            number(row["camera_frames_per_cpu_s"]),
            number(row["camera_frames_per_cpu_s"] / made["loaders"]["one process per core, in file order"]["camera_frames_per_cpu_s"]),
            seconds(row.get("first_batch_s")),
        )
        for name, made in found["sets"].items()
        for loader, row in made["loaders"].items()
    ]
    return table("loader and set|pictures/s|pictures per CPU second|of the ceiling|first batch", rows) + f"\n({found['machine']})\n"


def stream(found: Figures) -> str:
    """The stream against the ceiling."""
    rows = [
        (
            name,
            case["strategy"],
            case["window"],
            f"{case['ceiling']['camera_frames']:,}",
            number(case["ceiling_camera_frames_per_cpu_s"]),
            number(case["stream"]["camera_frames_per_cpu_s"]),
            number(case["stream"]["decode_efficiency"]),
            number(case["stream"]["decode_efficiency_wall"]),
            number(case["stream"]["decode_amplification"]),
            seconds(case["stream"]["first_batch_s"]),
        )
        for name, case in found["cases"].items()
    ]
    heads = "set|order|window|pictures|ceiling per CPU s|stream per CPU s|decode efficiency|by wall clock|decoded per delivered|first batch"
    return table(heads, rows) + f"\n({found['machine']})\n"


def storage_ranges(found: Figures) -> str:
    """Payload alone."""
    rows = [
        (network(case), *(seconds(case[way][what]) for way in ("ranges", "whole_files") for what in ("first_episode_s", "epoch_s")))
        for case in _by_network(found["compared"])
    ]
    return table("server|ranges: first episode|epoch|whole files: first episode|epoch", rows)


def storage_batches(found: Figures) -> str:
    """Decoded batches."""
    rows = [
        (
            network(case),
            *(
                cell
                for way in ("ranges", "whole_files")
                for one in [case[way]]
                for cell in (seconds(one["first_batch_s"]), f"{number(one['samples_per_s'])}/s", seconds(one["epoch_s"]))
            ),
        )
        for case in _by_network(found["batches"]["compared"])
    ]
    return table("server|ranges: first batch|then|end|whole files: first batch|then|end", rows)


def resume(found: Figures) -> str:
    """Seconds to the first batch, far into an epoch."""
    rows = []
    for order in ("lanes", "reservoir", "sequential", "episode_sequential", "remaining", "round_robin"):
        for key, what in (("first_batch", ""), ("with_pool_state", " with the pool state"), ("without_pool_state", " without it")):
            if key in found[order]:
                rows.append((f"`{order}`{what}", number(found[order][key]["cpu_s"]), number(found[order][key]["wall_s"])))
    return table("order|CPU s|wall s", rows)


def mixing(found: Figures) -> str:
    """Distinct episodes in a batch, by order and recording."""
    rows = [
        (
            f"{name}: {order}",
            number(one["decoded_frames_held"]),
            number(one["episodes_per_batch_of_16"]),
            number(one["uniform_distance"]),
            f"{one['decode_amplification']:.3f}",
        )
        for name, orders in found["mixing"].items()
        for order, one in orders.items()
        if isinstance(one, dict) and "decoded_frames_held" in one
    ]
    return table("recording: order|pictures held|episodes in 16|distance|decoded per picture", rows)


def faults(found: Figures) -> str:
    """Runs with faults."""
    rows = [
        (
            ", ".join(f"{count} × {kind}" for kind, count in one["faults"].items()),
            *(
                f"{one[what]:,}"
                for what in ("runs", "selected", "missing", "duplicated", "out_of_order", "wrong_pictures", "worker_groups")
            ),
            number(one["seconds"]),
        )
        for one in found.values()
        if isinstance(one, dict) and "faults" in one
    ]
    return table("faults|runs|frames selected|missing|duplicated|out of order|wrong pictures|worker groups|seconds", rows)


def soak(found: Figures) -> str:
    """What grows in a long run."""
    rows = [
        (
            name.removesuffix("_bytes").replace("_", " ").replace("  ", " ") + (", MB" if "memory" in name or "bytes" in name else ""),
            *(f"{one[what] / (1e6 if 'memory' in name or 'bytes' in name else 1):{form}}" for what, form in _SOAK.items()),
            f"{one['slope_percent_per_hour']:+.2f} %",
        )
        for name, one in found["series"].items()
    ]
    kept = found["objects_per_epoch"]
    how = (
        f"{found['minutes']:.0f} minutes, {found['epochs']} epochs, {found['samples_of_rank_0']:,} samples of rank 0, "
        f"{found['cpu_cores']:.2f} cores. Each epoch leaves {kept['all']:.0f} objects behind in rank 0, of the stream's own classes "
        f"{max(0, round(kept['own']))}. {found['machine']}"
    )
    return table("series|mean|slope per hour|of the mean", rows) + f"\n({how})\n"


def sidecar(found: Figures) -> str:
    """Building, opening and planning over sidecars."""
    building, opening, planning = found["building"], found["opening"], found["planning"]
    rows = [
        (f"files of {building['samples_per_file']:,} pictures indexed per second and core", number(building["files_per_s_per_core"])),
        ("reads per file", number(building["reads_per_file"])),
        ("bytes read of each file", f"{building['bytes_read_over_file_size']:.2%}"),
        ("bytes of the sidecar per picture", number(building["npz_bytes_per_sample"])),
        (f"opening an index of {opening['files']:,} files", seconds(opening["open_s"])),
        ("one table of it", f"{number(opening['ms_per_table'])} ms"),
        (
            f"memory of the index in {opening['sharing']['processes']} processes",
            f"{number(opening['sharing']['pss_of_index_total_mib'])} MiB",
        ),
        (f"spans of {planning['episodes']:,} episodes", f"{number(planning['cpu_s'])} CPU s"),
    ]
    return table("what|figure", rows)


def language(found: Figures) -> str:
    """What rendering costs."""
    rows = [
        (f"`{name}`", number(one["render_us_per_sample"]), f"{one['share_of_sample']:.1%}", number(one["plan_frames_per_s"]))
        for name, one in found["recipes"].items()
    ]
    return table("recipe|µs per sample|of a sample's cost|frames planned per s", rows)


def decoders(found: Figures) -> str:
    """torchcodec against PyAV."""
    rows = [
        (
            name,
            f"{number(one['pyav_cpu_ms'])} ms",
            f"{number(one['torchcodec_cpu_ms'])} ms",
            number(one["torchcodec_over_pyav"]),
            one["largest_difference"],
        )
        for name, one in found["sets"].items()
    ]
    return table("CPU time per picture|PyAV|torchcodec|torchcodec ÷ PyAV|largest difference", rows)


def handover(found: Figures) -> str:
    """The two frame stores."""
    what = {"calls": "decode calls alone", "window1": "stream, one picture in a sample", "window4": "stream, four pictures in a sample"}
    rows = [
        (
            title,
            f"{number(found[key]['slab_cpu_ms'])} ms",
            f"{number(found[key]['object_store_cpu_ms'])} ms",
            number(found[key]["object_store_over_slab"]),
            *(f"{found[key][f'{way}_pictures_s']:,}/s" if f"{way}_pictures_s" in found[key] else "" for way in ("slab", "object_store")),
        )
        for key, title in what.items()
    ]
    heads = "CPU time per picture delivered|slab|object store|object store ÷ slab|pictures by wall clock: slab|object store"
    return table(heads, rows) + f"\n({found['machine']})\n"


def prefeature(found: Figures) -> str:
    """Reading, writing, checking and training."""
    read, write, validate, train = (found[name] for name in ("read", "write", "validate", "ray_train"))
    rows = [
        ("reader", f"{number(read['reader_gb_s'])} GB/s, {number(read['reader_over_preadv'])} of bare `preadv`"),
        ("writer, durable and hashed", f"{number(write['writer_gb_s'])} GB/s"),
        ("`save_file` with fsync and SHA-256", f"{number(write['save_file_fsync_sha256_gb_s'])} GB/s"),
        ("every check of a trajectory, per core", f"{number(validate['trajectory_gb_s_per_core'])} GB/s"),
        ("checking the whole dataset", f"{number(validate['dataset_core_hours'])} core-hours"),
        ("records through Ray Train, from the disk", f"{number(train['from_disk_records_s'])}/s"),
        ("records through Ray Train, from the page cache", f"{number(train['from_page_cache_records_s'])}/s"),
    ]
    return table("what|figure", rows)


_SOAK = {"mean": ",.1f", "slope_per_hour": "+,.1f"}

TABLES: dict[str, tuple[str, Callable[[Figures], str]]] = {
    "compare": ("compare", compare),
    "stream": ("stream", stream),
    "storage-ranges": ("storage", storage_ranges),
    "storage-batches": ("storage", storage_batches),
    "resume": ("resume", resume),
    "mixing": ("plan", mixing),
    "faults": ("faults", faults),
    "soak": ("soak", soak),
    "sidecar": ("sidecar", sidecar),
    "language": ("language", language),
    "decoders": ("decoders", decoders),
    "handover": ("handover", handover),
    "prefeature": ("prefeature", prefeature),
}
"""Each table by name: the results that it stands on, and what renders them."""


def documents() -> list[Path]:
    """Documents that have tables."""
    return [
        path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if _BLOCK.search(path.read_text(encoding="utf-8"))
    ]


def rendered(text: str) -> str:
    """A document's text with its tables made anew.

    Raises:
        KeyError: a document names a table that does not exist.
    """

    def block(match: re.Match[str]) -> str:
        results, render = TABLES[match[2]]
        found = json.loads((RESULTS / f"{results}.json").read_text(encoding="utf-8"))
        return f"{match[1]}{render(found)}{match[3]}"

    return _BLOCK.sub(block, text)


def write_all() -> list[str]:
    """Writes the tables of all documents; names of those that changed."""
    changed = []
    for path in documents():
        before = path.read_text(encoding="utf-8")
        after = rendered(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path.relative_to(ROOT).as_posix())
    return changed
