"""The hand-off to Ray Train: a small shard object per rank instead of a split dataset.

Ray's own split cuts episodes across ranks and drops rows, and one rank that stops hangs the others. Here every rank
gets its rank, the world size and references to what was described once; it builds its own reads from the plan.
"""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.train
from ray.actor import ActorHandle
from ray.train import DataConfig

from actors.manager import PoolSettings, start_manager
from actors.node_cache import node_index, node_payload
from actors.pool_client import DecodePoolClient
from actors.slab import SlabHandle
from ingest.engine.counters import Counters
from ingest.errors import BudgetError, SettingsError
from ingest.plan import Cursor
from ingest.storage.processes import usable_cpus
from train_integration.decoding import DecodeBackend, InlineDecoding, ObjectDecoding, PoolDecoding
from train_integration.feed import RayFeed
from train_integration.options import StreamConfig, StreamDescription, decoded_budget_bytes
from train_integration.stream import SampleStream

_MIN_OBJECT_STORE_BYTES = 64 << 20
_READING, _DECODED = 0.5, 0.4
"""Parts of a node's object store for compressed pictures on their way, and for decoded ones that are kept there."""

_FEW_CPUS = 2
"""CPUs for each rank of a node up to which ``auto`` lets the ranks decode: an actor costs a process and a message for every call."""

_WARM_S = 30.0
"""Seconds that decoders may take to map a stream's memory ahead; those that take longer map it when they need it."""


@dataclass(frozen=True, slots=True)
class StreamHandles:
    """A described stream on a cluster: references that the driver owns, so they outlive Train workers.

    Attributes:
        description: the `StreamDescription`.
        job: its `ReadJob`, apart, because read tasks need nothing else.
        manager: the service manager, or None where there are no node services: each rank then decodes itself.
        location: dataset location, for messages.
        cursor: where a run without a checkpoint starts, as JSON; None for the start.
        max_steps: end each epoch after that many batches; None delivers it whole.
    """

    description: ray.ObjectRef[StreamDescription]
    job: ray.ObjectRef[Any]
    manager: ActorHandle | None
    location: str
    cursor: str | None = None
    max_steps: int | None = None


def node_services(description: StreamDescription, pool: PoolSettings | None) -> tuple[StreamDescription, ActorHandle | None]:
    """Starts the services that a stream uses on its nodes. Call it in the driver, and `stop_services` at the end.

    Args:
        description: the stream.
        pool: how many decode actors a node gets, and where. Where it asks for some, ``auto`` decodes in them.

    Returns:
        the stream as it will run; and the manager, or None where ranks decode and nothing else is shared.
    """
    if description.config.decode == "inline":
        return description, None
    if pool is not None and (pool.actors is not None or pool.cpu_nodes):
        description = replace(description, config=replace(description.config, decode="pool"))
    return description, start_manager(pool)


def publish_stream(description: StreamDescription, manager: ActorHandle | None, **options: Any) -> StreamHandles:
    """Puts a description where every rank of the cluster finds it. Call it in the driver."""
    if description.config.needs_actors and manager is None:
        raise SettingsError("decoding in actors needs a service manager: pass actors.manager.start_manager()")
    job = description.job.indexed(lambda index: node_index(index, manager)).stored(lambda store: node_payload(store, manager))
    description = replace(description, job=job)
    return StreamHandles(ray.put(description), ray.put(job), manager, job.location, **options)


def decoded_bytes_on_node(config: StreamConfig, ranks_on_node: int) -> int:
    """Bytes of decoded pictures that one of so many ranks of a node may hold, in the frame store of the stream. Needs a connected Ray.

    Raises:
        BudgetError: more were asked for than the rank's share of the object store.
    """
    budget = decoded_budget_bytes(config, ranks_on_node)
    if config.frame_store == "slab":
        return budget
    share = _object_store_share(_DECODED, ranks_on_node)
    if config.decoded_budget_gb is None:
        return min(budget, share)
    if budget > share:
        # Beyond it Ray would write pictures to the disk, and the stream would be slow without a word.
        raise BudgetError(
            f"the decoded budget of {budget / 2**30:.2f} GiB does not fit the object store: of what the node's ranks may fill with "
            f"pictures, this rank's share is {share / 2**30:.2f} GiB; start Ray with a larger --object-store-memory, lower "
            "decoded_budget_gb, or use frame_store slab"
        )
    return budget


def _object_store_share(part: float, ranks_on_node: int) -> int:
    """The bytes that each rank may take when a node's ranks share ``part`` of its object store."""
    total = float(ray.cluster_resources().get("object_store_memory", 0.0))
    nodes = max(1, sum(1 for node in ray.nodes() if node["Alive"]))
    return int(total / nodes * part / ranks_on_node)


@dataclass(frozen=True, slots=True)
class RankShard:
    """What one Train worker gets from `ray.train.get_dataset_shard`.

    Attributes:
        handles: the described stream.
        rank: rank of the worker.
        world_size: workers of this group.
        ranks_on_node: workers of this group on the same node; they share its memory.
        attempt: names the worker group, equal on all its ranks.
    """

    handles: StreamHandles
    rank: int
    world_size: int
    ranks_on_node: int
    attempt: str

    def open(self, *, cursor: Cursor | None = None, output: Any = "torch") -> SampleStream:
        """Opens the rank's stream in the calling process."""
        handles = self.handles
        description: StreamDescription = ray.get(handles.description)
        if cursor is None and handles.cursor is not None:
            cursor = Cursor.from_json(handles.cursor)
        return SampleStream(
            description,
            self.rank,
            self.world_size,
            RayFeed(handles.job, max(_MIN_OBJECT_STORE_BYTES, _object_store_share(_READING, self.ranks_on_node))),
            self._backend(description),
            decoded_bytes=decoded_bytes_on_node(description.config, self.ranks_on_node),
            cursor=cursor,
            max_steps=handles.max_steps,
            output=output,
        )

    def _backend(self, description: StreamDescription) -> Any:
        handles, config = self.handles, description.config
        manager = handles.manager
        threads = max(1, usable_cpus() // self.ranks_on_node)
        if manager is None or config.decode == "inline" or (not config.needs_actors and threads <= _FEW_CPUS):
            threads = config.decode_threads if config.decode == "inline" else min(threads, config.decode_threads)
            return lambda counters: InlineDecoding(threads, handles.location, counters)

        # Actors start while the job loads its model, not when it asks for the first batch.
        node_id = ray.get_runtime_context().get_node_id()
        shared_memory = config.frame_store == "slab"
        pool = manager.decode_pool.remote(node_id, shared_memory=shared_memory)

        def backend(counters: Counters) -> DecodeBackend:
            actors = ray.get(pool)
            if not shared_memory:
                return ObjectDecoding(DecodePoolClient(actors, counters), handles.location)

            def forget(token: bytes) -> None:
                for actor in actors:
                    actor.forget.remote(token)

            def warm(slab: SlabHandle) -> None:
                ray.wait([actor.warm.remote(slab) for actor in actors], num_returns=len(actors), timeout=_WARM_S)

            return PoolDecoding(DecodePoolClient(actors, counters), handles.location, forget, warm)

        return backend


class EpisodeDataConfig(DataConfig):
    """Gives every Train worker a `RankShard`. Pass it as ``dataset_config`` of a trainer.

    The trainer's ``datasets`` needs an entry of the same name; it is never read::

        TorchTrainer(loop, datasets=placeholder(), dataset_config=EpisodeDataConfig(handles), …)

    Args:
        streams: described streams by dataset name, or one for the name ``train``.
    """

    def __init__(self, streams: StreamHandles | dict[str, StreamHandles]) -> None:
        super().__init__()
        self._streams = streams if isinstance(streams, dict) else {"train": streams}

    def configure(
        self,
        datasets: Any,
        world_size: int,
        worker_handles: Any = None,  # noqa: ARG002 - the signature is Ray's
        worker_node_ids: list[str] | None = None,
        **_: Any,
    ) -> list[dict[str, Any]]:
        """Called by Ray Train at every start of a worker group, also after failures and resizes."""
        per_node = Counter(worker_node_ids or [])
        attempt = uuid.uuid4().hex[:12]
        return [
            {
                name: RankShard(handles, rank, world_size, per_node[worker_node_ids[rank]] if worker_node_ids else world_size, attempt)
                for name, handles in self._streams.items()
                if name in datasets
            }
            for rank in range(world_size)
        ]


def placeholder(*names: str) -> dict[str, Any]:
    """The ``datasets`` argument that a trainer needs beside `EpisodeDataConfig`."""
    return dict.fromkeys(names or ("train",), _nothing)


def _nothing() -> None:
    """Stands for a dataset; `EpisodeDataConfig` never looks at it."""


def get_sample_stream(
    name: str = "train", *, dp_rank: int | None = None, dp_size: int | None = None, output: Any = "torch"
) -> SampleStream:
    """The stream of the Train worker that calls it.

    Args:
        name: dataset name.
        dp_rank: data-parallel rank, where it differs from the world rank (tensor or pipeline parallelism).
        dp_size: data-parallel size.
        output: ``torch`` tensors or ``numpy`` arrays.
    """
    shard: Any = ray.train.get_dataset_shard(name)
    if not isinstance(shard, RankShard):
        raise SettingsError(f"the trainer's dataset {name!r} is not a reelray stream: pass dataset_config=EpisodeDataConfig(...)")
    if (dp_rank is None) != (dp_size is None):
        raise SettingsError("give dp_rank and dp_size together")
    if dp_rank is not None and dp_size is not None:
        shard = replace(shard, rank=dp_rank, world_size=dp_size)
    return shard.open(output=output)
