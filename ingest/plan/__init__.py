"""Plans: which rank delivers which frame of which unit at which step. Pure NumPy, no I/O.

A `Units` table says what exists. An epoch is a set of `Pieces`, each a range of positions in one unit's own frame
sequence. The pieces are divided among ranks and, inside each rank, among its workers (`sharing.divide`). Every such
consumer has an `Order`: a sequence of samples that delivers each frame of its share once, can be entered at any
sample, and says what is left after n of them (`Order.leftover`). The workers of a rank take turns, one batch each
(`Turns`), which is arithmetic on their batch counts; a batch comes from one worker.

    units ─▶ pieces ─▶ ranks ─▶ workers ─▶ order of each worker ─▶ turns ─▶ batches of each rank
                 ▲                                                             │
                 └── leftover after the batches of a segment ◀── cursor ◀──────┘

Orders: `remaining` and `round_robin` draw from a coverage pool, bit-equal to LeRobot's, and are replayed to seek;
`lanes` and `reservoir` are functions of the sample number; `sequential` and `episode_sequential` do not mix frames.

State is arithmetic. A `Cursor` holds the plan's fingerprint, the epoch, and its segments: topology and committed
batches. A plan walks the segments: each one divides what the one before left over, the last one is where the stream
continues. The same topology therefore continues sample by sample; another one re-shares the rest, so that every frame
is delivered once per epoch however often the topology changes. Nothing random depends on anything but (seed, epoch)
and, after the first change of topology, the number of the segment.

In orders without a pool, leftovers are cut ranges of the same keyed sequences; in pool orders and inside an open block
of `reservoir` they are lists of frames. A run that starts with fewer episodes than ranks is refused, unless
`share='frame_exact'`; one that goes on from a cursor never is: episodes are then cut, so that any number of ranks can
share any number of leftovers.

Skipped episodes (damage policy) are taken out of the orders that own them from a recorded step on; the other ranks'
orders, and the number of steps where it must be common, do not change. Repeats that pad a batch are never delivered.
"""

from __future__ import annotations

from ingest.plan.batches import Batch, RankPlan, RankTable
from ingest.plan.cursor import Cursor, Segment, SkippedRange, plan_fingerprint
from ingest.plan.epoch import EpochPlan, OrderTable, plan_epoch
from ingest.plan.mixing import Mixing, measure_mixing
from ingest.plan.order import Admission, Order, Span
from ingest.plan.pieces import Pieces
from ingest.plan.pool import CoveragePool
from ingest.plan.report import PlanReport, report_plan
from ingest.plan.settings import PlanSettings, Topology
from ingest.plan.shards import balanced_shards
from ingest.plan.simulate import Hardware, RankRun, simulate, simulate_rank
from ingest.plan.turns import Turns, WorkerStart, worker_starts, worker_turns
from ingest.plan.units import Units, cut_units

__all__ = [
    "Admission",
    "Batch",
    "CoveragePool",
    "Cursor",
    "EpochPlan",
    "Hardware",
    "Mixing",
    "Order",
    "OrderTable",
    "Pieces",
    "PlanReport",
    "PlanSettings",
    "RankPlan",
    "RankRun",
    "RankTable",
    "Segment",
    "SkippedRange",
    "Span",
    "Topology",
    "Turns",
    "Units",
    "WorkerStart",
    "balanced_shards",
    "cut_units",
    "measure_mixing",
    "plan_epoch",
    "plan_fingerprint",
    "report_plan",
    "simulate",
    "simulate_rank",
    "worker_starts",
    "worker_turns",
]
