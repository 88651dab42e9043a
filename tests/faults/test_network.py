"""The network between the nodes and the store is cut for a while; reading waits for it, and nothing is missing afterwards."""

from __future__ import annotations

import copy
from urllib.parse import urlsplit

import pytest
from servers.proxy import Cut, CutProxy
from servers.ranges import RangeServer

from benchmarks.faults import Blow, Nodes, Verdict, Work, run_under

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(600)]


def served(work: Work) -> dict[str, bytes]:
    return {f"a/set/{path.relative_to(work.root).as_posix()}": path.read_bytes() for path in work.root.rglob("*") if path.is_file()}


def elsewhere(work: Work, place: str) -> Work:
    other = copy.copy(work)
    other.place = place
    return other


def cut_run(work: Work, proxy: CutProxy, seconds: float, how: Cut) -> Verdict:
    """An epoch whose reading is cut off as soon as its ranks are there."""

    def strike(blow: Blow, pids: dict[int, int]) -> bool:
        if pids and not before:
            before.append(proxy.accepted)
        # Once a reader has connected, so that the cut meets it at work.
        if not before or proxy.accepted <= before[0]:
            return False
        proxy.cut(seconds, how)
        return True

    before: list[int] = []
    verdict = Verdict()
    blow = Blow(0, "network", 0.0)
    assert run_under(work, 41, [blow], strike, verdict) == [blow]
    return verdict


def check(verdict: Verdict, seconds: float) -> None:
    assert verdict.exact, verdict.to_json()
    assert verdict.selected > 0
    # It was waited for, and nobody was started again for it.
    assert verdict.worker_groups == 1
    assert verdict.seconds > seconds


@pytest.mark.parametrize(("seconds", "how"), [(5.0, "refuse"), (5.0, "swallow"), (60.0, "refuse"), (60.0, "swallow")])
def test_a_web_server_is_cut_off(cluster: Nodes, work: Work, seconds: float, how: Cut) -> None:
    with RangeServer(served(work)) as server:
        parts = urlsplit(server.url)
        assert parts.hostname is not None
        assert parts.port is not None
        with CutProxy((parts.hostname, parts.port)) as proxy:
            verdict = cut_run(elsewhere(work, f"http://127.0.0.1:{proxy.port}/a/set"), proxy, seconds, how)
            assert proxy.refused > 0 or how == "swallow"
    check(verdict, seconds)
