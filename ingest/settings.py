"""The one place that reads and sets the environment. Values are read at call time, so tests may set them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping
from pathlib import Path

from ingest.errors import SettingsError

DEFAULT_STREAMING_SEED = 42
"""Order seed when none is given (LeRobot's value)."""

DEFAULT_TRAIN_SEED = 1000
"""Default of ``--seed`` for training (LeRobot's value)."""


def hf_home() -> Path:
    """Root of the Hugging Face caches (``HF_HOME``, default ``~/.cache/huggingface``)."""
    explicit = os.environ.get("HF_HOME")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(base).expanduser() / "huggingface"


def lerobot_home() -> Path:
    """Root of LeRobot's caches (``HF_LEROBOT_HOME``, default ``$HF_HOME/lerobot``)."""
    explicit = os.environ.get("HF_LEROBOT_HOME")
    return Path(explicit).expanduser() if explicit else hf_home() / "lerobot"


def hub_cache() -> Path:
    """Snapshots of the Hub's own tools (``HF_HUB_CACHE``, default ``$HF_HOME/hub``)."""
    explicit = os.environ.get("HF_HUB_CACHE")
    return Path(explicit).expanduser() if explicit else hf_home() / "hub"


def hub_endpoint() -> str:
    """Hub base URL without a trailing slash (``HF_ENDPOINT``)."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def hub_offline() -> bool:
    """Whether ``HF_HUB_OFFLINE`` forbids network access to the Hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def hub_token() -> str | None:
    """The Hub token from ``HF_TOKEN`` or the login file, read at request time and never stored."""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if token:
        return token.strip()
    path = Path(os.environ.get("HF_TOKEN_PATH", str(hf_home() / "token"))).expanduser()
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def use_hub_token(token: str | bool) -> None:
    """Makes a Hub token that of this process and of those that it starts from now on.

    It goes to the environment alone, where ``hub_token`` looks: no plan, state or pickled store ever holds it.

    Args:
        token: the token; False for none at all; True for the one that is there, which then has to be.

    Raises:
        SettingsError: there is no token.
    """
    if token is True:
        if hub_token() is None:
            raise SettingsError("token is True, but there is none: set HF_TOKEN or run 'hf auth login'")
        return
    if token is not False and not token.strip():
        raise SettingsError("token is empty: leave it out, or give False to read without one")
    os.environ["HF_TOKEN"] = token or ""
    if not token:
        os.environ["HUGGING_FACE_HUB_TOKEN"] = ""
        os.environ["HF_TOKEN_PATH"] = os.devnull


def aws_variable(name: str) -> str | None:
    """One of the ``AWS_*`` variables, by the rest of its name; None where it is unset or empty."""
    return os.environ.get(f"AWS_{name}") or None


def google_emulator() -> str | None:
    """Address of a stand-in for Google Cloud Storage, as Google's own libraries take it (``STORAGE_EMULATOR_HOST``)."""
    value = os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    return (value if "://" in value else f"http://{value}") if value else None


def http_failure_log() -> Path | None:
    """Where failed requests are appended as JSON lines (``REELRAY_HTTP_FAILURE_LOG`` or LeRobot's name)."""
    value = os.environ.get("REELRAY_HTTP_FAILURE_LOG") or os.environ.get("LEROBOT_HTTP_FAILURE_LOG")
    return Path(value).expanduser() if value else None


def distributed_rank() -> tuple[int, int]:
    """``(rank, world_size)`` from ``RANK`` and ``WORLD_SIZE`` (defaults 0 and 1).

    Raises:
        SettingsError: when the pair is not ``0 <= rank < world_size``.
    """
    raw_rank, raw_world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        rank, world = int(raw_rank), int(raw_world)
    except ValueError:
        raise SettingsError(f"RANK={raw_rank!r} and WORLD_SIZE={raw_world!r} must be whole numbers") from None
    if world <= 0 or not 0 <= rank < world:
        raise SettingsError(f"expected 0 <= RANK < WORLD_SIZE, found RANK={rank} and WORLD_SIZE={world}")
    return rank, world


@contextlib.contextmanager
def defaults_of_environment(values: Mapping[str, str]) -> Generator[None]:
    """Sets variables that nobody has set, for libraries that read them alone, as long as the block runs."""
    fresh = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(fresh)
    try:
        yield
    finally:
        for name in fresh:
            os.environ.pop(name, None)
