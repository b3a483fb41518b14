"""The hooks that run rules at sites: on values, on leaf tensors, and on the autograd nodes of calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fxgrad.torch_support.private import current_backward

if TYPE_CHECKING:
    from fxgrad.rewriting.apply import Pass


class Entry:
    """A site in a chain; the number may be set later (reentrant checkpointing).  ``own``: it is observed here."""

    __slots__ = ("index", "own")

    def __init__(self, index: int, *, own: bool) -> None:
        self.index = index
        self.own = own


class Chain:
    """The tensor hook of one value: its sites, that of the latest call first, as the backward pass comes to them."""

    __slots__ = ("entries", "leaf", "run")
    __torch_unserializable__ = True

    def __init__(self, run: Pass, entry: Entry) -> None:
        self.run = run
        self.entries = [entry]
        self.leaf = False

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """The gradient after observation and rules; None where no rule changed it."""
        forward_record = self.run.forward_record
        own = not self.leaf or forward_record.task == current_backward() or not forward_record.computed
        return self.run.gradient(self.entries, gradient, observe=own)


class LeafChain:
    """The one hook of a leaf tensor: the rules act once, as in the latest forward call that took it."""

    __slots__ = ("chain",)
    __torch_unserializable__ = True

    def __init__(self) -> None:
        self.chain: Chain | None = None

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """The gradient after the rules."""
        return None if self.chain is None else self.chain(gradient)


class Through:
    """The hook on an autograd node, for rules that act on what a call passes back."""

    __slots__ = ("entry", "run", "unfit")
    __torch_unserializable__ = True

    def __init__(self, run: Pass, entry: Entry, unfit: str) -> None:
        self.run = run
        self.entry = entry
        self.unfit = unfit  # why this node does not stand for the call; empty where it does

    def __call__(self, passed: tuple[Tensor | None, ...], received: tuple[Tensor | None, ...]) -> Any:
        """What the call passes back instead; None where no rule acts."""
        return self.run.passed_back(self, passed, received)
