"""A process that fetches all its life keeps the memory of its buffers."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
from ingest.storage.processes import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults():
    buffers = [bytes(bytearray(3 << 20)) for _ in range(8)]
    del buffers
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
faults()
before = faults()
for _ in range(10):
    after = faults()
print(after - before)
"""


def _faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", _PROGRAM, how], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide by themselves what they keep")
def test_buffers_that_were_freed_are_not_mapped_anew() -> None:
    pages = 10 * 8 * (3 << 20) // 4096
    assert _faults("keep") < pages / 20
    assert _faults("not") > pages / 20
