"""One instrumented forward call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fxgrad.instrumentation.probe import put
from fxgrad.structure import tensors_in

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class Recording:
    """Takes probes during one forward call and gradients during its backward passes.

    Attributes:
        sink: what hooks call.
        number: of the forward call since watching began.
        shapes: of the value at each site, in site order.
        not_required: sites whose value required no gradient in this call.
        untold: sites whose hook cannot tell the value's gradient (views of memory changed in place).
        plan: the graph of the call, set when the forward has returned.
        report: which front end ran, and why.
        parameters: the model's parameters at this call, as (number, names, tensor).
        expected: how many slots to prepare.
        rewriting: the rewrite rules of this call, which then put the hooks; None without rules.
        partial: gives the graph of the calls so far, while the model's own Python runs.
    """

    __slots__ = (
        "__weakref__", "escalated", "expected", "leaf_handles", "not_required", "number", "parameters", "part",
        "partial", "plan", "report", "rewriting", "shapes", "sink", "table", "task", "untold",
    )  # fmt: skip

    def __init__(self, sink: Any, number: int, expected: int) -> None:
        self.sink = sink
        self.number = number
        self.expected = expected
        self.shapes: list[tuple[int, ...]] = []
        self.not_required: set[int] = set()
        self.untold: set[int] = set()
        self.leaf_handles: list[RemovableHandle] = []
        self.task: int | None = None
        self.part: Any = None
        self.plan: Any = None
        self.report: Any = None
        self.parameters: Any = ()
        self.escalated: frozenset[int] = frozenset()
        self.rewriting: Any = None
        self.partial: Any = None

    def follow(self, plan: Any) -> None:
        """Take probes of generated code, whose sites are known from ``plan`` beforehand."""
        self.plan = plan
        self.table: list[tuple[int, ...]] = plan.probe_table
        self.shapes = [()] * len(plan.sites)

    def probe(self, value: Any, call: int) -> None:
        """Put hooks on the tensors that call number ``call`` returned."""
        sites = self.table[call]
        if isinstance(value, Tensor):
            self._tensor(value, sites[0])
            return
        for site, (_, tensor) in zip(sites, tensors_in(value), strict=False):
            self._tensor(tensor, site)

    def _tensor(self, value: Tensor, site: int) -> None:
        if site < 0:
            return
        self.shapes[site] = value.shape
        if value.requires_grad:
            put(self, value, site)
        else:
            self.not_required.add(site)

    def release(self) -> None:
        """Take the hooks off leaf tensors; those on other tensors go with the graph."""
        for handle in self.leaf_handles:
            handle.remove()
        self.leaf_handles.clear()
