"""From where an operator is called: the modules around it, and the line of the user's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import NamedTuple

from torch import Tensor

from fxgrad.capture.modules import ModuleMap, Place
from fxgrad.capture.names import of_a_library
from fxgrad.torch_support.private import module_called_in, module_has_returned
from fxgrad.torch_support.structure import tensors_in


class Around(NamedTuple):
    """A module that an operator ran in.  Not the module itself: one that is replaced is to go."""

    path: str
    type: str
    leaf: bool


class Where(NamedTuple):
    """From where an operator was called.

    ``path`` and ``type`` of the innermost module (of the leaf, if it is inside of one); ``call``: operators with the
    same number ran in one call of a leaf; ``source``: the line of the user's; ``chain``: all modules around it, the
    innermost first.
    """

    path: str
    type: str
    leaf: bool
    call: int
    source: str | None
    chain: tuple[Around, ...]


class Finder:
    """Finds out from the Python frames where an operator is called."""

    def __init__(self, modules: ModuleMap) -> None:
        self._modules = modules
        self._libraries: dict[CodeType, bool] = {}
        self._frame: FrameType | None = None  # of the latest leaf; held, so that no other gets its place
        self._calls = 0

    def find(self, frame: FrameType | None) -> Where:
        """Of the operator that is running; ``frame`` is the innermost one that may be the user's."""
        places: list[tuple[Place, FrameType]] = []
        source = None
        root = self._modules.root
        while frame is not None:
            called = module_called_in(frame)
            if called is root:
                break
            if called is not None and not module_has_returned(
                frame
            ):  # its own forward hooks run in the module around it
                place = self._modules.places.get(id(called))
                if place is not None and place.module is called:
                    places.append((place, frame))
            elif called is None and source is None and not self._of_a_library(frame.f_code):
                source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        found = self._where(places, source)
        del places, frame
        return found

    def _where(self, places: Sequence[tuple[Place, FrameType]], source: str | None) -> Where:
        leaf = next((n for n in reversed(range(len(places))) if places[n][0].leaf), None)
        if leaf is None or places[leaf][1] is not self._frame:
            self._calls += 1
            self._frame = None if leaf is None else places[leaf][1]
        chain = tuple(Around(place.path, place.type, place.leaf) for place, _ in places[leaf or 0 :])
        if not chain:
            return Where("", type(self._modules.root).__name__, leaf=False, call=self._calls, source=source, chain=())
        return Where(chain[0].path, chain[0].type, leaf is not None, self._calls, source, chain)

    def given(self) -> Iterator[Tensor]:
        """What the leaf was given that the latest operator ran in."""
        if self._frame is not None:
            known = self._frame.f_locals
            for _, tensor in tensors_in((known.get("args"), known.get("kwargs"))):
                yield tensor

    def done(self) -> None:
        """The forward has returned."""
        self._frame = None

    def _of_a_library(self, code: CodeType) -> bool:
        known = self._libraries.get(code)
        if known is None:
            known = self._libraries[code] = of_a_library(code.co_filename)
        return known
