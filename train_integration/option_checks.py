"""Checks of options that commands and Python classes share, in LeRobot's words. Light: needs neither torch nor Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ingest.errors import SettingsError


def require_positive(values: Mapping[str, float | None], prefix: str = "") -> None:
    """Refuses values that are not above zero; None passes.

    Args:
        values: by the name of the option.
        prefix: what the name is spelled with.

    Raises:
        SettingsError: names the option and the value.
    """
    for name, value in values.items():
        # What is given in GiB must be finite in bytes.
        if value is not None and not 0 < value * 2**30 < math.inf:
            raise SettingsError(f"{prefix}{name} must be positive, found {value}")


def require_non_negative(values: Mapping[str, float], prefix: str = "") -> None:
    """Refuses values below zero.

    Raises:
        SettingsError: names the option and the value.
    """
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise SettingsError(f"{prefix}{name} must be non-negative, found {value}")


def refuse_eval_split(eval_split: float, prefix: str = "") -> None:
    """Refuses LeRobot's split by a share of the episodes, which streaming does not offer.

    Raises:
        SettingsError: it is not 0.
    """
    if eval_split:
        raise SettingsError(
            f"{prefix}eval_split is {eval_split:g}, which streaming does not offer: leave it 0 and hold episodes out "
            f"({prefix}exclude_episodes)"
        )
