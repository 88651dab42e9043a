"""A TCP proxy for tests: what goes through it can be cut for a while, as a network is."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from typing import Literal

Cut = Literal["refuse", "swallow"]


class CutProxy:
    """Forwards connections to an address until `cut` is called.

    ``refuse`` resets what is open and every new connection at once, as a host does whose service is down; ``swallow``
    keeps connections open and passes nothing on, as a network does that drops packets.

    Attributes:
        passed_bytes: bytes passed on so far, both ways.
        refused: connections refused so far.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._cut_until = 0.0
        self._how: Cut = "refuse"
        self.passed_bytes = 0
        self.refused = 0
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def is_cut(self) -> bool:
        return time.monotonic() < self._cut_until

    def cut(self, seconds: float, how: Cut = "refuse") -> None:
        """Lets nothing through for so many seconds."""
        self._how = how
        self._cut_until = time.monotonic() + seconds
        if how == "refuse":
            with self._lock:
                pairs = list(self._pairs)
            for pair in pairs:
                for end in pair:
                    _reset(end)

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            for end in pair:
                _reset(end)

    def __enter__(self) -> CutProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut and self._how == "refuse":
                self.refused += 1
                _reset(near)
                continue
            threading.Thread(target=self._forward, args=(near,), name="proxy-pair", daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._target, timeout=10)
        except OSError:
            _reset(near)
            return
        pair = (near, far)
        with self._lock:
            self._pairs.add(pair)
        try:
            self._pass_on(near, far)
        finally:
            with self._lock:
                self._pairs.discard(pair)
            for end in pair:
                with contextlib.suppress(OSError):
                    end.close()

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        with selectors.DefaultSelector() as ready:
            for end in other:
                ready.register(end, selectors.EVENT_READ)
            while not self._closed.is_set():
                for key, _ in ready.select(timeout=0.5):
                    end = key.fileobj
                    assert isinstance(end, socket.socket)
                    while self.is_cut and self._how == "swallow" and not self._closed.is_set():
                        time.sleep(0.05)
                    try:
                        data = end.recv(1 << 16)
                        if not data:
                            return
                        other[end].sendall(data)
                    except OSError:
                        return
                    with self._lock:
                        self.passed_bytes += len(data)


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        end.close()
