"""Settings of a plan."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ingest.errors import SettingsError

Strategy = Literal["lanes", "remaining", "round_robin", "sequential", "episode_sequential", "reservoir"]
Share = Literal["episodes", "frame_exact", "cost"]
Tail = Literal["exact", "drop_tail", "pad", "loop"]

DEFAULT_POOL = 32
DEFAULT_LANES = 16
MAX_DEFAULT_LANES = 32
DEFAULT_RESERVOIR_LANES = 64
RESERVOIR_ROUNDS = 2
"""Rounds whose samples ``reservoir`` permutes together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How many consumers share a plan.

    Attributes:
        world_size: training processes, at least 1.
        workers: consumers inside each rank; 0 and 1 both mean one.
        batch_size: samples of a batch, at least 1.
    """

    world_size: int = 1
    workers: int = 0
    batch_size: int = 1

    def __post_init__(self) -> None:
        # Cursors carry these numbers between machines, so they are bounded before anything is allocated by them.
        require_int("world_size", self.world_size, least=1, most=1 << 20)
        require_int("workers", self.workers, least=0, most=1 << 12)
        require_int("batch_size", self.batch_size, least=1, most=1 << 24)

    @property
    def consumers(self) -> int:
        """Consumers of each rank, at least 1."""
        return max(1, self.workers)

    def with_consumers(self) -> Topology:
        """The topology alone, with the number of consumers for workers."""
        return Topology(world_size=self.world_size, workers=self.consumers, batch_size=self.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings(Topology):
    """Everything beside the units that decides an order.

    Attributes:
        strategy: order mode. ``remaining`` and ``round_robin`` are LeRobot's, bit for bit; ``lanes`` is the native
            one; ``sequential`` follows the selection; ``episode_sequential`` shuffles episodes, not frames;
            ``reservoir`` mixes many lanes over several rounds.
        seed: seed of every order.
        pool_size: episodes mixed by each consumer of a pool order; None for ``max(1, round(32 / workers))``.
        byte_budget: bytes of compressed payload per rank, divided among its workers; None for no budget.
        lanes: lanes of each consumer; None for the multiple of the batch size (up to 32) that holds 16, and 64 in
            ``reservoir``. As many units are open at a time (in ``reservoir`` also those that change inside a block).
        share: ``episodes`` (balanced by frames), ``cost`` (balanced by decode cost) or ``frame_exact`` (ranks
            differ by at most one frame, at most world_size - 1 episodes are cut).
        tail: ``exact`` (unequal last steps), ``drop_tail`` (full batches, equal steps), ``pad`` (equal steps, repeats
            marked), ``loop`` (every consumer goes on with its next epoch, as LeRobot's ``repeat``).
        shuffle: False replays epoch 0 in every epoch.
        clamp_workers: whether a rank with fewer episodes than workers uses fewer workers instead of an error.
        weights: shares of the datasets 0, 1, ... in a weighted mixture, or ``frames`` to mix in proportion to their
            frames, every frame once; None for no mixing by dataset. Needs an order without a pool.
        mixture_block: samples of a mixture block, in which every dataset has its share exactly.
        dataset: the caller's fingerprint of what the units describe.

    Raises:
        SettingsError: naming the field and the value.
    """

    strategy: Strategy = "remaining"
    seed: int = 42
    pool_size: int | None = None
    byte_budget: int | None = None
    lanes: int | None = None
    share: Share = "episodes"
    tail: Tail = "exact"
    shuffle: bool = True
    clamp_workers: bool = False
    weights: tuple[float, ...] | Literal["frames"] | None = None
    mixture_block: int = 64
    dataset: str = ""

    def __post_init__(self) -> None:
        # A zero-argument super() does not work in slotted dataclasses.
        Topology.__post_init__(self)
        for name, choices in (("strategy", Strategy), ("share", Share), ("tail", Tail)):
            if getattr(self, name) not in get_args(choices):
                raise SettingsError(f"{name} must be one of {', '.join(get_args(choices))}, found {getattr(self, name)!r}")
        require_int("seed", self.seed, least=0, most=(1 << 63) - 1)
        for name in ("pool_size", "byte_budget", "lanes"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), least=1)
        require_int("mixture_block", self.mixture_block, least=1, most=1 << 16)
        if self.weights is not None:
            values = (1.0,) if self.weights == "frames" else self.weights
            if isinstance(values, str) or not all(weight >= 0 for weight in values) or not 0 < sum(values) <= sys.float_info.max:
                raise SettingsError(f"weights must be 'frames' or numbers >= 0 with a positive sum, found {self.weights!r}")
            if self.pooled:
                raise SettingsError(f"weights need strategy lanes, reservoir, sequential or episode_sequential, found {self.strategy!r}")
            if self.tail == "loop":
                raise SettingsError("tail 'loop' and weights exclude each other: a weighted mixture repeats its datasets by itself")

    @property
    def pooled(self) -> bool:
        """Whether the order is one of the two pool orders."""
        return self.strategy in ("remaining", "round_robin")

    def pool_share(self, workers: int) -> int:
        """Pool size of each of ``workers`` consumers."""
        return self.pool_size if self.pool_size is not None else max(1, round(DEFAULT_POOL / workers))

    def budget_share(self, workers: int) -> int | None:
        """Byte budget of each of ``workers`` consumers."""
        return None if self.byte_budget is None else max(1, self.byte_budget // workers)

    def lane_count(self, batch_size: int) -> int:
        """Lanes of each consumer; whole rounds make whole batches, so that a batch meets a lane once."""
        if self.lanes is not None:
            return self.lanes
        if self.strategy == "reservoir":
            return DEFAULT_RESERVOIR_LANES
        if batch_size <= DEFAULT_LANES:
            return -(-DEFAULT_LANES // batch_size) * batch_size
        return min(batch_size, MAX_DEFAULT_LANES)


def require_int(name: str, value: Any, *, least: int, most: int | None = None) -> None:
    """Check that a setting is a whole number in range.

    Raises:
        SettingsError: naming the field and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        wanted = {0: "non-negative", 1: "positive"}.get(least, f"at least {least}")
        raise SettingsError(f"{name} must be {wanted} and whole, found {value!r}")
    if most is not None and value > most:
        raise SettingsError(f"{name} must be at most {most}, found {value!r}")
