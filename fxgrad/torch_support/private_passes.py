"""Private names of torch about single backward passes, nodes and versions; the rules are those of ``private``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from fxgrad.torch_support.private import version_of

_version = operator.attrgetter("_version")


def versions_of(listed: Sequence[tuple[Any, ...]], library: Any = None) -> Sequence[int]:
    """``version_of`` each tensor that is the last item of a tuple; it is asked for every parameter in every step.

    ``library``: the native one, which takes a thirtieth of the time.
    """
    if library is not None and isinstance(listed, list):
        return memoryview(library.versions(listed)).cast("I")
    tensors = [item[-1] for item in listed]
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


def keeps_graph() -> bool:
    """Whether the running backward pass was asked to leave the graph as it is (``retain_graph=True``).

    ``torch._C._autograd._get_current_graph_task_keep_graph``, which AOTAutograd asks for the same end.  Where it is
    missing, every graph counts as freed by its first pass, so that a second one that raises may be explained by that.
    """
    ask = getattr(getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None)  # noqa: SLF001
    return False if ask is None else bool(ask())


def sequence_of(node: Any) -> int:
    """When an autograd node was made, as ``sequence_number`` counts (``Node._sequence_nr``); leaves have the same one.

    Only to look nodes up quickly: where the name is missing, all have one number, and the right one is searched for.
    """
    ask = getattr(node, "_sequence_nr", None)
    return 0 if ask is None else int(ask())
