"""The command line: ``reelray COMMAND …``. Each command is a frozen dataclass with a ``run()``; tyro makes its options.

Only the module of the command that runs is imported, so ``reelray --help`` needs neither torch nor Ray.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ingest import __version__
from ingest.errors import ReelrayError
from reelray.config_file import with_config_file

_BOOL_WITH_VALUE = re.compile(r"(--(?:[\w-]+\.)*)([\w-]+)=(true|false)", re.IGNORECASE)
_OPTION = re.compile(r"--(?:[\w-]+\.)*[\w-]+")


@dataclass(frozen=True, slots=True)
class Command:
    """Where one command lives, and the line that ``--help`` prints for it."""

    module: str
    name: str
    summary: str


COMMANDS: dict[str, Command] = {
    "demo": Command("demo", "Demo", "the main job, small: trains on two workers, kills one, resumes, proves coverage"),
    "train": Command("train", "Train", "the training job (also what `ray job submit` runs)"),
    "inspect": Command("inspect", "Inspect", "what a dataset is"),
    "doctor": Command("doctor", "Doctor", "everything wrong with a dataset; exit status 1 on errors"),
    "plan": Command("plan", "Plan", "shards, order, budgets and mixing of an epoch, without reading a picture"),
    "stream": Command("stream", "Stream", "deliver an epoch and record what was delivered"),
    "make-dataset": Command("make_dataset", "MakeDataset", "write a barcoded synthetic LeRobotDataset v3"),
    "bench": Command("bench", "Bench", "throughput against the sequential-decode ceiling, in one run"),
    "sidecar build": Command("sidecar", "SidecarBuild", "index the MP4 files of a dataset once"),
    "sidecar show": Command("sidecar", "SidecarShow", "print a sidecar, or the index of one MP4 file"),
    "sidecar verify": Command("sidecar", "SidecarVerify", "compare a sidecar with its source"),
    "sidecar push": Command("sidecar", "SidecarPush", "publish a sidecar beside its dataset"),
    "episode export": Command("episode", "EpisodeExport", "write one camera of one episode as an MP4 of its own"),
    "recipe check": Command("recipe", "RecipeCheck", "lint a language recipe"),
    "recipe coverage": Command("recipe", "RecipeCoverage", "which branch of a recipe each frame takes"),
    "recipe render": Command("recipe", "RecipeRender", "the chat that one frame becomes"),
    "recipe styles": Command("recipe", "RecipeStyles", "the language annotations of a dataset"),
    "prefeature cases": Command("prefeature", "PrefeatureCases", "choose and prepare the image-text cases of a v4 dataset"),
    "prefeature build": Command("prefeature", "PrefeatureBuild", "build the teacher tensors on the cluster"),
    "prefeature text-kv": Command("prefeature", "PrefeatureTextKv", "build the text K/V of all layers"),
    "prefeature merge": Command("prefeature", "PrefeatureMerge", "merge worker journals into the manifests"),
    "prefeature validate": Command("prefeature", "PrefeatureValidate", "check every condition of a v4 dataset"),
    "prefeature sync": Command("prefeature", "PrefeatureSync", "send a v4 dataset to its durable place, by hash"),
    "prefeature ensure": Command("prefeature", "PrefeatureEnsure", "restore what is missing or damaged"),
    "prefeature holdout": Command("prefeature", "PrefeatureHoldout", "build the validation and test set"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Status 0: done; 1: the command found or met an error; 2: wrong usage; 130: interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    name, rest = _split(arguments)
    if name is None:
        return _help(arguments)
    command = COMMANDS[name]
    try:
        import tyro

        options: Any = getattr(import_module(f"reelray.commands.{command.module}"), command.name)
        return int(tyro.cli(options, prog=f"reelray {name}", args=_normalise(with_config_file(options, rest))).run() or 0)
    except BrokenPipeError:
        # Whoever read the output has seen enough, as in `reelray inspect SRC | head`; nothing more can be flushed to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ReelrayError, OSError, MemoryError) as error:
        print(f"reelray {name}: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"reelray {name}: interrupted", file=sys.stderr)
        return 130


def _split(arguments: list[str]) -> tuple[str | None, list[str]]:
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name, arguments[words:]
    return None, arguments


def _normalise(arguments: Sequence[str]) -> list[str]:
    """LeRobot writes ``--flag=true`` and ``--seed=null``; tyro writes ``--flag``, ``--no-flag`` and ``--seed None``."""
    joined: list[str] = []
    for argument in arguments:
        if joined and argument.lower() in {"true", "false"} and _OPTION.fullmatch(joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    normal: list[str] = []
    for argument in joined:
        match = _BOOL_WITH_VALUE.fullmatch(argument)
        if match is not None:
            normal.append(f"{match[1]}{'' if match[3].lower() == 'true' else 'no-'}{match[2]}")
        elif argument.startswith("--") and argument.endswith("=null"):
            normal.append(argument.removesuffix("null") + "None")
        else:
            normal.append("None" if argument == "null" else argument)
    return normal


def _help(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] == "--version":
        print(f"reelray {__version__}")
        return 0
    asked = not arguments or arguments[0] in {"-h", "--help"}
    group = [name for name in COMMANDS if arguments and name.startswith(f"{arguments[0]} ")]
    if not asked and not group:
        print(f"reelray: unknown command {arguments[0]!r}; `reelray --help` lists them", file=sys.stderr)
        return 2
    print(
        "usage: reelray COMMAND [options]\n\nreelray streams LeRobotDataset v3 video into Ray Train, every frame exactly once.\n\ncommands:"
    )
    for name in group or COMMANDS:
        print(f"  {name:22s} {COMMANDS[name].summary}")
    print("\n`reelray COMMAND --help` lists a command's options.")
    return 0 if asked or {"-h", "--help"} & set(arguments) else 2


if __name__ == "__main__":
    sys.exit(main())
