"""Makes the environment in which LeRobot's loaders are measured: ``python -m benchmarks.lerobot_env FOLDER``.

LeRobot does not go together with the versions that reelray is tested with. So it gets an environment of its own on top of this one,
without its dependencies' bounds, and three changes, none of them on the way of a picture: type parameters are written as Python 3.11 has
them, PyAV is the one that LeRobot asks for, and torchvision, whose public wheels need another torch, is replaced by names that do nothing.
The decoder, torchcodec, needs FFmpeg's libraries on the machine (Debian: ffmpeg).
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

PACKAGES = """
    lerobot==0.6.1 torchcodec==0.13.0 av==15.1.0 datasets==4.1.1 accelerate==1.15.0 cachebox==6.2.10 deepdiff==9.1.0 dill==0.4.1
    draccus==0.11.6 einops==0.8.2 gymnasium==1.4.0 jsonlines==4.0.0 mergedeep==1.3.4 multiprocess==0.70.19 mypy_extensions==1.2.0
    orderly_set==5.5.0 pynput==1.8.2 pyserial==3.5 pyyaml_include==2.2 termcolor==3.3.0 typing_inspect==0.9.0
"""
_PARAMETERS = re.compile(r"^(\s*)(class|def) (\w+)\[([\w, :]+)\](\(?)", re.MULTILINE)
_ALIAS = re.compile(r"^type (\w+) = ", re.MULTILINE)
_FIRST_IMPORT = re.compile(r"^(?:import|from) (?!__future__)", re.MULTILINE)
_TORCHVISION = '''"""Stands in for torchvision: whatever is asked for exists and does nothing."""
import importlib.abc, importlib.machinery, sys, types

__version__ = "0"


class _Nothing:
    def __init__(self, *_, **__): pass


class _Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module): pass


sys.meta_path.append(_Finder())
'''


def for_python_311(text: str) -> str:
    """Source with its type parameters declared by ``TypeVar``."""
    names: list[str] = []

    def declare(match: re.Match[str]) -> str:
        own = [name.partition(":")[0].strip() for name in match[4].split(",")]
        names.extend(own)
        if match[2] == "def":
            return f"{match[1]}def {match[3]}{match[5]}"
        generic = f"Generic[{', '.join(own)}]"
        return f"{match[1]}class {match[3]}({generic}, " if match[5] else f"{match[1]}class {match[3]}({generic})"

    text = _ALIAS.sub(r"\1 = ", _PARAMETERS.sub(declare, text))
    first = _FIRST_IMPORT.search(text)
    if not names or first is None:
        return text
    head = "from typing import Generic, TypeVar\n" + "".join(f"{name} = TypeVar('{name}')\n" for name in dict.fromkeys(names))
    return text[: first.start()] + head + text[first.start() :]


def main() -> None:
    folder = Path(sys.argv[1])
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--ignore-requires-python", *PACKAGES.split()], check=True)
    packages = next((folder / "lib").glob("python3.*/site-packages"))
    (packages / "base.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    (packages / "torchvision").mkdir(exist_ok=True)
    (packages / "torchvision" / "__init__.py").write_text(_TORCHVISION, encoding="utf-8")
    for path in (packages / "lerobot").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        changed = for_python_311(text)
        if changed != text:
            path.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    main()
