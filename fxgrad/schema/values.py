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
        l2_norm: of the change, in the parameter's own unit.
        weight_norm: l2 norm of the parameter before the step.
        learning_rate: of its parameter group, None for an optimizer without one.
        epsilon: ``eps`` of its parameter group, None for an optimizer without one.
    """

    l2_norm: float
    weight_norm: float
    learning_rate: float | None
    epsilon: float | None = None


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
    """The optimizer of a watch, at one event.

    Attributes:
        type: its class name.
        step: number of the step that followed the event's backward, from 0 since watching began; None where none has
            been taken yet (in accumulation, or since a GradScaler skipped it).
        skipped: steps that the scaler has skipped among the last 100 that it was asked for; 0 without a scaler.
        others: how many of its parameters are none of the model's registered ones.
    """

    type: str
    step: int | None = None
    skipped: int = 0
    others: int = 0
