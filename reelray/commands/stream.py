"""``reelray stream``: deliver an epoch, and record what was delivered."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from ingest.plan import EpochPlan, plan_epoch
from reelray.commands.common import (
    Flat,
    OrderArguments,
    ReadArguments,
    RecipeArguments,
    Source,
    check_outputs,
    cursor_of,
    language_report,
    print_facts,
    print_json,
    print_language,
    progress_bar,
)
from train_integration.accounting import FrameAccount
from train_integration.mixtures import open_described
from train_integration.option_checks import require_non_negative, require_positive
from train_integration.options import StreamConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Deliver an epoch through Ray (or in one process) and report what was delivered."""

    src: Source
    """Location of the dataset, or a mixture file (.yaml) that names several."""
    order_options: Flat[OrderArguments] = field(default_factory=OrderArguments)
    read: Flat[ReadArguments] = field(default_factory=ReadArguments)
    language: Flat[RecipeArguments] = field(default_factory=RecipeArguments)
    engine: Literal["ray", "local"] = "ray"
    """Ray Train workers with read tasks and decode actors, or the single-process engine, which decodes by itself within
    --decoded-budget-gb (2 GiB when unset) and knows no other option of decoding."""
    order: Path | None = None
    """Write the order of delivery to this parquet file, with a digest of every picture."""
    digests: bool = True
    """Add digest:<camera> columns, and with a recipe digest:messages, to the order file."""
    max_steps: int | None = None
    """Stop after that many batches per rank."""
    cursor_in: Path | None = None
    """Go on where this cursor file stands."""
    cursor_out: Path | None = None
    """Write the position reached to this file."""
    decode: Literal["auto", "pool", "inline"] = "auto"
    """Decode in the node's actors, in threads of each rank, or in threads where a node has few CPUs for each rank."""
    decode_actors: int | None = None
    """Decode actors per node; the node's free CPUs when unset."""
    decode_cpus: float = 1.0
    """Logical CPUs that each decode actor reserves; a part of one where decoders share."""
    decode_on_cpu_nodes: bool = False
    """Decode on the nodes without GPUs instead of those of the ranks; pictures then cross the network."""
    frame_store: Literal["slab", "object_store"] = "slab"
    """Where decode actors leave pictures: in memory that they share with their ranks, or in Ray's object store."""
    decode_mode: Literal["auto", "once", "on_demand"] = "auto"
    """Decode units whole within the decoded budget and the rest sample by sample, all of them whole, or none."""
    decoded_budget_gb: float | None = None
    """GiB of decoded pictures per rank; a share of the node's memory when unset."""
    prefetch_batches: int = 4
    """Finished batches kept ahead."""
    step_s: float = 0.0
    """Seconds that each rank spends on a batch, to imitate training."""
    max_failures: int = 20
    """Worker groups that may be lost before the run is given up."""
    address: str | None = None
    """Ray cluster to join; a local one is started when unset."""
    json: bool = False
    """Print the report as JSON."""

    def run(self) -> int:
        """Delivers and reports."""
        from train_integration.delivery import deliver_locally, deliver_through_ray, write_cursor
        from train_integration.ledger import write_order

        require_positive({"decode_actors": self.decode_actors})
        names = ("decode_cpus", "step_s", "max_failures")
        require_non_negative({"max_steps": self.max_steps or 0} | {name: getattr(self, name) for name in names})
        check_outputs(order=self.order, cursor_out=self.cursor_out)
        order = self.order_options
        config = StreamConfig(
            plan=order.settings(),
            read=self.read.options(),
            damage=self.read.damage,
            recipe=self.language.stage(),
            decode=self.decode,
            frame_store=self.frame_store,
            decode_mode=self.decode_mode,
            decoded_budget_gb=self.decoded_budget_gb,
            byte_budget_gb=order.byte_budget_gb,
            prefetch_batches=self.prefetch_batches,
            lane_frames=order.lane_frames,
            episodes=self.read.selected(self.read.episodes),
            exclude_episodes=self.read.selected(self.read.exclude_episodes),
        )
        description, dataset = open_described(self.src, config, **self.read.keywords())
        cursor = cursor_of(self.cursor_in, order.epoch)
        settings = description.with_topology(world_size=order.ranks)
        if self.engine == "local" or order.dp_rank is not None:
            plan = plan_epoch(description.units, settings, cursor, epoch=order.epoch)
            ranks = list(range(order.ranks)) if order.dp_rank is None else [order.dp_rank]
            with progress_bar(_samples(plan, ranks, self.max_steps), " samples", "delivering") as bar:
                summary = deliver_locally(
                    dataset, description, plan, ranks=ranks, max_steps=self.max_steps, digests=self.digests, progress=bar.update
                )
        else:
            from actors.manager import PoolSettings
            from train_integration.cluster import ray_session

            with ray_session(cpus=order.ranks + (self.decode_actors or 2), address=self.address):
                summary = deliver_through_ray(
                    replace(description, config=replace(description.config, plan=settings)),
                    world_size=order.ranks,
                    cursor=cursor,
                    epoch=order.epoch,
                    max_steps=self.max_steps,
                    digests=self.digests,
                    pool=PoolSettings(actors=self.decode_actors, cpus=self.decode_cpus, cpu_nodes=self.decode_on_cpu_nodes),
                    max_failures=self.max_failures,
                    step_s=self.step_s,
                )
        if self.order is not None:
            write_order(self.order, summary.rows)
        if self.cursor_out is not None:
            write_cursor(self.cursor_out, summary.cursor)
        committed = summary.rows["committed"] & ~summary.rows["is_pad"]
        delivered = int(np.count_nonzero(committed))
        rows = {name: summary.rows[name][committed] for name in ("dataset", "index", "epoch")}
        epoch = int(rows["epoch"][0]) if delivered else order.epoch
        tally = FrameAccount(description).tally(rows["dataset"], rows["index"], epoch)
        report: dict[str, object] = {
            "dataset": self.src,
            "selected_episodes": dataset.num_episodes,
            "selected_frames": dataset.num_frames,
            "delivered": delivered,
            "distinct": tally.distinct,
            "repeated": tally.repeated,
            "duplicated": tally.duplicated,
            "replayed": int(np.count_nonzero(~summary.rows["committed"])),
            "padded": int(np.count_nonzero(summary.rows["is_pad"] & summary.rows["committed"])),
            "ranks": order.ranks,
            "steps": int(summary.rows["step"].max()) + 1 if len(summary.rows["step"]) else 0,
            "attempts": summary.attempts,
            "skipped": summary.skipped,
            "language": language_report(dataset),
            "seconds": round(summary.seconds, 3),
            "first_batch_s": summary.first_batch_s,
            "samples_per_s": delivered / summary.seconds if summary.seconds else 0.0,
            "counters": summary.counts,
            "payload_checked": dataset.payload_checked,
        }
        if self.json:
            print_json(report)
        else:
            shown = {name: value for name, value in report.items() if name not in {"counters", "skipped", "language"}}
            print_facts({name.replace("_", " "): "none" if value is None else value for name, value in shown.items()})
            for record in summary.skipped:
                print(f"skipped episode {record['episode']} ({record['frames']} frames): {record['message']}")
            print_language(language_report(dataset))
            if not dataset.payload_checked:
                print("payload unchecked: `reelray sidecar build SRC --checksums` records what fetched pictures are compared with")
        return 0


def _samples(plan: EpochPlan, ranks: list[int], max_steps: int | None) -> int:
    """Samples that some ranks deliver, to scale a progress bar."""
    total = 0
    for rank in ranks:
        ranked = plan.rank(rank)
        steps = (plan.end if plan.settings.tail == "loop" else ranked.steps) - ranked.start_step
        total += plan.settings.batch_size * (steps if max_steps is None else min(steps, max_steps))
    return total
