"""The network between the nodes and an S3 server is cut for a while."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from servers.proxy import CutProxy
from servers.s3 import S3Server, find_moto

from benchmarks.faults import Work
from benchmarks.nodes import nodes

from .test_network import check, cut_run, elsewhere, served

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def bucket(work: Work, monkeypatch: pytest.MonkeyPatch) -> Iterator[CutProxy]:
    """A bucket behind a proxy; the environment leads there."""
    executable = find_moto()
    if executable is None:
        pytest.skip("no moto_server: set REELRAY_MOTO_SERVER")
    pytest.importorskip("obstore")
    moto = S3Server(executable)
    moto.make_bucket("robots")
    for path, data in served(work).items():
        moto.put("robots", path, data)
    parts = urlsplit(moto.endpoint)
    assert parts.hostname is not None
    assert parts.port is not None
    with CutProxy((parts.hostname, parts.port)) as proxy:
        names = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "REGION": "us-east-1"}
        for name, value in (names | {"ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}).items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield proxy
    moto.close()


def test_a_bucket_is_cut_off(bucket: CutProxy, work: Work) -> None:
    # Nodes take their environment from the process that starts them.
    with nodes() as _:
        verdict = cut_run(elsewhere(work, "s3://robots/a/set"), bucket, "refuse")
    check(verdict)
