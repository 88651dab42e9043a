"""``python -m reelray.reference``: writes every option of every command, and every field of the settings, as markdown.

What it writes is `docs/reference.md`; a test compares the two, so that the document is never behind the code.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from importlib import import_module
from typing import Any

from reelray.cli import COMMANDS

SETTINGS = (
    ("ingest.plan", "PlanSettings", "the order of samples"),
    ("ingest.engine.spec", "ReadOptions", "what a sample consists of"),
    ("train_integration.options", "StreamConfig", "how samples are delivered"),
    ("actors.manager", "PoolSettings", "decode actors of a node"),
    ("train_integration.job", "JobSettings", "how a training job runs"),
    ("train_integration.training", "TrainingPlan", "what the training loop does"),
)
"""Settings that Python code gives, in the order in which they are described."""

_DEFAULT = re.compile(r"\s*\((default|required|optional|repeatable|sets)\b:?\s*(.*?)\)\s*$", re.DOTALL)
_HEADER = """# Reference

Every option of every command, and every field of the settings that Python code gives. Written by

```bash
python -m reelray.reference > docs/reference.md
```

Options may be written with `-` or `_`, as `--flag`, `--no-flag` or, as LeRobot does, `--flag=true`."""


def reference() -> str:
    """The whole document."""
    parts = [_HEADER, "## Commands"]
    for name, command in COMMANDS.items():
        options: Any = getattr(import_module(f"reelray.commands.{command.module}"), command.name)
        parts.append(f"### reelray {name}\n\n{_capital(command.summary)}.\n\n{_table(('option', 'default', 'meaning'), _options(options))}")
    parts.append("## Jobs\n\nWhat `python -m train_integration.jobs NAME [options] -- [options of the job]` takes.")
    parts.append(_table(("option", "default", "meaning"), _options(import_module("train_integration.jobs").Jobs)))
    parts.append("## Settings in Python")
    for module, name, what in SETTINGS:
        settings: Any = getattr(import_module(module), name)
        parts.append(
            f"### {name}\n\n`from {module} import {name}`: {what}.\n\n{_table(('field', 'default', 'meaning'), _settings(settings))}"
        )
    return "\n\n".join(parts) + "\n"


def _options(command: Any) -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of what a command's parser takes."""
    import tyro

    with warnings.catch_warnings():
        # The parser itself is asked, so that names and defaults are those that hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        parser: Any = tyro.extras.get_parser(command)
    for action in parser._actions:
        if "--help" in action.option_strings:
            continue
        text = " ".join(str(action.help or "").split())
        found = _DEFAULT.search(text)
        default = "" if found is None else (found[2] if found[1] == "default" else found[1])
        names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
        named = sorted(str(choice) for choice in action.choices or () if str(choice) != "None")
        choices = f" One of {', '.join(named)}." if named else ""
        yield names, f"`{default}`" if default else "", _DEFAULT.sub("", text) + choices


def _settings(settings: Any) -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of a dataclass's fields; meanings come from its docstring."""
    meanings = _attributes(inspect.getdoc(settings) or "")
    for field in fields(settings):
        yield f"`{field.name}`", _default(field), meanings.get(field.name, "")


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f"`{field.default!r}`"
    factory = field.default_factory
    return "required" if factory is MISSING else f"`{getattr(factory, '__name__', 'made')}()`"


def _attributes(text: str) -> dict[str, str]:
    """The ``Attributes`` of a docstring in Google's style."""
    found: dict[str, str] = {}
    name = ""
    _, _, listed = text.partition("Attributes:\n")
    for line in listed.splitlines():
        if not line.strip() or not line.startswith("    "):
            break
        entry = re.match(r"    (\w+): (.*)", line)
        if entry is not None:
            name = entry[1]
            found[name] = entry[2]
        elif name:
            found[name] += " " + line.strip()
    return found


def _table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) if len(lines) > 2 else "It takes no options."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    sys.stdout.write(reference())
