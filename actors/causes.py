"""What is behind the errors that Ray wraps around those of other processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn

from ray.exceptions import RayTaskError

from ingest.errors import ReelrayError, ResourceUnavailableError

_MISSING = re.compile(r"No module named '([\w.]+)'")
_PLACE = re.compile(r"\bpid=\d+, ip=([\w.:]+)")


def typed_cause(error: BaseException) -> Exception:
    """The typed error behind whatever Ray wrapped it in, or the error itself.

    A module that a process of the cluster does not find becomes a `ResourceUnavailableError`. Ray tells of it only in the text of an
    error, because what could not be imported there includes what would have been run.
    """
    chain = list(_chain(error))
    for found in chain:
        # Ray's own error of a task is of the type that it wraps as well, with a traceback for a message.
        if isinstance(found, ReelrayError) and not isinstance(found, RayTaskError):
            return found
    for found in chain:
        text = str(found)
        missing = _MISSING.search(text)
        if missing is not None:
            place = _PLACE.search(text)
            where = f"the node {place[1]}" if place is not None else "a node of the cluster"
            return ResourceUnavailableError(
                f"a process on {where} cannot import {missing[1]!r}: install reelray and what your code imports on every node, in the "
                "Python that Ray runs there, or ship them with the job (runtime_env working_dir, py_modules or pip)"
            )
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def raise_typed(error: Exception) -> NoReturn:
    """Raises what `typed_cause` finds, from the error that it was found in."""
    found = typed_cause(error)
    if found is error:
        raise found
    raise found from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and every one that it came of, in Python's sense or in Ray's."""
    seen: set[int] = set()
    stack: list[Any] = [error]
    while stack:
        found = stack.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        stack += [found.__cause__, found.__context__, getattr(found, "cause", None), getattr(found, "training_failures", None)]
        stack += list((getattr(found, "worker_failures", None) or {}).values())
