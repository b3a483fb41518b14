"""The oracle agrees with three other ways to find a gradient, and goes red for every mistake it is there to catch."""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import models, oracle, runs

Measured = dict[str, float | None]


def gradients_of(id: str) -> oracle.Gradients:  # noqa: A002
    case = models.MODELS[id]
    assert case.twin is not None
    model, args, kwargs = case.build()
    return oracle.site_gradients(case.twin, model, args, case.loss, kwargs)


# ---- it is right --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", models.cases(models.TWINS))
def test_agrees_with_retained_gradients(case: models.Case) -> None:
    model, args, kwargs = case.build()
    found = oracle.site_gradients(case.twin, model, args, case.loss, kwargs)
    honest = oracle.norms(oracle.retained_gradients(case.twin, model, args, case.loss, kwargs))
    assert oracle.compare(honest, found) == []
    assert any(gradient is not None for gradient in found.values())


@pytest.mark.parametrize("id", ["mlp", "fan_out", "mul_inplace", "alias_iadd", "chunk", "spectral", "scalars"])
def test_agrees_with_finite_differences(id: str) -> None:  # noqa: A002
    case = models.MODELS[id]
    model, args, kwargs = (oracle.as_double(part) for part in case.build())
    for value in args:
        value.requires_grad_()  # a difference sees the input, so autograd has to look there as well
    found = oracle.site_gradients(case.twin, model, args, case.loss, kwargs)
    slopes = oracle.finite_differences(case.twin, model, args, case.loss, kwargs)
    assert set(found) == set(slopes)
    for site, slope in slopes.items():
        gradient = found[site] if found[site] is not None else torch.zeros_like(slope)
        torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-8, msg=f"{site} of {id}")


class Squared(nn.Module):
    """``(x W^T)^2``, whose gradients can be written down."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        self.fc.weight = nn.Parameter(torch.tensor([[2.0, -1.0], [0.5, 3.0]]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return h * h


def squared_twin(model: Any, at: oracle.At, x: Tensor) -> Tensor:
    h = at("fc", model.fc(at("x", x)))
    return at("square", h * h)


def test_agrees_with_closed_forms() -> None:
    model, x = Squared(), torch.tensor([[1.0, 2.0]], requires_grad=True)
    found = oracle.site_gradients(squared_twin, model, (x,), torch.sum)
    weight = model.fc.weight.detach()
    h = x.detach() @ weight.T
    torch.testing.assert_close(found["square"], torch.ones(1, 2))
    torch.testing.assert_close(found["fc"], 2 * h)
    torch.testing.assert_close(found["x"], 2 * h @ weight)
    assert oracle.norm_of(found["fc"]) == pytest.approx(math.sqrt(float((4 * h * h).sum())))
    assert oracle.norm_of(found["fc"], "rms") == pytest.approx(math.sqrt(float((4 * h * h).mean())))
    assert oracle.norm_of(found["fc"], "max_abs") == pytest.approx(13.0)


def test_parameter_gradients_are_those_of_backward() -> None:
    case = models.MODELS["frozen"]
    model, args, kwargs = case.build()
    found = oracle.param_gradients(model, args, case.loss, kwargs)
    plain = runs.plain_run(model, args, kwargs, case.loss)
    assert {n for n, g in found.items() if g is None} == {"frozen.weight", "frozen.bias"}
    for name, gradient in plain.gradients.items():
        assert runs.difference(found[name], gradient) == ""


def test_leaves_the_model_and_its_inputs_alone() -> None:
    case = models.MODELS["residual_cnn"]
    model, args, kwargs = case.build()
    before = copy.deepcopy(model.state_dict())
    oracle.site_gradients(case.twin, model, args, case.loss, kwargs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert args[0].grad is None


# ---- it cannot be fooled by itself --------------------------------------------------------------------------------


def test_shares_nothing_with_fxgrad() -> None:
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.split(".")[0] == "fxgrad" or "overrides" in name or "fx" in name]
    assert not [name for name in names if "hook" in name]


def test_refuses_a_twin_of_another_model() -> None:
    case = models.MODELS["mul_inplace"]
    model, args, _ = case.build()

    def other(model: Any, at: oracle.At, x: Tensor) -> Tensor:
        return at("head", model.head(torch.sin(at("a", model.a(x)) * 2.0)))

    with pytest.raises(AssertionError, match="output differs"):
        oracle.site_gradients(other, model, args, case.loss)


def test_refuses_a_twin_with_other_gradients() -> None:
    case = models.MODELS["detach"]
    model, args, _ = case.build()

    def attached(model: Any, at: oracle.At, x: Tensor) -> Tensor:
        h = at("/tanh", torch.tanh(model.fc(x)))
        return model.head(h) + h * 0.5

    with pytest.raises(AssertionError):
        oracle.site_gradients(attached, model, args, case.loss)


def test_refuses_a_name_used_twice() -> None:
    at = oracle.At()
    at("a", torch.ones(2))
    with pytest.raises(AssertionError, match="twice"):
        at("a", torch.ones(2))


# ---- ten and more seeded bugs, each red ---------------------------------------------------------------------------


def wrong_consumer(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """Only what one consumer (the sine) sends back."""
    model, (x,), _ = models.MODELS["fan_out"].build()
    h = model.fc(x)
    part = h.view_as(h)
    part.retain_grad()
    ((h + h) * torch.sin(part)).square().mean().backward()
    return {**measured, "fc": oracle.norm_of(part.grad)}


def missed_accumulation(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """``h + h`` counted as one use of ``h``."""
    model, (x,), _ = models.MODELS["fan_out"].build()
    h = model.fc(x)
    part = h.view_as(h)
    part.retain_grad()
    ((part + h.detach()) * torch.sin(part)).square().mean().backward()
    return {**measured, "fc": oracle.norm_of(part.grad)}


def stale_slot(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """Every site reports the numbers of the site before it."""
    names = list(measured)
    return dict(zip(names, [measured[names[-1]], *list(measured.values())[:-1]], strict=True))


def after_instead_of_before(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """``retain_grad`` across an in-place change: the gradient of the later value."""
    model, (x,), _ = models.MODELS["mul_inplace"].build()
    h = model.a(x)
    h.retain_grad()
    h.mul_(3.0)
    model.head(torch.sin(h)).square().mean().backward()
    return {**measured, "a": oracle.norm_of(h.grad)}


def before_instead_of_after(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """The in-place op gets the gradient of the value that it changed."""
    return {**measured, "/mul_": measured["a"]}


def doubled_on_recompute(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """Squares added up in the forward and again in the recomputation."""
    doubled = {site: norm * math.sqrt(2.0) for site, norm in measured.items() if "block" in site and norm is not None}
    return {**measured, **doubled}


def recompute_as_calls(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """The recomputation recorded as further calls."""
    return {**measured, **{f"{site}#1": norm for site, norm in measured.items() if "block" in site}}


def masked_relu(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """The gradient behind the ReLU's mask instead of in front of it."""
    return {**measured, "act": measured["fc1"]}


def detached_as_zero(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """A value that autograd never comes to, reported as measured and zero."""
    return {**measured, "/detach": 0.0}


def detached_as_attached(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """The gradient that would flow if nobody had detached."""
    model, (x,), _ = models.MODELS["detach"].build()
    h = torch.tanh(model.fc(x)).detach().requires_grad_()
    (model.head(h) + h.detach() * 0.5).square().mean().backward()
    return {**measured, "/detach": oracle.norm_of(h.grad)}


def swapped_outputs(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """The two outputs of ``chunk`` confused."""
    return {**measured, "/chunk[0]": measured["/chunk[1]"], "/chunk[1]": measured["/chunk[0]"]}


def first_output_only(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """Only element 0 of a nested output looked at."""
    return {site: norm for site, norm in measured.items() if site not in ("lstm[1][0]", "lstm[1][1]")}


def swapped_calls(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """Calls of a reused module numbered in backward order."""
    return {**measured, "act": measured["act#2"], "act#2": measured["act"]}


def last_call_wins(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """Every call of a reused module written into one slot."""
    return {site: measured["act#2"] if site.startswith("act") else norm for site, norm in measured.items()}


def rms_as_l2(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """The root mean square under the name of the norm."""
    return oracle.norms(gradients, "rms")


def missing_root(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """The sum of squares under the name of the norm."""
    return {site: None if norm is None else norm**2 for site, norm in measured.items()}


def real_part_only(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """A complex gradient's imaginary part thrown away."""
    return oracle.norms({site: g.real if g is not None and g.is_complex() else g for site, g in gradients.items()})


def half_precision(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """Squares taken in float16, where small ones are lost."""
    half = {site: None if g is None else g.half().square().sum().sqrt().float() for site, g in gradients.items()}
    return oracle.norms(half)


def added_over_steps(measured: Measured, gradients: oracle.Gradients) -> Measured:
    """Two backward events silently added up."""
    return {site: None if norm is None else 2 * norm for site, norm in measured.items()}


BUGS: list[tuple[Callable[[Measured, oracle.Gradients], Measured], str]] = [
    (wrong_consumer, "fan_out"),
    (missed_accumulation, "fan_out"),
    (stale_slot, "mlp"),
    (after_instead_of_before, "mul_inplace"),
    (before_instead_of_after, "mul_inplace"),
    (doubled_on_recompute, "checkpoint"),
    (recompute_as_calls, "checkpoint"),
    (masked_relu, "mlp"),
    (detached_as_zero, "detach"),
    (detached_as_attached, "detach"),
    (swapped_outputs, "chunk"),
    (first_output_only, "lstm"),
    (swapped_calls, "shared_relu"),
    (last_call_wins, "shared_relu"),
    (rms_as_l2, "residual_cnn"),
    (missing_root, "mlp"),
    (real_part_only, "spectral"),
    (half_precision, "shape_loop"),
    (added_over_steps, "alias_iadd"),
]


@pytest.mark.parametrize(("bug", "id"), [pytest.param(bug, name, id=bug.__name__) for bug, name in BUGS])
def test_seeded_bug_is_red(bug: Callable[[Measured, oracle.Gradients], Measured], id: str) -> None:  # noqa: A002
    gradients = gradients_of(id)
    honest = oracle.norms(gradients)
    assert oracle.compare(honest, gradients) == []
    assert oracle.compare(bug(dict(honest), gradients), gradients) != []


def test_untold_sites_may_be_silent_but_not_wrong() -> None:
    case = models.MODELS["view_inplace"]
    gradients = gradients_of(case.id)
    silent = {site: None if site in case.unmeasurable else norm for site, norm in oracle.norms(gradients).items()}
    assert oracle.compare(silent, gradients, unmeasurable=case.unmeasurable) == []
    assert oracle.compare(silent, gradients) != []
    assert oracle.compare({**silent, "/view": 1e3}, gradients, unmeasurable=case.unmeasurable) != []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_is_not_zero(value: float) -> None:
    gradients: oracle.Gradients = {"a": torch.tensor([1.0, value])}
    assert oracle.compare({"a": value}, gradients) == []
    assert oracle.compare({"a": 1.0}, gradients) != []
    assert oracle.compare({"a": 0.0}, gradients) != []
