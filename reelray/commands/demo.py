"""``reelray demo``: the main job, small, with its proof."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reelray.commands.common import print_json, print_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Make a dataset, train on it with two Ray Train workers, kill one of them, and prove that every frame came once."""

    output: Path = Path("outputs/demo")
    """Folder for the dataset, checkpoints and the report; replaced when an earlier demo made it."""
    episodes: int = 10
    """Episodes of the made dataset."""
    cameras: int = 3
    """Cameras of the made dataset."""
    epochs: int = 4
    """Epochs to train."""
    kill: bool = True
    """Kill a worker in mid-epoch."""
    json: bool = False
    """Print the proof as JSON."""

    def run(self) -> int:
        """Runs the demo; status 1 when the proof fails."""
        from train_integration.demo import DemoSettings, proof_rows, run_demo

        settings = DemoSettings(output=self.output, episodes=self.episodes, cameras=self.cameras, epochs=self.epochs, kill=self.kill)
        proof = run_demo(settings)
        rows = proof_rows(proof, settings)
        if self.json:
            print_json(dict(rows) | {"held": proof.held, "report": str(proof.report)})
        else:
            print()
            print_table(rows)
            print(f"\nreport: {proof.report}")
            print("proof: " + ("every frame exactly once, in the planned order" if proof.held else "FAILED, see the table"))
        return 0 if proof.held else 1
