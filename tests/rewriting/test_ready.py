"""Every ready rule at parameters, layers, groups and edges, against the same written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad import rules
from fxgrad.rules import edges, groups, layers, nodes, parameters
from tests.rewriting.nets import Three, grads, make

By = Callable[[list[Tensor]], list[Tensor]]


def each(function: Callable[[Tensor], Tensor]) -> By:
    return lambda gradients: [function(g) for g in gradients]


def jointly(function: Callable[[Tensor], Tensor]) -> By:
    """Of all entries together."""

    def work(gradients: list[Tensor]) -> list[Tensor]:
        made = function(torch.cat([g.flatten() for g in gradients]))
        return [
            part.reshape(g.shape) for part, g in zip(made.split([g.numel() for g in gradients]), gradients, strict=True)
        ]

    return work


def fill(whole: Tensor) -> Tensor:
    return torch.where(whole == 0, 0.5 if bool(whole.any()) else 1.0, whole)


READY: dict[str, tuple[Callable[[Any], rules.Rule], By]] = {
    "scale": (lambda at: rules.scale(-2.0, at), each(lambda g: g * -2)),
    "clip_by_value": (lambda at: rules.clip_by_value(0.1, at), each(lambda g: g.clip(-0.1, 0.1))),
    "clip_by_norm": (lambda at: rules.clip_by_norm(0.1, at), jointly(lambda g: g * min(1.0, 0.1 / float(g.norm())))),
    "unit_norm": (lambda at: rules.unit_norm(at), jointly(lambda g: g / g.norm())),  # noqa: PLW0108
    "replace_zeros": (lambda at: rules.replace_zeros(7.0, at), each(lambda g: g + 7.0 * (g == 0))),
    "replace_nonfinite": (
        lambda at: rules.replace_nonfinite(at, posinf=2.0), each(lambda g: torch.nan_to_num(g, posinf=2.0, neginf=0.0)),
    ),
    "zero_out": (lambda at: rules.zero_out(at), each(torch.zeros_like)),  # noqa: PLW0108
    "sign": (lambda at: rules.sign(at), each(lambda g: (g > 0).float() - (g < 0).float())),  # noqa: PLW0108
    "guided_relu": (lambda at: rules.guided_relu(at), each(F.relu)),  # noqa: PLW0108
    "where": (lambda at: rules.where(lambda g: g > 0, None, lambda g: -3 * g, at),
              each(lambda g: g.relu() + 3 * (-g).relu())),
    "custom": (lambda at: rules.custom(torch.tanh, at), each(torch.tanh)),
    "custom_layer": (lambda at: rules.custom_layer(lambda d: {n: g + 1 for n, g in d.items()}, at),
                     each(lambda g: g + 1)),
    "fill_zero": (lambda at: rules.fill_zero(where=at), jointly(fill)),
}  # fmt: skip
PLACES: dict[str, tuple[Any, bool]] = {  # and whether a rule sees weight and bias together
    "parameters": (parameters("fc2.*"), False),
    "parameters, backward": (parameters("fc2.*", per="backward"), False),
    "arrival": (parameters("fc2.*", per="arrival"), False),
    "layers": (layers(path="fc2"), True),
    "layers, backward": (layers(path="fc2", per="backward"), True),
    "groups": (groups("fc2"), True),
}


@pytest.mark.parametrize("name", READY)
@pytest.mark.parametrize("place", PLACES)
def test_ready_rules_at_parameters(name: str, place: str) -> None:
    model, x = make(Three, 3), torch.randn(4, 1)
    found = grads(model, x)
    weight, bias = found["fc2.weight"], found["fc2.bias"]
    assert (weight == 0).any() and weight.any()
    (make_rule, by_hand), (where, together) = READY[name], PLACES[place]
    want = by_hand([weight, bias]) if together else [by_hand([g])[0] for g in (weight, bias)]
    with fxgrad.rewrite(model, make_rule(where)) as rewrite:
        grads(model, x)
        rewrite.apply()
    torch.testing.assert_close([model.fc2.weight.grad, model.fc2.bias.grad], want)
    assert torch.equal(model.fc3.weight.grad, found["fc3.weight"])


@pytest.mark.parametrize("name", READY)
def test_ready_rules_at_edges(name: str) -> None:
    """With one linear layer before the edge, its bias gets the sum of what the rule made."""
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), torch.randn(4, 2)
    parts: list[Tensor] = []
    make_rule, by_hand = READY[name]
    look = rules.custom(parts.append, edges("0", "1"))  # type: ignore[arg-type]
    with fxgrad.rewrite(model, [look, make_rule(edges("0", "1"))]):
        found = grads(model, x, lambda out: (out[:3] * torch.tensor([1.0, -2.0, 0.0])).sum())
    torch.testing.assert_close(found["0.bias"], by_hand([parts[0]])[0].sum(0))


@pytest.mark.parametrize("name", READY)
@pytest.mark.parametrize("audit", ["count", "full"])
def test_ready_rules_on_a_device_that_has_no_numbers(name: str, audit: Any) -> None:
    """Nothing is read by the host, and nothing is made on another device than the gradient's."""
    model = make(Three).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_rule, _ = READY[name]
    made = [
        make_rule(where)
        for where in (nodes(op="relu"), layers(), parameters(per="arrival"), groups("", per="backward"))
    ]
    with fxgrad.rewrite(model, made, audit=audit):
        model(torch.ones(4, 1, device="meta")).sum().backward()
        optimizer.step()
    assert all(p.grad.is_meta and p.grad.shape == p.shape for p in model.parameters())
