"""The records that a flow is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from fxgrad.schema.histogram import range_of, share_below
from fxgrad.schema.words import Level, NormWord, Reason


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Scalars of one gradient (one tensor, one backward event).

    ``level`` says which fields are filled: ``"norm"`` fills ``numel`` and ``l2_norm`` (and so ``rms``), ``"full"``
    fills all but the histogram, ``"histogram"`` that too.  A field that its level does not fill is None, never zero.
    At ``full`` every sum, norm and extremum is over the finite entries; the counts say what was left out.  Moduli
    are used for complex gradients.

    Attributes:
        level: ``"norm"``, ``"full"`` or ``"histogram"``.
        numel: number of entries, NaN and Inf included.
        l2_norm: at ``norm`` accumulated in float32 (float64 for a float64 gradient), at ``full`` in float64, with
            doubles scaled by the largest entry, so that no non-zero gradient has norm 0.
        max_abs: largest finite modulus, 0.0 for an empty gradient.
        min_abs_nonzero: smallest non-zero finite modulus, None where there is none.
        sum: sum of the finite entries (real part for complex).
        abs_sum: sum of their moduli.
        nan_count, inf_count, zero_count: entries that are NaN, infinite, exactly zero.
        flush_count: non-zero entries that would round to zero in float16 (modulus below 2**-25).
        subnormal_count: non-zero entries below the smallest normal number of the gradient's own dtype.
        overflow_count: finite entries beyond the range of float16 (65504).
        exponent_histogram: finite non-zero entries by exponent, 64 counts: below 2**-46, then one binade each from
            2**-46 to 2**16, then what is above; see ``underflow_share`` and ``overflow_share``.
    """

    level: Level
    numel: int
    l2_norm: float
    max_abs: float | None = None
    min_abs_nonzero: float | None = None
    sum: float | None = None
    abs_sum: float | None = None
    nan_count: int | None = None
    inf_count: int | None = None
    zero_count: int | None = None
    flush_count: int | None = None
    subnormal_count: int | None = None
    overflow_count: int | None = None
    exponent_histogram: tuple[int, ...] | None = None

    @property
    def rms(self) -> float:
        """``l2_norm / sqrt(numel)``; 0.0 for an empty gradient."""
        return self.l2_norm / math.sqrt(self.numel) if self.numel else 0.0

    @property
    def nonfinite(self) -> bool | None:
        """Whether an entry is NaN or Inf; None where the level cannot tell (an Inf norm at ``norm``)."""
        if self.nan_count is not None and self.inf_count is not None:
            return self.nan_count + self.inf_count > 0
        if math.isnan(self.l2_norm):
            return True
        return None if math.isinf(self.l2_norm) else False

    @property
    def outside_range(self) -> bool:
        """True where a ``norm`` of 0 or Inf may be the accumulator's doing and not the gradient's."""
        return self.level == "norm" and self.numel > 0 and (self.l2_norm == 0.0 or math.isinf(self.l2_norm))

    @property
    def all_zero(self) -> bool | None:
        """Whether every entry is exactly zero; None where the level cannot tell."""
        if self.zero_count is not None:
            return self.numel > 0 and self.zero_count == self.numel
        return None if self.outside_range else False

    def norm(self, which: NormWord) -> float | None:
        """The norm named ``which``; None where this level does not fill it."""
        value: float | None = getattr(self, which)
        return value

    def underflow_share(self, dtype: str, scale: float = 1.0) -> tuple[float, float] | None:
        """Share of the finite non-zero entries that ``dtype`` would round to zero at loss scale ``scale``.

        The gradient is multiplied by ``scale`` first.  The answer is the least and the most that the histogram allows;
        they are equal where ``scale`` is a power of two and the limit lies within 2**-46 to 2**16.  None without a
        histogram.

        Raises:
            OptionError: the dtype is not known, or the scale is not a positive number.
        """
        low, _ = range_of(dtype, scale)
        return self._share_below(low)

    def overflow_share(self, dtype: str, scale: float = 1.0) -> tuple[float, float] | None:
        """Share of the finite non-zero entries that leave the range of ``dtype`` at ``scale``; as ``underflow_share``.

        The least and the most differ by the bin that the largest number of ``dtype`` lies in.

        Raises:
            OptionError: the dtype is not known, or the scale is not a positive number.
        """
        _, high = range_of(dtype, scale)
        below = self._share_below(high)
        if below is None or not any(self.exponent_histogram or ()):
            return below
        return 1.0 - below[1], 1.0 - below[0]

    def _share_below(self, limit: float) -> tuple[float, float] | None:
        if self.exponent_histogram is None:
            return None
        return share_below(self.exponent_histogram, limit, (self.min_abs_nonzero or 0.0, self.max_abs or 0.0))

    def _comparable(self) -> tuple[object, ...]:
        values = (getattr(self, f.name) for f in fields(self))
        return tuple("nan" if isinstance(v, float) and math.isnan(v) else v for v in values)

    def __eq__(self, other: object) -> bool:
        """Field by field, NaN equal to NaN, so that a flow equals its own copy read from a file."""
        return self._comparable() == other._comparable() if isinstance(other, Statistics) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._comparable())


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the captured graph that returns at least one tensor (or is the graph's output).

    Attributes:
        key: unique and stable: module path + op + call index (see docs/concepts.md), the same from every front end.
        name: the torch.fx name, unique within one graph.
        op: torch.fx opcode: ``placeholder, call_module, call_function, call_method, output``; or ``external`` for
            a value that no front end could see being made (a custom autograd function, scripted code).
        target: torch.fx target as text: the module path, the qualified function name, the method name.
        module_path: path of the module whose forward made the call (for ``call_module``: of the module itself).
        module_type: class name of that module.
        call_index: 0 for the first call of this op in this module during one forward, 1 for the second, ...
        source: ``file:line`` of the user's code, None where unknown.
    """

    key: str
    name: str
    op: str
    target: str
    module_path: str
    module_type: str
    call_index: int
    source: str | None


class _HasStatistics:
    """The statistics of a record, readable as its own attributes (None where not measured)."""

    __slots__ = ()
    statistics: Statistics | None

    def _statistic(self, name: str) -> Any:
        return None if self.statistics is None else getattr(self.statistics, name)

    @property
    def measured(self) -> bool:
        """Whether a gradient was seen here."""
        return self.statistics is not None

    @property
    def l2_norm(self) -> float | None:
        """Square root of the sum of squared moduli; None where not measured."""
        value: float | None = self._statistic("l2_norm")
        return value

    @property
    def rms(self) -> float | None:
        """``l2_norm / sqrt(numel)``; None where not measured."""
        value: float | None = self._statistic("rms")
        return value

    @property
    def max_abs(self) -> float | None:
        """Largest finite modulus; None where not measured or not filled at this level."""
        value: float | None = self._statistic("max_abs")
        return value

    @property
    def nan_count(self) -> int | None:
        """Entries that are NaN; None where not measured or not filled at this level."""
        value: int | None = self._statistic("nan_count")
        return value

    @property
    def inf_count(self) -> int | None:
        """Entries that are infinite; None where not measured or not filled at this level."""
        value: int | None = self._statistic("inf_count")
        return value

    @property
    def zero_count(self) -> int | None:
        """Entries that are exactly zero; None where not measured or not filled at this level."""
        value: int | None = self._statistic("zero_count")
        return value

    @property
    def subnormal_count(self) -> int | None:
        """Entries below the dtype's smallest normal number; None where not measured or not filled."""
        value: int | None = self._statistic("subnormal_count")
        return value


@dataclass(frozen=True, slots=True)
class Consumer:
    """The use of a value: the consuming node's ``key`` and where the value stands among its arguments.

    ``argument`` is ``"args[0]"``, ``"kwargs['mask']"``, ``"args[0][1]"`` ...
    """

    key: str
    argument: str


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What happened to the gradient of a site after it was measured.

    Attributes:
        rules: names of the rules that stand at the site, in the order in which they run.
        ran: how often each of them ran at the site, in all backward passes through this forward call until the flow was
            first read: 0 where its step has not come, or where nothing arrived.
        after: statistics of what they passed on; None where they did not run.
    """

    rules: tuple[str, ...]
    ran: tuple[int, ...]
    after: Statistics | None = None


@dataclass(frozen=True, slots=True)
class Site(_HasStatistics):
    """A place where a gradient is observed: one tensor that ``node`` returned.

    Attributes:
        node: the node that returned the tensor.
        output_position: ``""`` for the only tensor, else its place in the output (``"[1][0]"``, ``"['logits']"``).
        consumer: None for the total gradient of the value; else the one use whose part this is.
        shape, dtype, device: of the value (``"float32"``, ``"cuda:0"``).
        derived_from: the site whose gradient this one's statistics were taken from, None where measured itself.
        statistics: of the gradient as it arrived, None where none was measured (then ``flow.blind_spots`` says why).
        rewritten: what rewrite rules made of it then; None where none stands here.
    """

    node: Node
    output_position: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    statistics: Statistics | None
    consumer: Consumer | None = None
    derived_from: str | None = None
    rewritten: Rewritten | None = None

    @property
    def passed_on(self) -> Statistics | None:
        """Statistics of the gradient that went on from here: after the rewrite rules, where some ran."""
        after = None if self.rewritten is None else self.rewritten.after
        return self.statistics if after is None else after

    @property
    def key(self) -> str:
        """Key of the node."""
        return self.node.key

    @property
    def id(self) -> str:
        """``key`` + ``output_position``, unique among the node sites of a flow."""
        return self.node.key + self.output_position

    @property
    def name(self) -> str:
        """torch.fx name of the node."""
        return self.node.name

    @property
    def op(self) -> str:
        """torch.fx opcode of the node."""
        return self.node.op

    @property
    def target(self) -> str:
        """torch.fx target of the node, as text."""
        return self.node.target

    @property
    def module_path(self) -> str:
        """Path of the module whose forward made the call."""
        return self.node.module_path

    @property
    def call_index(self) -> int:
        """Which call of this op in this module, from 0."""
        return self.node.call_index

    @property
    def source(self) -> str | None:
        """``file:line`` of the user's code."""
        return self.node.source


@dataclass(frozen=True, slots=True)
class Edge(_HasStatistics):
    """A value that flows from one node to another in the forward pass.

    Attributes:
        producer: key of the node that returned the value.
        output_position: which of its tensors.
        consumer: who takes it, and as which argument.
        statistics: of the part of the gradient that this consumer sends back; None where not measured (asked for by
            ``sites="edge"``; ``flow.blind_spots`` says why).  The parts of all uses add up to the value's gradient.
    """

    producer: str
    output_position: str
    consumer: Consumer
    statistics: Statistics | None = None


@dataclass(frozen=True, slots=True)
class ParameterRecord(_HasStatistics):
    """Gradient statistics of one parameter in one backward event.

    Attributes:
        name: its first full name in the model.
        aliases: further names of the same tensor (tied weights).
        shape, dtype, device: of the parameter.
        requires_grad: False for a frozen parameter.
        statistics: of what *this* backward pass contributed; None where it contributed nothing.
        reason: why ``statistics`` is None, else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    statistics: Statistics | None
    aliases: tuple[str, ...] = ()
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class BlindSpot:
    """A node, one of its tensors or one use of such a tensor, without a measured gradient, and why.

    ``reason`` is a word of ``REASONS``; ``detail`` one sentence, with the names that matter in this case.
    ``consumer`` is None for a tensor; else the use whose part was not measured.
    """

    key: str
    output_position: str
    reason: Reason
    detail: str
    consumer: Consumer | None = None

    @property
    def id(self) -> str:
        """``key`` + ``output_position``."""
        return self.key + self.output_position


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: which sites it took in and which it returned (``Site.id``, in order)."""

    path: str
    type: str
    call_index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModuleFlow:
    """What the gradient did in one module call.

    Attributes:
        path, type, call_index: of the call; the root module has path ``""``.
        gradient_in: l2 norm over all outputs of what the call received; None where none was measured.
        gradient_out: l2 norm over all inputs of what it passed back; None where none was measured, and where an
            input is also used outside of the call, so that the call's own part cannot be told from the rest.
        gain: ``gradient_out / gradient_in``; None where either is None or ``gradient_in`` is 0.
    """

    path: str
    type: str
    call_index: int
    gradient_in: float | None
    gradient_out: float | None
    gain: float | None
