"""Weighted mixtures: every block of samples holds each dataset's share exactly, at any sample, in constant time.

A dataset is a stream of passes: pass p is all of its frames, laid out along a line keyed by (seed, p). An epoch takes
the next ``blocks * quota`` frames of every dataset's stream, so that each frame of a dataset comes once per pass
whatever the weights are, and an epoch is again a set of pieces, which ranks share like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ingest.errors import PlanError
from ingest.plan.hashing import hash_key, shuffled_rows
from ingest.plan.order import Admission, Order, Span
from ingest.plan.pieces import Pieces
from ingest.plan.settings import PlanSettings
from ingest.plan.shards import even_bounds
from ingest.plan.units import Units

_PASS_SALT, _BLOCK_SALT = 31, 32


def block_quotas(units: Units, settings: PlanSettings) -> NDArray[np.int64]:
    """Samples of each dataset in a mixture block, int64[D]; their sum is the block.

    Raises:
        PlanError: when weights and datasets do not match, or a weight is too small for the block.
    """
    weights = settings.weights
    datasets = int(units.dataset.max(initial=-1)) + 1
    frames = np.bincount(units.dataset, units.frames, minlength=datasets)
    share = frames if weights == "frames" else np.array(weights, dtype=np.float64)
    if len(share) != datasets:
        raise PlanError(f"weights must have one number for each of the {datasets} datasets, found {len(share)}: {list(share)}")
    exact = share / share.sum() * settings.mixture_block
    quotas = np.floor(exact).astype(np.int64)
    # The samples that rounding down leaves over go to the largest remainders, ties to the lower dataset.
    by_remainder = np.argsort(quotas - exact, kind="stable")
    quotas[by_remainder[: settings.mixture_block - int(quotas.sum())]] += 1
    if weights != "frames":
        for number in range(datasets):
            if share[number] > 0 and not quotas[number]:
                raise PlanError(
                    f"weights[{number}]={share[number]} gives no sample in a block of {settings.mixture_block}: raise mixture_block"
                )
            if share[number] > 0 and not frames[number]:
                raise PlanError(f"weights[{number}]={share[number]} but dataset {number} has no frames: give it weight 0")
    return quotas


def mixture_pieces(units: Units, settings: PlanSettings, epoch: int) -> Pieces:
    """What an epoch of a mixture delivers: the next stretch of every dataset's stream of passes.

    Raises:
        PlanError: as ``block_quotas``.
    """
    whole = Pieces.whole(units)
    quotas = block_quotas(units, settings)
    if settings.weights == "frames":
        return whole
    used = quotas[whole.dataset] > 0
    blocks = max(1, round(int(whole.count[used].sum()) / settings.mixture_block))
    epoch = epoch if settings.shuffle else 0
    parts: list[Pieces] = []
    for dataset in np.flatnonzero(quotas).tolist():
        own = whole.take(whole.dataset == dataset)
        length = int(own.count.sum())
        begin = epoch * blocks * int(quotas[dataset])
        end = begin + blocks * int(quotas[dataset])
        for number in range(begin // length, -(-end // length)):
            word = hash_key(settings.seed, _PASS_SALT, number, own.dataset, own.episode)[: len(own)]
            line = own.take(np.lexsort((own.lo, own.episode, word)))
            first, last = max(begin - number * length, 0), min(end - number * length, length)
            cut, part = line.cut(np.array([first, last, length], dtype=np.int64))
            taken = cut.take(part == 1)
            parts.append(replace(taken, copy=np.full(len(taken), number, dtype=np.int64)))
    return Pieces.concatenate(units, parts)


def mixture_ends(counts: NDArray[np.int64], quotas: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Where to cut each dataset's line so that every part has whole blocks, as far as they go; fewer blocks than parts are cut.

    Args:
        counts: frames of each dataset, int64[D].
        quotas: samples of each dataset in a block, int64[D].
        parts: number of parts.

    Returns:
        int64[D, parts], ascending ends in each row, the last being ``counts``.
    """
    used = quotas > 0
    blocks = int((counts[used] // quotas[used]).min()) if used.any() else 0
    blocks = blocks if blocks >= parts else 0
    whole = even_bounds(blocks, parts)[None, :] * quotas[:, None]
    rest = np.stack([even_bounds(int(count), parts) for count in counts - blocks * quotas])
    return whole + rest


class MixtureOrder(Order):
    """Orders of several datasets interleaved in proportion to what each has to deliver.

    Sample k of a dataset with t samples is due at time (k + 1/2) / t; the samples of all datasets by due time, cut
    into blocks, give each block every dataset's share to within one sample, and exactly where the share is whole.
    Inside a block the datasets take keyed random places; each dataset's own order is kept.

    Args:
        pieces: the consumer's share of all datasets.
        make: makes the order of one dataset from its pieces and its part of the consumer's samples.
        block: samples of a block.
        seed: seed of the plan.
        epoch: epoch number.
    """

    def __init__(self, pieces: Pieces, make: Callable[[Pieces, float], Order], *, block: int, seed: int, epoch: int) -> None:
        self._total = int(pieces.count.sum())
        dataset = pieces.dataset
        self._orders: list[Order] = []
        for number in np.unique(dataset).tolist():
            own = pieces.take(dataset == number)
            self._orders.append(make(own, int(own.count.sum()) / self._total))
        self._counts: NDArray[np.int64] = np.array([len(order) for order in self._orders], dtype=np.int64)
        self.pieces: Pieces = Pieces.concatenate(pieces.units, [order.pieces for order in self._orders])
        sizes = np.array([len(order.pieces) for order in self._orders], dtype=np.int64)
        self._shift: NDArray[np.int64] = np.cumsum(sizes) - sizes
        self._block = block
        self._key = int(hash_key(seed, epoch, _BLOCK_SALT)[0])

    def __len__(self) -> int:
        return self._total

    def _due(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        return (counts + 0.5) / self._counts

    def _taken(self, samples: int) -> NDArray[np.int64]:
        """Samples of each dataset among the ``samples`` that are due first (ties to the lower dataset), int64[D]."""
        if samples >= self._total:
            return self._counts.copy()
        taken = np.clip(np.floor(self._counts * (samples / self._total) + 0.5).astype(np.int64), 0, self._counts)
        number = np.arange(len(taken))
        while True:
            following = np.where(taken < self._counts, self._due(taken), np.inf)
            last = np.where(taken > 0, self._due(taken - 1), -np.inf)
            add, drop = int(np.lexsort((number, following))[0]), int(np.lexsort((number, last))[-1])
            total = int(taken.sum())
            if total < samples:
                taken[add] += 1
            elif total > samples:
                taken[drop] -= 1
            elif (last[drop], drop) > (following[add], add):
                taken[drop] -= 1
                taken[add] += 1
            else:
                return taken

    def _blocks(self, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Dataset place and local sample number of every sample of the blocks ``first..last``."""
        start, stop = first * self._block, min(last * self._block, self._total)
        before, after = self._taken(start), self._taken(stop)
        owner = np.repeat(np.arange(len(before)), after - before)
        counts = after - before
        local = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(before, counts)
        owner = owner[np.lexsort((owner, (local + 0.5) / self._counts[owner]))]
        full = (stop - start) // self._block * self._block
        rows = np.arange(first, first + full // self._block)
        shuffled = owner[:full].reshape(-1, self._block)
        shuffled = np.take_along_axis(shuffled, shuffled_rows(rows, self._block, self._key), axis=1).reshape(-1)
        ragged = owner[full:]
        if len(ragged):
            ragged = ragged[shuffled_rows(np.array([first + len(rows)]), len(ragged), self._key)[0]]
        owner = np.concatenate((shuffled, ragged))
        numbers = np.empty_like(owner)
        for place in range(len(before)):
            own = owner == place
            numbers[own] = before[place] + np.arange(int(own.sum()))
        return owner, numbers

    def _span(self, start: int, stop: int) -> Span:
        first = start // self._block
        owner, numbers = self._blocks(first, -(-stop // self._block))
        rows = slice(start - first * self._block, stop - first * self._block)
        owner, numbers = owner[rows], numbers[rows]
        result = Span(*(np.empty(len(owner), dtype=np.int64) for _ in range(4)))
        present: list[int] = np.unique(owner).tolist()
        for place in present:
            own = owner == place
            low, high = int(numbers[own][0]), int(numbers[own][-1])
            part = self._orders[place].span(low, high + 1)
            result.entry[own] = part.entry + self._shift[place]
            result.unit[own], result.frame[own], result.cycle[own] = part.unit, part.frame, part.cycle
        return result

    def _locals(self, samples: int) -> NDArray[np.int64]:
        block, inside = divmod(samples, self._block)
        taken = self._taken(block * self._block)
        if inside:
            owner, _ = self._blocks(block, block + 1)
            taken = taken + np.bincount(owner[:inside], minlength=len(taken))
        return taken

    def leftover(self, samples: int) -> Pieces:
        """What each dataset's order has left."""
        done = self._locals(min(max(samples, 0), self._total)).tolist()
        return Pieces.concatenate(self.pieces.units, [order.leftover(n) for order, n in zip(self._orders, done, strict=True)])

    def _admission(self, start: int, stop: int) -> Admission:
        return self._uses.within(start, stop)

    @cached_property
    def _uses(self) -> Admission:
        """The admissions of all datasets, merged; uses are known to the block, and rounded outwards."""
        parts: list[Admission] = []
        for place, order in enumerate(self._orders):
            own = order.admission()
            first = np.maximum(self._rank(place, own.first) - 1, 0) // self._block * self._block
            last = np.minimum(((self._rank(place, own.last) + 1) // self._block + 1) * self._block, self._total) - 1
            parts.append(replace(own, entry=own.entry + self._shift[place], admitted=first - 1, first=first, last=last))
        names = Admission.__slots__
        joined = Admission(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})
        order = np.lexsort((joined.entry, joined.first))
        return joined.take(order)

    def _rank(self, place: int, local: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples due before a dataset's own sample numbers, to within one."""
        due = (local + 0.5) / self._counts[place]
        others = [np.floor(due * count + 0.5) for other, count in enumerate(self._counts.tolist()) if other != place]
        return (local + np.sum(others, axis=0)).astype(np.int64) if others else local
