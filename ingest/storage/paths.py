"""Paths inside a dataset, as strangers write them: checked before they touch a file system."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ingest.errors import UnsafeInputError

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_FIELD = re.compile(r"(?P<name>[a-z_]+)(?::0?(?P<width>[0-9]{1,2})d)?")
_TEMPLATE_FIELDS = frozenset({"video_key", "image_key", "chunk_index", "file_index", "episode_index", "episode_chunk", "frame_index"})


def check_relative(path: str) -> str:
    """Returns ``path`` when it stays below its root.

    Raises:
        UnsafeInputError: the path is empty or absolute, has a scheme, a backslash, a NUL or a ``..`` part.
    """
    parts = path.split("/")
    if not path or path.startswith(("/", "~")) or "\\" in path or "\0" in path or ":" in parts[0] or ".." in parts:
        raise UnsafeInputError(f"path {path!r} is not a plain path below the dataset root (no '..', no scheme, not absolute)")
    return path


def common_folder(paths: Sequence[str]) -> str:
    """The deepest folder that holds every path; empty for the root."""
    folders = [path.split("/")[:-1] for path in paths]
    if not folders:
        return ""
    first, last = min(folders), max(folders)
    shared = next((number for number, part in enumerate(first) if number >= len(last) or last[number] != part), len(first))
    return "/".join(first[:shared])


def expand_template(template: str, fields: Mapping[str, str | int]) -> str:
    """Expands a path template from ``info.json`` without ``str.format``, which would evaluate attributes and indexes.

    Args:
        template: for example ``videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4``.
        fields: values by placeholder name.

    Raises:
        UnsafeInputError: an unknown placeholder or format, a stray brace, or a result that leaves the root.
    """

    def value(match: re.Match[str]) -> str:
        field = _FIELD.fullmatch(match[1])
        if field is None or field["name"] not in _TEMPLATE_FIELDS or field["name"] not in fields:
            raise UnsafeInputError(
                f"path template {template!r}: placeholder {match[0]!r} is not one of {sorted(fields)} with an optional width such as ':03d'"
            )
        found = fields[field["name"]]
        if field["width"] is None:
            return str(found)
        if not isinstance(found, int):
            raise UnsafeInputError(f"path template {template!r}: {match[0]!r} asks for digits, but {field['name']} is text")
        return f"{found:0{int(field['width'])}d}"

    expanded = _PLACEHOLDER.sub(value, template)
    if "{" in _PLACEHOLDER.sub("", template) or "}" in _PLACEHOLDER.sub("", template):
        raise UnsafeInputError(f"path template {template!r} has an unbalanced brace")
    return check_relative(expanded)
