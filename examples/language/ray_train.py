"""The same policy through Ray Train: two workers, every frame exactly once per epoch, resumed from the newest checkpoint.

Run from the checkout: ``python examples/language/ray_train.py --folder FOLDER``; a local Ray is started.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import ray
import ray.train
import torch
from data import make_annotated
from policy import LossOf, TextPolicy, Vocabulary, train_on
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from ingest.language import RenderStage, load_recipe
from ingest.language.episode import read_language
from ingest.language.inventory import style_report
from ingest.plan import PlanSettings
from reelray import EpisodeDataConfig, StreamConfig, get_sample_stream
from train_integration.checkpoints import load_checkpoint, save_checkpoint
from train_integration.config import placeholder, publish_stream
from train_integration.options import open_stream


def train_worker(config: dict[str, Any]) -> None:
    """What each Train worker runs: one checkpoint per epoch, with the stream's position and the recipe inside."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = TextPolicy(len(config["vocabulary"]), picture=config["picture"], state=4, action=4)
    model = prepare_model(LossOf(policy, config["camera"]))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    with get_sample_stream() as stream:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            state, training = load_checkpoint(checkpoint)
            stream.load_state_dict(state)
            policy.load_state_dict(training["policy"])
            optimiser.load_state_dict(training["optimiser"])
        while stream.epoch < config["epochs"]:
            epoch = stream.epoch
            history = train_on(model, stream, config["vocabulary"], optimiser)
            text, action = (sum(step[part] for step in history) / len(history) for part in (0, 1))
            weights = {"policy": policy.state_dict(), "optimiser": optimiser.state_dict()} if stream.rank == 0 else None
            save_checkpoint({"epoch": epoch, "text_loss": text, "action_loss": action, "steps": len(history)}, stream, weights)


def main() -> None:
    """Makes the dataset, describes the stream once, and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the dataset and the checkpoints go")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    folder = options.folder.resolve()
    source = make_annotated(folder / "dataset")
    texts = style_report(read_language(source)).entries
    camera = source.cameras[0]
    config = StreamConfig(
        plan=PlanSettings(strategy="lanes", batch_size=16, tail="pad"),
        recipe=RenderStage(load_recipe("subtask")),
        epochs=None,
        decode="inline",
        decoded_budget_gb=0.1,
    )
    description, dataset = open_stream(source.store, config)
    print(f"{dataset.num_frames} frames, {sum(map(len, dataset.language.leaving().values()))} without supervision")
    # Workers import this folder's modules.
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(import_path())}}
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={
            "vocabulary": Vocabulary([*source.tasks.texts, *(entry.text for entry in texts)]),
            "picture": source.info.features[camera].picture_shape[:2],
            "camera": camera,
            "epochs": options.epochs,
        },
        scaling_config=ScalingConfig(num_workers=2),
        datasets=placeholder(),
        dataset_config=EpisodeDataConfig(publish_stream(description, None)),
        run_config=RunConfig(name="language", storage_path=str(folder / "runs"), failure_config=FailureConfig(max_failures=3)),
    )
    result = trainer.fit()
    print(f"epoch {result.metrics['epoch']}: text loss {result.metrics['text_loss']:.3f}, action loss {result.metrics['action_loss']:.4f}")
    print(f"checkpoint with its recipe: {result.checkpoint.path}")


def import_path() -> list[str]:
    """Folders that this process imports from and workers need: the example's own and the checkout's."""
    here = Path(__file__).resolve().parent
    return [str(here), str(here.parents[1])]


if __name__ == "__main__":
    main()
