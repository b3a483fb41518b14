"""Which front end runs the next forward call, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxgrad.capture.agreement import DisagreementError, agree, node_word
from fxgrad.capture.captured import Plan
from fxgrad.capture.modules import ModuleMap
from fxgrad.capture.names import METADATA
from fxgrad.capture.pictures import snapshot
from fxgrad.capture.proxies import set_grad
from fxgrad.capture.symbolic import Trace, trace
from fxgrad.errors import CaptureError
from fxgrad.instrumentation.insert import compiled, insert_probes
from fxgrad.preserve import modules_preserved, random_streams
from fxgrad.schema import CaptureReport, FrontEnd
from fxgrad.structure import tensors_in

_KEPT = 4  # symbolic graphs kept: train and eval, with and without an optional argument
_CAPTURES = 3  # a model whose state trips the guards more often than this stays with eager


@dataclass(slots=True, eq=False)
class Symbolic:
    """A trace that may be run; ``function`` is None until its sites are known."""

    trace: Trace
    key: Any
    plan: Plan | None = None
    function: Callable[..., Any] | None = None
    graph: fx.Graph | None = None

    def complete(self, plan: Plan, numbers: Mapping[fx.Node, int], *, values: bool = False) -> None:
        """Put the probes in, now that it is known what each node returns; ``values``: they look at values too."""
        table = plan.site_table if values else plan.probe_table
        wanted = {node: n for node, n in numbers.items() if any(site >= 0 for site in table[n])}
        self.graph = insert_probes(self.trace.graph, wanted)
        self.function = compiled(self.graph)
        self.plan = plan


def may_return_tensor(node: fx.Node) -> bool:
    """Whether a node of a trace can return a tensor, as far as its op tells."""
    if node.op in ("output", "get_attr") or node.target is set_grad or isinstance(node.target, type):
        return False
    return node.op in ("placeholder", "call_module") or node_word(node) not in METADATA


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a trace depends on besides the model: the arguments' structure and constants, and torch's own switches.

    Which arguments are one and the same tensor is a part of it: forward may ask ``a is b``.
    """
    tensors = [id(tensor) for _, tensor in tensors_in((args, kwargs))]
    switches = (
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"), torch.get_default_dtype(), torch.get_default_device(),
    )  # fmt: skip
    return snapshot((args, kwargs)), [tensors.index(tensor) for tensor in tensors], switches


class Chooser:
    """Chooses between ``eager`` and ``symbolic`` for each call of one model, and keeps the reason in words.

    ``auto``: the first call with arguments of one structure runs under eager.  At the next one the model is traced; if
    the trace makes the same calls with the same constants as eager recorded, it takes over for as long as its guards
    hold.  Nothing is run twice.
    """

    def __init__(self, model: nn.Module, modules: ModuleMap, forward: Callable[..., Any], capture: str) -> None:
        self.model = model
        self.modules = modules
        self.forward = forward
        self.capture = capture
        self.one_shot = False
        self.values = False  # whether probes look at values too
        self._ready: list[Symbolic] = []
        self._candidate: tuple[Any, Plan] | None = None
        self._captures = 0
        self._refused: dict[str, str] = {}
        self._front_end: FrontEnd = "eager"
        self._reason = ""

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> Symbolic | None:
        """The symbolic graph for this call, or None for eager.

        Raises:
            CaptureError: ``symbolic`` was asked for and the model cannot be traced.
        """
        self._front_end = "eager"
        if self.capture == "eager":
            self._reason = "asked for"
            return None
        if self.one_shot and self.capture == "auto":
            self._reason = "one-shot: the model's own Python runs exactly once, so nothing has to be compared"
            return None
        key = call_key(args, kwargs)
        ready, tripped = self._guarded(key)
        if ready is None and self.capture == "symbolic":
            ready = self._keep(Symbolic(self._trace(args, kwargs, names), key))
        elif ready is None:
            ready = self._promoted(key, args, kwargs, names, tripped)
        if ready is not None:
            self._front_end = "symbolic"
            if self.capture == "symbolic":
                self._reason = "asked for"
        return ready

    def preview(self, args: tuple[Any, ...], names: list[str]) -> fx.Graph:
        """A graph with probes behind every node that may return a tensor, before any call told which ones do.

        Raises:
            CaptureError: the model cannot be traced.
        """
        made = self._trace(args, {}, names)
        nodes = [node for node in made.graph.nodes if may_return_tensor(node)]
        return insert_probes(made.graph, {node: number for number, node in enumerate(nodes)})

    @property
    def latest_graph(self) -> fx.Graph | None:
        """The instrumented graph that took over last."""
        return self._ready[-1].graph if self._ready else None

    def report(self) -> CaptureReport:
        """Which front end ran the last call, and why."""
        return CaptureReport(
            self._front_end, self._reason, type(self.model).__name__, self.model.training, torch.__version__,
            tuple(self._refused.items()),
        )  # fmt: skip

    @property
    def compares(self) -> bool:
        """Whether a trace may still be compared with what eager records."""
        open_ = self.capture == "auto" and not self.one_shot and self._captures < _CAPTURES
        return open_ and "symbolic" not in self._refused

    def ran_eagerly(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Eager recorded ``plan``; the next call with such arguments may be symbolic."""
        if self.compares:
            self._candidate = (call_key(args, kwargs), plan)

    def _guarded(self, key: Any) -> tuple[Symbolic | None, str | None]:
        tripped = None
        for ready in self._ready:
            if ready.key == key:
                tripped = ready.trace.guards.broken()
                if tripped is None:
                    return ready, None
        return None, tripped

    def _promoted(
        self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str], tripped: str | None
    ) -> Symbolic | None:
        candidate, self._candidate = self._candidate, None
        if "symbolic" in self._refused:
            self._reason = f"symbolic was refused: {self._refused['symbolic']}"
            return None
        if tripped is not None and self._captures >= _CAPTURES:
            self._refused["symbolic"] = f"the model's state changes too often: {tripped}"
            self._reason = f"symbolic was refused: {self._refused['symbolic']}"
            return None
        if candidate is None or candidate[0] != key:
            first = "the first call of this kind runs the model's own Python, against which a trace is checked"
            self._reason = f"a guard tripped: {tripped}" if tripped is not None else first
            return None
        try:
            return self._take_over(key, candidate[1], args, kwargs, names)
        except (CaptureError, DisagreementError) as error:
            if isinstance(error, CaptureError) or self._captures >= _CAPTURES:
                self._refused["symbolic"] = str(error)
            self._reason = f"symbolic was refused: {error}"
            return None

    def _take_over(
        self, key: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
    ) -> Symbolic:
        self._captures += 1
        made = Symbolic(self._trace(args, kwargs, names), key)
        made.complete(plan, agree(made.trace, plan), values=self.values)
        calls = len(plan.calls) - 1
        self._reason = f"the trace makes the same {calls} calls, with the same constants, as the model's own run"
        return self._keep(made)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> Trace:
        own = getattr(self.forward, "__func__", None)
        if own is not type(self.model).forward:
            message = f"{type(self.model).__name__} cannot be traced symbolically: its forward was replaced"
            raise CaptureError(message)
        with modules_preserved(self.model), random_streams():
            made = trace(self.modules, args, kwargs, names)
        if made.doubts and self.capture == "symbolic":  # auto checks the answer against the model's own run
            message = (
                f"{type(self.model).__name__} cannot be traced symbolically: {'; '.join(dict.fromkeys(made.doubts))}"
            )
            raise CaptureError(message)
        return made

    def _keep(self, ready: Symbolic) -> Symbolic:
        self._ready = [*self._ready, ready][-_KEPT:]
        return ready
