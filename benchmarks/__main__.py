"""Measure everything and write the tables of the documents anew: ``make figures``.

python -m benchmarks [NAME ...]     run the benchmarks that are named, or all, then render
python -m benchmarks --render       render what is in benchmarks/results
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.figures import write_all

NAMES = ("plan", "resume", "sidecar", "language", "decoders", "handover", "storage", "prefeature", "stream", "compare", "faults")
"""In this order, those that need nothing but one process first. An hour of `benchmarks.soak` is run by its own name."""


def main() -> int:
    """Status 1: a benchmark failed; the others ran, and their figures are rendered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--render", action="store_true", help="run nothing")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    failed = []
    for name in () if options.render else options.names or NAMES:
        started = time.monotonic()
        print(f"=== benchmarks.{name}", flush=True)
        status = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode
        failed += [name] if status else []
        print(f"=== benchmarks.{name}: status {status} after {time.monotonic() - started:.0f} s", flush=True)
    print("written: " + (", ".join(write_all()) or "nothing has changed"))
    if failed:
        print("failed: " + ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
