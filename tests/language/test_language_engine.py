"""Rendering inside the single-process engine: the same messages in every topology and after a resume, each frame once."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from ingest.engine import open_dataset
from ingest.language import RenderStage, load_recipe
from ingest.language.coverage import plan_language
from ingest.language.episode import read_language
from ingest.language.importing import Span, rows_from_spans, state_row
from ingest.language.write import write_annotations
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.source import open_source
from ingest.plan import PlanSettings, Units, plan_epoch
from ingest.storage.local import LocalStore

RECIPE = load_recipe("subtask_mem")
TOPOLOGIES = [
    {"strategy": "sequential", "batch_size": 5},
    {"strategy": "remaining", "batch_size": 4, "workers": 2},
    {"strategy": "lanes", "batch_size": 3, "world_size": 2},
    {"strategy": "episode_sequential", "batch_size": 7, "world_size": 3},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Six short episodes; the first four are annotated, but not from their first frame."""
    made = make_dataset(tmp_path_factory.mktemp("engine") / "ds", MakeOptions(episodes=6, frames="9:13", cameras=1, size=(32, 64), gop=4))
    languages = list(read_language(open_source(LocalStore.at(made.root))))
    rows = {
        language.episode: [
            *rows_from_spans([Span(3, 6, f"reach {language.episode}"), Span(6, 9, "grasp")], language.timestamps),
            state_row("holding", float(language.timestamps[6]), style="memory"),
        ]
        for language in languages[:4]
    }
    write_annotations(made.root, rows)
    return made.root


def oracle(root, stage):
    """Messages by global index, rendered from the annotations alone; frames without supervision are left out."""
    found = {}
    for language in read_language(open_source(LocalStore.at(root))):
        for frame in range(len(language)):
            sample = stage(language.sample(frame))
            if sample is not None:
                found[int(language.index[frame])] = sample["messages"]
    return found


def delivered(dataset, units, settings, resume_after=None):
    """Messages by global index over all ranks; with ``resume_after``, that many batches and then another topology."""
    plan = plan_epoch(units, settings)
    found = {}

    def take(plan, steps=None):
        for rank in range(plan.world_size):
            for planned, batch in dataset.iter_batches(plan, rank, max_steps=steps):
                for place in np.flatnonzero(~planned.is_pad):
                    index = int(batch["index"][place])
                    assert index not in found, "a frame came twice"
                    found[index] = batch["messages"][place]

    if resume_after is not None:
        take(plan, resume_after)
        settings = replace(settings, world_size=3 - settings.world_size if settings.world_size < 3 else 1)
        plan = plan_epoch(units, settings, plan.cursor_at(resume_after))
    take(plan)
    return found


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology["strategy"])
@pytest.mark.parametrize("resume_after", [None, 1])
def test_every_topology_renders_each_frame_once_and_alike(root, topology, resume_after):
    stage = RenderStage(RECIPE)
    dataset = open_dataset(root, render=pickle.loads(pickle.dumps(stage)), cameras=())
    assert delivered(dataset, dataset.units(), PlanSettings(**topology), resume_after) == oracle(root, stage)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology["strategy"])
def test_frames_without_supervision_leave_before_planning(root, topology):
    stage = RenderStage(RECIPE, policy="drop")
    plan = plan_language(stage, read_language(open_source(LocalStore.at(root))))
    leaving = sum(len(frames) for frames in plan.leaving().values())
    assert leaving > 0
    dataset = open_dataset(root, render=stage, cameras=())
    runs = [(part.episode, lo, hi) for part in plan.episodes for lo, hi in part.kept_runs()]
    episode, lo, hi = (np.asarray(column) for column in zip(*runs, strict=True))
    units = Units(np.zeros(len(runs), np.int32), episode, lo, hi, np.zeros(len(runs), np.int64), (hi - lo).astype(np.float64))
    found = delivered(dataset, units, PlanSettings(**topology))
    assert found == oracle(root, stage)
    assert len(found) == dataset.num_frames - leaving


def test_samples_of_the_engine_equal_those_of_the_annotations(root):
    stage = RenderStage(RECIPE)
    dataset = open_dataset(root, render=stage, cameras=())
    (language,) = read_language(open_source(LocalStore.at(root)), [2])
    for frame in range(len(language)):
        sample = dataset.sample(2, frame)
        assert sample["messages"] == stage(language.sample(frame))["messages"]
        assert "language_persistent" not in sample
