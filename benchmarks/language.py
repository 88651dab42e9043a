"""What language rendering costs: microseconds per sample, share of a training step, planning rate, bytes per episode.

Run from the checkout: ``python -m benchmarks.language``; writes ``benchmarks/results/language.json``. Times are CPU times.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics as statistics_module
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ingest.engine.dataset import Dataset, iter_samples, open_dataset
from ingest.engine.rendering import render_batch
from ingest.language import STATE_COLUMN, RenderStage, load_recipe, rows_array, shipped_recipes
from ingest.language.coverage import plan_language
from ingest.language.episode import AnnotationRows, EpisodeLanguage, read_language
from ingest.language.importing import Span, rows_from_spans, state_row
from ingest.language.write import write_annotations
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.source import open_source
from ingest.plan import EpochPlan, PlanSettings, plan_epoch
from ingest.storage.local import LocalStore
from train_integration.decoding import InlineDecoding
from train_integration.feature_stats import feature_statistics
from train_integration.feed import LocalFeed
from train_integration.options import StreamConfig, open_stream
from train_integration.policy import BehaviourCloning
from train_integration.stream import SampleStream

PASSES = 5
BATCH = 32


def annotations_of(language: EpisodeLanguage, cameras: Sequence[str]) -> list[dict[str, Any]]:
    """A dense annotation: a subtask and a memory each 30 frames, a question on each 25th, a remark on each 50th."""
    times, frames = language.timestamps, len(language)
    starts = range(0, frames, 30)
    rows = rows_from_spans([Span(start, min(start + 30, frames), f"step {start // 30}") for start in starts], times)
    rows += [state_row(f"did {start // 30} steps", float(times[start]), style="memory") for start in starts]
    rows += [state_row("do all steps", 0.0, style="plan")]
    for frame in range(5, frames, 25):
        for camera in cameras:
            rows.append({"role": "user", "style": "vqa", "content": "how many?", "camera": camera, "frame": frame})
            rows.append({"role": "assistant", "style": "vqa", "content": '{"label":"disc","count":1}', "camera": camera, "frame": frame})
    for frame in range(7, frames, 50):
        call = {"type": "function", "function": {"name": "say", "arguments": {"text": "sure"}}}
        rows.append({"role": "user", "style": "interjection", "content": "faster", "frame": frame})
        rows.append({"role": "assistant", "style": None, "content": None, "tool_calls": [call], "frame": frame})
    return [dict(row) for row in rows]


def median_us(run: Callable[[], int]) -> float:
    """Median over passes of CPU microseconds per item; ``run`` returns how many items it handled."""
    results: list[float] = []
    for _ in range(PASSES):
        started = time.process_time()
        count = run()
        results.append((time.process_time() - started) / count * 1e6)
    return statistics_module.median(results)


def through(stage: RenderStage, samples: Sequence[dict[str, Any]]) -> Callable[[], int]:
    """Renders every sample once."""

    def run() -> int:
        for sample in samples:
            stage(sample)
        return len(samples)

    return run


def broadcast_sizes() -> dict[str, int]:
    """An episode of 18,000 frames with 40 state rows: repeated per frame in Arrow, and packed once."""
    rows = [state_row(f"subtask number {number} of forty", number * 15.0) for number in range(40)]
    column = rows_array([rows], STATE_COLUMN).take(pa.array(np.zeros(18_000, np.int64)))
    started = time.perf_counter()
    packed = AnnotationRows.from_columns({STATE_COLUMN: column}, 18_000)
    return {
        "broadcast_arrow_bytes": column.nbytes,
        "packed_bytes": len(packed.pack()),
        "pack_ms": round((time.perf_counter() - started) * 1e3),
    }


def step_figures(root: Path, recipe: str) -> dict[str, Any]:
    """Rendering as a share of a training step's CPU time: a batch from the stream, behaviour cloning forward, backward and update.

    Decoding is inline with one thread and the policy is small, so the share of a larger model is smaller.
    """
    torch.set_num_threads(1)  # threads that wait for each other spend CPU time, the more the busier the machine is
    config = StreamConfig(
        plan=PlanSettings(strategy="lanes", batch_size=BATCH), recipe=recipe, decode="inline", decode_threads=1, decoded_budget_gb=0.3
    )
    description, dataset = open_stream(root, config)
    spec = dataset.spec
    statistics = {
        key: (torch.from_numpy(mean), torch.from_numpy(std))
        for key, (mean, std) in feature_statistics(dataset, ["action", "observation.state"]).items()
    }
    policy = BehaviourCloning(spec.cameras, "observation.state", statistics)
    optimiser = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    stream = SampleStream(
        description,
        0,
        1,
        LocalFeed(description.job),
        lambda counters: InlineDecoding(1, "benchmark", counters),
        decoded_bytes=300 << 20,
    )
    spent: list[float] = []
    with stream:
        for batch in stream:
            optimiser.zero_grad(set_to_none=True)
            policy.loss(batch).backward()
            optimiser.step()
            spent.append(time.process_time())
    raw = next(batch for _, batch in open_dataset(root, cameras=()).iter_batches(_one_epoch(dataset)))
    stage = dataset.render
    assert stage is not None
    render_ms = median_us(lambda: len([render_batch(stage, raw) for _ in range(20)])) / 1e3
    step_ms = (spent[-1] - spent[0]) / (len(spent) - 1) * 1e3  # pictures are decoded ahead, for no single step
    return {
        "batch_size": BATCH,
        "step_ms": round(step_ms, 2),
        "render_ms": round(render_ms, 3),
        "share_of_step": round(render_ms / step_ms, 4),
    }


def _one_epoch(dataset: Dataset) -> EpochPlan:
    return plan_epoch(dataset.units(), PlanSettings(strategy="lanes", batch_size=BATCH, dataset=dataset.fingerprint()))


def unannotated_figures(root: Path) -> dict[str, float]:
    """Opening and reading a dataset that has no annotation: without a recipe it does what it did before there were any."""

    def opening(recipe: str | None) -> float:
        return round(median_us(lambda: len([open_dataset(root, cameras=(), recipe=recipe)])) / 1e3, 2)

    dataset = open_dataset(root, cameras=())
    batches = [batch for _, batch in dataset.iter_batches(_one_epoch(dataset))]
    stage = RenderStage(load_recipe("subtask_mem"))
    rendering = median_us(lambda: sum(len(render_batch(stage, batch)["is_pad"]) for batch in batches))
    return {
        "open_ms": opening(None),
        "open_ms_with_recipe": opening("subtask_mem"),
        "stages_without_recipe": int(dataset.render is not None),
        "render_us_per_sample_with_recipe": round(rendering, 2),
    }


def measure(folder: Path) -> dict[str, Any]:
    """All figures."""
    made = make_dataset(folder / "ds", MakeOptions(episodes=6, frames="150", cameras=2, size=(240, 320), gop=30))
    source = open_source(LocalStore.at(made.root))
    bare = list(read_language(source))
    dataset = open_dataset(made.root, return_uint8=True)
    engine_us = median_us(lambda: sum(1 for _ in iter_samples(dataset)))
    unannotated = unannotated_figures(made.root)
    write_annotations(made.root, {language.episode: annotations_of(language, source.cameras) for language in bare})
    source = open_source(LocalStore.at(made.root))
    languages = list(read_language(source))
    read_us = median_us(lambda: sum(len(language) for language in read_language(source)))
    samples = [language.sample(frame) for language in languages for frame in range(len(language))]
    plain = [{"action": sample["index"], "task": sample["task"], "timestamp": sample["timestamp"]} for sample in samples]
    recipes: dict[str, Any] = {}
    for name in shipped_recipes():
        stage = RenderStage(load_recipe(name))
        render_us = median_us(through(stage, samples))
        recipes[name] = {
            "render_us_per_sample": round(render_us, 2),
            "share_of_sample": round(render_us / (engine_us + render_us), 4),
            "plan_frames_per_s": round(1e6 / median_us(lambda stage=stage: plan_language(stage, languages).frames)),
        }
    return {
        "machine": {"python": platform.python_version(), "processor": platform.machine()},
        "frames": len(samples),
        "state_rows_per_episode": len(languages[0].rows.state(0)),
        "engine_us_per_sample": round(engine_us, 1),
        "read_annotations_us_per_frame": round(read_us, 2),
        "recipes": recipes,
        "training_step": {name: step_figures(made.root, name) for name in ("subtask_mem", "subtask_mem_vqa_speech")},
        "unannotated": unannotated,
        "unannotated_us_per_sample": {
            "no_recipe": round(median_us(through(RenderStage(None), plain)), 3),
            "with_recipe": round(median_us(through(RenderStage(load_recipe("subtask_mem")), plain)), 3),
        },
        "sizes": broadcast_sizes(),
    }


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "language.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder))
    text = json.dumps(figures, indent=2)
    options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
