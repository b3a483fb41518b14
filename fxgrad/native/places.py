"""Where the library lies: in torch's cache of extensions, by all that it depends on.  Nothing here runs a program."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "fxgrad_native"
SOURCES = Path(__file__).parent / "csrc"
FLAGS = [
    "-O3", "-DNDEBUG", "-g0", "-fvisibility=hidden",
    "-Wno-psabi", "-Wno-ignored-attributes",  # vectors never leave their file
    *(["-fopenmp"] if sys.platform == "linux" else []),  # as torch, whose threads are used
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """One compiler's folder in the cache."""

    folder: Path

    @property
    def library(self) -> Path:
        """What is loaded."""
        return self.folder / f"{NAME}.so"

    @property
    def facts(self) -> Path:
        """How the library was built, as JSON."""
        return self.folder / "built.json"

    @property
    def failure(self) -> Path:
        """Why it could not be, as JSON."""
        return self.folder / "failed.json"

    @property
    def log(self) -> Path:
        """What the compiler said."""
        return self.folder / "build.log"

    @property
    def lock(self) -> Path:
        """Held by the process that builds."""
        return self.folder / "lock"


def root() -> Path:
    """The cache of extensions: ``TORCH_EXTENSIONS_DIR``, or what torch takes without it."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "torch_extensions"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


@functools.cache
def sources_hash() -> str:
    """Of our sources and of how they are compiled."""
    found = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def shelf() -> Path:
    """The folder of this torch, Python, machine and version of our sources.  It has a folder for each compiler.

    The loops for all kinds of CPU are in one library, which chooses at run time: machines of different kinds may share
    a cache.
    """
    import torch

    abi = f"abi{int(torch.compiled_with_cxx11_abi())}"
    python = f"{sys.implementation.cache_tag}{sys.abiflags}"
    system = f"{platform.system()}-{platform.machine()}".lower()
    return root() / "fxgrad" / f"torch-{torch.__version__}-{abi}-{python}-{system}-{sources_hash()}"


def compiler() -> list[str]:
    """The words of the C++ compiler's command, as torch chooses it; empty where there is none on this machine."""
    words = shlex.split(os.environ.get("CXX") or "c++")
    return words if words and shutil.which(words[0]) else []


def place() -> Place:
    """The folder of the present compiler, known by its file, since asking it would run it."""
    words = compiler()
    if not words:
        return Place(shelf() / "no-compiler")
    path = Path(shutil.which(words[0]) or words[0])
    with contextlib.suppress(OSError):
        path = path.resolve()
    try:
        facts = (words, str(path), path.stat().st_size, path.stat().st_mtime_ns)
    except OSError:
        facts = (words, str(path), 0, 0)
    return Place(shelf() / f"{path.name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}")


def built() -> Place | None:
    """Where there is a library to load: that of the present compiler, else the newest of another one."""
    own = place()
    if own.library.is_file():
        return own
    try:
        others = [Place(folder) for folder in own.folder.parent.iterdir()]
        there = [other for other in others if other.library.is_file()]
        return max(there, key=lambda other: other.library.stat().st_mtime, default=None)
    except OSError:
        return None


def read_json(path: Path) -> dict[str, Any] | None:
    """What is in ``path``; None where it is missing or no object."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
