"""A web server for tests: exact ranges, latency, bandwidth, faults on demand, and a record of every request."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import unquote, urlsplit


@dataclass
class Request:
    """One request as it arrived, and what went back."""

    number: int
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes = b""
    status: int = 0
    sent_bytes: int = 0
    fault: str = ""

    @property
    def range(self) -> tuple[int, int] | None:
        value = self.headers.get("range", "")
        if not value.startswith("bytes="):
            return None
        first, _, last = value[6:].partition("-")
        return (int(first), int(last) + 1) if first and last else None


@dataclass
class Reply:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request.

    ``kind``: ``status`` (with ``status`` and ``headers``), ``reset`` before the headers, ``cut`` (the body stops at 60 %, the connection is
    reset), ``stall`` (it stops there and the connection stays open), ``silent`` (no reply at all), ``short`` (fewer bytes, honest length),
    ``wrong_range`` (Content-Range of other bytes), ``html`` (a web page with status 200).
    """

    kind: str
    status: int = 503
    headers: tuple[tuple[str, str], ...] = ()


FaultRule = Callable[[Request], "Fault | None"]


def fail_nth(number: int, fault: Fault) -> FaultRule:
    """Exactly the ``number``-th request (from 1) fails."""
    return lambda request: fault if request.number == number else None


class _Listener(ThreadingHTTPServer):
    # The default of five waiting connections drops the rest, whose clients come again a second later.
    request_queue_size = 128


class WebServer:
    """Serves through ``answer(request) -> Reply``; subclasses or callers say what exists."""

    def __init__(
        self, answer: Callable[[Request], Reply] | None = None, *, latency_s: float = 0.0, bytes_per_s: float | None = None
    ) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.fault: FaultRule | None = None
        self.requests: list[Request] = []
        self._answer = answer
        self._lock = threading.Lock()
        self._bandwidth = threading.Lock()
        self._connections: set[socket.socket] = set()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: object) -> None:
                """Silence."""

            def setup(self) -> None:
                super().setup()
                threading.current_thread().name = "test-web-server-connection"
                owner._connections.add(self.connection)

            def finish(self) -> None:
                with suppress_os_error():
                    super().finish()
                owner._connections.discard(self.connection)

            def do(self) -> None:
                owner._serve(self)

            do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do

        self._http = _Listener(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, name="test-web-server", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        for connection in list(self._connections):
            with suppress_os_error():
                connection.shutdown(socket.SHUT_RDWR)
        self._http.server_close()
        self._thread.join()
        deadline = time.monotonic() + 2
        while self._connections and time.monotonic() < deadline:
            time.sleep(0.002)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, request: Request) -> Reply:
        assert self._answer is not None
        return self._answer(request)

    def forget(self) -> None:
        """Starts counting requests again."""
        with self._lock:
            self.requests = []

    @property
    def sent_bytes(self) -> int:
        """Body bytes that went out."""
        return sum(request.sent_bytes for request in self.requests)

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        length = int(handler.headers.get("content-length") or 0)
        chunked = "chunked" in (handler.headers.get("transfer-encoding") or "")
        body = _read_chunked(handler) if chunked else handler.rfile.read(length)
        with self._lock:
            request = Request(
                len(self.requests) + 1,
                handler.command,
                unquote(parts.path),
                parts.query,
                {name.lower(): value for name, value in handler.headers.items()},
                body,
            )
            self.requests.append(request)
        if self.latency_s:
            time.sleep(self.latency_s)
        fault = self.fault(request) if self.fault else None
        request.fault = fault.kind if fault else ""
        if fault and fault.kind == "silent":
            self._hold(handler)
            return
        if fault and fault.kind == "reset":
            self._reset(handler)
            return
        if fault and fault.kind == "status":
            reply = Reply(fault.status, dict(fault.headers), b'{"error": "injected"}')
        elif fault and fault.kind == "html":
            reply = Reply(200, {"content-type": "text/html; charset=utf-8"}, b"<!doctype html><title>please log in</title>")
        else:
            reply = self.answer(request)
            reply = _damaged(reply, fault) if request.method != "HEAD" else reply
        request.status = reply.status
        self._send(handler, request, reply, request.fault)

    def _hold(self, handler: BaseHTTPRequestHandler) -> None:
        """Says nothing more until the client gives up or the server closes."""
        with suppress_os_error():
            handler.connection.recv(1)
        handler.close_connection = True

    def _send(self, handler: BaseHTTPRequestHandler, request: Request, reply: Reply, fault: str) -> None:
        try:
            handler.send_response(reply.status)
            headers = {"content-length": str(len(reply.body)), **reply.headers}
            for name, value in headers.items():
                handler.send_header(name, value)
            handler.end_headers()
            body = b"" if request.method == "HEAD" else reply.body
            if fault in {"cut", "stall"}:
                body = body[: len(body) * 6 // 10]
            step = 65536 if self.bytes_per_s is None else max(1024, int(self.bytes_per_s * 0.01))
            for start in range(0, len(body), step):
                part = body[start : start + step]
                if self.bytes_per_s is not None:
                    # One link shared by all connections.
                    with self._bandwidth:
                        time.sleep(len(part) / self.bytes_per_s)
                # Counted first: a client may have the last byte before this thread goes on.
                request.sent_bytes += len(part)
                handler.wfile.write(part)
            handler.wfile.flush()
            if fault == "cut":
                self._reset(handler)
            elif fault == "stall":
                self._hold(handler)
        except OSError:
            handler.close_connection = True

    @staticmethod
    def _reset(handler: BaseHTTPRequestHandler) -> None:
        with suppress_os_error():
            # Linger of zero turns the close into a reset.
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.connection.close()
        handler.close_connection = True


def _read_chunked(handler: BaseHTTPRequestHandler) -> bytes:
    parts: list[bytes] = []
    while True:
        size = int(handler.rfile.readline().split(b";")[0], 16)
        parts.append(handler.rfile.read(size))
        handler.rfile.readline()
        if size == 0:
            return b"".join(parts)


@contextmanager
def suppress_os_error() -> Iterator[None]:
    try:
        yield
    except OSError:
        return


def _damaged(reply: Reply, fault: Fault | None) -> Reply:
    if fault is None or reply.status not in {200, 206}:
        return reply
    if fault.kind == "short":
        honest = {name: value for name, value in reply.headers.items() if name != "content-length"}
        return Reply(reply.status, honest, reply.body[: len(reply.body) // 2])
    if fault.kind == "wrong_range" and "content-range" in reply.headers:
        span, _, total = reply.headers["content-range"].removeprefix("bytes ").partition("/")
        first, _, last = span.partition("-")
        return Reply(reply.status, {**reply.headers, "content-range": f"bytes {int(first) + 1}-{int(last) + 1}/{total}"}, reply.body)
    return reply


def range_reply(request: Request, data: bytes, headers: dict[str, str] | None = None) -> Reply:
    """The reply of an honest server to a GET or HEAD of ``data``, range or not."""
    base = {"accept-ranges": "bytes", "content-type": "application/octet-stream", **(headers or {})}
    wanted = request.range
    if wanted is None:
        return Reply(200, {**base, "content-length": str(len(data))}, data)
    start, stop = wanted
    if start >= len(data):
        return Reply(416, {**base, "content-range": f"bytes */{len(data)}"}, b"")
    stop = min(stop, len(data))
    return Reply(206, {**base, "content-range": f"bytes {start}-{stop - 1}/{len(data)}"}, data[start:stop])


class RangeServer(WebServer):
    """Serves ``objects`` (path without a leading slash → bytes) with ETags, and directory pages when ``pages`` is set."""

    def __init__(self, objects: dict[str, bytes] | None = None, *, pages: bool = True, etags: bool = True, **options: float) -> None:
        self.objects = dict(objects or {})
        self.pages, self.etags = pages, etags
        super().__init__(**options)  # pyright: ignore[reportArgumentType]

    def answer(self, request: Request) -> Reply:
        name = request.path.lstrip("/")
        data = self.objects.get(name)
        if data is not None:
            tag = {"etag": f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'} if self.etags else {}
            return range_reply(request, data, tag)
        if self.pages and (not name or name.endswith("/")):
            children = sorted(
                {
                    rest.split("/")[0] + ("/" if "/" in rest else "")
                    for path in self.objects
                    if path.startswith(name) and (rest := path[len(name) :])
                }
            )
            if children:
                links = "".join(f'<li><a href="{child}">{child}</a></li>' for child in ["../", *children])
                return Reply(200, {"content-type": "text/html"}, f"<html><body><ul>{links}</ul></body></html>".encode())
        return Reply(404, {"content-type": "text/plain"}, b"not found")
