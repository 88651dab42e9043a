"""The whole way of an annotated dataset, in one process: make, check, look, train. ``ray_train.py`` trains on a cluster.

Run from the checkout: ``python examples/language/train.py --folder FOLDER``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from data import make_annotated
from policy import LossOf, TextPolicy, Vocabulary, action_error, train_on

from ingest.engine import open_dataset
from ingest.engine.dataset import Dataset
from ingest.language import RenderStage, load_recipe, read_recipe
from ingest.language.coverage import plan_language
from ingest.language.coverage_report import CoverageReport
from ingest.language.episode import read_language
from ingest.language.inventory import style_report
from ingest.language.lint import check_recipe
from ingest.language.preview import preview_frame
from ingest.lerobot.source import Source
from ingest.plan import PlanSettings, plan_epoch

RECIPE = "subtask"
OPPOSITE = {
    f"keep {down} {right}": f"keep {up} {left}"
    for down, up in (("down", "up"), ("up", "down"))
    for right, left in (("right", "left"), ("left", "right"))
}


def epoch_batches(dataset: Dataset, epoch: int, batch_size: int) -> Iterator[Mapping[str, Any]]:
    """One epoch of the single-process engine in the native order; the Ray stream delivers the same batches."""
    settings = PlanSettings(strategy="lanes", batch_size=batch_size, dataset=dataset.fingerprint())
    plan = plan_epoch(dataset.units(), settings, epoch=epoch)
    for _, batch in dataset.iter_batches(plan):
        yield batch


def inspect(source: Source, folder: Path) -> Vocabulary:
    """What to look at before training: lint, coverage, the texts, and one frame as a page."""
    print(check_recipe(read_recipe(RECIPE), source.cameras).to_text(), end="\n\n")
    stage = RenderStage(load_recipe(RECIPE))
    languages = list(read_language(source))
    print(CoverageReport(plan_language(stage, languages)).to_text(), end="\n\n")
    styles = style_report(languages)
    print(styles.to_text(), end="\n\n")
    page = folder / "frame.html"
    page.write_text(preview_frame(stage, languages[0], 30).to_html(), encoding="utf-8")
    print(f"frame 30 of episode 0 as a page: {page}\n")
    return Vocabulary([*source.tasks.texts, *(entry.text for entry in styles.entries)])


def main() -> None:
    """Makes, checks, trains, and shows that the policy reads its text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="where to put the dataset; a temporary folder by default")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        run(folder, options.epochs, options.batch_size)


def run(folder: Path, epochs: int, batch_size: int) -> dict[str, float]:
    """The example itself; returns the last epoch's losses and the action error with right and with opposite texts."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    source = make_annotated(folder / "dataset")
    vocabulary = inspect(source, folder)
    camera = source.cameras[0]
    dataset = open_dataset(source.store, recipe=RECIPE, return_uint8=True)
    model = TextPolicy(len(vocabulary), picture=source.info.features[camera].picture_shape[:2], state=4, action=4)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    text = action = 0.0
    for epoch in range(epochs):
        history = train_on(LossOf(model, camera), epoch_batches(dataset, epoch, batch_size), vocabulary, optimiser)
        text, action = (sum(step[part] for step in history) / len(history) for part in (0, 1))
        print(f"epoch {epoch}: text loss {text:.3f}, action loss {action:.4f}")
    batches = list(epoch_batches(dataset, epochs, batch_size))
    right, wrong = (action_error(model, batches, vocabulary, camera, swap) for swap in ({}, OPPOSITE))
    print(f"action error with the right text {right:.4f}, with the opposite text {wrong:.4f}")
    return {"text_loss": text, "action_loss": action, "right_text": right, "opposite_text": wrong}


if __name__ == "__main__":
    main()
