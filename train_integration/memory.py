"""Memory for decoded pictures: how much a rank may hold, in which form, and which units it lets decode whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ingest.datasource import UnitList
from ingest.engine.blocks import BlockStore, OpenBatches
from ingest.engine.frames import FrameStore
from ingest.engine.modes import DecodeMode, choose_once
from ingest.engine.pictures import PictureForm
from ingest.engine.spec import SampleSpec
from ingest.errors import BudgetError
from train_integration.decoding import DecodeBackend
from train_integration.direct import BatchMemory, batches_at_once
from train_integration.fits import peak_pictures
from train_integration.worklist import WorkList


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What a rank may hold.

    Attributes:
        decoded_bytes: decoded pictures in slots.
        mode: how units are decoded.
        ahead: batches for which on-demand pictures are asked in advance.
        stall_s: seconds without progress after which a batch is given up with `IngestStalledError`.
    """

    decoded_bytes: int
    mode: DecodeMode = "auto"
    ahead: int = 4
    stall_s: float = 300.0


@dataclass(frozen=True, slots=True, eq=False)
class FrameStores:
    """Memory of a rank: slots for units that are decoded whole and for pictures decoded on demand, or batches being filled.

    ``needed`` is how many slots for whole units the plan uses at a time, about.
    """

    whole: FrameStore | None = None
    demand: FrameStore | None = None
    batches: BatchMemory | None = None
    needed: int = 0

    @property
    def peak_bytes(self) -> int:
        """Most bytes of decoded pictures that each held, each at its own time."""
        slots = sum(store.peak_used * store.slot_bytes for store in (self.whole, self.demand) if store is not None)
        return slots + (self.batches.peak_bytes if self.batches is not None else 0)

    @property
    def slots(self) -> int:
        """Pictures that may be held at a time."""
        return sum(store.slots for store in (self.whole, self.demand, self.batches) if store is not None)

    @property
    def free(self) -> int:
        """Pictures that more may be held at present."""
        return sum(store.free for store in (self.whole, self.demand, self.batches) if store is not None)

    def warm(self, backend: DecodeBackend) -> None:
        """Touches what will be used, here and in the decoders, before anything is."""
        if self.batches is not None:
            self.batches.warm()
            for blocks in self.batches.stores.values():
                backend.warm(blocks)
        for store, count in ((self.whole, self.needed), (self.demand, self.demand.slots if self.demand is not None else 0)):
            if store is not None:
                store.warm(count)
                if count >= store.slots:
                    backend.warm(store)

    def close(self) -> None:
        """Closes all."""
        for store in (self.whole, self.demand, self.batches):
            if store is not None:
                store.close()


class RankMemory:
    """Lays out the memory for one work list.

    Args:
        spec: what samples consist of.
        work: the rank's units and batches.
        forms: form of the pictures, by camera.
        backend: makes memory that it can decode to.
        budgets: what may be held.
        open_units: units that the order keeps open at a time, about.
        saved: what decoding each unit whole saves; asked for only where not all of them fit.
        suspects: (dataset, episode) of those that are never decoded whole, because a picture of theirs is damaged.
    """

    def __init__(
        self,
        spec: SampleSpec,
        work: WorkList,
        forms: Mapping[str, PictureForm],
        backend: DecodeBackend,
        budgets: Budgets,
        open_units: int,
        saved: Callable[[UnitList], NDArray[np.float64]],
        suspects: Collection[tuple[int, int]] = (),
    ) -> None:
        self._spec = spec
        self._work = work
        self._forms = forms
        self._backend = backend
        self._budgets = budgets
        self._open_units = open_units
        self._saved = saved
        self._suspect = np.zeros(len(work.list), np.bool_)
        for dataset, episode in suspects:
            self._suspect |= (work.list.dataset == dataset) & (work.list.episode == episode)
        self._per_sample = sum(spec.windows.size(camera) or 1 for camera in spec.cameras)
        self._slot_bytes = max((form.nbytes(spec.features[camera]) for camera, form in forms.items()), default=1)

    def lay_out(self, stores: FrameStores | None, *, direct: bool) -> tuple[NDArray[np.bool_], FrameStores]:
        """Decides how every unit is decoded, and makes the memory for it, or goes on with what there is.

        Args:
            stores: memory of the work list before, or None.
            direct: whether pictures are delivered as they are decoded, one for each sample.

        Returns:
            bool[N], units that are decoded whole; and the memory. Where it has neither slots for whole units nor for
            pictures on demand, units are decoded straight into batches.

        Raises:
            BudgetError: the budget does not hold one batch.
        """
        work = self._work
        if not self._spec.cameras:
            return np.ones(len(work.list), np.bool_), FrameStores()
        per_batch = work.batch_size * self._per_sample
        slots = self._budgets.decoded_bytes // self._slot_bytes
        if slots < per_batch:
            raise BudgetError(
                f"one batch needs {per_batch} decoded pictures of {self._slot_bytes} bytes, but the decoded budget of "
                f"{self._budgets.decoded_bytes} bytes holds {slots}: raise decoded_budget_gb, or lower batch size, window or picture size"
            )
        if stores is None or (stores.whole is None and stores.demand is None):
            before = None if stores is None else stores.batches
            whole = self._budgets.mode != "on_demand" and not self._suspect.any()
            batches = self._batch_memory(before) if direct and whole else None
            if batches is not None:
                return np.ones(len(work.list), np.bool_), FrameStores(batches=batches)
            once, fresh = self._new_slots(slots, per_batch)
            return once, replace(fresh, batches=before)
        room = stores.whole.slots if stores.whole is not None else 0
        once = self._decoded_once(room, room)
        demand = stores.demand if once.all() else stores.demand or self._backend.make_frames(self._slot_bytes, per_batch * 2)
        return once, replace(stores, demand=demand)

    def _batch_memory(self, memory: BatchMemory | None) -> BatchMemory | None:
        """Memory for decoding every unit straight into its batches, or None where budget or back end do not allow it."""
        work = self._work
        sizes = {camera: form.nbytes(self._spec.features[camera]) for camera, form in self._forms.items()}
        batch_bytes = work.batch_size * sum(sizes.values())
        needed, most = batches_at_once(work), self._budgets.decoded_bytes // batch_bytes
        if needed > most:
            return None
        # Some more than the plan needs at once lets decoding run ahead of the batches.
        limit = min(most, needed + self._budgets.ahead)
        if memory is not None:
            memory.open.allow(limit)
            return memory
        # Batches that are queued, in hand and with the loop have their memory still.
        batches = limit + self._budgets.ahead + 3
        stores: dict[str, BlockStore] = {}
        for camera, nbytes in sizes.items():
            blocks = self._backend.make_blocks(nbytes, work.batch_size, batches)
            if blocks is None:
                return None
            stores[camera] = blocks
        return BatchMemory(stores, OpenBatches(limit), work.batch_size, batch_bytes, batches)

    def _decoded_once(self, slots: int, beside: int) -> NDArray[np.bool_]:
        """bool[N], units that are decoded whole.

        Args:
            slots: pictures that may be held if all units are.
            beside: pictures that may be held beside those decoded on demand.

        Raises:
            BudgetError: all units shall be, and do not fit.
        """
        work, mode = self._work, self._budgets.mode
        opened = work.first_step, work.last_step, work.pictures
        if mode == "on_demand":
            return np.zeros(len(work.list), np.bool_)
        if self._suspect.any():
            return choose_once(*opened, beside, np.where(self._suspect, 0.0, self._saved(work.list)))
        if choose_once(*opened, slots).all():
            return np.ones(len(work.list), np.bool_)
        if mode == "once":
            raise BudgetError(
                f"decode_mode once must hold {peak_pictures(*opened)} decoded pictures of {self._slot_bytes} bytes at a time, but the "
                f"decoded budget of {self._budgets.decoded_bytes} bytes holds {slots}: raise decoded_budget_gb, lower lanes, "
                "lane_frames or pool_size, or leave decode_mode at auto"
            )
        return choose_once(*opened, beside, self._saved(work.list))

    def _new_slots(self, slots: int, per_batch: int) -> tuple[NDArray[np.bool_], FrameStores]:
        """Decides once or on demand for every unit, and makes the slots for both."""
        work = self._work
        reserve = min(per_batch * (self._budgets.ahead + 1), slots)
        once = self._decoded_once(slots, slots - reserve)
        # Room for two more units than the plan needs at once lets decoding run ahead of the batches.
        peak = peak_pictures(work.first_step[once], work.last_step[once], work.pictures[once])
        largest = int(work.pictures[once].max()) if once.any() else 0
        # A short stretch may not be typical of those that follow with the same slots.
        typical = int(work.pictures.mean() * self._open_units) if len(work.pictures) else 0
        room = min(slots if once.all() else slots - reserve, max(peak, typical) + 2 * largest)
        needed = room
        if self._budgets.mode == "once" and once.all():
            room = slots
        return once, FrameStores(
            self._backend.make_frames(self._slot_bytes, room) if once.any() else None,
            None if once.all() else self._backend.make_frames(self._slot_bytes, reserve),
            needed=needed,
        )
