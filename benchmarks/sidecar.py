"""What indexing costs: building, opening, sharing and planning over sidecars.

Run ``python -m benchmarks.sidecar`` from the repository root; results go to ``benchmarks/results/sidecar.json``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import av
import numpy as np

from ingest.engine.indexing import IndexedSource
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.source import open_source
from ingest.storage.local import LocalStore
from ingest.video.boxes import read_sample_table
from ingest.video.mini import mini_header, mini_mp4_sizes
from ingest.video.sidecar.build import build_sidecar, index_file
from ingest.video.sidecar.mapped import MappedIndex, write_mapped_index
from ingest.video.sidecar.spec import SidecarSpec
from ingest.video.span_table import episode_spans
from ingest.video.tables import SampleTable, constant

PASSES = 5
"""Times are the best of so many passes: other work on the machine only ever slows one down."""


def machine() -> dict[str, object]:
    """Where the figures come from."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ""
    )
    return {
        "cpu": model or platform.machine(),
        "cores": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyav": av.__version__,
        "kernel": platform.release(),
    }


def synthetic(seed: int, samples: int, *, reordered: bool, path: str) -> SampleTable:
    """A table such as a robot camera's file has: random sizes, 30 pictures/s, key pictures every 2 (or 12 with B-frames)."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(300, 30_000, samples)
    durations = constant(512, samples)
    dts = np.arange(samples, dtype=np.int64) * 512
    composition = np.tile([1024, 2048, 512, 512], samples // 4 + 1)[:samples].astype(np.int64) if reordered else constant(0, samples)
    sync = np.arange(0, samples, 12 if reordered else 2)
    start = dts + composition
    presented = np.argsort(start, kind="stable") if reordered else np.arange(samples)
    template = _template()
    return replace(
        template,
        path=path,
        file_size=int(sizes.sum()) + (1 << 20),
        offsets=(1 << 20) + np.cumsum(sizes) - sizes,
        sizes=sizes,
        durations=durations,
        composition=composition,
        dts=dts,
        sync=sync,
        starts=sync,
        descriptions=constant(0, samples),
        presented=presented,
        presented_pts=start[presented],
        sample_pts=start / 15360,
    )


def _template() -> SampleTable:
    import io

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = 640, 480, "yuv420p"
        container.mux(stream.encode(av.VideoFrame(640, 480, "yuv420p")))
        container.mux(stream.encode(None))
    data = buffer.getvalue()
    return read_sample_table(lambda start, stop: data[start:stop], len(data), "template.mp4")


def sparse_files(folder: Path, count: int, samples: int) -> list[str]:
    """Files with true indexes and holes for payload; every other one has its index at the end."""
    names = []
    for number in range(count):
        table = synthetic(number, samples, reordered=number % 4 == 3, path=f"v{number:04d}.mp4")
        payload = int(table.sizes.sum())
        header = mini_header(table, 0, samples, np.cumsum(table.sizes) - table.sizes, payload, edit=None)
        ftyp, moov = len(table.ftyp), len(header) - 8
        with (folder / table.path).open("wb") as stream:
            if number % 2:
                wide = (16 + payload).to_bytes(8, "big")
                stream.write(header[:ftyp] + b"\0\0\0\1mdat" + wide)
                stream.seek(payload, 1)
                stream.write(header[ftyp:moov])
            else:
                stream.write(header)
                stream.truncate(len(header) + payload)
        names.append(table.path)
    return names


def _index_share(job: tuple[str, list[str]]) -> int:
    store = LocalStore.at(job[0])
    return sum(index_file(store, path).table.samples for path in job[1])


def building(folder: Path, count: int, samples: int) -> dict[str, object]:
    """Files per second per core, reads, bytes, and scaling over processes."""
    names = sparse_files(folder, count, samples)
    store = LocalStore.at(folder)
    began, cpu = time.perf_counter(), time.process_time()
    indexed = [index_file(store, name) for name in names]
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    scaling = {}
    for tasks in (1, 2, 4):
        with multiprocessing.get_context("forkserver").Pool(tasks) as pool:
            pool.map(_index_share, [(str(folder), names[:1])] * tasks)
            rates = []
            for _ in range(PASSES):
                began = time.perf_counter()
                pool.map(_index_share, [(str(folder), names[task::tasks]) for task in range(tasks)])
                rates.append(count / (time.perf_counter() - began))
            scaling[tasks] = round(max(rates), 1)
    began = time.perf_counter()
    report = build_sidecar(store, names, folder / "sidecar.npz", repo_id="bench/sidecar", revision="v3.0", workers=4)
    return {
        "files": count,
        "samples_per_file": samples,
        "files_per_s_per_core": round(count / cpu, 1),
        "files_per_s_wall": round(count / wall, 1),
        "reads_per_file": sum(file.reads for file in indexed) / count,
        "bytes_read_over_file_size": sum(file.bytes_read for file in indexed) / sum(file.table.file_size for file in indexed),
        "files_per_s_by_tasks": scaling,
        "sidecar_build_s": round(time.perf_counter() - began, 2),
        "npz_bytes_per_sample": round((folder / "sidecar.npz").stat().st_size / report.samples, 2),
    }


def _tables(files: int, samples: int) -> Iterator[SampleTable]:
    for number in range(files):
        yield synthetic(number % 40, samples, reordered=number % 40 >= 30, path=f"v{number:06d}.mp4")


SHARER = """
import sys
from pathlib import Path
import numpy as np
from ingest.video.sidecar.mapped import MappedIndex
index = MappedIndex(Path(sys.argv[1]))
names = index.spec.paths[: int(sys.argv[2])]
total = 0
kept = []
for name in names:
    table = index.table(name)
    total += int(table.sizes.sum()) + int(table.offsets[-1]) + int(table.presented[-1])
    kept.append(table)
print("ready", flush=True)
sys.stdin.readline()
pss = private = 0
for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
    if line.startswith("Pss:"):
        pss = int(line.split()[1])
mapped = 0
for block in Path("/proc/self/smaps").read_text().split("VmFlags"):
    if sys.argv[1] in block:
        mapped += sum(int(l.split()[1]) for l in block.splitlines() if l.startswith("Pss:"))
print(pss, mapped, flush=True)
sys.stdin.readline()
"""


def sharing(path: Path, files: int, processes: int = 8) -> dict[str, object]:
    """Memory of processes that map the same index."""
    command = [sys.executable, "-c", SHARER, str(path), str(files)]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    for process in started:
        process.stdout.readline()
    figures = []
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
        figures.append([int(value) for value in process.stdout.readline().split()])
    for process in started:
        process.communicate("\n")
    return {
        "processes": processes,
        "files_touched": files,
        "pss_total_mib": round(sum(row[0] for row in figures) / 1024, 1),
        "pss_of_index_total_mib": round(sum(row[1] for row in figures) / 1024, 1),
    }


def opening(folder: Path, files: int, samples: int) -> dict[str, object]:
    """A large mapped index: size, time to open, time to the first tables, memory of eight processes."""
    path = folder / "index.bin"
    spec = SidecarSpec("bench/index", "v3.0", "bench", {f"v{number:06d}.mp4": None for number in range(files)})
    sizes = {table.path: table.file_size for table in _tables(min(files, 40), samples)}
    spec = replace(spec, sizes={name: sizes[f"v{int(name[1:7]) % 40:06d}.mp4"] for name in spec.sizes})
    began = time.perf_counter()
    write_mapped_index(path, spec, _cached_tables(files, samples))
    wrote = time.perf_counter() - began
    opened, tables = [], []
    for _ in range(4 * PASSES):  # of milliseconds each
        began = time.perf_counter()
        index = MappedIndex(path)
        opened.append(time.perf_counter() - began)
        began = time.perf_counter()
        for number in range(0, files, max(1, files // 200)):
            index.table(f"v{number:06d}.mp4")
        tables.append(time.perf_counter() - began)
    return {
        "files": files,
        "samples_per_file": samples,
        "write_s": round(wrote, 1),
        "index_bytes": path.stat().st_size,
        "index_bytes_per_sample": round(path.stat().st_size / files / samples, 2),
        "open_s": round(min(opened), 3),
        "ms_per_table": round(1000 * min(tables) / len(range(0, files, max(1, files // 200))), 3),
        "sharing": sharing(path, min(files, 400)),
    }


def _cached_tables(files: int, samples: int) -> Iterator[SampleTable]:
    made = list(_tables(40, samples))
    for number in range(files):
        table = made[number % 40]
        # Other sizes and offsets in every file, so that nothing but ramps and constants can be shared.
        sizes = np.roll(table.sizes, number)
        yield replace(table, path=f"v{number:06d}.mp4", sizes=sizes, offsets=(1 << 20) + np.cumsum(sizes) - sizes)


def planning(episodes: int) -> dict[str, object]:
    """Spans and exact mini-MP4 sizes of very many episodes, computed from the index alone."""
    samples, per_file = 20_000, 100
    figures: dict[str, object] = {"episodes": episodes}
    for reordered in (False, True):
        table = synthetic(1, samples, reordered=reordered, path="v.mp4")
        starts = np.arange(per_file) * (samples / per_file / 30)
        rounds, passes = max(1, episodes // per_file // 20 // PASSES), []
        for _ in range(PASSES):
            began = time.process_time()
            for _ in range(rounds):
                mini_mp4_sizes(table, episode_spans(table, starts, starts + samples / per_file / 30))
            passes.append((time.process_time() - began) / rounds * (episodes // per_file))
        figures["cpu_s_with_b_frames" if reordered else "cpu_s"] = round(min(passes), 1)
    figures["simulated"] = "1/20 of the files timed, scaled up"
    return figures


def cluster(folder: Path, files: int) -> dict[str, object]:
    """Files indexed per second by 1, 2 and 4 Ray tasks, the sidecar written and the index derived; Ray's start not counted."""
    import ray

    from actors.sidecar_build import ClusterSettings, build_on_cluster

    make_dataset(folder / "ds", MakeOptions(episodes=files, frames="8:8", cameras=1, size=(32, 64), gop=4, video_files=files))
    videos = IndexedSource.of(open_source(LocalStore.at(folder / "ds")))
    ray.init(address="local", num_cpus=4, object_store_memory=300_000_000, include_dashboard=False, log_to_driver=False)
    rates: dict[int, float] = {}
    try:
        for tasks in (1, 2, 4):
            how = ClusterSettings(tasks=tasks, force=True, cache_home=folder / "home")
            build_on_cluster(videos, how)  # starts the processes of the tasks
            rates[tasks] = round(max(files / build_on_cluster(videos, how).build.elapsed_s for _ in range(3)), 1)
    finally:
        ray.shutdown()
    return {"files": files, "files_per_s_by_ray_tasks": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=400, help="files to index")
    parser.add_argument("--index-files", type=int, default=10_000, help="files of the large mapped index")
    parser.add_argument("--samples", type=int, default=20_000, help="samples per file")
    parser.add_argument("--episodes", type=int, default=1_000_000, help="episodes to plan")
    parser.add_argument("--cluster-files", type=int, default=300, help="files to index with Ray tasks; 0 starts no Ray")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "sidecar.json")
    options = parser.parse_args()
    figures: dict[str, object] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        figures["building"] = building(Path(folder), options.files, options.samples)
        print(json.dumps(figures["building"]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        figures["opening"] = opening(Path(folder), options.index_files, options.samples)
        print(json.dumps(figures["opening"]), flush=True)
    if options.cluster_files:
        with tempfile.TemporaryDirectory() as folder:
            figures["cluster"] = cluster(Path(folder), options.cluster_files)
            print(json.dumps(figures["cluster"]), flush=True)
    figures["planning"] = planning(options.episodes)
    figures["peak_rss_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures["planning"]))


if __name__ == "__main__":
    main()
