"""Sync to and restore from the durable copy, by inventory and hash; nothing is ever deleted remotely."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ingest.errors import DamagedDataError, MetadataError, ObjectNotFoundError, SettingsError, StorageError
from ingest.prefeature import layout
from ingest.prefeature.config import DatasetConfig, parse_config, read_config
from ingest.prefeature.durable import FileDigest, digest_of, hash_file, require_space, write_bytes
from ingest.prefeature.jsonio import canonical_json, parse_object, read_json
from ingest.prefeature.merge import inventory_lines, listed, parse_inventory, read_inventory
from ingest.prefeature.remote import Remote
from ingest.prefeature.tensorfile import read_header

HASH_CACHE = f"{layout.LOGS}/hash_cache.json"
UPLOAD_TRIES = 3
BATCH_FILES, BATCH_BYTES = 512, 32 << 30
"""After so much the remote learns what it holds; a sync that breaks off sends at most this much again."""

PARTS = ("base", "text-kv", "all")
_UNDER_WAY = b'{"state":"objects are being replaced; this mark attests nothing"}\n'


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync did or, in a dry run, would do.

    Attributes:
        uploads: paths sent, in no particular order.
        nbytes: their bytes.
        changed: files that differ from the inventory of the last merge.
        unknown: remote objects that are not part of the dataset; reported, never touched.
        success: whether the remote carries the success mark of exactly this state.
        executed: False for a dry run.
    """

    uploads: tuple[str, ...]
    nbytes: int
    changed: tuple[str, ...]
    unknown: tuple[str, ...]
    success: bool
    executed: bool


@dataclass(frozen=True, slots=True)
class EnsureReport:
    """What a restore found and fetched.

    Attributes:
        checked: files compared with the inventory.
        hashed: how many of them by content.
        restored: paths fetched.
        nbytes: their bytes.
        complete: whether the whole dataset, not only the part, is now present.
    """

    checked: int
    hashed: int
    restored: tuple[str, ...]
    nbytes: int
    complete: bool


Runner = Callable[[Callable[[str], Any], Sequence[str]], Iterable[Any]]
"""Does some work for every path, in any place, and returns the results in the order of the paths."""


def in_threads(threads: int) -> Runner:
    """Runs work in threads of this process; the first failure cancels what has not begun."""

    def run(work: Callable[[str], Any], paths: Sequence[str]) -> list[Any]:
        with ThreadPoolExecutor(threads, thread_name_prefix="transfer") as pool:
            futures = [pool.submit(work, path) for path in paths]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    return run


class HashCache:
    """Hashes of local files by identity (size, inode, modification and change time), kept in ``logs/``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        try:
            self._known = read_json(root / HASH_CACHE)
        except MetadataError:
            self._known = {}
        self._used: dict[str, list[int | str]] = {}

    def digests(self, paths: Iterable[str], run: Runner) -> dict[str, FileDigest]:
        """Digests of files, computed only where the identity is new.

        Raises:
            ObjectNotFoundError: a file is not there.
            StorageError: one cannot be read.
        """
        identities = {path: self._identity(path) for path in paths}
        new = [path for path, identity in identities.items() if self._recorded(path)[:4] != identity]
        for path, digest in zip(new, run(functools.partial(_hash_below, self._root), new), strict=True):
            self._known[path] = [*identities[path], digest.sha256]
        self._used |= {path: self._recorded(path) for path in identities}
        return {path: FileDigest(int(identity[0]), str(self._used[path][4])) for path, identity in identities.items()}

    def _identity(self, path: str) -> list[int | str]:
        try:
            stat = os.stat(self._root / path)
        except OSError as error:
            raise ObjectNotFoundError(f"{path}: {error.strerror or error}") from error
        return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]

    def _recorded(self, path: str) -> list[int | str]:
        kept = self._known.get(path)
        return cast("list[int | str]", kept) if isinstance(kept, list) and len(cast("list[Any]", kept)) == 5 else []

    def save(self) -> None:
        """Writes what was used, merged with what was known."""
        write_bytes(self._root / HASH_CACHE, canonical_json(self._known | self._used).encode())


def _hash_below(root: Path, path: str) -> FileDigest:
    return hash_file(root / path)


def require_same_dataset(remote: Remote, config: DatasetConfig, present: Mapping[str, int]) -> None:
    """The wrong-prefix guard.

    Raises:
        MetadataError: the prefix holds another dataset, or things that are no dataset at all.
    """
    if layout.CONFIG not in present:
        if present:
            example = sorted(present)[0]
            raise MetadataError(f"{remote.url} is not empty ({example!r}) and holds no {layout.CONFIG}: this looks like the wrong prefix")
        return
    found = parse_config(parse_object(remote.read(layout.CONFIG), f"{remote.url}/{layout.CONFIG}"))
    if found.fingerprint != config.fingerprint:
        raise MetadataError(
            f"{remote.url} holds build {found.fingerprint}, the local dataset is {config.fingerprint}: wrong prefix or stale build"
        )


def _send(remote: Remote, root: Path, digests: Mapping[str, FileDigest], read_back: bool, path: str) -> None:
    digest = digests[path]
    problem = ""
    for _ in range(UPLOAD_TRIES):
        try:
            sent = remote.upload(root / path, path)
            if sent != digest:
                raise StorageError(f"{path} changed while it was being sent; finish the build before syncing")
            size = remote.size(path)
            if size != digest.size:
                problem = f"the remote reports {size} bytes, expected {digest.size}"
                continue
            if not read_back or remote.digest(path) == digest:
                return
            problem = "the remote returns other bytes than were sent"
        except ObjectNotFoundError as error:
            problem = f"the object is not there after its upload ({error})"
    raise StorageError(f"{remote.url}/{path}: {problem}; {UPLOAD_TRIES} tries")


def attests(success: bytes | None, inventory: bytes) -> bool:
    """Whether a success mark speaks for exactly this inventory."""
    if success is None:
        return False
    try:
        return parse_object(success, layout.SUCCESS).get("inventory_sha256") == hashlib.sha256(inventory).hexdigest()
    except MetadataError:
        return False


def _fetch(remote: Remote, root: Path, digests: Mapping[str, FileDigest], path: str) -> None:
    remote.download(path, root / path, digests[path])


def sync(
    root: Path, remote: Remote, *, execute: bool, read_back: bool = True, threads: int = 8, runner: Runner | None = None
) -> SyncReport:
    """Sends what the remote lacks or holds differently.

    Files are compared by hash, never by size and time alone: every step file has the same size. Data goes first, then the
    inventory and the manifests, the success mark last and only when it attests this very inventory.

    Args:
        root: dataset root after merge.
        remote: the durable copy.
        execute: False only reports.
        read_back: verify every upload by reading it again, not only by its size.
        threads: concurrent transfers.
        runner: hashes and transfers files, for example as Ray tasks; threads of this process when None.

    Raises:
        MetadataError: nothing was merged yet, or the prefix belongs to something else.
        StorageError: an upload failed or could not be verified.
    """
    config = read_config(root)
    inventory = read_inventory(root)
    present = remote.list()
    require_same_dataset(remote, config, present)
    cache = HashCache(root)
    run = runner or in_threads(threads)
    local = cache.digests(sorted(inventory), run)
    changed = sorted(path for path, digest in inventory.items() if local[path] != digest)
    lines = inventory_lines(local)
    theirs = _recorded_remotely(remote) if layout.INVENTORY in present else {}
    stale = [path for path, digest in sorted(local.items()) if present.get(path) != digest.size or theirs.get(path) != digest]
    journals = {path.relative_to(root).as_posix(): hash_file(path) for path in sorted((root / layout.JOURNALS).glob("worker_*.jsonl"))}
    stale += [path for path, digest in journals.items() if present.get(path) != digest.size or remote.digest(path) != digest]
    success = (root / layout.SUCCESS).read_bytes() if (root / layout.SUCCESS).is_file() else None
    valid = attests(success, lines)
    unknown = sorted(set(present) - set(local) - set(journals) - set(layout.LAST_FILES))
    if execute:
        if changed:
            write_bytes(root / layout.INVENTORY, lines)
        digests = local | journals | {layout.INVENTORY: digest_of(lines), layout.SUCCESS: digest_of(success or b"")}
        send = functools.partial(_send, remote, root, digests, read_back)
        first = [layout.CONFIG] if layout.CONFIG in stale or layout.CONFIG not in present else []
        last = [name for name in (layout.CASES, layout.MANIFEST, layout.TRAIN_MANIFEST) if name in stale]
        if layout.SUCCESS in present and any(path in present for path in stale):
            # whoever restores meanwhile is told at once, rather than after gigabytes that do not fit together
            remote.write(layout.SUCCESS, _UNDER_WAY)
        # the remote inventory vouches for what is verified and for nothing else, so a sync that breaks off can be continued
        verified = {path: digest for path, digest in theirs.items() if path not in set(stale)}
        if verified != theirs:
            remote.write(layout.INVENTORY, inventory_lines(verified))
        for path in first:
            send(path)
        for batch in _batches([path for path in stale if path not in first and path not in last], digests):
            list(run(send, batch))
            verified |= {path: local[path] for path in batch if path in local}
            remote.write(layout.INVENTORY, inventory_lines(verified))
        now = remote.list()
        wanted = local | journals
        lost = [path for path, digest in sorted(wanted.items()) if path not in last and now.get(path) != digest.size]
        if lost:
            raise StorageError(f"{remote.url}: {len(lost)} files are not there after the upload: {listed(lost)}; sync again")
        for path in (layout.INVENTORY, *last, *([layout.SUCCESS] if valid else [])):
            send(path)
        cache.save()
    return SyncReport(tuple(stale), sum((local | journals)[path].size for path in stale), tuple(changed), tuple(unknown), valid, execute)


def _batches(paths: Sequence[str], digests: Mapping[str, FileDigest]) -> Iterator[list[str]]:
    batch: list[str] = []
    nbytes = 0
    for path in paths:
        if batch and (len(batch) >= BATCH_FILES or nbytes + digests[path].size > BATCH_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(path)
        nbytes += digests[path].size
    if batch:
        yield batch


def _recorded_remotely(remote: Remote) -> dict[str, FileDigest]:
    try:
        return parse_inventory_bytes(remote.read(layout.INVENTORY))
    except MetadataError:
        return {}  # nothing is known about the objects, so all of them are sent


def parse_inventory_bytes(data: bytes) -> dict[str, FileDigest]:
    """Digests by path from the bytes of an inventory."""
    rows = [parse_object(line, f"{layout.INVENTORY} line {number}") for number, line in enumerate(data.splitlines(), 1)]
    return parse_inventory(rows, layout.INVENTORY)


def in_part(path: str, part: str) -> bool:
    """Whether a file belongs to ``base`` (everything but the all-block text K/V), ``text-kv`` or ``all``."""
    return part == "all" or path.startswith(f"{layout.TEXT_KV}/") == (part == "text-kv")


def local_build(root: Path) -> str | None:
    """Fingerprint of the build in a folder, also when its configuration is damaged; None when nothing tells."""
    try:
        return str(read_json(root / layout.CONFIG)["fingerprint"])
    except (MetadataError, KeyError):
        pass
    try:
        return read_header(root, layout.NOISE).metadata.get("build_fingerprint")
    except DamagedDataError:
        return None


def _sampled(path: str, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") < share * 2**32


def _problem(root: Path, path: str, digest: FileDigest) -> bool:
    """Whether a file is missing, of another size, or has a damaged header."""
    try:
        if (root / path).stat().st_size != digest.size:
            return True
        if path.endswith(".safetensors"):
            read_header(root, path)
    except (OSError, DamagedDataError):
        return True
    return False


def ensure(
    root: Path,
    remote: Remote,
    *,
    parts: str = "base",
    deep: bool = False,
    sample: float = 0.02,
    repair: bool = True,
    threads: int = 8,
    runner: Runner | None = None,
) -> EnsureReport:
    """Makes a local copy complete: fetches what is missing, truncated or damaged, touches nothing else.

    Args:
        root: local dataset folder; made when missing.
        remote: the durable copy, which must carry a valid success mark.
        parts: ``base``, ``text-kv`` or ``all``.
        deep: compare every file's hash; otherwise a fixed sample.
        sample: share of files hashed when not deep.
        repair: False raises instead of fetching.
        threads: concurrent transfers.
        runner: hashes and transfers files, for example as Ray tasks; threads of this process when None.

    Raises:
        SettingsError: unknown part.
        MetadataError: the remote is incomplete, or the local folder holds another build.
        DamagedDataError: something is wrong locally and ``repair`` is False.
        StorageError: a transfer failed, or disk space is short.
    """
    if parts not in PARTS:
        raise SettingsError(f"unknown part {parts!r}: use one of {', '.join(PARTS)}")
    lines = remote.read(layout.INVENTORY)
    if not attests(remote.read(layout.SUCCESS), lines):
        raise MetadataError(f"{remote.url}: the success mark does not attest the inventory; an upload is unfinished or was not validated")
    config_bytes = remote.read(layout.CONFIG)
    config = parse_config(parse_object(config_bytes, f"{remote.url}/{layout.CONFIG}"))
    here = local_build(root)
    if here not in (None, config.fingerprint):
        raise MetadataError(f"{root} holds build {here}, {remote.url} holds {config.fingerprint}; use another folder")
    whole = parse_inventory_bytes(lines)
    chosen = {path: digest for path, digest in whole.items() if in_part(path, parts) or path in layout.LAST_FILES}
    root.mkdir(parents=True, exist_ok=True)
    cache = HashCache(root)
    run = runner or in_threads(threads)
    hashed = [path for path in chosen if deep or path in layout.LAST_FILES or _sampled(path, sample)]
    wrong = {path for path, digest in chosen.items() if _problem(root, path, digest)}
    found = cache.digests([path for path in hashed if path not in wrong], run)
    bad = sorted(wrong | {path for path, digest in found.items() if digest != chosen[path]})
    if bad and not repair:
        raise DamagedDataError(f"{root}: {len(bad)} files are missing or damaged: {listed(bad)}")
    require_space(root, sum(chosen[path].size for path in bad), "the restore")
    list(run(functools.partial(_fetch, remote, root, chosen), bad))
    still = [path for path in bad if _problem(root, path, chosen[path])]
    if still:
        raise StorageError(f"{root}: {len(still)} files are still wrong after the restore: {listed(still)}")
    write_bytes(root / layout.INVENTORY, lines)
    _fetch_journals(root, remote)
    complete = all((root / path).is_file() and (root / path).stat().st_size == digest.size for path, digest in whole.items())
    if complete:
        write_bytes(root / layout.SUCCESS, remote.read(layout.SUCCESS))
    else:
        (root / layout.SUCCESS).unlink(missing_ok=True)
    cache.save()
    return EnsureReport(len(chosen), len(hashed), tuple(bad), sum(chosen[path].size for path in bad), complete)


def _fetch_journals(root: Path, remote: Remote) -> None:
    """Journals let a restored copy be built on; existing ones are newer and stay."""
    for path in remote.list():
        if path.startswith(f"{layout.JOURNALS}/worker_") and not (root / path).exists():
            write_bytes(root / path, remote.read(path))
