"""Give a model back as it was: what a one-shot look may change is noted before and restored after."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.torch_private import version_of

_CONTAINERS = (dict, list, set)


@contextmanager
def preserved(model: nn.Module, inputs: Iterable[Tensor]) -> Iterator[None]:
    """Restore, also after an error: ``.grad``, buffers, attributes of modules, hooks, flags and random streams.

    Parameters are not copied.  A forward that writes into a parameter is reported by a warning.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in _unique(model.buffers())]
    leaves = [t for t in _unique((*model.parameters(), *inputs)) if t.requires_grad and t.is_leaf]
    grads = [(leaf, leaf.grad) for leaf in leaves]
    versions = [(name, parameter, version_of(parameter)) for name, parameter in model.named_parameters()]
    for leaf in leaves:
        leaf.grad = None
    try:
        with modules_preserved(model), random_streams():
            yield
    finally:
        for leaf, grad in grads:
            leaf.grad = grad
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):  # batch_norm writes without counting up the version
                    buffer.copy_(value)
        _warn_of_changed(versions)


@contextmanager
def modules_preserved(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules: rebound ones, and the entries of lists, dicts and sets among them."""
    modules = [(module, dict(module.__dict__), _contents(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        _restore_modules(modules)


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _contents(attributes: dict[str, Any]) -> dict[str, Any]:
    """Shallow copies of the containers among the attributes (hook registries among them)."""
    return {name: value.copy() for name, value in attributes.items() if isinstance(value, _CONTAINERS)}


def _restore_modules(modules: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> None:
    for module, attributes, contents in modules:
        for name in [name for name in module.__dict__ if name not in attributes]:
            del module.__dict__[name]
        module.__dict__.update(attributes)
        for name, saved in contents.items():
            container = attributes[name]
            if not _same(container, saved):
                container.clear()
                getattr(container, "extend" if isinstance(saved, list) else "update")(saved)


def _same(container: Any, saved: Any) -> bool:
    """Same entries in the same order, by identity: entries may be tensors, whose == is no answer."""
    if len(container) != len(saved):
        return False
    if isinstance(saved, dict):
        pairs = zip(container.items(), saved.items(), strict=True)
        return all(k1 is k2 and v1 is v2 for (k1, v1), (k2, v2) in pairs)
    return isinstance(saved, set) or all(one is two for one, two in zip(container, saved, strict=True))


@contextmanager
def random_streams() -> Iterator[None]:
    """Restore the random streams of torch (all devices in use), Python and NumPy."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _warn_of_changed(versions: Sequence[tuple[str, Tensor, int]]) -> None:
    changed = [name for name, parameter, version in versions if version_of(parameter) != version]
    if changed:
        listed = ", ".join(changed[:5]) + (" ..." if len(changed) > 5 else "")  # noqa: PLR2004  # a readable list
        warnings.warn(
            f"the model writes into its own parameters when it runs ({listed}); fxgrad cannot undo that. "
            "Use fxgrad.watch inside of the training loop, where nothing has to be undone.",
            stacklevel=5,
        )
