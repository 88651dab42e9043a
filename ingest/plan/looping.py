"""A consumer that goes on with its next epoch when one is finished, as LeRobot's ``repeat`` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ingest.plan.order import Admission, Order, Span
from ingest.plan.pieces import Pieces
from ingest.plan.turns import UNLIMITED


class LoopOrder(Order):
    """The orders of consecutive epochs, one after another, without end.

    Entries of spans and admissions are rows of the pieces of ``cycle``, the order of one epoch.

    Args:
        make: the consumer's order for an epoch number; all have the same length.
        epoch: the first epoch.
    """

    def __init__(self, make: Callable[[int], Order], epoch: int) -> None:
        self._make = make
        self._epoch = epoch
        self._cycles: dict[int, Order] = {0: make(epoch)}
        self.pieces: Pieces = self._cycles[0].pieces
        self._length = len(self._cycles[0])

    def __len__(self) -> int:
        return UNLIMITED

    @property
    def epoch_length(self) -> int:
        """Samples of one epoch."""
        return self._length

    def cycle(self, number: int) -> Order:
        """The order of the epoch that comes ``number`` epochs after the first; the last two are kept."""
        if number not in self._cycles:
            self._cycles = {key: order for key, order in self._cycles.items() if key == number - 1}
            self._cycles[number] = self._make(self._epoch + number)
        return self._cycles[number]

    def _span(self, start: int, stop: int) -> Span:
        parts: list[Span] = []
        while start < stop:
            number, place = divmod(start, self._length)
            size = min(stop - start, self._length - place)
            part = self.cycle(number).span(place, place + size)
            parts.append(replace(part, cycle=part.cycle + number))
            start += size
        return Span.join(parts)

    def _admission(self, start: int, stop: int) -> Admission:
        parts: list[Admission] = []
        for number in range(start // self._length, -(-stop // self._length)):
            shift = number * self._length
            own = self.cycle(number).admission(max(start - shift, 0), min(stop - shift, self._length))
            parts.append(replace(own, admitted=own.admitted + shift, first=own.first + shift, last=own.last + shift))
        if not parts:
            return self.cycle(0).admission(0, 0)
        return Admission(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in Admission.__slots__})

    def leftover(self, samples: int) -> Pieces:
        """What is left of the epoch that sample ``samples`` belongs to."""
        number, place = divmod(samples, self._length)
        return self.cycle(number).leftover(place)
