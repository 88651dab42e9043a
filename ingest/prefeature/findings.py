"""What a validation found, and the report in three forms."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ingest.errors import DamagedDataError, ReelrayError
from ingest.prefeature.jsonio import canonical_json


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One violated condition.

    Attributes:
        code: stable short name of the condition.
        file: path relative to the dataset root, or None for the dataset as a whole.
        tensor: tensor name, or None.
        index: flat index of the first bad element, or None.
        message: what was expected and what was found.
    """

    code: str
    file: str | None
    tensor: str | None
    index: int | None
    message: str

    def __str__(self) -> str:
        place = " ".join(
            str(part) for part in (self.file, self.tensor, None if self.index is None else f"[{self.index}]") if part is not None
        )
        return f"{self.code}: {place or 'dataset'}: {self.message}"


CONDITIONS: Mapping[str, str] = {
    "files": "case, step, context, text and video files: exactly those expected",
    "header": "names, shapes, dtypes, sizes, keys and fingerprints of every tensor file",
    "hash": "contents equal to the inventory",
    "finite": "no NaN or Inf",
    "hole": "no runs of zeros where data belongs",
    "mask": "context masks all true, text masks a true prefix with zero padding",
    "context_frames": "context frames and selected indices as the selection rule gives them",
    "shared": "indices, cameras and rotary fields equal in the four context files",
    "camera": "labels, viewmats and Ks equal the pose tables",
    "rope": "rotary window fields",
    "timestep": "timesteps equal the schedule",
    "noise": "step 0 noise equals the recorded noise",
    "chain": "each noisy sample follows from the previous one bit for bit",
    "history": "each chunk was made from the final latents of the chunks before it",
    "velocity": "the frozen final layer reproduces the velocity",
    "condition": "frame conditions depend on timestep and action only",
    "window": "block-0 features of a frame agree between windows",
    "input65": "the rebuilt 65-channel input equals the teacher's",
    "kv": "rebuilt K/V within relative L2 5e-3 and cosine 0.9999",
    "text": "case text K/V equal the all-block file",
    "image": "prepared images unchanged and of the right size",
    "video": "videos decode to the right number and size of pictures",
    "manifest": "unique, complete manifest with correct fields and links",
    "train_manifest": "the training manifest is exactly the chunks with a predecessor",
}
"""Every condition by code; the report lists all of them, also those without findings."""


_STYLE = "body{font:14px sans-serif}table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #bbb;padding:3px 8px}"


@dataclass(slots=True)
class Report:
    """Result of a validation.

    Attributes:
        findings: every violation.
        checked: files or records looked at, by condition.
        bytes_read: payload bytes read.
        seconds: wall time.
        level: ``quick`` or ``full``.
        warnings: what was noticed without being wrong.
    """

    level: str
    findings: list[Finding] = field(default_factory=list[Finding])
    checked: Counter[str] = field(default_factory=Counter[str])
    bytes_read: int = 0
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list[str])

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def add(self, code: str, message: str, *, file: str | None = None, tensor: str | None = None, index: int | None = None) -> None:
        """Records a violation."""
        self.findings.append(Finding(code, file, tensor, index, message))

    def add_damage(self, code: str, error: Exception, file: str) -> None:
        """Records an error that a check met, with the places that it names."""
        tensor, element = (error.tensor, error.element) if isinstance(error, DamagedDataError) else (None, None)
        text = str(error) if isinstance(error, ReelrayError) else f"{type(error).__name__}: {error}"
        self.add(code, text, file=file, tensor=tensor, index=element)

    def extend(self, other: Report) -> None:
        """Takes in a part's findings and counts."""
        self.findings += other.findings
        self.checked.update(other.checked)
        self.bytes_read += other.bytes_read
        self.warnings += other.warnings

    def rows(self) -> Iterable[tuple[str, str, int, int]]:
        """Condition, description, number checked, number of findings."""
        found = Counter(finding.code for finding in self.findings)
        for code, text in CONDITIONS.items():
            yield code, text, self.checked[code], found[code]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; findings sorted."""
        return {
            "ok": self.ok,
            "level": self.level,
            "conditions": {code: {"about": text, "checked": checked, "findings": found} for code, text, checked, found in self.rows()},
            "findings": [asdict(finding) for finding in sorted(self.findings, key=str)],
            "warnings": self.warnings,
            "bytes_read": self.bytes_read,
            "seconds": round(self.seconds, 3),
        }

    def to_text(self) -> str:
        """A table for people."""
        lines = [f"{'condition':<15} {'checked':>8} {'wrong':>6}  about"]
        lines += [f"{code:<15} {checked:>8} {found:>6}  {text}" for code, text, checked, found in self.rows()]
        lines += [str(finding) for finding in sorted(self.findings, key=str)[:200]]
        lines += [f"warning: {warning}" for warning in self.warnings]
        verdict = "valid" if self.ok else f"{len(self.findings)} findings"
        return "\n".join([*lines, f"{verdict} ({self.level}, {self.bytes_read / 1e9:.2f} GB read in {self.seconds:.1f} s)"])

    def to_html(self) -> str:
        """A page without scripts or external resources."""

        def table(head: list[str], rows: Iterable[Iterable[object]]) -> str:
            body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
            return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{body}</table>"

        found = [
            (f.code, f.file or "", f.tensor or "", "" if f.index is None else f.index, f.message) for f in sorted(self.findings, key=str)
        ]
        verdict = "valid" if self.ok else f"{len(self.findings)} findings"
        head = f"<!doctype html><meta charset='utf-8'><title>Validation</title><style>{_STYLE}</style>"
        return (
            f"{head}<h1>Validation: {verdict}</h1>"
            f"<p>Level {html.escape(self.level)}, {self.bytes_read / 1e9:.2f} GB read in {self.seconds:.1f} s.</p>"
            + table(["condition", "about", "checked", "wrong"], self.rows())
            + table(["condition", "file", "tensor", "index", "message"], found)
            + (f"<h2>Warnings</h2><pre>{html.escape(chr(10).join(self.warnings))}</pre>" if self.warnings else "")
            + "\n"
        )

    def dumps(self) -> str:
        """The JSON text."""
        return canonical_json(self.to_json(), indent=2) + "\n"
