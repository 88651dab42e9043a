"""The network between the nodes and the store is cut for a while; reading waits for it, and nothing is missing afterwards."""

from __future__ import annotations

import copy
from urllib.parse import urlsplit

import pytest
from servers.proxy import Cut, CutProxy
from servers.ranges import RangeServer

from benchmarks.faults import Blow, Verdict, Work, run_under
from benchmarks.nodes import Nodes

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

CUTS_S = (5.0, 60.0)


def served(work: Work) -> dict[str, bytes]:
    return {f"a/set/{path.relative_to(work.root).as_posix()}": path.read_bytes() for path in work.root.rglob("*") if path.is_file()}


def elsewhere(work: Work, place: str) -> Work:
    other = copy.copy(work)
    other.place = place
    return other


def cut_run(work: Work, proxy: CutProxy, how: Cut) -> Verdict:
    """An epoch whose reading is cut off as soon as its ranks are there, and again, for longer, once it has gone on."""

    def strike(blow: Blow, pids: dict[int, int]) -> bool:
        if pids and not before:
            before.append(proxy.passed_bytes)
        # Only when bytes pass, so that each cut meets a reader at work.
        if not before or proxy.is_cut or proxy.passed_bytes <= before[0]:
            return False
        proxy.cut(CUTS_S[len(before) - 1], how)
        before.insert(0, proxy.passed_bytes)
        return True

    before: list[int] = []
    verdict = Verdict()
    blows = [Blow(0, "network", 0.0) for _ in CUTS_S]
    assert run_under(work, 41, blows, strike, verdict) == blows
    return verdict


def check(verdict: Verdict) -> None:
    assert verdict.exact, verdict.to_json()
    assert verdict.selected > 0
    # It was waited for, and nobody was started again for it.
    assert verdict.worker_groups == 1
    assert verdict.seconds > sum(CUTS_S)


@pytest.mark.parametrize("how", ["refuse", "swallow"])
def test_a_web_server_is_cut_off(cluster: Nodes, work: Work, how: Cut) -> None:
    with RangeServer(served(work)) as server:
        parts = urlsplit(server.url)
        assert parts.hostname is not None
        assert parts.port is not None
        with CutProxy((parts.hostname, parts.port)) as proxy:
            verdict = cut_run(elsewhere(work, f"http://127.0.0.1:{proxy.port}/a/set"), proxy, how)
            assert proxy.refused > 0 or how == "swallow"
    check(verdict)
