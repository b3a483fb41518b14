"""The library in this process: found, checked, loaded once; or the reason why not."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from fxgrad.native.build import impossible, is_building
from fxgrad.native.places import NAME, Place, built, place, read_json

SWITCH = "FXGRAD_NATIVE"  # 0: off; prebuilt: used where it is there, never built by itself
LOOK = 1.0  # seconds between two looks for a library that wasn't there
_OFF = ("0", "off", "false", "no")
#: Compares the library with plain torch; what is wrong with it, or None.
Verify = Callable[[Any], str | None]


class Loader:
    """Loads the library at most once, and remembers why not.

    Attributes:
        module: the library; None as long as it isn't loaded.
        refused: whether it is there and no good, so that looking again is of no use in this process.
    """

    def __init__(self) -> None:
        self.module: Any = None
        self.refused = False
        self._reason = ""
        self._next = 0.0
        self._lock = threading.Lock()

    @property
    def off(self) -> bool:
        """Whether it is switched off by its environment variable."""
        return os.environ.get(SWITCH, "").lower() in _OFF

    @property
    def may_build(self) -> bool:
        """Whether a watch may have it built."""
        return not self.off and os.environ.get(SWITCH, "").lower() != "prebuilt"

    def load(self, verify: Verify) -> Any:
        """The library, or None; looks for it at most once in ``LOOK`` seconds.  Never raises and never prints."""
        if self.module is not None or self.refused:
            return None if self.off else self.module
        now = time.monotonic()
        if now < self._next or self.off:
            return None
        with self._lock:
            if self.module is None and not self.refused:
                self._next = now + LOOK
                try:
                    self._load(verify)
                except Exception as error:  # noqa: BLE001  # the Python recorder goes on
                    self.refused = True
                    self._reason = f"it could not be loaded: {type(error).__name__}: {error}".splitlines()[0]
        return self.module

    def _load(self, verify: Verify) -> None:
        where = built()
        if where is None:
            return
        module = imported(where)
        wrong = verify(module)
        if wrong is None:
            self.module = module
        else:
            self.refused, self._reason = True, f"self-check failed: {wrong}"

    def reason(self) -> str | None:
        """Why the library isn't used, in a line; None where it is."""
        if self.off:
            return f"{SWITCH}={os.environ[SWITCH]}"
        if self.module is not None:
            return None
        return self._reason or _why_missing()


def imported(where: Place) -> Any:
    """The library as a module, unchecked.

    Raises:
        ImportError: it can't be loaded.
    """
    path = str(where.library)
    files = importlib.machinery.ExtensionFileLoader(NAME, path)
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(NAME, files, origin=path))
    files.exec_module(module)
    return module


def _why_missing() -> str:
    where = place()
    reason = impossible()
    if reason is not None:
        return reason
    failed = read_json(where.failure)
    if failed is not None:
        return f"build failed: {failed.get('reason')}; see {where.log}, and run `fxgrad build` to try again"
    if is_building(where):
        return "being built"
    return "not built yet: run `fxgrad build`"


loader = Loader()
