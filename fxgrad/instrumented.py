"""What ``fxgrad.instrument`` returns: the fx.GraphModule of the pass, which shares everything with the model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fxgrad.engine import Engine, Options
from fxgrad.errors import CaptureError
from fxgrad.schema import GradientFlow
from fxgrad.watching import refuse_unwatchable

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Instrumented(fx.GraphModule):
    """A model with probes in its graph.

    Parameters, buffers and submodules are the model's own objects, ``state_dict`` keys are the same, and ``train`` and
    ``eval`` reach the model.  ``graph`` and ``code`` show the pass; a call with arguments of another structure, in
    another mode or after a change of Python state is captured anew, or runs the model's own Python under observation.
    A copy or pickle is the same pass on a copy of the model, with a recorder of its own.
    """

    _engine: Engine
    _options: Options
    _shown: fx.Graph | None

    def __init__(self, model: nn.Module, options: Options) -> None:
        refuse_unwatchable(model)
        engine = Engine(model, model.forward, options)
        graph = engine.chooser.preview(*_example(model))
        super().__init__(model, graph, class_name=type(model).__name__)
        for name in _SHARED:
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["training"] = model.training
        self.__dict__["_engine"] = engine
        self.__dict__["_options"] = options
        self.__dict__["_shown"] = None

    # ---- the call --------------------------------------------------------------------------------------------

    def recompile(self) -> Any:
        """Regenerate the code of the graph; calls go on through the guards and the recorder."""
        code = super().recompile()
        kind: Any = type(self)
        kind.graph_forward = kind.forward
        kind.forward = _OBSERVED
        return code

    def train(self, mode: bool = True) -> Instrumented:  # noqa: FBT001, FBT002  # nn.Module's own signature
        """Set training mode, on the model too."""
        super().train(mode)
        engine = self.__dict__.get("_engine")
        if engine is not None:
            engine.model.training = mode
        return self

    def _show_latest(self) -> None:
        graph = self._engine.chooser.latest_graph
        if graph is not None and graph is not self._shown:
            self.__dict__["_shown"] = graph
            self.graph = graph

    # ---- reading ---------------------------------------------------------------------------------------------

    def flow(self) -> GradientFlow:
        """The flow of the latest backward event.

        Raises:
            NoFlowError: no backward pass has run through a call yet.
        """
        return self._engine.flow()

    @property
    def history(self) -> tuple[GradientFlow, ...]:
        """The flows of the latest backward events, oldest first."""
        return tuple(self._engine.history())

    def remove(self) -> None:
        """Take all hooks off; the model is as it was, and calls run it plainly."""
        self._engine.close()

    # ---- copies ----------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Instrumented:
        """The same pass on a deep copy of the model."""
        made = Instrumented(copy.deepcopy(self._engine.model, memo), self._options)
        memo[id(self)] = made
        return made

    def __copy__(self) -> Instrumented:
        """The same pass on the same model, with a recorder of its own."""
        return Instrumented(self._engine.model, self._options)

    def __reduce__(self) -> Any:
        """The model and the options: the pass is run again where it is loaded."""
        return Instrumented, (self._engine.model, self._options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As ``__reduce__``, for every protocol."""
        del protocol
        return self.__reduce__()


@torch.compiler.disable(recursive=True)  # type: ignore[no-untyped-call, untyped-decorator]
def _observed(self: Instrumented, *args: Any, **kwargs: Any) -> Any:
    """The forward of an instrumented model."""
    engine = self.__dict__["_engine"]
    if not engine.recorder.on:
        return engine.forward(*args, **kwargs)
    result = engine(*args, **kwargs)
    self._show_latest()
    return result


_OBSERVED: Callable[..., Any] = _observed


def _example(model: nn.Module) -> tuple[tuple[Any, ...], list[str]]:
    """Stand-ins for the required arguments: tracing looks at their type only; and all positional names."""
    signature = inspect.signature(model.forward)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in signature.parameters.values() if p.kind in kinds]
    if any(
        p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is inspect.Parameter.empty
        for p in signature.parameters.values()
    ):
        message = (
            f"{type(model).__name__} cannot be instrumented ahead of a call: it has required keyword arguments; "
            "use fxgrad.watch, which sees real arguments"
        )
        raise CaptureError(message)
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    return tuple(torch.empty(0) for _ in required), [p.name for p in positional]
