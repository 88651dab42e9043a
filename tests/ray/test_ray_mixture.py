"""A weighted mixture of two datasets through Ray: what is delivered, resumed and learned from is what the file says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.manager import PoolSettings
from ingest.engine.spec import ReadOptions
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import Cursor, PlanSettings, plan_epoch
from train_integration.accounting import FrameAccount
from train_integration.delivery import DeliverySummary, deliver_locally, deliver_through_ray
from train_integration.job import JobSettings, coverage, make_plan, run_training
from train_integration.mixtures import Mixture, open_described
from train_integration.options import StreamConfig, StreamDescription

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("ray_cluster")]

MIXTURE = """
block: 6
datasets:
  - {source: a, weight: 1}
  - source: b
    weight: 2
    drop: [observation.images.cam0]
    rename: {observation.images.cam1: observation.images.cam0}
"""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    make_dataset(folder / "a", MakeOptions(episodes=4, frames="10:16", cameras=1, size=(32, 64), fps=10, gop=4, seed=1))
    make_dataset(folder / "b", MakeOptions(episodes=4, frames="8:12", cameras=2, size=(32, 64), fps=10, gop=3, seed=2))
    (folder / "mixture.yaml").write_text(MIXTURE)
    return folder / "mixture.yaml"


def opened(mixture: Path, **config: object) -> tuple[StreamDescription, Mixture]:
    plan = PlanSettings(strategy="lanes", batch_size=4, tail="pad", seed=5)
    described, dataset = open_described(mixture, replace(StreamConfig(plan=plan, decoded_budget_gb=0.1, lane_frames=6), **config))
    assert isinstance(dataset, Mixture)
    return described, dataset


def through_ray(description: StreamDescription, world: int, cursor: Cursor | None = None, max_steps: int | None = None) -> DeliverySummary:
    options = {"epoch": 0, "max_steps": max_steps, "digests": True, "pool": PoolSettings(actors=1)}
    return deliver_through_ray(description, world_size=world, cursor=cursor, **options)


def test_a_mixture_is_delivered_and_goes_on_with_other_ranks(mixture: Path) -> None:
    description, dataset = opened(mixture)
    first = through_ray(description, 2, max_steps=3)
    rest = through_ray(description, 3, first.cursor)
    for found, world, cursor, limit in ((first, 2, None, 3), (rest, 3, first.cursor, None)):
        plan = plan_epoch(description.units, description.with_topology(world_size=world), cursor)
        expected = deliver_locally(dataset, description, plan, ranks=list(range(world)), max_steps=limit, digests=True)
        for name in expected.rows:
            if name != "t_ns":
                np.testing.assert_array_equal(found.rows[name], expected.rows[name], err_msg=name)
    rows = {name: np.concatenate([first.rows[name], rest.rows[name]]) for name in ("dataset", "index", "is_pad")}
    real = ~rows["is_pad"]
    tally = FrameAccount(description).tally(rows["dataset"][real], rows["index"][real], 0)
    assert (tally.missing, tally.duplicated) == (0, 0)
    shares = np.bincount(rows["dataset"][real])
    assert shares[1] == 2 * shares[0]


def test_a_mixture_is_trained_on_with_its_own_statistics(mixture: Path, tmp_path: Path) -> None:
    description, dataset = opened(mixture, epochs=None, read=ReadOptions(action_chunk=2))
    plan = make_plan(dataset, steps=12, chunk=2, seed=3, save_every=4)
    parts = [one.source.stats["action"] for one in dataset.datasets]
    np.testing.assert_allclose(plan.statistics["action"][0], (parts[0]["mean"] + 2 * parts[1]["mean"]) / 3)
    result = run_training(description, plan, JobSettings(output_dir=tmp_path / "run", world_size=2, pool=PoolSettings(actors=1)))
    whole, *_ = coverage(description, result.rows, 2)
    assert result.steps == 12
    assert whole.complete
    assert (whole.missing, whole.duplicated, whole.in_order) == (0, 0, True)
