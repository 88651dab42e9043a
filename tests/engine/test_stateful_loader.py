"""The loader that keeps the state of its workers itself, torchdata's: sample-exact from any batch, over epochs, with any workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from streams import described
from torchdata.stateful_dataloader import StatefulDataLoader

from ingest.engine import ReadOptions
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import plan_epoch
from train_integration.iterable import EpisodeIterableDataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

EPOCHS = 3
BATCH = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("stateful") / "ds"
    make_dataset(target, MakeOptions(episodes=5, frames="4:9", cameras=1, size=(32, 64), gop=3, seed=1))
    return target


class Loop:
    """A training loop over a loader: batches of one epoch after the other.

    Attributes:
        loader: where they come from.
        before: batches that were taken before the state that it goes on from.
        steps: batches of an epoch.
    """

    def __init__(self, description: Any, workers: int, *, batched: bool, persistent: bool) -> None:
        dataset = EpisodeIterableDataset(description, rank=0, world_size=1, batched=batched)
        size = None if batched else BATCH
        self.before, self.steps = 0, 1
        self.loader = StatefulDataLoader(dataset, batch_size=size, num_workers=workers, persistent_workers=persistent)

    def take(self, count: int) -> list[list[int]]:
        """The next batches; where that ends an epoch, its end is met too, as a loop does."""
        taken: list[list[int]] = []
        while len(taken) < count:
            ended = True
            for batch in self.loader:
                taken.append(batch["index"].tolist())
                if len(taken) == count and not self._epoch_over(taken):
                    ended = False
                    break
            if not ended:
                break
        return taken

    def _epoch_over(self, taken: list[list[int]]) -> bool:
        return (len(taken) + self.before) % self.steps == 0


@pytest.mark.parametrize(
    ("workers", "batched", "persistent"),
    [(0, False, False), (1, True, False), (2, False, True), (3, True, False), pytest.param(3, False, True, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("strategy", ["lanes", "remaining"])
def test_a_stateful_loader_goes_on_exactly(root: Path, strategy: str, workers: int, batched: bool, persistent: bool) -> None:
    description, dataset = described(
        root, strategy=strategy, batch_size=BATCH, lane_frames=3, workers=workers, read=ReadOptions(cameras=())
    )
    whole: list[list[int]] = []
    for epoch in range(EPOCHS):
        plan = plan_epoch(description.units, description.with_topology(world_size=1), epoch=epoch)
        whole += [batch["index"].tolist() for _, batch in dataset.iter_batches(plan)]
    steps = len(whole) // EPOCHS
    for stop in (1, steps - 1, steps, steps + 1, 2 * steps):
        first, second = (Loop(description, workers, batched=batched, persistent=persistent) for _ in range(2))
        first.steps = second.steps = steps
        head = first.take(stop)
        second.before = stop
        second.loader.load_state_dict(first.loader.state_dict())
        del first
        assert head + second.take(len(whole) - stop) == whole, f"after {stop} of {steps} batches"
