"""What is wrong, odd or repaired in a dataset, as data: one finding per fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ingest.errors import DatasetError, MetadataError

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault or oddity.

    Attributes:
        code: stable name of the kind, such as ``stale_data_file_index``.
        severity: ``error`` when the dataset contradicts itself or lacks data, ``warning`` when it can be used as it
            is, ``info`` when it only deserves to be known.
        message: a whole sentence that names what, where, found and expected.
        file: path relative to the dataset root, or None.
        episode: episode index, or None when the fault concerns a whole file.
        column: column, feature or JSON field, or None.
        found: the value found, as text.
        expected: the value that fits the rest of the dataset, as text.
        repairable: True when reading goes on with the value in ``expected``.
    """

    code: str
    severity: Severity
    message: str
    file: str | None = None
    episode: int | None = None
    column: str | None = None
    found: str | None = None
    expected: str | None = None
    repairable: bool = False

    def __str__(self) -> str:
        return self.message

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields in declaration order."""
        return asdict(self)


def raise_first(findings: Sequence[Finding], where: str, kind: type[DatasetError] = MetadataError) -> None:
    """Raises ``kind`` for the first error that reading cannot repair; later ones are counted in the message.

    Args:
        findings: what a check returned.
        where: location of the dataset, without credentials.
        kind: exception class to raise.
    """
    faults = [finding for finding in findings if finding.severity == "error" and not finding.repairable]
    if not faults:
        return
    more = f" ({len(faults) - 1} more faults: run `reelray doctor` on the dataset for all of them)" if len(faults) > 1 else ""
    raise kind(f"{where}: {faults[0].message}{more}")
