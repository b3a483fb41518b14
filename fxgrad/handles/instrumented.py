"""What ``fxgrad.instrument`` returns: the fx.GraphModule of the pass, which shares everything with the model."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxgrad.capture.tracing import example_of
from fxgrad.engine.step import Options
from fxgrad.errors import CaptureError
from fxgrad.handles.graphs import GraphEngine, Kind
from fxgrad.handles.packing import Packed, pack, unpack
from fxgrad.handles.watching import refuse_unwatchable
from fxgrad.schema import GradientFlow, History
from fxgrad.torch_support.private import show_graph

SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_NOTE = "fxgrad: a traced graph; Python state is baked in as it was (numbers, flags, globals, branches)"


class Instrumented(fx.GraphModule):
    """A model with probes in its graph.

    Parameters, buffers and submodules are the model's own objects, ``state_dict`` keys are the same, and ``train`` and
    ``eval`` reach the model.  ``graph`` and ``code`` are what runs: edit ``graph`` and call ``recompile()``, as of any
    graph module.  They show one kind of call; train and eval each have a graph, and arguments of another structure are
    traced anew.  Python state is baked in, as with torch.fx: numbers, flags, entries of dictionaries, globals and
    branches are what they were when the model was traced.  A copy or pickle has the edits, and a recorder of its own.
    """

    _engine: GraphEngine
    _options: Options

    def __init__(self, model: nn.Module, options: Options) -> None:
        refuse_unwatchable(model)
        empty = fx.Graph()
        empty.output(None)
        super().__init__(nn.Module(), empty, class_name=type(model).__name__)
        for name in SHARED:
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["training"] = model.training
        self.__dict__["_options"] = options
        self.__dict__["_generating"] = False
        self.__dict__["_forward"] = type(self).forward = _with_the_face_of(model.forward)
        self.__dict__["_engine"] = engine = GraphEngine(model, model.forward, options)
        engine.shown_by(self)
        engine.show(example_of(model), {})

    # ---- the graph -------------------------------------------------------------------------------------------

    def recompile(self) -> Any:
        """Generate the code of the graph; from now on calls of the kind that is shown run it, observed."""
        code = super().recompile()
        kind: Any = type(self)
        generated, kind.forward = kind.forward, self.__dict__.get("_forward", _OBSERVED)
        engine: GraphEngine | None = self.__dict__.get("_engine")
        if engine is not None and engine.shown is not None:
            if self.__dict__["_generating"]:
                engine.shown.function, engine.shown.code = generated, self._code
            else:
                engine.edited(self._graph, generated, self._code)
        return code

    def show(self, kind: Kind) -> None:
        """Make ``graph`` and ``code`` those of ``kind``, whose code is generated when it is wanted."""
        show_graph(self, kind.graph, kind.code)

    def generate(self) -> None:
        """Generate the code of the graph that is shown, if that was not done yet."""
        shown = self._engine.shown
        if shown is not None and shown.function is None:
            self.__dict__["_generating"] = True
            try:
                self.graph = shown.graph
            finally:
                self.__dict__["_generating"] = False

    @property
    def code(self) -> str:
        """The Python code of the graph."""
        self.generate()
        return super().code

    def __str__(self) -> str:
        """The modules and the code."""
        self.generate()
        return super().__str__()

    def train(self, mode: bool = True) -> Instrumented:  # noqa: FBT001, FBT002  # nn.Module's own signature
        """Set training mode, on the model too; ``graph`` is then the one for that mode."""
        super().train(mode)
        engine: GraphEngine | None = self.__dict__.get("_engine")
        if engine is not None:
            engine.model.training = mode
            if engine.shown is not None:
                _show_if_traceable(engine, *engine.shown.example)
        return self

    def extra_repr(self) -> str:
        """What a reader of the printed module should know."""
        return _NOTE

    def __getattr__(self, name: str) -> Any:
        """Tensors and other attributes that the model keeps outside of its registries are read from the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            engine = self.__dict__.get("_engine")
            if engine is None or name not in engine.model.__dict__:
                raise
            return engine.model.__dict__[name]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast, as ``to`` and ``double`` do."""
        self._engine.forget_call_graphs()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    # ---- reading ---------------------------------------------------------------------------------------------

    def flow(self) -> GradientFlow:
        """The flow of the latest backward event.

        Raises:
            NoFlowError: no backward pass has run through a call yet.
        """
        return self._engine.flow()

    @property
    def history(self) -> History:
        """The flows of the latest backward events, oldest first."""
        return History(self._engine.history())

    def remove(self) -> None:
        """Take all hooks off; the model is as it was, and calls run the graph unobserved."""
        self._engine.close()

    # ---- copies ----------------------------------------------------------------------------------------------

    def _edits(self) -> list[Packed]:
        """The edited graphs, the one that is shown last."""
        edited = [kind for kind in self._engine.kinds if kind.edited]
        return [pack(kind) for kind in sorted(edited, key=lambda kind: kind is self._engine.shown)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Instrumented:
        """The same graph on a deep copy of the model."""
        made = _made(copy.deepcopy(self._engine.model, memo), self._options, self._edits())
        memo[id(self)] = made
        return made

    def __copy__(self) -> Instrumented:
        """The same graph on the same model, with a recorder of its own."""
        return _made(self._engine.model, self._options, self._edits())

    def __reduce__(self) -> Any:
        """The model, the options and the edits: the pass is run again where it is loaded."""
        return _made, (self._engine.model, self._options, self._edits())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As ``__reduce__``, for every protocol."""
        del protocol
        return self.__reduce__()


def _made(model: nn.Module, options: Options, edits: Sequence[Packed]) -> Instrumented:
    """The graph module of ``model`` with these edits."""
    module = Instrumented(model, options)
    engine = module._engine  # noqa: SLF001  # our own
    for packed in edits:
        kind = unpack(packed)
        engine.add(kind)
        engine.display(kind)
    return module


def _show_if_traceable(engine: GraphEngine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with contextlib.suppress(CaptureError):  # said by the next call, if there is one in this mode
        engine.show(args, kwargs)


@torch.compiler.disable(recursive=True)  # type: ignore[no-untyped-call, untyped-decorator]
def _observed(self: Instrumented, *args: Any, **kwargs: Any) -> Any:
    """The forward of an instrumented model: the code of the graph for this kind of call, under observation."""
    return self.__dict__["_engine"](*args, **kwargs)


_OBSERVED: Callable[..., Any] = _observed


def _with_the_face_of(own: Callable[..., Any]) -> Callable[..., Any]:
    """The forward, with the signature of the model's: libraries ask for it."""

    def forward(self: Instrumented, *args: Any, **kwargs: Any) -> Any:
        return _OBSERVED(self, *args, **kwargs)

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(own)
    with_self = signature.replace(parameters=[itself, *signature.parameters.values()])
    forward.__signature__ = with_self  # type: ignore[attr-defined]
    return forward
