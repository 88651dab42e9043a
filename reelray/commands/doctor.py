"""``reelray doctor``: everything wrong with a dataset."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ingest.errors import DatasetError, StorageError, UnsafeInputError
from ingest.lerobot.doctor import audit
from ingest.lerobot.findings import AuditReport
from ingest.lerobot.windows import DEFAULT_TOLERANCE_S
from ingest.storage.base import Store
from ingest.video.index import ProbingIndex
from reelray.commands.common import Flat, PlaceArguments, Source, progress_bar
from train_integration.option_checks import require_non_negative


def with_annotations(report: AuditReport, store: Store, *, allow_unknown_version: bool) -> AuditReport:
    """The report with what is questionable about the language annotations, where the dataset can be opened at all."""
    from ingest.language.audit import audit_source
    from ingest.lerobot.source import open_source

    if any(finding.code == "info_unreadable" for finding in report.findings):
        return report
    try:
        found = audit_source(open_source(store, allow_unknown_version=allow_unknown_version))
    except (DatasetError, UnsafeInputError, StorageError):
        # The report says why.
        return report
    return replace(
        report, findings=tuple(sorted((*report.findings, *found), key=lambda one: ("error", "warning", "info").index(one.severity)))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """Everything wrong with a dataset, each fault once and by name. Status 1: there is an error, repairable or not."""

    src: Source
    """Location of the dataset."""
    place: Flat[PlaceArguments] = field(default_factory=PlaceArguments)
    strict_time: bool = False
    """Times off by more than tolerance_s are errors instead of warnings."""
    tolerance_s: float = DEFAULT_TOLERANCE_S
    """Most that a picture's or a row's time may deviate, in seconds."""
    limit: int | None = None
    """Findings to list, at most; errors come first. The exit status counts all."""
    json: bool = False
    """Print the report as JSON."""

    def run(self) -> int:
        """Prints the findings."""
        require_non_negative({"limit": self.limit or 0, "tolerance_s": self.tolerance_s})
        store = self.place.store(self.src)
        with progress_bar(None, " files", "checking") as bar:

            def progress(path: str, done: int) -> None:
                bar.set_postfix_str(path, refresh=False)
                bar.update(done - bar.n)

            report = audit(
                store,
                index=ProbingIndex(store),
                strict_time=self.strict_time,
                tolerance_s=self.tolerance_s,
                allow_unknown_version=self.place.allow_unknown_version,
                progress=progress,
            )
        report = with_annotations(report, store, allow_unknown_version=self.place.allow_unknown_version)
        status = report.exit_status
        left_out = 0 if self.limit is None else max(0, len(report.findings) - self.limit)
        if left_out:
            report = replace(report, findings=report.findings[: self.limit])
        if self.json:
            print(report.to_json())
            return status
        print(report.to_text())
        if left_out:
            print(f"{left_out} more findings are not listed (--limit {self.limit})")
        return status
