"""From a location to the store that reads it."""

from __future__ import annotations

import importlib.util
import os

from ingest.storage.base import Store
from ingest.storage.fsspec_store import FsspecStore
from ingest.storage.https import HttpStore
from ingest.storage.hub import HubBucketStore, HubDatasetStore, pin
from ingest.storage.local import LocalStore
from ingest.storage.locations import Location, parse_location
from ingest.storage.retry import RetryPolicy


def open_store(location: Location | str | os.PathLike[str], *, policy: RetryPolicy | None = None) -> Store:
    """Opens the store of a dataset. A Hub dataset is pinned to the commit that its revision points at now.

    Args:
        location: parsed, or a text for ``parse_location``.
        policy: retries of remote stores.

    Raises:
        LocationError: the text is no location.
        ObjectNotFoundError: a local directory, dataset or revision that does not exist.
        AccessDeniedError: a dataset that the present credentials may not read.
    """
    place = location if isinstance(location, Location) else parse_location(location)
    if place.kind == "local":
        return LocalStore.at(place.url)
    if place.kind == "hub":
        return HubDatasetStore(pin(place, policy), policy=policy)
    if place.kind == "bucket":
        return HubBucketStore(place, policy=policy)
    if place.kind == "http":
        return HttpStore(place, policy=policy)
    if place.kind == "object" and importlib.util.find_spec("obstore") is not None:
        from ingest.storage.object_store import ObjectStore

        return ObjectStore(place, policy=policy)
    return FsspecStore(place, policy=policy)
