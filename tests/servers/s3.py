"""An S3 server for tests: moto in a process and environment of its own, because its boto would spoil this one's."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest


def find_moto() -> str | None:
    """The executable ``moto_server``: named by REELRAY_MOTO_SERVER, in ``.venvs/moto`` of the repository, or on the path."""
    named = os.environ.get("REELRAY_MOTO_SERVER")
    local = Path(__file__).resolve().parents[2] / ".venvs" / "moto" / "bin" / "moto_server"
    return named or (str(local) if local.is_file() else shutil.which("moto_server"))


class S3Server:
    """A running server; ``put`` and ``make_bucket`` fill it."""

    def __init__(self, executable: str) -> None:
        self.process = subprocess.Popen(
            [executable, "-H", "127.0.0.1", "-p", "0"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        self.endpoint = self._wait()

    def _wait(self) -> str:
        assert self.process.stderr is not None
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            line = self.process.stderr.readline()
            if "Running on http://" in line:
                # The server logs every request; a full pipe would stop it.
                threading.Thread(target=self._drain, name="moto-log", daemon=True).start()
                return line.split("Running on ", 1)[1].split()[0].strip()
            if not line and self.process.poll() is not None:
                break
        self.close()
        pytest.skip("moto_server did not start")

    def _drain(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(ValueError):
            for _ in self.process.stderr:
                pass

    def _store(self, bucket: str) -> Any:
        from obstore.store import S3Store

        return S3Store(
            bucket,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id="test",
            secret_access_key="test",
            client_options={"allow_http": True},
        )

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        # Moto takes the account from the header and checks no signature.
        request.add_header(
            "Authorization", "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        )
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20).read()

    def put(self, bucket: str, path: str, body: bytes) -> None:
        import obstore

        obstore.put(self._store(bucket), path, body)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
