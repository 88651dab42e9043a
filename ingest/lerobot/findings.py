"""What is wrong, odd or repaired in a dataset, as data: one finding per fault."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ingest.errors import DatasetError, MetadataError

Severity = Literal["error", "warning", "info"]

_ORDER: tuple[Severity, ...] = ("error", "warning", "info")
_LISTED_PER_CODE = 100


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


@dataclass(slots=True)
class Findings:
    """Collects findings and keeps the number per kind bounded, so that a million faults stay readable.

    Attributes:
        listed: findings kept.
        left_out: findings dropped by (code, severity).
    """

    listed: list[Finding] = field(default_factory=list[Finding])
    left_out: Counter[tuple[str, Severity]] = field(default_factory=Counter[tuple[str, Severity]])
    _counts: Counter[str] = field(default_factory=Counter[str])

    def add(self, finding: Finding) -> None:
        """Keeps a finding, or counts it when its kind is well represented."""
        self._counts[finding.code] += 1
        if self._counts[finding.code] > _LISTED_PER_CODE:
            self.left_out[finding.code, finding.severity] += 1
        else:
            self.listed.append(finding)

    def extend(self, findings: Iterable[Finding]) -> None:
        """Adds several."""
        for finding in findings:
            self.add(finding)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found.

    Attributes:
        root: location of the dataset, without credentials.
        findings: errors first, then warnings, then the rest; in the order found.
        checked: what was looked at: episodes, rows, data files, video files, pictures.
    """

    root: str
    findings: tuple[Finding, ...]
    checked: Mapping[str, int]

    @classmethod
    def of(cls, root: str, found: Findings, checked: Mapping[str, int]) -> AuditReport:
        """Sorts findings by severity and says how many were left out."""
        more = [
            Finding(code, severity, f"{count} more findings of the kind {code} are not listed", found=str(count))
            for (code, severity), count in found.left_out.items()
        ]
        ordered = sorted([*found.listed, *more], key=lambda finding: _ORDER.index(finding.severity))
        return cls(root, tuple(ordered), dict(checked))

    @property
    def exit_status(self) -> int:
        """1 when there is an error, also one that reading can repair; else 0."""
        return int(any(finding.severity == "error" for finding in self.findings))

    def count(self, severity: Severity) -> int:
        """Findings of one severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def to_json(self) -> str:
        """The report as one JSON object."""
        counts = {f"{severity}s": self.count(severity) for severity in _ORDER}
        body = {"root": self.root, "exit_status": self.exit_status, **counts, "checked": dict(self.checked)}
        return json.dumps({**body, "findings": [finding.to_dict() for finding in self.findings]}, indent=2, ensure_ascii=False)

    def to_text(self) -> str:
        """The report for people: one line per finding, then a summary."""
        lines = [f"{finding.severity:7}  {finding.code:26}  {finding.message}" for finding in self.findings]
        looked = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in self.checked.items())
        verdict = "no fault found" if not self.findings else ", ".join(f"{self.count(severity)} {severity}" for severity in _ORDER)
        return "\n".join([*lines, f"{self.root}: {verdict}; checked {looked or 'nothing'}"])
