"""Which entries of an activation are active, judged by its derivative, and where its units lie."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.schema import Activity

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "functional_relu": F.relu,
    "method_relu": lambda x: x.relu(),
    "relu_": lambda x: (x * 1).relu_(),
    "functional_relu_in_place": lambda x: F.relu(x * 1, inplace=True),
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -2, 3.5),
    "hardtanh_": lambda x: F.hardtanh_(x * 1, min_val=-2),
    "clamp": lambda x: x.clamp(min=0),
    "clamp_both": lambda x: torch.clamp(x, -1, max=2),
    "clamp_": lambda x: (x * 1).clamp_(max=1.5),
    "clip": lambda x: x.clip(-1, 1),
    "clamp_min": lambda x: torch.clamp_min(x, 0.25),
    "clamp_max": lambda x: x.clamp_max(0.25),
    "maximum": lambda x: torch.maximum(x, torch.zeros(())),
    "maximum_reversed": lambda x: torch.maximum(torch.zeros_like(x), x),
    "minimum": lambda x: torch.minimum(x, torch.full((), 2.0)),
    "threshold": lambda x: F.threshold(x, 0.5, -1.0),
    "threshold_above": lambda x: F.threshold(x, 0.5, 20.0),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "softshrink": lambda x: F.softshrink(x, 0.7),
    "hardshrink": lambda x: F.hardshrink(x, 0.7),
    "sigmoid": torch.sigmoid,
    "functional_sigmoid": F.sigmoid,
    "tanh": torch.tanh,
    "functional_tanh": F.tanh,
    "expit": torch.special.expit,
    "softsign": F.softsign,
    "softplus": F.softplus,
    "softplus_steep": lambda x: F.softplus(x, beta=5),
    "logsigmoid": F.logsigmoid,
    "elu": F.elu,
    "elu_two": lambda x: F.elu(x, 2.0),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, alpha=0.5),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    **{
        kind.__name__: kind()
        for kind in (
            nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.Softplus,
            nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Softsign, nn.LogSigmoid, nn.Softshrink, nn.Hardshrink,
        )
    },
    "Threshold": nn.Threshold(0.1, 0.0),
    "Hardtanh_wide": nn.Hardtanh(-3.0, 3.0),
    "ELU_two": nn.ELU(2.0),
}  # fmt: skip
WITHOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": F.leaky_relu,
    "prelu": nn.PReLU(),
    "rrelu": nn.RReLU(),
    "maximum_of_two": lambda x: torch.maximum(x, x * 2),
    "clamp_by_tensor": lambda x: x.clamp(min=x.detach().mean()),
    "softmax": lambda x: x.softmax(-1),
    "scalar": lambda x: x.sum().relu(),
}


class Act(nn.Module):
    """Two units in their columns: the first from -x to x, the second on one side."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * 1.0)


def column(first: float, last: float) -> Tensor:
    return torch.linspace(first, last, 401)[:, None]


INPUT = torch.cat([column(-60.0, 60.0), column(-60.0, -20.0), column(20.0, 60.0)], dim=1) + 0.013


def activity_of(model: nn.Module, x: Tensor, capture: Any = "eager", steps: int = 1) -> Activity | None:
    with fxgrad.watch(model, capture=capture, forward=True) as watch:
        for _ in range(steps):
            x = x.detach().requires_grad_()
            model(x).sum().backward()
        found = [site.activity for site in watch.flow() if site.activity is not None]
    assert len(found) <= 1
    return found[0] if found else None


def slopes(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The derivative of each entry, by autograd."""
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(x).sum(), x)
    return slope.abs()


def test_a_module_in_place() -> None:
    activity = activity_of(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), INPUT)
    assert activity is not None
    assert activity.units == 3


@pytest.mark.parametrize("capture", ["eager", "auto"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_active_is_what_passes_a_gradient_on(name: str, capture: Any) -> None:
    function = FUNCTIONS[name]
    slope = slopes(function, INPUT)
    activity = activity_of(Act(function), INPUT, capture, steps=3)
    assert activity is not None
    assert (activity.axis, activity.units, activity.samples) == (1, 3, 401)
    # Near the flat end of a smooth activation both answers are right: there the slope is small, and not 0.
    surely, perhaps = (slope > 3e-5).sum(0), (slope > 0).sum(0)
    assert surely.sum() <= activity.active <= perhaps.sum()
    assert set((perhaps == 0).nonzero().flatten().tolist()) <= set(activity.never)
    assert not set((surely > 0).nonzero().flatten().tolist()) & set(activity.never)
    exact = all(word not in name.lower() for word in ("sig", "tanh", "lu", "mish", "soft", "expit")) or "relu" in name
    if exact:
        assert activity.active == (slope > 0).sum()


@pytest.mark.parametrize("name", WITHOUT)
def test_without_a_flat_end_there_is_no_activity(name: str) -> None:
    assert activity_of(Act(WITHOUT[name]), INPUT) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", [torch.relu, torch.sigmoid, torch.tanh, F.gelu, F.silu, F.elu])
def test_other_dtypes(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.tensor([[-30.0, 0.5, 30.0], [-40.0, -0.5, 40.0]], dtype=dtype)
    activity = activity_of(Act(function), x)
    assert activity is not None
    flat = {torch.sigmoid: (0, 2), torch.tanh: (0, 2)}.get(function, (0,))
    assert activity.never == flat


@pytest.mark.parametrize("function", [F.gelu, F.silu, F.mish, F.hardswish])
def test_zero_is_not_flat_for_a_gate(function: Callable[[Tensor], Tensor]) -> None:
    """A zero-initialised op before it is no dead one: the slope at 0 is a half."""
    activity = activity_of(Act(function), torch.zeros(4, 3))
    assert activity is not None
    assert activity.never == ()


def test_nan_is_not_inactive() -> None:
    activity = activity_of(Act(torch.relu), torch.tensor([[float("nan"), -1.0]]))
    assert activity is not None
    assert activity.never == (1,)


def test_settings_that_change_between_steps() -> None:
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.limit = 1.0
            self.act = nn.Hardtanh(-1.0, 1.0)

        def forward(self, x: Tensor) -> Tensor:
            return (x * 1).clamp(max=self.limit) + self.act(x)

    model = Annealed()
    x = torch.tensor([[0.5, 5.0, 50.0]], requires_grad=True)
    for capture in ("eager", "auto"):
        with fxgrad.watch(model, capture=capture, forward=True) as watch:  # type: ignore[arg-type]
            for limit in (1.0, 1.0, 10.0, 10.0, 100.0):
                model.limit = model.act.max_val = limit
                model(x).sum().backward()
                for site in watch.flow():
                    if site.activity is not None:
                        want = tuple(n for n, value in enumerate((0.5, 5.0, 50.0)) if value >= limit)
                        assert site.activity.never == want, (capture, limit, site.id)


# ---- units -----------------------------------------------------------------------------------------------------------


class Then(nn.Module):
    """Modules and functions one after the other."""

    def __init__(self, *steps: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.steps = nn.ModuleList([step for step in steps if isinstance(step, nn.Module)])
        self.order = steps

    def forward(self, x: Tensor) -> Tensor:
        for step in self.order:
            x = step(x)
        return x


class ResidualOfConvs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(3, 5, 1), nn.Conv1d(3, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.one(x) + 0.5 * self.two(x))


UNITS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "linear": (lambda: Then(nn.Linear(4, 6), torch.relu), (2, 4), 1, 6),
    "linear_3d": (lambda: Then(nn.Linear(4, 6), torch.relu), (2, 3, 4), 2, 6),
    "linear_5d": (lambda: Then(nn.Linear(4, 6), nn.LayerNorm(6), F.gelu), (2, 3, 2, 2, 4), 4, 6),
    "linear_1d": (lambda: Then(nn.Linear(4, 6), torch.relu), (4,), 0, 6),
    "matmul": (lambda: Then(lambda x: x @ torch.ones(4, 6), torch.relu), (2, 3, 4), 2, 6),
    "conv1d": (lambda: Then(nn.Conv1d(4, 6, 2), torch.relu), (2, 4, 9), 1, 6),
    "conv1d_unbatched": (lambda: Then(nn.Conv1d(4, 6, 2), torch.relu), (4, 9), 0, 6),
    "conv2d": (lambda: Then(nn.Conv2d(4, 6, 2), nn.BatchNorm2d(6), nn.ReLU(inplace=True)), (2, 4, 5, 5), 1, 6),
    "conv2d_unbatched": (lambda: Then(nn.Conv2d(4, 6, 2), nn.ReLU()), (4, 5, 5), 0, 6),
    "conv3d": (lambda: Then(nn.Conv3d(2, 6, 2), nn.Dropout3d(), nn.ReLU()), (2, 2, 3, 3, 3), 1, 6),
    "conv_transpose": (lambda: Then(nn.ConvTranspose1d(4, 6, 2), torch.tanh), (2, 4, 5), 1, 6),
    "functional_conv": (lambda: Then(lambda x: F.conv1d(x, torch.ones(6, 4, 2)), torch.relu), (2, 4, 5), 1, 6),
    "conv_pool": (lambda: Then(nn.Conv1d(4, 6, 2), nn.MaxPool1d(2), lambda x: x * 2, torch.relu), (2, 4, 9), 1, 6),
    "batch_norm_1d": (lambda: Then(nn.BatchNorm1d(4), torch.relu), (3, 4, 5), 1, 4),
    "group_norm": (lambda: Then(nn.GroupNorm(2, 4), torch.relu), (3, 4, 5), 1, 4),
    "batch_norm_of_rows": (lambda: Then(nn.BatchNorm1d(4), torch.relu), (3, 4), 1, 4),
    "permuted": (lambda: Then(nn.Conv1d(4, 6, 1), lambda x: x.transpose(1, 2), torch.relu), (2, 4, 5), 2, 6),
    "unknown_4d": (lambda: Then(lambda x: x * 2, torch.relu), (2, 4, 5, 5), 1, 4),
    "unknown_3d": (lambda: Then(lambda x: x * 2, torch.relu), (2, 4, 5), 2, 5),
    "flattened": (lambda: Then(nn.Conv1d(4, 6, 1), nn.Flatten(), torch.relu), (2, 4, 5), 1, 30),
    "embedding": (lambda: Then(nn.Embedding(9, 6), torch.relu), (2, 5), 2, 6),
    "chunk": (lambda: Then(nn.Conv1d(4, 6, 1), lambda x: x.chunk(2, dim=1)[0], torch.sigmoid), (2, 4, 5), 1, 3),
    "residual": (ResidualOfConvs, (2, 3, 5), 1, 5),
    "behind_another": (lambda: Then(nn.Conv1d(4, 6, 1), F.leaky_relu, torch.relu), (2, 4, 5), 1, 6),
}


@pytest.mark.parametrize("capture", ["eager", "auto"])
@pytest.mark.parametrize("name", UNITS)
def test_units_lie_along_the_dimension_that_made_them(name: str, capture: Any) -> None:
    make, shape, axis, units = UNITS[name]
    torch.manual_seed(0)
    model = make()
    x = torch.randint(9, shape) if name == "embedding" else torch.randn(shape, requires_grad=True)
    with fxgrad.watch(model, capture=capture, forward=True) as watch:
        for _ in range(3):
            out = model(x)
            out.sum().backward()
        (activity,) = (site.activity for site in watch.flow() if site.activity is not None)
    assert (activity.axis, activity.units, activity.samples) == (axis, units, out.numel() // units)


def test_never_and_active_are_counted_over_all_other_dimensions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    with torch.no_grad():
        model[0].bias[[1, 4]] = -100.0
    x = torch.randn(2, 3, 7, 7)
    active = model(x) > 0
    activity = activity_of(model, x, "auto", steps=3)
    assert activity is not None
    assert activity.never == tuple((~active.any(dim=3).any(dim=2).any(dim=0)).nonzero().flatten().tolist())
    assert activity.active == active.sum()
    assert activity.samples == 2 * 5 * 5


def test_an_empty_batch_proves_nothing() -> None:
    activity = activity_of(Act(torch.relu), torch.zeros(0, 3))
    assert activity is not None
    assert (activity.samples, activity.never, activity.active) == (0, (), 0)


def test_the_axis_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxgrad.engine import forward_values as forward

    found: list[int] = []
    original = forward.gate_of

    def counting(calls: Any, number: int) -> Any:
        found.append(number)
        return original(calls, number)

    monkeypatch.setattr(forward, "gate_of", counting)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    for call in (model, fxgrad.instrument(model, forward=True)):
        found.clear()
        with fxgrad.watch(model, forward=True) if call is model else nullcontext():
            for _ in range(4):
                call(torch.ones(1, 3)).sum().backward()
        assert sorted(found) == [0, 1, 2]
