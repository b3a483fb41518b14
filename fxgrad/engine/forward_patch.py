"""What stands in place of a model's forward: one per model, for all of its watches and rewrites."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from fxgrad.engine.face import ABSENT, Plain, face_of, is_property
from fxgrad.errors import WatchError
from fxgrad.rewriting.apply import MARK as RULES
from fxgrad.rewriting.apply import NodeRules
from fxgrad.torch_support.private import compiled_original, graph_in_the_making
from fxgrad.torch_support.private_compiled import called_as_compiled
from fxgrad.torch_support.private_skipping import leave_to_python

_PATCHED = "_fxgrad_forward"
_NO_GRAPH = (
    "fxgrad watches or rewrites this model and needs its Python to run: torch.compile runs its forward as it is, and "
    "with fullgraph=True cannot. Take torch.compile(model, backend='fxgrad') and fxgrad.flow_of(model) to see into a "
    "compiled model, or call remove() first"
)
_UNCOMPILED = (
    "fxgrad watches or rewrites a model that is called as compiled code, and needs its Python: it runs uncompiled, and "
    "may differ in the last bits from what is compiled. Compile first, then fxgrad.watch(compiled)"
)
_installing = threading.RLock()


class ForwardPatch(Protocol):
    """A watch or a rewrite on a model."""

    observes: bool

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward under this watch or rewrite."""
        ...

    def returned(self, result: Any) -> None:
        """The forward, whoever ran it, has returned ``result``."""
        ...


class PatchedForward:
    """One per model.  The newest watch runs a call, or else the newest rewrite; the rules act under both.

    It stands in the instance's ``__dict__`` as ``forward``, so that direct calls of ``model.forward`` come here too.

    Attributes:
        plain: the model's own forward, without us.
        rules: of all rewrites on the model, at sites.
        one_shots: how many one-shot calls are running.
    """

    def __init__(self, model: nn.Module) -> None:
        self.plain = Plain(model)
        self.rules = NodeRules(model)
        self.patches: list[ForwardPatch] = []
        self.one_shots = 0
        self._model = model
        self._said = False  # whether it was said that compiled code runs uncompiled
        leave_to_python()
        # One function for all faces: dynamo makes no graph of the observed call, and says this where it has to.
        self._call = torch.compiler.disable(self._run, recursive=True, reason=_NO_GRAPH)  # type: ignore[no-untyped-call]
        self._ours: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}

    def _install(self) -> None:
        self._ours = {
            "forward": face_of(self.plain, self._call), "__deepcopy__": self._deepcopy,
            "__reduce_ex__": self._reduce, "_replicate_for_data_parallel": self._replicate,
            "__prepare_scriptable__": self._refuse_script, _PATCHED: self, RULES: self.rules,
        }  # fmt: skip
        own = self._model.__dict__
        self._saved = {name: own.get(name, ABSENT) for name in self._ours}
        own.update(self._ours)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        patches = self.patches
        if not patches:  # a forward stood on top of us when the last patch went, and is gone or calls us
            self._go()
            return self.plain(*args, **kwargs)
        if not (self._said or self.one_shots) and called_as_compiled(self._model):
            self._said = True
            with contextlib.suppress(RuntimeWarning):  # where warnings are errors: the user's step goes on
                warnings.warn(_UNCOMPILED, RuntimeWarning, stacklevel=2)
        if graph_in_the_making():  # of torch.jit.trace or torch.export, which runs what it makes without us
            return self.plain(*args, **kwargs)
        patch = patches[-1]
        if not patch.observes and len(patches) > 1:
            patch = next((g for g in reversed(patches) if g.observes), patch)
        result = patch.call(args, kwargs)
        for one in patches:
            one.returned(result)
        return result

    # ---- coming and going ------------------------------------------------------------------------------------

    def add(self, patch: ForwardPatch) -> PatchedForward:
        """A patch comes, and runs calls from now on; the first one puts this in place.

        Returns:
            What stands in place, which is another one where that was quicker.
        """
        with _installing:
            patched: PatchedForward = self._model.__dict__.get(_PATCHED, self)
            if not patched.patches:
                patched.plain.own = self._model.__dict__.get("forward", ABSENT)
                patched._install()
            patched.patches = [*patched.patches, patch]
            return patched

    def take_out(self, patch: ForwardPatch) -> None:
        """A patch goes; the last one gives the model back as it was.

        What the user put on top meanwhile stays, and may go on to call what stood in place here: that runs the plain
        forward for good, and goes by itself once nothing stands on top.
        """
        with _installing:
            self.patches = [other for other in self.patches if other is not patch]
            if not self.patches:
                self._go()

    def _go(self) -> None:
        with _installing:
            own = self._model.__dict__
            if not self.patches and own.get(_PATCHED, self) is self:
                self._give_back()

    def _give_back(self) -> None:
        """Take out what is ours, and only that."""
        own = self._model.__dict__
        for name, ours in self._ours.items():
            if name in own and own[name] == ours:
                if self._saved[name] is ABSENT:
                    del own[name]
                else:
                    own[name] = self._saved[name]

    @property
    def covered(self) -> bool:
        """Whether another forward stands where calls would come to us."""
        return bool(self.patches) and self._model.__dict__.get("forward", ABSENT) != self._ours["forward"]

    def stay(self) -> None:
        """Come back in place where the user's code took us out: by ``del``, or by taking wrappers off the forward.

        A forward that may lead to us is left alone.
        """
        with _installing:
            own = self._model.__dict__
            found = own.get("forward", ABSENT)
            if self.covered and (found is ABSENT or self.plain.is_below(found)):
                self.plain.own = self._saved["forward"] = found
                own["forward"] = self._ours["forward"] = face_of(self.plain, self._call)

    # ---- copies ----------------------------------------------------------------------------------------------

    @contextmanager
    def _without(self) -> Iterator[None]:
        """The model as it is without us, for the time that a copy of it is made."""
        with _installing:
            own = self._model.__dict__
            ours = {name: own[name] for name, value in self._ours.items() if name in own and own[name] == value}
            self._give_back()
            try:
                yield
            finally:
                own.update(ours)

    def _deepcopy(self, memo: dict[int, Any]) -> Any:
        with self._without():
            return copy.deepcopy(self._model, memo)

    def _reduce(self, protocol: Any) -> Any:
        with self._without():
            reduced = self._model.__reduce_ex__(protocol)
            if isinstance(reduced, tuple) and len(reduced) > 2 and reduced[2] is self._model.__dict__:  # noqa: PLR2004
                reduced = (*reduced[:2], dict(reduced[2]), *reduced[3:])
            return reduced

    def _replicate(self) -> Any:
        """For ``nn.DataParallel``: a replica runs its own forward, on its own device."""
        with self._without():
            return self._model._replicate_for_data_parallel()  # type: ignore[no-untyped-call]  # noqa: SLF001

    def _refuse_script(self) -> Any:
        """What ``torch.jit.script`` asks a module for before it compiles its source.

        Raises:
            WatchError: always.  Scripting what is returned here would swap it into a parent module for good.
        """
        name = type(self._model).__name__
        message = (
            f"torch.jit.script cannot compile this {name} while fxgrad watches or rewrites it: a scripted forward is "
            "not Python. Script copy.deepcopy(model), which is the plain model, or call remove() first."
        )
        raise WatchError(message)


def patched_forward_of(model: nn.Module) -> PatchedForward | None:
    """What stands in place of this very model's forward, if anything does."""
    found: PatchedForward | None = model.__dict__.get(_PATCHED)
    return found if found is not None and found.patches else None


def patching(model: nn.Module) -> PatchedForward:
    """What stands in place of the model's forward, or what will; ``add`` puts it there."""
    patched: PatchedForward | None = model.__dict__.get(_PATCHED)
    return PatchedForward(model) if patched is None else patched


def refuse_unpatchable(model: Any, what: str) -> None:
    """Raise for what has no Python forward of its own.

    Args:
        model: what was given.
        what: ``"watch"`` or ``"rewrite"``, for the message.

    Raises:
        WatchError: not a module, a compiled or scripted one, or one whose forward is a property.
    """
    if not isinstance(model, nn.Module):
        message = f"fxgrad.{what} wants a torch.nn.Module, but got {type(model).__name__}"
        raise WatchError(message)
    name = type(model).__name__
    if is_property(model):
        message = f"the forward of {name} is a property of its class, in whose place nothing can be put on one model"
        raise WatchError(message)
    if compiled_original(model) is not None:
        message = (
            f"this model is already compiled ({name}); hooks put on it now would never run. "
            "Compile the original with torch.compile(model, backend='fxgrad') and read fxgrad.flow_of(model), or "
            "compile the result of fxgrad.instrument(model, engine='function')."
        )
        raise WatchError(message)
    if isinstance(model, torch.jit.ScriptModule):
        message = (
            f"{name} is a scripted module, whose forward is not Python and cannot be observed; {what} the original"
        )
        raise WatchError(message)
