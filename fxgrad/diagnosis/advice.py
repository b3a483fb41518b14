"""Why it happened, and what to try: words that fit the case, for checks that see the same thing for many reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from fxgrad.diagnosis.causes import Cause, cause_of
from fxgrad.diagnosis.check import number
from fxgrad.diagnosis.kinds import NORMS, WEIGHTED
from fxgrad.diagnosis.precision import seeds_of
from fxgrad.diagnosis.view import FlowView
from fxgrad.diagnosis.weights import main_weight, scale
from fxgrad.schema import Node, ParameterRecord, Statistics

#: Layers that run over time, by the kind of their node.
RECURRENT = frozenset(kind for kind in WEIGHTED if kind.startswith(("lstm", "gru", "rnn")))
_HALF_EPSILON = 2.0**-25  # what is at most this becomes 0 in float16
_LARGE_INIT = 4.0  # rms(weight) * sqrt(fan_in), which is 1 to 2 at usual initialisations
_SEVERAL = 3  # matrices whose largest entry is the same to three digits by no accident
_CONSTANT = 1e-4  # gain of a normalisation, times the rms of its input, where that makes no difference to what follows
_CUT_OFF = frozenset({"clamp_min", "relu", "clamp", "margin_ranking_loss"})
_ONE_HOT = 40.0  # of logits: below it no softmax in float32 gives exactly 1 and exactly 0
_LARGE_SEED = 30.0  # of the gradient at an output, summed over a sample: about 1 for the usual losses


#: What makes something that is the same for every input, if it is used in one way.
_ADDS_UP = {
    "softmax": ("what follows adds up its shares, which make 1 for every input", "use the shares one by one"),
    "normalize": ("over a single entry it is 1 or -1, whatever the input", "normalise over more than one entry"),
}


# ---- the way through the model -----------------------------------------------------------------------------------


def of_one(view: FlowView, check: str, node: Node) -> Cause:
    """For a single operation that the gradient vanishes or explodes at."""
    kind = view.kinds[node.key]
    size = _input_rms(view, node.key)
    if check == "vanishing" and kind in NORMS and size is not None:
        if (view.gain(node.key) or 1.0) * size > _CONSTANT:
            why = f"its input has rms {number(size)}, by which it divides"
            return Cause(why, "lower the gain of what lies before it, or begin with smaller weights")
        return Cause(
            "what follows takes the sum or mean over what it normalises, which is the same for every input",
            "sum or average before the normalisation or over another dimension, or put a linear layer between",
        )
    if check == "vanishing" and kind in _ADDS_UP and (view.gain(node.key) or 1.0) < _CONSTANT:
        return Cause(*_ADDS_UP[kind])
    if kind in RECURRENT:
        return Cause("it runs over many steps", _over_time(check))
    if check == "exploding" and kind in {"attention", "softmax", "matmul"}:
        return _of_scores(view)
    if check == "vanishing":
        mend = "rescale it (a tiny factor or weight, a flat activation), or lead a skip past it"
    else:
        mend = "it has a huge factor or weight: initialise it like its neighbours, or normalise behind it"
    return Cause("", mend)


def _input_rms(view: FlowView, key: str) -> float | None:
    """Of the first value that a node takes; None where it was not measured."""
    sites = (view.by_id.get(edge.producer + edge.output_position) for edge in view.takes[key])
    return next((site.value.rms for site in sites if site is not None and site.value is not None), None)


def of_chain(view: FlowView, check: str, kind: str, *, recurrent: bool) -> Cause:  # noqa: PLR0911  # one return a reason
    """For many operations of one kind that do it together."""
    if recurrent or kind in RECURRENT:
        return Cause("a recurrence, that multiplies by the same weight in each step", _over_time(check))
    if check == "exploding":
        large = _large_weights(view)
        if kind in {"attention", "softmax", "matmul"}:
            return _of_scores(view)
        mend = "lower the gain of the initialisation (He for ReLU, Xavier for tanh), add normalisation, clip gradients"
        return Cause(large, mend)
    if kind in {"sigmoid", "tanh"}:
        return Cause("", "use ReLU, GELU or SiLU with a fitting initialisation, or skip connections with normalisation")
    clipped = _clipped_weights(view)
    if kind in WEIGHTED and clipped is not None:
        return Cause(
            f"the weights are clipped: the largest of each matrix is {number(clipped)}",
            "widen the limit that weights are clipped to (0.01 is usual in a Wasserstein GAN), or use a gradient "
            "penalty or spectral normalisation in its place",
        )
    if kind in WEIGHTED:
        mend = "raise the gain of the initialisation (He for ReLU, Xavier for tanh), or add normalisation and skips"
        return Cause("", mend)
    return Cause("", "add skip connections with normalisation")


def _clipped_weights(view: FlowView) -> float | None:
    """The limit that all weight matrices reach and none exceeds, where there are several."""
    records = [r for r in view.flow.parameters if len(r.shape) > 1 and r.value is not None]
    largest = {number(r.value.max_abs or 0.0) for r in records if r.value is not None}
    alike = len(records) >= _SEVERAL and len(largest) == 1
    return records[0].value.max_abs if alike and records[0].value is not None else None


def _over_time(check: str) -> str:
    if check == "exploding":
        return (
            "clip the gradient norm (torch.nn.utils.clip_grad_norm_), begin with orthogonal recurrent weights "
            "(nn.init.orthogonal_), or go back over fewer steps (detach the state)"
        )
    return (
        "begin with a forget-gate bias of 1 (LSTM) and orthogonal recurrent weights (nn.init.orthogonal_), use LSTM or "
        "GRU in place of a plain recurrence, or go back over fewer steps"
    )


def _of_scores(view: FlowView) -> Cause:
    large = _large_weights(view)
    why = "the scores of the attention are too large" + (f": {large}" if large else "")
    return Cause(
        why,
        "divide the scores by sqrt(d), initialise query and key with std 1/sqrt(fan_in) (0.02 in transformers), or "
        "normalise queries and keys",
    )


def _large_weights(view: FlowView) -> str:
    """In words, where most weight matrices of the model begin far too large."""
    nodes = [node for node in view.flow.nodes if view.kinds[node.key] in WEIGHTED | {"attention"}]
    records = {r.name: r for node in nodes if (r := main_weight(view, node)) is not None and len(r.shape) > 1}
    sizes = [size for record in records.values() if (size := scale(record)) is not None]
    if not sizes or median(sizes) < _LARGE_INIT:
        return ""
    return f"the weights have rms(weight) * sqrt(fan_in) of about {number(median(sizes))}, where 1 to 2 is usual"


# ---- numbers that are none ---------------------------------------------------------------------------------------


def of_nonfinite(view: FlowView, key: str, statistics: Statistics | None, *, forward: bool) -> Cause:
    """For an operation that turned finite numbers into NaN or Inf."""
    zeros = _rows_of_zeros(view, view.nodes[key])
    if zeros is not None:
        return Cause(
            f"weight norm divides each row of {zeros.name} by its length, and a row is zero "
            f"({zeros.value.zero_count if zeros.value is not None else 0} entries are)",
            "let no row begin at zero: initialise at random, or add the weight norm behind the initialisation",
        )
    taken = [view.by_id.get(edge.producer + edge.output_position) for edge in view.takes[key]]
    dtypes = {site.dtype for site in (*view.sites[key], *taken) if site is not None}
    dtype = "float16" if "float16" in dtypes else next(iter(dtypes), "")
    overflow = statistics is not None and bool(statistics.inf_count)
    found = cause_of(view.kinds[key], dtype, forward=forward, overflow=overflow)
    if overflow and dtype == "float16" and not forward:
        return Cause(f"the gradient left the range of float16 (65504){_scaled(view)}", _lower_scale(view))
    return found


_LOWER_SCALE = (
    "lower the loss scale (a GradScaler begins at 2**16 and finds its own), or use bfloat16, or float32 for this part"
)


def _lower_scale(view: FlowView) -> str:
    """With who should know of the scale, where nobody told."""
    told = view.flow.event.loss_scale or not is_multiplied(view)
    return _LOWER_SCALE if told else f"{_LOWER_SCALE}; give a GradScaler to watch(scaler=), which knows what it skips"


def of_nonfinite_loss(view: FlowView) -> Cause:
    """For a gradient that is NaN or Inf when it comes out of the loss."""
    if any(site.dtype == "float16" for site in view.flow.sites) and is_multiplied(view):
        return Cause(f"the loss made it: it left the range of float16 (65504){_scaled(view)}", _lower_scale(view))
    risky = [op.name for op in view.flow.event.loss_ops if op.name in _RISKY]
    if risky:
        return Cause(f"the loss made it, which takes {', '.join(dict.fromkeys(risky))}",
                     "keep what goes into it away from 0 (clamp, or an eps in it), and skip empty batches")  # fmt: skip
    mend = "look at the loss: log or division of 0, every label ignored, a scale that overflows"
    return Cause("the loss made it", mend)


_RISKY = frozenset({"log", "log2", "log10", "sqrt", "rsqrt", "pow", "acos", "asin", "reciprocal", "norm", "div"})


def is_multiplied(view: FlowView) -> bool:
    """Whether the last that was done to the loss is a product, as a GradScaler takes one."""
    ops = view.flow.event.loss_ops
    return bool(view.flow.event.loss_scale) or (bool(ops) and ops[0].name == "mul")


def looks_scaled(views: Sequence[FlowView], view: FlowView) -> bool:
    """Whether a scaler that was not handed over may be at work: such a loss, and a later gradient is finite."""
    later = (one.flow.parameters for one in views[views.index(view) + 1 :])
    hurt = (any(r.statistics is not None and r.statistics.nonfinite for r in records) for records in later)
    return is_multiplied(view) and not all(hurt)


def _scaled(view: FlowView) -> str:
    factor = view.flow.event.loss_scale
    if factor:
        return f": the loss was multiplied by {number(factor)}"
    return ": the loss was multiplied, as by a GradScaler" if is_multiplied(view) else ""


def _rows_of_zeros(view: FlowView, node: Node) -> ParameterRecord | None:
    """The direction of a weight norm that has a row of zeros, as far as their count tells."""
    for record in view.records(node):
        named = record.name.endswith(("weight_v", "parametrizations.weight.original1"))
        zeros = record.value.zero_count if record.value is not None else None
        row = math.prod(record.shape[1:]) if len(record.shape) > 1 else 0
        if named and zeros and row and zeros >= row:
            return record
    return None


# ---- steps -------------------------------------------------------------------------------------------------------


def of_step(view: FlowView, record: ParameterRecord) -> Cause:
    """For a step that changed a parameter by too much."""
    epsilon = record.update.epsilon if record.update is not None else None
    if record.dtype == "float16" and epsilon is not None and epsilon <= _HALF_EPSILON:
        return Cause(
            f"eps {number(epsilon)} is 0 in float16, so that the step divides by the root of squares that underflow",
            "keep the parameters in float32 (torch.autocast and GradScaler) or bfloat16, or use an eps of 1e-4 or more",
        )
    return of_loss(view) or Cause("", "lower the learning rate, clip the gradient norm, or scale targets and loss")


# ---- the loss ----------------------------------------------------------------------------------------------------


def of_loss(view: FlowView) -> Cause | None:
    """What the loss does to the size of the gradient, where the autograd nodes between output and loss tell it."""
    ops = {op.name: op for op in view.flow.event.loss_ops}
    size = seed_size(view)
    softmax = ops.get("log_softmax")
    tempered = softmax is not None and bool({"div", "mul"}.intersection(softmax.takes))
    if tempered and size and not 1 / _LARGE_SEED < size < _LARGE_SEED:
        return Cause(
            "the loss divides or multiplies the logits before its softmax (a temperature), and sends back a gradient "
            f"of {number(size)} in all, where about 1 is usual",
            "use a temperature nearer to 1, or learn it between limits",
        )
    first = view.flow.event.loss_ops[0] if view.flow.event.loss_ops else None
    summed = any(op.reduction == "sum" for op in ops.values()) or (first is not None and first.name == "sum")
    if summed:
        return Cause(
            "the loss is summed over the batch (reduction='sum'), so that the gradient grows with it",
            "use reduction='mean', or divide the loss by the number of samples",
        )
    return None


def of_zero_loss(view: FlowView) -> Cause:
    """Why a loss sends back nothing but zeros."""
    names = {op.name for op in view.flow.event.loss_ops}
    if any(name.startswith("nll_loss") for name in names):
        return _of_zero_cross_entropy(view)
    if {"exp", "sub"} <= names:
        return Cause("the exponent is a difference of one value and itself, as in a policy ratio whose old "
                     "log-probabilities are the new ones, in the graph",
                     "detach the old log-probabilities, as they were when the actions were taken: "
                     "(log_prob - old_log_prob.detach()).exp()")  # fmt: skip
    if is_cut_off(view):
        return Cause("it is cut off at 0 (a margin that all samples meet)",
                     "a larger margin, or harder samples; nothing where the task is learnt")  # fmt: skip
    return Cause("", "look at the loss: every label ignored or masked, a softmax over one class, a margin that all "
                 "samples meet")  # fmt: skip


def is_cut_off(view: FlowView) -> bool:
    """Whether the loss is 0 once every sample keeps its distance."""
    return any(op.name in _CUT_OFF for op in view.flow.event.loss_ops)


def _of_zero_cross_entropy(view: FlowView) -> Cause:
    """One class, probabilities that are 1 to the last bit, or no label: in this order, as far as the outputs tell."""
    seeds = seeds_of(view)
    if seeds and all(classes_of(site.shape) == 1 for site in seeds):
        return Cause(
            "cross_entropy over a single logit is constantly 0: a softmax over one entry is 1, whatever the logit",
            "use binary_cross_entropy_with_logits for one logit, or give the model one output for each class",
        )
    largest = max((site.value.max_abs or 0.0 for site in seeds if site.value is not None), default=0.0)
    if largest > _ONE_HOT:
        return Cause(
            f"the outputs reach {number(largest)}, so that the softmax in cross_entropy is 1 and 0 to the last bit",
            "nothing where the task is learnt; otherwise make the outputs smaller (a temperature, initial weights, a "
            "scale in front of the loss)",
        )
    return Cause("cross_entropy gives that where every label is its ignore_index (or where it is over a single logit)",
                 "check labels and ignore_index, and skip batches without a label")  # fmt: skip


def classes_of(shape: tuple[int, ...]) -> int:
    """How many classes cross_entropy sees in outputs of this shape."""
    return shape[1] if len(shape) > 1 else shape[0] if shape else 0


def no_label(view: FlowView) -> bool:
    """Whether a mean cross entropy got no label at all, so that the loss was NaN and sent zeros all the same."""
    seeds = seeds_of(view)
    mean = any(op.name.startswith("nll_loss") and op.reduction == "mean" for op in view.flow.event.loss_ops)
    small = bool(seeds) and all(
        s.value is not None and (s.value.max_abs or 0.0) <= _ONE_HOT and s.dtype != "float16" for s in seeds
    )
    zero = all(s.statistics is not None and s.statistics.all_zero for s in seeds)
    return mean and small and zero and all(classes_of(site.shape) > 1 for site in seeds)


def seed_size(view: FlowView) -> float:
    """The largest root mean square of the gradient at an output, times its entries; the loss scale divided out."""
    sizes = [s.statistics.rms * s.statistics.numel for s in seeds_of(view) if s.statistics is not None]
    return max(sizes, default=0.0) / (view.flow.event.loss_scale or 1.0)


__all__ = [
    "RECURRENT",
    "is_cut_off",
    "looks_scaled",
    "no_label",
    "of_chain",
    "of_loss",
    "of_nonfinite",
    "of_nonfinite_loss",
    "of_one",
    "of_step",
    "of_zero_loss",
    "seed_size",
]
