"""The coverage pool against a plain transcription of its rules, and its admission properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.errors import BudgetError, CursorError, PlanError
from ingest.plan import CoveragePool
from ingest.plan.pool_state import MAX_STATE_BYTES, dump_pool, load_pool


def transcription(counts: list[int], sizes: list[int] | None, pool: int, budget: int | None, strategy: str, seed: list[int]):
    """One draw at a time, as the rules are written down."""
    rng = np.random.default_rng(seed)
    pending = np.array([slot for slot, count in enumerate(counts) if count], dtype=np.int64)
    rng.shuffle(pending)
    waiting = pending.tolist()
    residents: dict[int, list[int]] = {}
    turn: list[int] = []
    out: list[tuple[int, int]] = []

    def admit() -> None:
        while len(residents) < pool:
            used = sum(sizes[slot] for slot in residents) if sizes else 0
            fitting = [slot for slot in waiting if budget is None or sizes[slot] <= budget - used]
            if not fitting:
                return
            waiting.remove(fitting[0])
            frames = np.arange(counts[fitting[0]], dtype=np.int64)
            rng.shuffle(frames)
            residents[fitting[0]] = frames.tolist()

    admit()
    while residents:
        if strategy == "remaining":
            draw = int(rng.integers(sum(len(left) for left in residents.values())))
            for slot, left in residents.items():  # noqa: B007
                if draw < len(left):
                    break
                draw -= len(left)
        else:
            if not turn:
                turn = list(residents)
                rng.shuffle(turn)
            slot = turn.pop()
        frame = residents[slot].pop()
        if not residents[slot]:
            del residents[slot]
            admit()
        out.append((slot, frame))
    assert not waiting
    return out


cases = st.fixed_dictionaries(
    {
        "counts": st.lists(st.integers(0, 40), min_size=1, max_size=15),
        "pool": st.integers(1, 8),
        "strategy": st.sampled_from(["remaining", "round_robin"]),
        "seed": st.integers(0, 2**32),
        "tight": st.sampled_from([None, 1.0, 1.3, 2.5]),
    }
)


def built(case: dict) -> tuple[CoveragePool, list[int] | None, int | None]:
    rng = np.random.default_rng(case["seed"])
    sizes = rng.integers(1, 100, len(case["counts"])).tolist() if case["tight"] else None
    budget = int(max(sizes) * case["tight"]) if sizes else None
    pool = CoveragePool(
        np.array(case["counts"]),
        pool_size=case["pool"],
        seed=[case["seed"], 3],
        strategy=case["strategy"],
        sizes=None if sizes is None else np.array(sizes),
        byte_budget=budget,
    )
    return pool, sizes, budget


@settings(max_examples=150)
@given(cases, st.integers(1, 9))
def test_bulk_draws_give_the_order_of_single_draws(case: dict, chunk: int) -> None:
    pool, sizes, budget = built(case)
    found: list[tuple[int, int]] = []
    while pool.emitted < sum(case["counts"]):
        slots, frames = pool.take(chunk)
        found += zip(slots.tolist(), frames.tolist(), strict=True)
        assert len(pool.resident) <= case["pool"]
        if budget is not None:
            assert pool.resident_bytes <= budget
            assert pool.resident_bytes == sum(sizes[slot] for slot in pool.resident)
    assert found == transcription(case["counts"], sizes, case["pool"], budget, case["strategy"], [case["seed"], 3])
    assert sorted(pool.admitted) == [slot for slot, count in enumerate(case["counts"]) if count]
    assert sorted(pool.evicted) == sorted(pool.admitted)
    assert len(pool.take(5)[0]) == 0


def test_array_bounds_draw_what_single_calls_draw() -> None:
    highs = np.concatenate((np.arange(400, 0, -1), np.full(50, 1 << 33), np.arange(7, 1, -1)))
    bulk, single = np.random.default_rng([1, 2]), np.random.default_rng([1, 2])
    assert bulk.integers(0, highs).tolist() == [int(single.integers(int(high))) for high in highs]
    assert bulk.bit_generator.state == single.bit_generator.state


@settings(max_examples=100)
@given(cases, st.data())
def test_a_stored_state_continues_the_order(case: dict, data: st.DataObject) -> None:
    total = sum(case["counts"])
    done = data.draw(st.integers(0, total))
    pool, _, _ = built(case)
    pool.take(done)
    state = dump_pool(pool)
    assert state is not None
    rest = pool.take(total)
    fresh, _, _ = built(case)
    load_pool(fresh, state)
    assert fresh.emitted == done
    assert [part.tolist() for part in fresh.take(total)] == [part.tolist() for part in rest]


def test_states_stay_small_or_are_not_written() -> None:
    counts = np.full(5000, 300)
    pool = CoveragePool(counts, pool_size=32, seed=[1, 0])
    pool.take(100_000)
    assert len(dump_pool(pool) or b"") < 4096
    assert dump_pool(CoveragePool(counts, pool_size=3000, seed=[1, 0])) is None


def test_damaged_and_foreign_states_are_refused() -> None:
    counts = np.array([5, 6, 7])
    state = dump_pool(CoveragePool(counts, pool_size=2, seed=[1, 0]))
    assert state is not None
    with pytest.raises(CursorError, match="another share, seed"):
        load_pool(CoveragePool(counts, pool_size=2, seed=[1, 1]), state)
    with pytest.raises(CursorError, match="another share, seed"):
        load_pool(CoveragePool(np.array([5, 6, 8]), pool_size=2, seed=[1, 0]), state)
    fresh = CoveragePool(counts, pool_size=2, seed=[1, 0])
    for place in range(len(state)):
        broken = bytearray(state)
        broken[place] ^= 1
        with pytest.raises(CursorError):
            load_pool(fresh, bytes(broken))
    for size in range(len(state)):
        with pytest.raises(CursorError):
            load_pool(fresh, state[:size])
    with pytest.raises(CursorError, match="not a pool state"):
        load_pool(fresh, b"RRPOOL1\n" + bytes(MAX_STATE_BYTES))


def test_arguments_are_checked_before_anything_is_admitted() -> None:
    counts = np.array([5, 6])
    with pytest.raises(PlanError, match="pool_size must be positive, found 0"):
        CoveragePool(counts, pool_size=0, seed=[1])
    with pytest.raises(PlanError, match=r"strategy must be .* found 'lanes'"):
        CoveragePool(counts, pool_size=1, seed=[1], strategy="lanes")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="byte_budget must be positive, found 0"):
        CoveragePool(counts, pool_size=1, seed=[1], sizes=counts, byte_budget=0)
    with pytest.raises(PlanError, match="needs the byte size"):
        CoveragePool(counts, pool_size=1, seed=[1], byte_budget=5)
    with pytest.raises(PlanError, match="expected 2 byte sizes"):
        CoveragePool(counts, pool_size=1, seed=[1], sizes=np.array([1]), byte_budget=5)
    with pytest.raises(PlanError, match="episode 9 has a negative byte size: -1"):
        CoveragePool(counts, pool_size=1, seed=[1], sizes=np.array([1, -1]), names=np.array([4, 9]))
    with pytest.raises(BudgetError, match="Episode 9 requires 7 bytes, exceeding the byte budget 6"):
        CoveragePool(counts, pool_size=1, seed=[1], sizes=np.array([1, 7]), byte_budget=6, names=np.array([4, 9]))


def test_candidates_follow_the_pending_order_and_are_not_admitted() -> None:
    pool = CoveragePool(np.full(10, 3), pool_size=2, seed=[1, 0])
    assert pool.prefetch_candidates(3) == pool.admission_order[2:5]
    assert pool.admitted_count == 2
    assert pool.newly_admitted == pool.admission_order[:2]
