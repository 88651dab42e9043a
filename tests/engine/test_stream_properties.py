"""Random settings, budgets and stops: a stream delivers what the single-process engine delivers, and gives everything back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from streams import PICTURE_BYTES, STRATEGIES, config, equal, open_rank

from ingest.engine import ReadOptions
from ingest.errors import PlanError
from ingest.plan import plan_epoch

CAMERAS = ("observation.images.cam0", "observation.images.cam1")
WINDOWS = st.none() | st.lists(st.sampled_from([-1.0, -0.3, -0.1, 0.0, 0.1, 0.4, 2.0]), min_size=1, max_size=3, unique=True)
PLANS = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(STRATEGIES),
        "world_size": st.integers(1, 3),
        "workers": st.integers(0, 3),
        "batch_size": st.integers(1, 9),
        "seed": st.integers(0, 9),
        "tail": st.sampled_from(["exact", "pad", "drop_tail"]),
        "share": st.sampled_from(["episodes", "cost", "frame_exact"]),
        "lane_frames": st.sampled_from([None, 1, 3, 8, 64]),
        "shuffle": st.booleans(),
        "epochs": st.integers(1, 2),
    }
)


@given(PLANS, WINDOWS, st.integers(0, 3), st.none() | st.integers(0, 6))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_stream_equals_the_oracle(small: Path, plan: dict[str, Any], window: list[float] | None, spare: int, stop: int | None) -> None:
    read = ReadOptions(delta_timestamps=None if window is None else {CAMERAS[0]: window, "action": [0.0, 0.1]})
    description, dataset = config(small, read=read, **plan)
    world, epochs = plan["world_size"], plan["epochs"] if stop is None else 1
    try:
        planned = [plan_epoch(description.units, description.with_topology(world_size=world), epoch=epoch) for epoch in range(epochs)]
    except PlanError:
        assume(False)
    batch = plan["batch_size"] * (1 + (1 if window is None else len(window)))
    budget = (batch + spare * batch * 2) * PICTURE_BYTES
    for rank in range(world):
        with open_rank(description, rank, world, decoded=budget, max_steps=stop) as stream:
            for one in planned:
                oracle = dataset.iter_batches(one, rank, max_steps=stop)
                for found in stream:
                    equal(found, next(oracle)[1])
                assert next(oracle, None) is None
            state = stream.state_dict()
            ended = stream.epoch > 0 or stop is None
        if plan["epochs"] == epochs:
            assert all(store.free == store.slots for store in stream.stores)
        if not ended:
            rest = list(dataset.iter_batches(planned[0], rank))[stream.step :]
            with open_rank(description, rank, world, decoded=budget) as again:
                again.load_state_dict(state)
                for found, (_, wanted) in zip(again, rest, strict=False):
                    equal(found, wanted)
