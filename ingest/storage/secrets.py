"""Keeping credentials out of everything that is written, printed or pickled."""

from __future__ import annotations

import logging
import re

from ingest import settings

CREDENTIAL_VARIABLES = (
    "HF_TOKEN",
    "HF_TOKEN_PATH",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "STORAGE_EMULATOR_HOST",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
)
"""Environment variables that workers need to read where the driver can; they are passed on by name, never in a plan."""

_HIDDEN = "***"
_PATTERNS = (
    # scheme://user:password@host
    (re.compile(r"(?<=://)[^/@\s'\"]+@"), f"{_HIDDEN}@"),
    # every query string: signed URLs keep their signature there
    (re.compile(r"(://[^\s?'\"]+)\?[^\s'\"]*"), rf"\1?{_HIDDEN}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]+"), rf"\1 {_HIDDEN}"),
    (re.compile(r"\bhf_[A-Za-z0-9_-]{6,}"), _HIDDEN),
    (re.compile(r"(?i)\b((?:x-amz-[a-z-]+|signature|awsaccesskeyid|sig|token|secret|password)=)[^&\s'\"]+"), rf"\1{_HIDDEN}"),
)


def redact(text: str) -> str:
    """``text`` without tokens, passwords, user information and query strings."""
    token = settings.hub_token()
    if token:
        text = text.replace(token, _HIDDEN)
    for pattern, hidden in _PATTERNS:
        text = pattern.sub(hidden, text)
    return text


class _RedactingFilter(logging.Filter):
    """Rewrites records of HTTP libraries, which log whole addresses: a signed one is a credential."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        return True


_FILTER = _RedactingFilter()
_HTTP_LOGGERS = ("httpx", *(f"httpcore.{part}" for part in ("connection", "http11", "http2", "proxy", "socks")))


def quiet_http_logs() -> None:
    """Makes the HTTP libraries' log records go through ``redact``, and leaves out one line per request unless somebody set their level."""
    for name in _HTTP_LOGGERS:
        for variant in (name, name.replace("httpx", "httpx2").replace("httpcore", "httpcore2")):
            logger = logging.getLogger(variant)
            # A filter that is there already is not added twice.
            logger.addFilter(_FILTER)
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.WARNING)
