"""Pages never show a stranger's text as markup."""

from __future__ import annotations

from ingest.prefeature.findings import CONDITIONS, Report

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def test_a_strangers_text_is_text_on_a_page() -> None:
    report = Report(level=HOSTILE)
    report.add(next(iter(CONDITIONS)), HOSTILE, file=HOSTILE, tensor=HOSTILE)
    report.warnings.append(HOSTILE)
    page = report.to_html()
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;") >= 4
