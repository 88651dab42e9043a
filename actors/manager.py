"""One manager per job: it makes the node services, owns them, and takes them with it when it ends.

An actor made by a Train worker would die with that worker. The manager is made by the driver and never detached, so
worker deaths leave the services alone, and the end of the driver, however it comes, removes them.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.causes import raise_typed
from actors.decode_pool import DecodeActor, DecodeElsewhereActor
from actors.node_cache import NodeCacheActor
from actors.resources import beside_caller, wait_for_resources
from ingest import __version__
from ingest.errors import ResourceUnavailableError, VersionSkewError

_LOG = logging.getLogger("reelray.actors")
_CACHE_THREADS = 16
"""Requests that a node's cache answers at once; those for another dataset do not wait for a build."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How many decode actors a node gets, and what each reserves.

    Attributes:
        actors: decode actors per node; None takes the node's free CPUs, and one where none is free.
        cpu_nodes: decode on the nodes that have CPUs and no GPU, for the ranks of all others. Pictures then cross the network.
        cpus: logical CPUs that each actor reserves; 0 where none is free and ``actors`` is None.
        start_timeout_s: seconds to wait for actors to start and to answer.
    """

    actors: int | None = None
    cpus: float = 1.0
    cpu_nodes: bool = False
    start_timeout_s: float = 60.0


def node_label(node_id: str) -> str:
    """A short name of a node for dashboards and messages."""
    return node_id[:8]


class _Manager:
    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._landings: dict[str, list[ActorHandle]] = {}
        self._decoders: dict[str, list[ActorHandle]] = {}
        self._caches: dict[str, ActorHandle] = {}
        self._making = threading.Lock()

    def ping(self) -> str:
        """Answers once the actor is up; the version that it runs."""
        return __version__

    def decode_pool(self, node_id: str, *, shared_memory: bool = True) -> list[ActorHandle]:
        """The decode actors for the ranks of one node, made at the first request; its ranks ask at the same time.

        Args:
            node_id: the ranks' node.
            shared_memory: whether the actors must be on that node, because they write to memory of its ranks.
        """
        with self._making:
            if not self._settings.cpu_nodes:
                return self._decoders_on(node_id)
            if not shared_memory:
                return self._decoders_elsewhere()
            if node_id not in self._landings:
                self._landings[node_id] = self._make_landings(node_id)
            return self._landings[node_id]

    def pools(self) -> dict[str, int]:
        """How many decode actors each node has."""
        return {node_id: len(decoders) for node_id, decoders in self._decoders.items()}

    def node_cache(self, node_id: str) -> ActorHandle:
        """The cache of one node, made at the first request."""
        with self._making:
            if node_id not in self._caches:
                self._caches[node_id] = self._make_cache(node_id)
            return self._caches[node_id]

    def _make_cache(self, node_id: str) -> ActorHandle:
        cache_class: Any = NodeCacheActor
        options = _kept_on(node_id) | {"num_cpus": 0, "max_concurrency": _CACHE_THREADS}
        cache = cache_class.options(name=f"reelray-cache-{node_label(node_id)}-{_own_label()}", **options).remote()
        self._await_start(
            [cache],
            f"the cache of node {node_label(node_id)}",
            "it asks for 0 CPUs, so check `ray status` for a node that is gone or out of memory",
        )
        return cache

    def _decoders_elsewhere(self) -> list[ActorHandle]:
        """The decoders on the nodes that have CPUs and no GPU; they serve all ranks.

        Raises:
            ResourceUnavailableError: there is no such node, or actors do not answer in time.
        """
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _is_cpu_node(node["Resources"])]
        if not nodes:
            raise ResourceUnavailableError("no node of the cluster has CPUs and no GPU: add one, or decode on the nodes of the ranks")
        return [decoder for node in nodes for decoder in self._decoders_on(node)]

    def _make_landings(self, node_id: str) -> list[ActorHandle]:
        """One actor on the node of the ranks for each decoder on the CPU nodes.

        Raises:
            ResourceUnavailableError: as `_decoders_elsewhere`.
        """
        actor_class: Any = DecodeElsewhereActor
        actors: list[ActorHandle] = [
            actor_class.options(name=f"reelray-landing-{node_label(node_id)}-{number}-{_own_label()}", **_kept_on(node_id)).remote(decoder)
            for number, decoder in enumerate(self._decoders_elsewhere())
        ]
        self._await_start(actors, f"the landing actors of node {node_label(node_id)}", "look for failing starts in the actors' logs")
        return actors

    def _decoders_on(self, node_id: str) -> list[ActorHandle]:
        if node_id not in self._decoders:
            self._decoders[node_id] = self._make_decoders(node_id)
        return self._decoders[node_id]

    def _make_decoders(self, node_id: str) -> list[ActorHandle]:
        settings = self._settings
        free = _free_on(node_id).get("CPU", 0.0)
        count, cpus = settings.actors, settings.cpus
        if count is None:
            count = int(free // cpus) if cpus > 0 else 1
            if count < 1:
                count, cpus = 1, 0.0
                _LOG.warning(
                    "node %s has %.1f free CPUs: one decode actor shares the others' CPUs; leave CPUs free for faster decoding",
                    node_label(node_id),
                    free,
                )
        else:
            wait_for_resources(
                {"CPU": count * cpus}, f"{count} decode actors on node {node_label(node_id)}", available=lambda: _free_on(node_id)
            )
        actor_class: Any = DecodeActor
        actors: list[ActorHandle] = [
            actor_class.options(
                name=f"reelray-decode-{node_label(node_id)}-{number}-{_own_label()}", num_cpus=cpus, **_kept_on(node_id)
            ).remote()
            for number in range(count)
        ]
        self._await_start(
            actors,
            f"the decode pool of node {node_label(node_id)}",
            f"each actor asks for {cpus:g} CPU and the node had {free:g} free: lower --decode-actors or the CPUs of the Train workers, "
            "and look for failing starts in the actors' logs",
        )
        return actors

    def _await_start(self, actors: list[ActorHandle], what: str, advice: str) -> None:
        """Waits until actors answer, with the version that runs here; otherwise ends them.

        Raises:
            ResourceUnavailableError: some do not answer in time, or cannot import what they run.
            VersionSkewError: one runs another version.
        """
        timeout_s = self._settings.start_timeout_s
        try:
            pings: list[Any] = [actor.ping.remote() for actor in actors]
            ready, late = ray.wait(pings, num_returns=len(pings), timeout=timeout_s)
            if late:
                raise ResourceUnavailableError(f"{what}: {len(late)} of {len(actors)} did not answer within {timeout_s:.0f} s; {advice}")
            for version in _answers(ready):
                _refuse_skew(version, what)
        except Exception:
            for actor in actors:
                ray.kill(actor)
            raise


def _kept_on(node_id: str) -> dict[str, Any]:
    """Options of an actor that stays on one node: Ray starts it again, and never a call of it."""
    placed = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return {"scheduling_strategy": placed, "max_restarts": -1, "max_task_retries": 0}


def _is_cpu_node(resources: dict[str, float]) -> bool:
    return resources.get("CPU", 0.0) > 0 and not resources.get("GPU")


def _own_label() -> str:
    """Tells the services of one manager from those of another."""
    return str(ray.get_runtime_context().get_actor_id())[:8]


def _answers(pings: list[Any]) -> list[str]:
    try:
        return ray.get(pings)
    except RayError as error:
        raise_typed(error)


def _refuse_skew(version: str, what: str) -> None:
    if version != __version__:
        raise VersionSkewError(
            f"{what} runs reelray {version}, and this job {__version__}: install one version on every node, "
            "or ship it with runtime_env py_modules"
        )


def _free_on(node_id: str) -> dict[str, float]:
    per_node: Any = ray.state.available_resources_per_node()  # pyright: ignore[reportAttributeAccessIssue]
    return dict(per_node.get(node_id, {}))


def start_manager(settings: PoolSettings | None = None) -> ActorHandle:
    """Starts the job's manager. Call it in the driver and keep the handle: the services live as long as it does.

    Raises:
        ResourceUnavailableError: the manager was not scheduled within 30 s, or could not be imported where it was.
        VersionSkewError: it runs another version of reelray than the driver.
    """
    manager_class: Any = ray.remote(_Manager).options(max_concurrency=16, **beside_caller("manager"))
    manager: Any = manager_class.remote(settings or PoolSettings())
    start = time.monotonic()
    ready, _ = ray.wait([manager.ping.remote()], timeout=30)
    if not ready:
        raise ResourceUnavailableError(
            f"the service manager was not scheduled within {time.monotonic() - start:.0f} s although it asks for 0 CPUs; "
            "check `ray status` for nodes that are starting or out of memory"
        )
    try:
        _refuse_skew(_answers(ready)[0], "the service manager")
    except VersionSkewError:
        ray.kill(manager)
        raise
    return manager


def stop_services(manager: ActorHandle | None) -> None:
    """Ends a job's manager, and with it every service that it made. The end of the driver does the same."""
    if manager is not None:
        ray.kill(manager)
