"""Publishing sidecars: the one thing this package ever writes to a remote, and only when asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingest import settings
from ingest.errors import AccessDeniedError, ObjectNotFoundError, SidecarError, StorageError, TransientStorageError
from ingest.storage import hub_api
from ingest.storage.base import Store
from ingest.storage.http import ask
from ingest.storage.hub import HubBucketStore, HubDatasetStore, pin
from ingest.storage.locations import Location, parse_location
from ingest.storage.paths import check_relative
from ingest.storage.retry import RETRYABLE_STATUS, RetryPolicy
from ingest.storage.secrets import quiet_http_logs, redact
from ingest.storage.wrapped import unwrapped

SIDECAR_BRANCH = "lerobot-sidecars"
"""Branch of a dataset repository that holds its sidecars; the source branches stay untouched."""

SIDECAR_FOLDER = "meta/mp4-sidecars"
"""Folder below the dataset's root that sidecars are published in."""


def published_store(store: Store, *, policy: RetryPolicy | None = None) -> Store | None:
    """Where published sidecars of ``store`` can be read: the sidecar branch of a dataset, the bucket itself, else None.

    Raises:
        StorageError: the Hub did not answer; a branch that does not exist is None, not an error.
    """
    store = unwrapped(store)
    if isinstance(store, HubBucketStore):
        return store
    if not isinstance(store, HubDatasetStore):
        return None
    place = store.location
    branch = parse_location(f"hf://datasets/{place.repo_id}@{SIDECAR_BRANCH}" + (f"/{place.path}" if place.path else ""))
    try:
        return HubDatasetStore(pin(branch, policy), policy=policy)
    except ObjectNotFoundError:
        return None


class SidecarPublisher:
    """Writes sidecars of one dataset: to the branch ``lerobot-sidecars`` of its repository, or into its bucket."""

    def __init__(self, location: Location, *, complete: bool = True, policy: RetryPolicy | None = None) -> None:
        """
        Args:
            location: a Hub dataset at a commit, or a bucket.
            complete: whether the sidecar describes every video of the dataset.
            policy: retries of the access check; uploads have the Hub client's own.

        Raises:
            SidecarError: not on the Hub, a dataset that is not pinned to a commit, or a sidecar of a subset.
        """
        if location.kind not in {"hub", "bucket"} or location.repo_id is None:
            raise SidecarError(f"{location.url}: sidecars are published to hf:// datasets and buckets only; elsewhere, copy the file")
        if location.kind == "hub" and not location.pinned:
            raise SidecarError(
                f"{location.url}: publishing needs a pinned source commit of 40 hex digits, found {location.revision!r}: "
                "a sidecar describes one commit, not a branch that moves"
            )
        if not complete:
            raise SidecarError(f"{location.url}: only a complete dataset sidecar can be published; build it over all episodes first")
        self._location = location
        self._repo_id = location.repo_id
        self._policy = policy or RetryPolicy()

    def publish(self, path_in_repo: str, data: bytes | Path, message: str) -> str:
        """Uploads one sidecar in one commit.

        Args:
            path_in_repo: below the dataset's root, in ``meta/mp4-sidecars/``.
            data: content, or the file that holds it.
            message: of the commit; buckets have none.

        Returns:
            The ``hf://`` URL of what was written.

        Raises:
            SidecarError: a path outside ``meta/mp4-sidecars/``.
            AccessDeniedError: no token, or one without write permission; says what to do.
            StorageError: the upload failed; nothing was published.
        """
        check_relative(path_in_repo)
        if not path_in_repo.startswith(f"{SIDECAR_FOLDER}/"):
            raise SidecarError(f"{path_in_repo!r} is not below {SIDECAR_FOLDER}/: nothing else is ever published")
        hub_api.refuse_offline(f"publishing to {self._location.url}")
        self.check_access()
        full = f"{self._location.path}/{path_in_repo}" if self._location.path else path_in_repo
        source = data if isinstance(data, bytes) else str(data)
        try:
            if self._location.kind == "bucket":
                self._upload_to_bucket(full, source)
                return f"hf://buckets/{self._repo_id}/{full}"
            self._upload_to_branch(full, source, message)
            return f"hf://datasets/{self._repo_id}@{SIDECAR_BRANCH}/{full}"
        except StorageError:
            raise
        except Exception as error:
            raise self._translate(error) from None

    def check_access(self) -> None:
        """Asks whether the present token may write.

        Raises:
            AccessDeniedError: it may not, or there is none.
            StorageError: the Hub did not answer.
        """
        if settings.hub_token() is None:
            raise AccessDeniedError(f"publishing to {self._location.url} needs a token: {self._advice()}")
        group = "datasets" if self._location.kind == "hub" else "buckets"
        route = "auth-check/write" if self._location.kind == "hub" else "xet-write-token"
        url = f"{settings.hub_endpoint()}/api/{group}/{self._repo_id}/{route}"
        reply = ask("GET", url, hub_api.auth_headers(), self._policy)
        if reply.status in {401, 403}:
            raise AccessDeniedError(
                f"the present token may not write to {self._location.url} (the Hub answered {reply.status}): {self._advice()}"
            )
        if reply.status == 404 and reply.headers.get("x-error-code") == "RepoNotFound":
            raise ObjectNotFoundError(f"{self._location.url} does not exist, or the present token may not see it: {self._advice()}")
        # A Hub without this route says nothing either way; the upload itself will.

    def _advice(self) -> str:
        return f"set HF_TOKEN or run 'hf auth login' with a token that has write permission for {self._repo_id}"

    def _upload_to_branch(self, path: str, source: bytes | str, message: str) -> None:
        api = self._api()
        commit = self._location.revision
        api.create_branch(repo_id=self._repo_id, branch=SIDECAR_BRANCH, revision=commit, repo_type="dataset", exist_ok=True)
        api.upload_file(
            path_or_fileobj=source,
            path_in_repo=path,
            repo_id=self._repo_id,
            repo_type="dataset",
            revision=SIDECAR_BRANCH,
            commit_message=message,
        )

    def _upload_to_bucket(self, path: str, source: bytes | str) -> None:
        api = self._api()
        if not hasattr(api, "batch_bucket_files"):
            raise StorageError("the installed huggingface_hub does not know buckets: upgrade it (pip install -U huggingface_hub)")
        api.batch_bucket_files(self._repo_id, add=[(source, path)])

    def _api(self) -> Any:
        # Imported here: reading needs none of it, and it is slow to import.
        import huggingface_hub

        quiet_http_logs()
        return huggingface_hub.HfApi(endpoint=settings.hub_endpoint(), token=settings.hub_token() or False, library_name="reelray")

    def _translate(self, error: Exception) -> StorageError:
        status = getattr(getattr(error, "response", None), "status_code", None)
        text = f"publishing to {self._location.url} failed: {redact(str(error).strip().partition(chr(10))[0]) or type(error).__name__}"
        if status in {401, 403}:
            return AccessDeniedError(f"{text}; {self._advice()}")
        if status == 404:
            return ObjectNotFoundError(text)
        if status in RETRYABLE_STATUS or isinstance(error, ConnectionError | TimeoutError):
            return TransientStorageError(f"{text}; try again later")
        return StorageError(text)
