"""Keeping credentials out of everything that is written, printed or pickled."""

from __future__ import annotations

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
