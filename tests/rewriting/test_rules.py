"""What each ready rule makes of a gradient, and what it costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxgrad
from fxgrad import rules
from fxgrad.errors import RuleError
from fxgrad.rules import layers, nodes, parameters
from tests.rewriting.nets import Three, batch, grads, make

NAN, INF = float("nan"), float("inf")
AT = nodes("/mul")


class Times(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


def through(rule: rules.Rule, gradient: Tensor) -> Tensor:
    """What comes out of a rule that gets this gradient."""
    x = torch.zeros_like(gradient, requires_grad=True)
    with fxgrad.rewrite(Times(), rule) as rewrite:
        rewrite._model(x).backward(gradient)
    return x.grad


GIVEN = torch.tensor([-4.0, -0.5, 0.0, 0.25, 3.0])
VALUES: dict[str, tuple[rules.Rule, list[float]]] = {
    "scale": (rules.scale(-2.0, AT), [8.0, 1.0, -0.0, -0.5, -6.0]),
    "clip_by_value": (rules.clip_by_value(1.0, AT), [-1.0, -0.5, 0.0, 0.25, 1.0]),
    "replace_zeros": (rules.replace_zeros(7.0, AT), [-4.0, -0.5, 7.0, 0.25, 3.0]),
    "zero_out": (rules.zero_out(AT), [0.0] * 5),
    "sign": (rules.sign(AT), [-1.0, -1.0, 0.0, 1.0, 1.0]),
    "guided": (rules.guided_relu(AT), [0.0, 0.0, 0.0, 0.25, 3.0]),
    "where": (rules.where(lambda g: g > 0, lambda g: g * 10, -1.0, AT), [-1.0, -1.0, -1.0, 2.5, 30.0]),
    "where, itself": (rules.where(lambda g: g > 0, None, 0.0, AT), [0.0, 0.0, 0.0, 0.25, 3.0]),
    "fill_zero": (rules.fill_zero(1.0, 0.5, AT), [-4.0, -0.5, 0.5, 0.25, 3.0]),
    "custom": (rules.custom(lambda g: g.square(), AT), [16.0, 0.25, 0.0, 0.0625, 9.0]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    rule, want = VALUES[name]
    assert torch.equal(through(rule, GIVEN), torch.tensor(want))


def test_norms() -> None:
    assert torch.allclose(through(rules.clip_by_norm(1.0, AT), GIVEN), GIVEN / GIVEN.norm())
    assert torch.equal(through(rules.clip_by_norm(9.0, AT), GIVEN), GIVEN)
    assert torch.allclose(through(rules.unit_norm(AT), GIVEN), GIVEN / GIVEN.norm())
    assert torch.equal(through(rules.unit_norm(AT, eps=9.0), GIVEN), GIVEN)
    assert torch.equal(through(rules.unit_norm(AT), torch.zeros(3)), torch.zeros(3))
    assert torch.equal(through(rules.clip_by_norm(1.0, AT), torch.zeros(3)), torch.zeros(3))


def test_bad_entries() -> None:
    given = torch.tensor([NAN, INF, -INF, 2.0])
    assert through(rules.replace_nonfinite(AT), given).tolist() == [0.0, 0.0, 0.0, 2.0]
    rule = rules.replace_nonfinite(AT, nan=1.0, posinf=5.0, neginf=-5.0)
    assert through(rule, given).tolist() == [1.0, 5.0, -5.0, 2.0]
    assert through(rules.zero_out(AT), given).tolist() == [0.0] * 4


def test_noise_has_a_stream_of_its_own() -> None:
    state = torch.get_rng_state()
    rule = rules.add_noise(0.5, AT, seed=3)
    one, two = through(rule, GIVEN), through(rule, GIVEN)
    assert torch.equal(one, two)  # two rewrites
    assert not torch.equal(one, through(rules.add_noise(0.5, AT, seed=4), GIVEN))
    assert torch.equal(state, torch.get_rng_state())
    noise = through(rules.add_noise(0.5, AT), torch.zeros(100_000))
    assert float(noise.std()) == pytest.approx(0.5, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.01)


def test_noise_differs_between_places_and_runs_and_follows_its_schedule() -> None:
    model, (x, _) = make(Three), batch(make(Three))
    rule = rules.add_noise(1.0, parameters("*bias"), schedule=lambda step: 0.0 if step == 1 else 1.0)
    seen = []
    with fxgrad.rewrite(model, rule) as rewrite:
        for step in range(3):
            plain = grads(model, x)
            rewrite.step = step
            rewrite.apply()
            seen.append([p.grad - plain[n] for n, p in model.named_parameters() if "bias" in n])
    first, second, third = seen
    assert all(not noise.any() for noise in second)
    assert not torch.allclose(first[2], third[2])
    assert not torch.allclose(first[0][:1], first[1][:1])


def test_freeze_stops_a_branch() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(2, 2)
            self.left = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
            self.right = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            return (self.left(h) + self.right(h)).square().sum()

    model, x = make(Branches), torch.randn(3, 2)
    plain = grads(model, x)
    with fxgrad.rewrite(model, rules.freeze("left")):
        found = grads(model, x)
    assert all(not found[name].any() for name in found if name.startswith("left"))
    assert torch.equal(found["right.weight"], plain["right.weight"])
    assert not torch.allclose(found["stem.weight"], plain["stem.weight"])


# ---- activations -----------------------------------------------------------------------------------------------------


class Steps(nn.Module):
    """Step functions in all spellings; what goes into one of them is used elsewhere as well."""

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        a = torch.sign(h) + 3 * h
        b = torch.round(a).floor()
        c = b * 1.0
        c.sign_()
        return c * 5


@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_straight_through(capture: Any) -> None:
    model, x = Steps(), torch.randn(4, requires_grad=True)
    with fxgrad.rewrite(model, rules.straight_through(), capture=capture) as rewrite:
        for _ in range(3):
            x.grad = None
            model(x).sum().backward()
            assert torch.equal(x.grad, torch.full((4,), 5.0 * (1 + 3) * 2))
    records = rewrite.report().records
    assert [record.place for record in records] == ["/sign", "/round", "/floor", "/sign_"]
    assert all(record.ran == 3 for record in records)
    x.grad = None
    model(x).sum().backward()
    assert not x.grad.any()


def test_straight_through_under_a_condition_and_behind_another_rule() -> None:
    class Sign(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sign(x)

    model, x = Sign(), torch.randn(4, requires_grad=True)
    when = rules.given(lambda g: torch.tensor([True, True, False, False]))
    with fxgrad.rewrite(model, [rules.scale(3.0, nodes(op="sign")), rules.straight_through(when=when)]):
        model(x).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x[0] * x[1], "it has 2"),
        (lambda x: x.sum(0), r"returned shape \(3,\)"),
        (lambda x: F.softmin(x, 0), "'/softmin': it is several autograd operations"),
        (lambda x: (x * 1).view_as(x).sign_(), "'/sign_': it returned or changed a view"),
    ],
)
def test_straight_through_refuses_what_is_no_step(function: Any, words: str) -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    rule = rules.straight_through(nodes(op=("mul", "sum", "softmin", "sign_"), optional=True))
    with fxgrad.rewrite(Other(), rule) as rewrite, pytest.raises(RuleError, match=words):
        rewrite._model(torch.randn(2, 3, requires_grad=True)).sum().backward()


def test_straight_through_at_a_call_that_returns_its_argument_does_nothing() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.identity = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.identity(x.exp())

    model, x = Same(), torch.ones(2, requires_grad=True)
    with fxgrad.rewrite(model, rules.straight_through(nodes("identity"))):
        model(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2).exp())


@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_guided_relu_finds_every_relu(capture: Any) -> None:
    class Relus(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act, self.act_ = nn.Linear(3, 3), nn.ReLU(), nn.ReLU(inplace=True)
            self.other = nn.ReLU6()

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(self.fc(x))
            x = F.relu(self.fc(x))
            x = torch.relu(self.fc(x)).relu()
            x = self.act_(self.fc(x))
            x = self.fc(x).relu_()
            x = F.relu(self.fc(x), inplace=True)
            return self.other(F.leaky_relu(x))

    model = make(Relus)
    with fxgrad.rewrite(model, rules.guided_relu(), capture=capture) as rewrite:
        model(torch.randn(2, 3)).sum().backward()
    places = [record.place for record in rewrite.report().records]
    assert places == ["act", "/relu", "/relu#1", "/relu#2", "act_", "/relu_", "/relu#3"]


# ---- what it costs ---------------------------------------------------------------------------------------------------


class Kernels(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


def kernels(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> Counter[str]:
    """What a backward pass and a step compute."""
    optimizer.zero_grad()
    out = model(x).sum()
    with Kernels() as seen:
        out.backward()
        optimizer.step()
    return seen.count


CHEAP = {
    "scale": lambda where: rules.scale(0.5, where),
    "clip_by_value": lambda where: rules.clip_by_value(1.0, where),
    "replace_nonfinite": rules.replace_nonfinite,
    "zero_out": rules.zero_out,
    "sign": rules.sign,
    "guided_relu": rules.guided_relu,
    "custom": lambda where: rules.custom(lambda g: g * 2, where),
}


@pytest.mark.parametrize("name", CHEAP)
@pytest.mark.parametrize(
    "where", [nodes("fc*"), parameters(), parameters(per="arrival"), layers(), layers(per="backward")],
    ids=["nodes", "parameters", "arrival", "layers", "backward"],
)  # fmt: skip
def test_a_rule_without_condition_is_one_kernel_per_gradient(name: str, where: Any) -> None:
    model, x = make(Three), torch.randn(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain = kernels(model, x, optimizer)
    with fxgrad.rewrite(model, CHEAP[name](where)):
        for _ in range(3):
            found = kernels(model, x, optimizer)
    extra = found - plain
    extra.pop("detach.default", None)  # no kernel
    assert not plain - found
    assert sum(extra.values()) == (3 if where == nodes("fc*") else 6), extra


def test_rules_that_take_two_kernels_and_which() -> None:
    """The mask of ``replace_zeros`` and the noise of ``add_noise`` have to be made first; then one kernel uses them."""
    model, x = make(Three), torch.randn(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain = kernels(model, x, optimizer)
    made = {
        rules.replace_zeros(1.0, nodes("fc*")): {"eq.Scalar": 3, "where.self": 3},
        rules.add_noise(1.0, nodes("fc*")): {"randn.generator": 3, "add.Tensor": 3},
    }
    for rule, want in made.items():
        with fxgrad.rewrite(model, rule):
            for _ in range(3):
                found = kernels(model, x, optimizer)
        extra = found - plain
        extra.pop("scalar_tensor.default", None)  # the number itself, no kernel over the gradient
        assert extra == want


SYNCS = {"_local_scalar_dense.default", "is_nonzero.default", "nonzero.default", "equal.default"}
ALL = {
    "clip_by_norm": lambda where: rules.clip_by_norm(1.0, where),
    "unit_norm": rules.unit_norm,
    "replace_zeros": lambda where: rules.replace_zeros(1.0, where),
    "add_noise": lambda where: rules.add_noise(1.0, where),
    "fill_zero": lambda where: rules.fill_zero(where=where),
    "where": lambda where: rules.where(lambda g: g > 0, None, 0.0, where),
    "given": lambda where: rules.scale(2.0, where, rules.given(lambda g: torch.stack(
        [v.norm() for v in (g.values() if isinstance(g, dict) else [g])]).sum() > 0)),
    **CHEAP,
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("where", [nodes("fc*"), layers(), layers(per="backward")], ids=["nodes", "layers", "backward"])
@pytest.mark.parametrize("audit", ["count", "full"])
def test_nothing_waits_for_the_device(name: str, where: Any, audit: Any) -> None:
    model, x = make(Three), torch.randn(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with fxgrad.rewrite(model, ALL[name](where), audit=audit):
        for _ in range(3):
            found = kernels(model, x, optimizer)
    assert not SYNCS & found.keys()


def test_nothing_is_computed_where_no_rule_acts() -> None:
    model, x = make(Three), torch.randn(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain = kernels(model, x, optimizer)
    with fxgrad.rewrite(model, rules.scale(2.0, nodes("fc1"), rules.steps(100))):
        assert kernels(model, x, optimizer) == plain
