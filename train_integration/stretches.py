"""Stretches: an epoch of one rank, planned and executed piece by piece, so that starts and resumes cost the same anywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ingest.errors import SettingsError
from ingest.plan import EpochPlan, RankPlan, plan_epoch

FIRST_STRETCH_SAMPLES = 1 << 16
"""Samples of the first stretch: few, so that the first batch comes soon."""

_LAST_STRETCH_SAMPLES = 1 << 19
_GROWTH = 4


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Some consecutive steps of a rank's pass over its data.

    A pass is an epoch or, where steps are limited, a part of one. Under ``tail='loop'``, whose order never ends, it is
    as many batches as one epoch of the longest rank has, so that all ranks end their passes at the same step.

    Attributes:
        plan: the epoch's plan.
        ranked: the rank's plan; kept from stretch to stretch, because a pool order moves on and must not start over.
        start: first step.
        stop: end of the steps, exclusive.
        end: end of the pass.
        limit: most steps of a pass, or None.
        until: step at which the limit ends this pass, or None.
        samples: samples of a stretch.
    """

    plan: EpochPlan
    ranked: RankPlan
    start: int
    stop: int
    end: int
    limit: int | None
    until: int | None
    samples: int

    @classmethod
    def begin(cls, plan: EpochPlan, rank: int, limit: int | None, samples: int) -> Stretch:
        """The first stretch of what is left of a plan."""
        return cls._of(plan, plan.rank(rank), limit, None if limit is None else plan.cursor.batches + limit, samples)

    @classmethod
    def _of(cls, plan: EpochPlan, ranked: RankPlan, limit: int | None, until: int | None, samples: int) -> Stretch:
        start = plan.cursor.batches
        end = (start // ranked.steps + 1) * ranked.steps if plan.settings.tail == "loop" else ranked.steps
        end = end if until is None else min(end, until)
        return cls(plan, ranked, start, 0, max(start, end), limit, until, samples)._sized()

    def _sized(self) -> Stretch:
        steps = max(1, self.samples // self.plan.settings.batch_size)
        return replace(self, stop=min(self.end, self.start + steps))

    @property
    def is_last(self) -> bool:
        """Whether the pass ends with this stretch."""
        return self.stop >= self.end

    @property
    def open_units(self) -> int:
        """Units that the order keeps open at a time, about."""
        settings, workers = self.plan.settings, self.ranked.workers
        if settings.pooled:
            return workers * settings.pool_share(workers)
        return workers * (settings.lane_count(settings.batch_size) if settings.strategy in {"lanes", "reservoir"} else 1)

    def following(self) -> Stretch:
        """The stretch after this one, or the first one of the next pass."""
        samples = max(self.samples, min(self.samples * _GROWTH, _LAST_STRETCH_SAMPLES))
        if not self.is_last:
            return replace(self, start=self.stop, samples=samples)._sized()
        plan = self.plan
        reached = self.end if plan.settings.tail == "loop" else plan.steps if self.until is None else self.until
        cursor = plan.cursor_at(reached)
        if cursor.epoch != plan.epoch:
            return Stretch.begin(plan_epoch(plan.units, plan.settings, cursor), self.ranked.rank, self.limit, samples)
        until = None if self.limit is None else cursor.batches + self.limit
        return self._of(EpochPlan(plan.units, plan.settings, cursor, plan.segment), self.ranked, self.limit, until, samples)

    def from_step(self, step: int) -> Stretch:
        """This pass from a later step on, unchanged."""
        return replace(self, start=step)._sized()

    def again(self, plan: EpochPlan) -> Stretch:
        """This pass from a later position of another plan on, which leaves out an episode.

        Raises:
            SettingsError: the order never ends, so nothing can be taken out of it.
        """
        if plan.settings.tail == "loop":
            raise SettingsError("damage policy 'skip_episode' and tail 'loop' exclude each other: use tail 'pad'")
        return self._of(plan, plan.rank(self.ranked.rank), self.limit, self.until, self.samples)

    def frames_left(self, dataset: int, episode: int, step: int) -> int:
        """Frames of an episode that the rank has not delivered before a step."""
        total = 0
        for order, done in zip(self.ranked.orders, self.ranked.samples_before(step), strict=True):
            left = order.leftover(done)
            total += int(left.count[np.asarray((left.dataset == dataset) & (left.episode == episode))].sum())
        return total
