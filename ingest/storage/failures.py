"""Failed attempts: counted by kind, and written to the optional log, one JSON object a line, never a credential."""

from __future__ import annotations

import json
import os
import re
import time
from urllib.parse import urlsplit

from ingest import settings
from ingest.storage.secrets import redact
from ingest.storage.traffic import count_fault

_ANSWERED = re.compile(r"\banswered (\d{3})\b")
_NAMED = re.compile(r"[A-Za-z]{1,40}(?:Error|Timeout)\b")


def log_failure(
    method: str, url: str, *, attempt: int, error: str, status: int | None = None, byte_range: tuple[int, int] | None = None
) -> None:
    """Counts one failed attempt, and appends it to the file that ``settings.http_failure_log`` names when there is one.

    Args:
        method: HTTP method, or the store's own verb.
        url: what was asked; its query and user information are left out.
        attempt: counted from 1.
        error: what happened, in words.
        status: HTTP status where there was one.
        byte_range: half-open range asked for, in bytes.
    """
    answered = _ANSWERED.search(error)
    status = int(answered[1]) if status is None and answered else status
    named = _NAMED.match(error)
    count_fault(str(status) if status is not None else named[0] if named else "unusable reply")
    path = settings.http_failure_log()
    if path is None:
        return
    parts = urlsplit(url)
    record = {
        "time": time.time(),
        "pid": os.getpid(),
        "method": method,
        "host": parts.hostname or "",
        "path": redact(parts.path),
        "range": None if byte_range is None else list(byte_range),
        "attempt": attempt,
        "status": status,
        "error": redact(error),
    }
    line = json.dumps(record, ensure_ascii=False) + "\n"
    try:
        # One write on an append-only descriptor keeps lines of several processes whole.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError:
        # The log is an aid: a full disk must not turn a retried fault into a failed run.
        return
