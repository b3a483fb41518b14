"""What the gradients are, found the slow and naive way, to judge fxgrad by.

Shares nothing with the mechanism under test: no fxgrad, no hooks, no modes, no traced graph.  A *twin* of a model is
a function ``twin(model, at, *args, **kwargs)`` that computes the same thing from the same parameters, but fully out
of place, and passes each value through ``at(site, value)`` under the name fxgrad should give it.  The oracle runs the
twin once per site with a zero leaf added there, and asks autograd for the gradient with respect to that leaf.
Comparing whole runs bit for bit lives in ``tests/runs.py``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.runs import fresh, plain_run, tensors_in

Twin = Callable[..., Any]
Loss = Callable[[Any], Tensor]
Gradients = dict[str, Tensor | None]
Norm = Literal["l2_norm", "rms", "max_abs"]


class At:
    """What a twin calls with each value.  This plain one only notes the names, in order.

    Attributes:
        values: the value at each site, as the twin passed it in.
        origin: for a site that returned the very tensor of an earlier site, the name of that one.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.origin: dict[str, str] = {}
        self._returned: list[tuple[Tensor, str]] = []  # holds the tensors, so that identity stays meaningful

    def __call__(self, site: str, value: Tensor) -> Tensor:
        """The value of ``site``, to be used by the twin instead of the one passed in."""
        assert site not in self.values, f"the twin names {site!r} twice"
        self.values[site] = value
        result = self._change(site, value)
        self._returned.append((result, site))
        return result

    def same(self, site: str, value: Tensor) -> Tensor:
        """``site`` returns the very tensor object ``value``: same value, same total gradient."""
        assert site not in self.values, f"the twin names {site!r} twice"
        self.values[site] = value
        self.origin[site] = next(name for tensor, name in reversed(self._returned) if tensor is value)
        return value

    def _change(self, site: str, value: Tensor) -> Tensor:
        del site
        return value


class ZeroLeafAt(At):
    """Adds a zero leaf to the value of one site."""

    def __init__(self, chosen: str) -> None:
        super().__init__()
        self.chosen = chosen
        self.leaf: Tensor | None = None

    def _change(self, site: str, value: Tensor) -> Tensor:
        if site != self.chosen or not value.requires_grad:
            return value  # where the plain model needs no gradient, there is none to report
        self.leaf = torch.zeros_like(value, requires_grad=True)
        return value + self.leaf


class ShiftAt(At):
    """Adds a constant to one entry of the value of one site, for finite differences."""

    def __init__(self, chosen: str, index: int, shift: complex) -> None:
        super().__init__()
        self.chosen, self.index, self.shift = chosen, index, shift

    def _change(self, site: str, value: Tensor) -> Tensor:
        if site != self.chosen:
            return value
        flat = torch.zeros(value.numel(), dtype=value.dtype)
        flat[self.index] = self.shift if value.is_complex() else self.shift.real
        return value + flat.view(value.shape)


class RetainAt(At):
    """Asks each value to keep its gradient: right here, because a twin changes nothing in place."""

    def _change(self, site: str, value: Tensor) -> Tensor:
        del site
        if value.requires_grad:
            value.retain_grad()
        return value


def run_twin(
    twin: Twin, model: nn.Module, at: At, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, seed: int
) -> tuple[nn.Module, Any]:
    """One run of the twin on copies of everything, so that no run leaves a trace in another."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    args, kwargs = fresh(args), fresh(dict(kwargs or {}))
    torch.manual_seed(seed)
    return model, twin(model, at, *args, **kwargs)


def site_gradients(
    twin: Twin,
    model: nn.Module,
    args: tuple[Any, ...],
    loss: Loss,
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Gradients:
    """dL/d(value) at every site of the twin, in forward order; None where the loss sends none there.

    Raises:
        AssertionError: the twin does not compute what the model computes.
    """
    assert_is_twin(twin, model, args, loss, kwargs, seed)
    names = At()
    run_twin(twin, model, names, args, kwargs, seed)
    found: Gradients = {}
    for site in names.values:
        if site in names.origin:
            found[site] = found[names.origin[site]]
            continue
        at = ZeroLeafAt(site)
        _, output = run_twin(twin, model, at, args, kwargs, seed)
        scalar = loss(output)
        if at.leaf is None or not scalar.requires_grad:
            found[site] = None
        else:
            (found[site],) = torch.autograd.grad(scalar, at.leaf, allow_unused=True)
    return found


def retained_gradients(
    twin: Twin,
    model: nn.Module,
    args: tuple[Any, ...],
    loss: Loss,
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Gradients:
    """The same by ``retain_grad`` in one backward: a second opinion, cheaper, and made another way."""
    at = RetainAt()
    _, output = run_twin(twin, model, at, args, kwargs, seed)
    loss(output).backward()
    return {site: value.grad if value.requires_grad else None for site, value in at.values.items()}


def finite_differences(
    twin: Twin,
    model: nn.Module,
    args: tuple[Any, ...],
    loss: Loss,
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    step: float = 1e-6,
) -> dict[str, Tensor]:
    """Central differences in float64, entry by entry, at every site: knows nothing of autograd.

    Only for small models whose every value reaches the loss by ordinary differentiable steps: a difference sees
    through ``detach``.  Complex entries give dL/d(real) + i dL/d(imaginary), which is torch's convention.
    """
    model, args, kwargs = as_double(model), as_double(args), as_double(dict(kwargs or {}))
    names = At()
    run_twin(twin, model, names, args, kwargs, seed)

    def loss_at(site: str, index: int, shift: complex) -> float:
        with torch.no_grad():
            _, output = run_twin(twin, model, ShiftAt(site, index, shift), args, kwargs, seed)
            return float(loss(output))

    found = {}
    for site, value in names.values.items():
        axes = (1.0, 1.0j) if value.is_complex() else (1.0 + 0j,)
        slopes = torch.zeros(value.numel(), dtype=value.dtype)
        for index in range(value.numel()):
            for axis in axes:
                rise = loss_at(site, index, axis * step) - loss_at(site, index, -axis * step)
                slope = rise / (2 * step) * axis
                slopes[index] += slope if value.is_complex() else slope.real
        found[site] = slopes.view(value.shape)
    return found


def as_double(value: Any) -> Any:
    """A copy with every floating tensor in float64 and every complex one in complex128."""
    if isinstance(value, nn.Module):
        model = copy.deepcopy(value)
        for module in model.modules():
            for store in (module._parameters, module._buffers):  # .double() drops imaginary parts
                for name, tensor in store.items():
                    wide = as_double(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    store[name] = nn.Parameter(wide, tensor.requires_grad) if is_parameter else wide
        return model
    if isinstance(value, Tensor):
        wide = {True: torch.complex128, False: torch.float64}[value.is_complex()]
        floating = value.is_floating_point() or value.is_complex()
        return value.detach().to(wide if floating else value.dtype).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: as_double(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(as_double(item) for item in value)
    return value


def param_gradients(
    model: nn.Module,
    args: tuple[Any, ...],
    loss: Loss,
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Gradients:
    """Gradients of the parameters by ``autograd.grad``: nothing is accumulated, and None says unused."""
    model, args, kwargs = copy.deepcopy(model), fresh(args), fresh(dict(kwargs or {}))
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(seed)
    found = torch.autograd.grad(loss(model(*args, **kwargs)), list(wanted.values()), allow_unused=True)
    given = dict(zip(wanted, found, strict=True))
    return {name: given.get(name) for name, _ in model.named_parameters()}


def assert_is_twin(
    twin: Twin,
    model: nn.Module,
    args: tuple[Any, ...],
    loss: Loss,
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> None:
    """Outputs and parameter gradients of the twin are the model's, or the oracle is worth nothing."""
    plain = plain_run(copy.deepcopy(model), args, kwargs, loss, seed)
    assert plain.error is None, f"the plain model raises: {plain.error}"
    copied, output = run_twin(twin, model, At(), args, kwargs, seed)
    loss(output).backward()
    theirs = [(place, tensor.detach()) for place, tensor in tensors_in(output)]
    assert [place for place, _ in theirs] == [place for place, _ in plain.outputs], "the twin returns another structure"
    for (place, mine), (_, twins) in zip(plain.outputs, theirs, strict=True):
        torch.testing.assert_close(twins, mine, rtol=1e-6, atol=1e-6, equal_nan=True, msg=f"output{place} differs")
    for name, parameter in copied.named_parameters():
        mine, twins = plain.gradients[name], parameter.grad
        assert (mine is None) == (twins is None), f"only one of model and twin has a gradient at {name}"
        if mine is not None and twins is not None:
            torch.testing.assert_close(twins, mine, rtol=1e-5, atol=1e-7, equal_nan=True)


def norm_of(gradient: Tensor, which: Norm = "l2_norm") -> float:
    """A norm of a gradient in float64, by modulus, written out so that it can be read."""
    moduli = gradient.detach().to_dense().to(torch.complex128).abs().flatten()
    if which == "max_abs":
        return float(moduli.max()) if moduli.numel() else 0.0
    l2_norm = math.sqrt(float((moduli * moduli).sum()))
    return l2_norm if which == "l2_norm" else l2_norm / math.sqrt(max(moduli.numel(), 1))


def norms(gradients: Gradients, which: Norm = "l2_norm") -> dict[str, float | None]:
    """``norm_of`` of every gradient; None stays None."""
    return {site: None if g is None else norm_of(g, which) for site, g in gradients.items()}


def compare(
    measured: Mapping[str, float | None],
    oracle: Gradients,
    which: Norm = "l2_norm",
    unmeasurable: Iterable[str] = (),
    rtol: float = 1e-4,
    atol: float = 1e-9,
) -> list[str]:
    """In how far measured norms differ from the oracle's; empty where they agree.

    Args:
        measured: norm per site, None where the tool saw no gradient.
        oracle: what ``site_gradients`` returned.
        which: the norm that ``measured`` holds.
        unmeasurable: sites where the tool may say that it cannot tell; it must then say None, never a wrong number.
        rtol, atol: relative and absolute tolerance of a norm.
    """
    unmeasurable = set(unmeasurable)
    differences = [f"{site}: missing" for site in oracle if site not in measured]
    differences += [f"{site}: not a site of the model" for site in measured if site not in oracle]
    for site, gradient in oracle.items():
        if site not in measured:
            continue
        got, want = measured[site], None if gradient is None else norm_of(gradient, which)
        if got is None and want is not None and site not in unmeasurable:
            differences.append(f"{site}: not measured, should be {want:.6g}")
        elif got is not None and want is None:
            differences.append(f"{site}: measured {got:.6g}, but no gradient arrives there")
        elif got is not None and want is not None and not _close(got, want, rtol, atol):
            differences.append(f"{site}: measured {got:.6g}, should be {want:.6g}")
    return differences


def _close(got: float, want: float, rtol: float, atol: float) -> bool:
    if math.isnan(got) or math.isnan(want) or math.isinf(got) or math.isinf(want):
        return got == want or (math.isnan(got) and math.isnan(want))
    return abs(got - want) <= atol + rtol * abs(want)
