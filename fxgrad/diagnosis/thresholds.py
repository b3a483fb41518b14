"""Every number that a check compares with, in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from fxgrad.errors import OptionError

_SHOWN = 3  # that the short form names


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds of the checks.  ``decades`` are log10 of a ratio of l2 norms.

    Attributes:
        steps: flows that the history form of a check looks at; shorter series are judged by their last flow.
        vanishing, vanishing_error: decades that a gradient may lose on its way to the parameters that lie furthest from
            the loss, for a warning and for an error.
        vanishing_recurrent: the same over the calls of a recurrence, whose parameters get a gradient from later calls.
        exploding, exploding_error: decades that it may gain.
        depth_rate: decades per linear or convolution that a chain may gain whatever its length: a deep residual stream
            grows a little with every block.
        exploding_chain: the same where no node does it alone.
        own_drop: decades that one node must lose or gain by itself to be blamed alone.
        scale_break: decades by which one scaling operation may change the gradient.
        throttle: ``rms(weight) * sqrt(fan_in)`` below which a weight is small on purpose (zero-initialised heads,
            LayerScale, LoRA B).
        dead, dead_info: share of an activation's units that never fire, for a warning and for information, over
            several steps.
        dead_caused: the same in one step, for units whose bias or weights keep them from firing.
        dead_margin: how many times what the weights usually bring a bias must lie below zero to be such a cause.
        dead_samples: entries per unit that the history form needs.
        sigmoid_slope, tanh_slope, clamp_slope: mean derivative below which the activation is saturated.
        sigmoid_gain, tanh_gain, softmax_gain, clamp_gain: and the gain that it must stay below as well.
        softmax_mass: mean of the largest share of a softmax from which on it is saturated.
        cancelled: gradient of a value over the largest part of it that a use sends back, below which the parts cancel.
        starved: share of its largest sibling's gradient below which a branch starves.
        starved_steps: steps after which that is a warning.
        underflow, underflow_info: share of entries that become zero in their dtype.
        headroom: share of the dtype's largest number from which on there is a risk of overflow.
        spike_sigma, spike_factor, spike_steps: robust deviations and factor over its median from which on a step is a
            spike, and the steps that the median needs.
        update_large: change of a parameter over its norm in one step.
        update_low, update_high: usual range of that over many steps.
        update_lost: share of a parameter's entries that stay as they are in float16 or bfloat16.
        decay: share of a matrix that a step takes away by weight decay.
        shrink: cosine between what a step takes away and the matrix from which on it does little else.
        idle: steps that a GradScaler skips, all of them, or that bring a member of a list no input.
        epsilon: factor over the optimizer's epsilon below which the root mean square of a gradient is swallowed.
        epsilon_share: share of weights for which that must be so.
        seed_low, seed_high: usual range of the root mean square of the gradient at the outputs, loss scale divided out.
        symmetry: variance of a weight's entries over their squared mean, below which they are all the same.
        target_range, target_info: rms of output minus target over that of the outputs (at least 1) from which on
            targets are far off, for a warning and for information.
        skips: steps that a GradScaler may skip among 100.
    """

    steps: int = 5
    vanishing: float = 4.0
    vanishing_error: float = 6.0
    vanishing_recurrent: float = 15.0
    exploding: float = 3.0
    exploding_error: float = 5.0
    depth_rate: float = 0.045
    exploding_chain: float = 4.3
    own_drop: float = 1.0
    scale_break: float = 3.0
    throttle: float = 0.1
    dead: float = 0.7
    dead_info: float = 0.2
    dead_caused: float = 0.25
    dead_margin: float = 6.0
    dead_samples: int = 1000
    sigmoid_slope: float = 0.008
    sigmoid_gain: float = 0.03
    tanh_slope: float = 0.1
    tanh_gain: float = 0.2
    softmax_mass: float = 0.9
    softmax_gain: float = 0.05
    clamp_slope: float = 0.01
    clamp_gain: float = 0.2
    cancelled: float = 3e-6
    starved: float = 1e-4
    starved_steps: int = 100
    underflow: float = 0.5
    underflow_info: float = 0.1
    headroom: float = 0.25
    spike_sigma: float = 7.0
    spike_factor: float = 4.0
    spike_steps: int = 20
    update_large: float = 1.0
    update_low: float = 1e-5
    update_high: float = 1e-1
    update_lost: float = 0.8
    decay: float = 0.05
    shrink: float = 0.7
    idle: int = 10
    epsilon: float = 10.0
    epsilon_share: float = 0.5
    seed_low: float = 1e-6
    seed_high: float = 1e4
    symmetry: float = 1e-6
    target_range: float = 3000.0
    target_info: float = 100.0
    skips: int = 5

    def __repr__(self) -> str:
        """The thresholds that differ from the default, in one line."""
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        words = ", ".join(changed[:_SHOWN]) + (f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else "")
        return f"Thresholds({words or 'the defaults'})"

    def __post_init__(self) -> None:
        """Refuse what a check cannot compare with: its silence would look like health.

        Raises:
            OptionError: a threshold is no number or NaN, or a count of steps is no whole number of at least 1.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
                message = f"Thresholds: {field.name} must be a number, but is {value!r}"
                raise OptionError(message)
        for name in ("steps", "starved_steps", "spike_steps", "idle"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                message = f"Thresholds: {name} must be a whole number of at least 1, but is {value!r}"
                raise OptionError(message)
