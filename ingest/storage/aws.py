"""S3 settings as the AWS tools take them: environment first, then the shared files; read when a store is opened, never kept in a plan."""

from __future__ import annotations

import configparser
from pathlib import Path

from ingest.settings import aws_variable


def _profile(variable: str, default: str, section_prefix: str) -> dict[str, str]:
    name = aws_variable("PROFILE") or "default"
    parser = configparser.RawConfigParser()
    try:
        parser.read(Path(aws_variable(variable) or default).expanduser(), encoding="utf-8")
    except (OSError, configparser.Error, UnicodeDecodeError):
        return {}
    section = name if name == "default" or not section_prefix else f"{section_prefix} {name}"
    return dict(parser.items(section)) if parser.has_section(section) else {}


def endpoint() -> str | None:
    """URL of an S3-compatible server, or None for Amazon's own."""
    config = _profile("CONFIG_FILE", "~/.aws/config", "profile")
    return aws_variable("ENDPOINT_URL_S3") or aws_variable("ENDPOINT_URL") or aws_variable("ENDPOINT") or config.get("endpoint_url")


def region() -> str | None:
    """Region from the environment or the shared configuration file."""
    config = _profile("CONFIG_FILE", "~/.aws/config", "profile")
    return aws_variable("REGION") or aws_variable("DEFAULT_REGION") or config.get("region")


def shared_credentials() -> dict[str, str] | None:
    """Keys of the profile in the shared credentials file; None when the environment has keys or the file has none."""
    if aws_variable("ACCESS_KEY_ID"):
        return None
    found = _profile("SHARED_CREDENTIALS_FILE", "~/.aws/credentials", "")
    if "aws_access_key_id" not in found or "aws_secret_access_key" not in found:
        return None
    keys = {"access_key_id": found["aws_access_key_id"], "secret_access_key": found["aws_secret_access_key"]}
    if "aws_session_token" in found:
        keys["token"] = found["aws_session_token"]
    return keys
