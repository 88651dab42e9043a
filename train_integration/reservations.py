"""Bytes to reserve for units whose videos turn out to need a lead-in, found out once and reserved from then on.

Reading never holds more than is reserved. Where key pictures need earlier ones (intra refresh, or a list of key pictures
that lies), which only shows in their bytes, a unit comes back as a `ReservationError` instead; the units of that camera
are then reserved with the lead-in that was met, and the rest of the work is read anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ingest.datasource import ReadJob
from ingest.engine.units import payload_bytes
from train_integration.worklist import WorkList


class LeadIns:
    """Lead-ins met so far, by dataset and camera.

    Args:
        job: how units are read.
    """

    def __init__(self, job: ReadJob) -> None:
        self._job = job
        self._leads: dict[int, dict[str, int]] = {}

    def learn(self, dataset: int, leads: Iterable[tuple[str, int]]) -> bool:
        """Notes the ``leads`` of a `ReservationError`; whether one of them is longer than was known."""
        known = self._leads.setdefault(dataset, {})
        before = dict(known)
        for camera, lead in leads:
            known[camera] = max(lead, known.get(camera, 0))
        return known != before

    def reserve(self, work: WorkList) -> WorkList:
        """The same work with the bytes that its units hold with their lead-ins."""
        if not self._leads:
            return work
        units = work.list
        nbytes = units.nbytes.copy()
        for dataset, leads in self._leads.items():
            rows = np.flatnonzero(units.dataset == dataset)
            job = self._job.jobs[dataset]
            held = payload_bytes(units.take(rows), job.source, job.index, job.spec, leads)
            nbytes[rows] = np.maximum(nbytes[rows], held)
        return replace(work, list=replace(units, nbytes=nbytes))
