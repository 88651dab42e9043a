"""An S3 server on this machine for demos and rehearsals: ``moto_server``, which lives in an environment of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from ingest.errors import ResourceUnavailableError

_START_S = 90.0
_KEYS = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo", "AWS_REGION": "us-east-1"}  # nothing checks them


@contextlib.contextmanager
def s3_server(executable: Path, bucket: str) -> Iterator[str]:
    """Runs the server with one empty bucket and points this process's S3 settings to it.

    Args:
        executable: a ``moto_server``.
        bucket: name of the bucket.

    Yields:
        The endpoint's URL.

    Raises:
        ResourceUnavailableError: the server does not start.
    """
    command = [str(executable), "-H", "127.0.0.1", "-p", "0"]
    try:
        process = subprocess.Popen(  # noqa: S603 (the user names the server)
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, bufsize=1
        )
    except OSError as error:
        raise ResourceUnavailableError(f"{executable}: {error.strerror or error}; `make demo-prefeature` installs it") from error
    before = {name: os.environ.get(name) for name in (*_KEYS, "AWS_ENDPOINT_URL")}
    try:
        endpoint = _wait(process)
        os.environ.update(_KEYS, AWS_ENDPOINT_URL=endpoint)
        _make_bucket(endpoint, bucket)
        yield endpoint
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[str]) -> str:
    """The endpoint once the server says that it listens."""
    log = process.stderr
    assert log is not None
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        line = log.readline()
        if "Running on http://" in line:
            # every request is logged; a full pipe would stop the server
            threading.Thread(target=lambda: [None for _ in log], name="s3-log", daemon=True).start()
            return line.split("Running on ", 1)[1].split()[0].strip()
        if not line and process.poll() is not None:
            break
    raise ResourceUnavailableError(f"{process.args!r} did not start (status {process.poll()})")


def _make_bucket(endpoint: str, bucket: str) -> None:
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")  # noqa: S310 (an address of this machine)
    # the server takes the account from this header and checks no signature
    scope = "Credential=demo/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    request.add_header("Authorization", f"AWS4-HMAC-SHA256 {scope}")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20).read()
