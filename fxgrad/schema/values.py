"""Facts of the forward pass and of the optimizer, for those who ask what a gradient met on its way."""

from __future__ import annotations

from dataclasses import dataclass

from fxgrad.schema.lines import in_a_line
from fxgrad.schema.statistics import Statistics


@in_a_line("argument", "text")
@dataclass(frozen=True, slots=True)
class Constant:
    """A constant that a node was called with, or a setting of a leaf module.

    Attributes:
        argument: ``"args[1]"``, ``"kwargs['eps']"``; for a leaf module the attribute's name, ``"negative_slope"``.
        text: as Python writes it; at most 80 characters.
        number: its value where it is a real number or a bool, else None.
    """

    argument: str
    text: str
    number: float | None = None


@in_a_line("axis", "units", "samples", "active")
@dataclass(frozen=True, slots=True)
class Activity:
    """Which units of an activation's output were active in one forward call.

    A unit is an index along ``axis``: a channel behind a convolution, else an entry of the last dimension.  An entry
    is active where the activation passes a gradient on: above 0 for ReLU and its kin, strictly between the limits of
    a clamp, off the flat end of GELU, SiLU, sigmoid, tanh ... by 1e-6.

    Attributes:
        axis: dimension of the units, counted from 0.
        units: how many there are.
        samples: entries per unit.
        never: the units without any active entry, ascending.
        active: active entries over all units.
    """

    axis: int
    units: int
    samples: int
    never: tuple[int, ...]
    active: int


@in_a_line("axis")
@dataclass(frozen=True, slots=True)
class ChannelSums:
    """The gradient of what a convolution, linear or matmul-like node returned, unit by unit.

    Attributes:
        axis: dimension of the units, counted from 0.
        square_sums: sum of squared moduli over the finite entries of each unit.
    """

    axis: int
    square_sums: tuple[float, ...]


@in_a_line("name", "shape", "dtype")
@dataclass(frozen=True, slots=True)
class BufferRecord:
    """A floating or complex buffer as it was when the forward began.

    Attributes:
        name: its full name in the model.
        shape, dtype, device: of the buffer.
        value: its statistics.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    value: Statistics


@in_a_line("l2_norm", "weight_norm", "learning_rate")
@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did to one parameter.

    Attributes:
        l2_norm: of the change, in the parameter's own unit; NaN or Inf where the step left such entries.
        weight_norm: l2 norm of the parameter before the step.
        learning_rate: of its parameter group, None for an optimizer without one.
        epsilon: ``eps`` of its parameter group, None for an optimizer without one.
        weight_decay: of its parameter group, None for an optimizer without one.
        shrink: cosine between what the step took away and the parameter before it: 1.0 where the step did nothing but
            shrink the parameter.  None where it was not measured: learning rate times weight decay below 1e-3.
        lost: share of the entries with a gradient that did not change, 0 to 1; None where it was not measured: other
            dtypes than float16 and bfloat16, no entry with a gradient.
    """

    l2_norm: float
    weight_norm: float
    learning_rate: float | None
    epsilon: float | None = None
    weight_decay: float | None = None
    shrink: float | None = None
    lost: float | None = None


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step of one optimizer behind a backward event.

    Attributes:
        optimizer: its class name.
        place: its number among the optimizers of the watch, from 0.
        number: of the step, from 0 since watching began; None where its kernel skipped it.
        parameters: how many parameters it had a gradient for.
        gradient_norm: l2 norm over all of them of what ``.grad`` held when the step began, so behind clipping and
            unscaling; 0.0 where there was none, None where it was not measured.
        carried_norm: l2 norm over its parameters of what ``.grad`` held already when the first backward pass that it
            used began; 0.0 where nothing did, or where it was cleared before a later one; None where not measured.
        learning_rates: of its parameter groups; None in place of one that is no number.
    """

    optimizer: str
    place: int
    number: int | None
    parameters: int
    gradient_norm: float | None
    carried_norm: float | None
    learning_rates: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class LossOp:
    """An operation between the model's outputs and what was differentiated.

    Attributes:
        name: of the autograd node, such as ``"nll_loss"``, ``"log_softmax"``, ``"mse_loss"``, ``"mean"``.
        takes: name of what made its first operand, views and casts left out; with ``model.`` in front where that is in
            the model's forward; empty where it needs no gradient.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``; empty for an operation without one.
    """

    name: str
    takes: tuple[str, ...] = ()
    reduction: str = ""


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """The optimizers of a watch, at one event.

    Attributes:
        type: class name; of several, joined by ``+``.
        step: number of the step that followed the event's backward, from 0 since watching began; None where none has
            been taken yet (in accumulation, or since a GradScaler skipped it).
        skipped: steps that the scaler has skipped among the last ``asked`` that it was asked for; 0 without a scaler.
        asked: steps that the scaler was asked for up to this event, at most 100; 0 without a scaler.
        missing: the trained parameters that are in no group of the optimizers, by name.
        moved: those of them that something else has changed since watching began, such as another optimizer.
        steps: the steps behind this event, one per optimizer that took one.
        others: how many of its parameters are none of the model's registered ones.
    """

    type: str
    step: int | None = None
    skipped: int = 0
    asked: int = 0
    missing: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    steps: tuple[StepFacts, ...] = ()
    others: int = 0
