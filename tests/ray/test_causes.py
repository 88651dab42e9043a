"""What a task or an actor of Ray failed with arrives as itself, in one line."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from actors.causes import raise_typed, typed_cause
from ingest.errors import ResourceUnavailableError, StorageError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def failure(function: Any) -> RayError:
    """What calling it in a task raises here."""
    with pytest.raises(RayError) as caught:
        ray.get(ray.remote(num_cpus=0)(function).remote())
    return caught.value


def full_disk() -> Any:
    """A function that fails by name; it travels by value, since workers cannot import this module."""

    def fails() -> None:
        raise StorageError("the disk is full")

    return fails


def through_another() -> Any:
    """The same in a task of a task."""
    fails = full_disk()

    def asks() -> None:
        ray.get(ray.remote(num_cpus=0)(fails).remote())

    return asks


@pytest.mark.parametrize("made", [full_disk, through_another])
def test_a_typed_error_is_found_behind_tasks(made: Any) -> None:
    error = failure(made())
    found = typed_cause(error)
    assert type(found) is StorageError
    assert str(found) == "the disk is full"
    with pytest.raises(StorageError, match=r"^the disk is full$"):
        raise_typed(error)


def test_an_error_without_a_typed_one_stays_what_it_is() -> None:
    def divides() -> float:
        return 1 / 0

    error = failure(divides)
    assert typed_cause(error) is error
    with pytest.raises(ZeroDivisionError):
        raise_typed(error)


def test_a_module_that_is_not_there_is_named() -> None:
    def asks() -> None:
        import no_such_robot.arms  # type: ignore[import-not-found]  # noqa: F401

    def dies() -> Any:
        class Actor:
            def __init__(self) -> None:
                asks()

            def ping(self) -> None:
                """Never answers."""

        return ray.remote(num_cpus=0)(Actor).remote()

    with pytest.raises(RayError) as caught:
        ray.get(dies().ping.remote())
    for error in (failure(asks), caught.value):
        found = typed_cause(error)
        assert isinstance(found, ResourceUnavailableError)
        assert "cannot import 'no_such_robot'" in str(found)
        assert "\n" not in str(found)


def test_the_error_that_another_was_met_with_counts() -> None:
    try:
        try:
            full_disk()()
        except OSError as error:
            raise RuntimeError("it did not end") from error
    except RuntimeError as error:
        found = typed_cause(error)
    assert str(found) == "the disk is full"
