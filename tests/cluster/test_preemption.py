"""Stopping on request: every rank stops after the same step, whatever the interleaving, and SIGTERM is only a request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train_integration.preemption import EXIT_STOPPED, Demand, StopBoard, StopRequest, stop_on_sigterm


class Mailbox:
    """Delivers calls to a board late: at the latest when the answer is wanted."""

    def __init__(self, board: StopBoard) -> None:
        self._board = board
        self._queue: list[tuple[str, int, list[int | None]]] = []

    def about_to_take(self, group: str, step: int) -> list[int | None]:
        answer: list[int | None] = []
        self._queue.append((group, step, answer))
        return answer

    def deliver(self) -> None:
        if self._queue:
            group, step, answer = self._queue.pop(0)
            answer.append(self._board.about_to_take(group, step))

    def wait(self, answer: list[int | None]) -> int | None:
        while not answer:
            self.deliver()
        return answer[0]


@dataclass
class Rank:
    stop: StopRequest
    step: int = 0
    begun: bool = False
    stopped: bool = False
    demands: list[Demand] = field(default_factory=list)

    def advance(self) -> None:
        if self.stopped:
            return
        if not self.begun:
            self.stop.begin(self.step + 1)
            self.begun = True
            return
        self.step += 1
        self.begun = False
        demand = self.stop.after(self.step)
        self.demands.append(demand)
        self.stopped = demand is Demand.STOP


@settings(max_examples=150, deadline=None)
@given(
    world=st.integers(1, 4),
    moves=st.lists(st.integers(0, 9), min_size=5, max_size=60),
    ask_at=st.integers(0, 59),
)
def test_all_ranks_stop_after_the_same_step(world: int, moves: list[int], ask_at: int) -> None:
    board = StopBoard()
    mailboxes = [Mailbox(board) for _ in range(world)]
    ranks = [
        Rank(StopRequest(box, "group", preemption=lambda: None, wait=box.wait))  # type: ignore[arg-type]
        for box in mailboxes
    ]
    asked_after = None
    for number, move in enumerate(moves):
        if number == ask_at:
            board.ask()
            asked_after = max(rank.step for rank in ranks)
        if move < 5:
            mailboxes[move % world].deliver()
        else:
            ranks[move % world].advance()
    if asked_after is None:
        board.ask()
        asked_after = max(rank.step for rank in ranks)
    for _ in range(400):
        for rank in ranks:
            rank.advance()
    assert all(rank.stopped for rank in ranks)
    assert len({rank.step for rank in ranks}) == 1
    # Ranks of a real group wait for each other's gradients; here one may be a step further, never more than two are added.
    assert ranks[0].step <= asked_after + 2 + (world > 1)
    assert board.asked()


def test_without_a_request_nothing_stops() -> None:
    board = StopBoard()
    stop = StopRequest(board, "group", preemption=lambda: None, wait=lambda answer: answer)
    for step in range(1, 30):
        stop.begin(step)
        assert stop.after(step) is Demand.GO_ON
    assert not board.asked()


def test_a_group_that_begins_again_stops_early() -> None:
    board = StopBoard()
    first = StopRequest(board, "one", preemption=lambda: None, wait=lambda answer: answer)
    first.begin(90)
    board.ask()
    again = StopRequest(board, "two", preemption=lambda: None, wait=lambda answer: answer)
    again.begin(51)
    assert again.after(51) is Demand.GO_ON
    again.begin(52)
    assert again.after(52) is Demand.STOP


@dataclass(frozen=True)
class Info:
    preempted_node_to_ranks: dict[str, list[int]]


def test_an_announced_loss_is_saved_for_once() -> None:
    told: list[Info | None] = [None, Info({"a": [0]}), Info({"a": [0]}), Info({"a": [0], "b": [1]}), None, Info({"a": [0]})]
    looks = iter(told)
    stop = StopRequest(None, "group", preemption=lambda: next(looks), preemption_every=10)
    demands = {step: stop.after(step) for step in range(1, 61)}
    assert [step for step, demand in demands.items() if demand is Demand.SAVE] == [20, 40, 60]
    assert Demand.STOP not in demands.values()


@pytest.mark.parametrize("start", [0, 7])
def test_losses_are_looked_for_at_the_same_steps_on_every_rank(start: int) -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1

    stop = StopRequest(None, "group", preemption=look, preemption_every=5)
    found: list[int] = []
    for step in range(start + 1, 31):
        before = looks
        stop.after(step)
        found += [step] if looks > before else []
    assert found == [step for step in (5, 10, 15, 20, 25, 30) if step > start]


def test_no_look_where_none_is_wanted() -> None:
    stop = StopRequest(None, "group", preemption=lambda: pytest.fail("not asked for"), preemption_every=0)
    assert all(stop.after(step) is Demand.GO_ON for step in range(1, 100))


def test_sigterm_is_a_request() -> None:
    asked = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm(asked.set) as came:
        assert not came()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(5)
        assert came()
        assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_handler_is_taken_back_without_a_signal() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm(lambda: None) as came:
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert not came()


def test_elsewhere_than_in_the_main_thread_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found: list[object] = []

    def run() -> None:
        with stop_on_sigterm(lambda: None) as came:
            found.extend([signal.getsignal(signal.SIGTERM), came()])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before, False]


def test_a_second_sigterm_ends_the_process() -> None:
    code = textwrap.dedent("""
        import os, signal, time
        from train_integration.preemption import stop_on_sigterm
        with stop_on_sigterm(lambda: None):
            os.kill(os.getpid(), signal.SIGTERM)
            print("alive", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "alive"
    assert done.returncode == -signal.SIGTERM


def test_the_exit_status_is_that_of_sigterm() -> None:
    assert EXIT_STOPPED == 128 + signal.SIGTERM


@pytest.mark.ray
def test_sigterm_reaches_ranks_while_the_driver_waits_for_them(metrics_cluster: str) -> None:
    import time

    import ray

    from train_integration.preemption import start_stop_board

    board = start_stop_board()

    @ray.remote(num_cpus=0)
    def rank(handle: object) -> int:
        stop = StopRequest(handle, "group", preemption=lambda: None)
        step = 0
        while step < 2000:
            stop.begin(step + 1)
            time.sleep(0.02)
            step += 1
            if stop.after(step) is Demand.STOP:
                break
        return step

    timer = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGTERM))
    with stop_on_sigterm(lambda: board.ask.remote()) as came:
        refs = [rank.remote(board) for _ in range(2)]
        timer.start()
        steps = ray.get(refs, timeout=90)
    assert came()
    assert steps[0] == steps[1] < 2000
