"""The records that a flow is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fxgrad.presenting import presenter
from fxgrad.schema.lines import in_a_line
from fxgrad.schema.precision import Fit
from fxgrad.schema.ranks import Spread
from fxgrad.schema.statistics import Statistics
from fxgrad.schema.values import Activity, ChannelSums, Constant, Update
from fxgrad.schema.words import Reason


@in_a_line("key", "op", "target", "source")
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
        constants: numbers and words among the arguments, or the settings of a leaf module (``eps``, ``min_val`` ...).
        parameters: full names of the parameters and buffers that the call takes directly, or that the leaf module owns.
        unregistered: what it takes that requires a gradient and belongs to no registered module: where that is held
            (``"layers[1].weight"``), or its shape in words where no module holds it.
    """

    key: str
    name: str
    op: str
    target: str
    module_path: str
    module_type: str
    call_index: int
    source: str | None
    constants: tuple[Constant, ...] = ()
    parameters: tuple[str, ...] = ()
    unregistered: tuple[str, ...] = ()


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

    def fits(self, dtype: str, scale: float | Literal["tensor"] = 1.0) -> Fit | None:
        """How much of the gradient ``dtype`` would hold (``Statistics.fits``); None where none was measured.

        Raises:
            OptionError: as there.
        """
        return None if self.statistics is None else self.statistics.fits(dtype, scale)

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


@in_a_line("key", "argument")
@dataclass(frozen=True, slots=True)
class Consumer:
    """The use of a value: the consuming node's ``key`` and where the value stands among its arguments.

    ``argument`` is ``"args[0]"``, ``"kwargs['mask']"``, ``"args[0][1]"`` ...
    """

    key: str
    argument: str


@in_a_line("rules", "ran", "changed")
@dataclass(frozen=True, slots=True)
class Rewritten:
    """What happened to the gradient of a site, an edge or a parameter under rewrite rules.

    Where a rule acts on a layer or group of parameters, ``fired``, ``changed`` and the norms of each rule are those of
    all of them together; ``before`` and ``after`` are those of the parameter.

    Attributes:
        rules: names of the rules that stand there, in the order in which they run.
        ran: how often each of them ran there until the flow was first read: at a site or edge in all backward passes
            through this forward call, at a parameter from this forward call to the next; 0 where its step has not come,
            or where nothing arrived.
        after: statistics of what they passed on; None as ``reason`` says.  At a parameter those of the latest time, and
            where rules act at several moments (``per=``), of the last of these.
        fired: how often each of them changed an entry; None for one without ``audit="full"``, empty where none has it.
        changed: how many entries each of them changed, over all these runs; None and empty likewise.
        before: statistics of what came to the first of them, at the same time as ``after``.  At a site those of the
            site; at a parameter of ``.grad`` (``per="step"``), of the contribution of the pass (``"backward"``) or of
            what arrived (``"arrival"``).
        norms_before, norms_after: l2 norm of what each of them got and made at its latest run of these; None for one
            that did not run or without ``audit="full"``, empty where none has it.
            A straight-through rule acts on what a call passes back to its input, behind ``after``: these are its norms.
        reason: why ``before`` or ``after`` is None; None where both are there.
    """

    rules: tuple[str, ...]
    ran: tuple[int, ...]
    after: Statistics | None = None
    fired: tuple[int | None, ...] = ()
    changed: tuple[int | None, ...] = ()
    before: Statistics | None = None
    norms_before: tuple[float | None, ...] = ()
    norms_after: tuple[float | None, ...] = ()
    reason: str | None = None


@in_a_line("id", "op", "shape", "dtype", "l2_norm")
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
        value: statistics of the value itself, in the forward pass; None where they were not asked for.
        activity: which units of an activation's output ever fired in this forward; None for other values, or where
            forward statistics were not asked for.
        channels: the gradient unit by unit; None where ``channels=True`` was not given, or the node makes no units.
        spread: how the ranks differ here, in a reduced flow; None in others, and where no rank measured it.
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
    value: Statistics | None = None
    activity: Activity | None = None
    channels: ChannelSums | None = None
    spread: Spread | None = None

    def __str__(self) -> str:
        """A few lines: what made the value, its gradient, and the value itself where that was measured."""
        return presenter().site_text(self)

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


@in_a_line("producer", "output_position", "consumer", "l2_norm")
@dataclass(frozen=True, slots=True)
class Edge(_HasStatistics):
    """A value that flows from one node to another in the forward pass.

    Attributes:
        producer: key of the node that returned the value.
        output_position: which of its tensors.
        consumer: who takes it, and as which argument.
        statistics: of the part of the gradient that this consumer sends back; None where not measured (asked for by
            ``sites="edge"``; ``flow.blind_spots`` says why).  The parts of all uses add up to the value's gradient.
            What rules at the edge made of it is in there; ``rewritten.before`` is what they got.
        rewritten: what rewrite rules at this edge did; None where none stands here.
    """

    producer: str
    output_position: str
    consumer: Consumer
    statistics: Statistics | None = None
    rewritten: Rewritten | None = None


@in_a_line("name", "shape", "requires_grad", "l2_norm")
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
        value: statistics of the parameter itself, when the forward began; None where they were not asked for.
        update: what the optimizer step behind this backward did to it; None where no optimizer was given, no step
            has been taken yet, or the parameter had no gradient in it.
        rewritten: what rewrite rules at the parameter, its layer or its group did; None where none stands there.
        registered: False for one in a plain list or dict, which ``parameters()``, ``to()`` and ``state_dict()`` miss.
        spread: as of a site.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    statistics: Statistics | None
    aliases: tuple[str, ...] = ()
    reason: Reason | None = None
    value: Statistics | None = None
    update: Update | None = None
    rewritten: Rewritten | None = None
    registered: bool = True
    spread: Spread | None = None


@in_a_line("id", "reason")
@dataclass(frozen=True, slots=True)
class BlindSpot:
    """A node, one of its tensors or one use of such a tensor, without a measured gradient, and why.

    ``reason`` is a word of ``REASONS``; ``detail`` one sentence, with the names that matter in this case.
    ``consumer`` is None for a tensor; else the use whose part was not measured.  ``cut`` is the key of the node that
    cuts the value off from the gradient, where there is one.
    """

    key: str
    output_position: str
    reason: Reason
    detail: str
    consumer: Consumer | None = None
    cut: str | None = None

    @property
    def id(self) -> str:
        """``key`` + ``output_position``."""
        return self.key + self.output_position


@in_a_line("path", "type", "call_index")
@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: which sites it took in and which it returned (``Site.id``, in order)."""

    path: str
    type: str
    call_index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@in_a_line("path", "type", "call_index", "gradient_in", "gradient_out", "gain")
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
