"""Telling a person when ranks use fewer workers than asked for."""

from __future__ import annotations

import logging

from ingest.plan import EpochPlan

_LOG = logging.getLogger("reelray.plan")


def log_clamped_workers(plan: EpochPlan) -> list[tuple[int, int]]:
    """Logs each rank that owns fewer episodes than workers were asked for.

    Returns:
        ``(rank, workers used)`` of those ranks.
    """
    wanted = max(1, plan.settings.workers)
    clamped = [(rank, plan.segment.workers(rank)) for rank in range(plan.world_size) if plan.segment.workers(rank) < wanted]
    for rank, used in clamped[:8]:
        _LOG.info("rank %d owns fewer episodes than its %d workers: it uses %d", rank, wanted, used)
    if len(clamped) > 8:
        _LOG.info("and %d more ranks use fewer workers than asked for", len(clamped) - 8)
    return clamped
