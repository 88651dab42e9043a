"""``python -m train_integration.train …``: the training job as a cluster runs it, with the options of ``reelray train``.

``ray job submit --working-dir . -- python -m train_integration.train --dataset.repo_id …`` needs no installed command: the
working directory is enough. The exit status tells an orchestrator what to do next, see `train_integration.jobs.ExitStatus`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the training command.

    Args:
        arguments: options as after ``reelray train``; those of the process by default.

    Returns:
        The exit status.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    # The command line is a layer above this package, so it is looked up where a job starts rather than imported here.
    command: Any = import_module("reelray.cli")
    return int(command.main(["train", *given]))


if __name__ == "__main__":
    sys.exit(main())
