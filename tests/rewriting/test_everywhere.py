"""What holds for rules wherever they act: at nodes, edges, parameters, layers and groups, at each of their moments."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad import rules
from fxgrad.errors import RuleError
from fxgrad.rules import edges, groups, layers, nodes, parameters
from tests.rewriting.nets import Shared, Three, fill_by_hand, make, same, train
from tests.rewriting.test_contract import BAD

WHERE: dict[str, Any] = {
    "nodes": nodes(),
    "edges": edges(),
    "parameters": parameters(),
    "parameters, backward": parameters(per="backward"),
    "arrival": parameters(per="arrival"),
    "layers": layers(),
    "layers, backward": layers(per="backward"),
    "groups": groups(""),
    "groups, backward": groups("", per="backward"),
}


@pytest.mark.parametrize("place", WHERE)
@pytest.mark.parametrize("function", [lambda g: g, lambda _: None], ids=["identity", "none"])
@pytest.mark.parametrize("kind", [Three, Shared])
def test_identity_and_none_leave_training_as_it_is(place: str, function: Any, kind: type[nn.Module]) -> None:
    model, plain = make(kind), train(make(kind), 4)
    with fxgrad.rewrite(model, rules.custom(function, WHERE[place]), audit="full") as rewrite:
        assert same(train(model, 4), plain)
    records = rewrite.report().records
    assert sum(record.ran for record in records) >= 4
    assert {record.changed for record in records} == {0}


@pytest.mark.parametrize("place", WHERE)
def test_training_after_the_rule_is_gone_is_what_it_was(place: str) -> None:
    model, other = make(Three), make(Three)
    with fxgrad.rewrite(model, rules.custom(lambda g: g + 0.5, WHERE[place])):
        assert not same(train(model, 2), train(make(Three), 2))
    other.load_state_dict(model.state_dict())
    assert same(train(model, 3), train(other, 3))
    assert all(not p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize("place", WHERE)
def test_two_handles_are_one_with_both_rules(place: str) -> None:
    add, times = rules.custom(lambda g: g + 0.5, WHERE[place]), rules.clip_by_value(0.1, WHERE[place])
    one, two, turned = make(Three), make(Three), make(Three)
    with fxgrad.rewrite(one, [add, times]):
        want = train(one, 3)
    with fxgrad.rewrite(two, add), fxgrad.rewrite(two, times):
        assert same(train(two, 3), want)
    with fxgrad.rewrite(turned, times), fxgrad.rewrite(turned, add):
        assert not same(train(turned, 3), want)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("place", WHERE)
def test_what_is_refused_is_refused_everywhere(kind: str, place: str) -> None:
    model = make(Three)
    rule = rules.custom(BAD[kind][0], WHERE[place], name="mine")
    with fxgrad.rewrite(model, rule), pytest.raises(RuleError, match=r"rule 'mine' .*fc"):
        train(model, 1)


def test_an_edge_rule_that_raises_says_what_is_rewritten_already() -> None:
    model = make(Three)

    def fails(_: Tensor) -> Tensor:
        raise ValueError("no")  # noqa: EM101

    made = [rules.scale(2.0, edges("/relu#1", "fc3")), rules.custom(fails, edges("/relu", "fc2"))]
    words = (
        r"'fails' raised ValueError at '/relu -> fc2 args\[0\]': no.*half of it rewritten: at /relu#1 -> fc3 args\[0\]"
    )
    with fxgrad.rewrite(model, made), pytest.raises(RuleError, match=words):
        train(model, 1)


def test_a_rule_that_raises_as_a_gradient_arrives_says_what_is_rewritten_already() -> None:
    def fails(_: Tensor) -> Tensor:
        raise ValueError("no")  # noqa: EM101

    made = [
        rules.scale(2.0, parameters("fc3.*", per="arrival")),
        rules.custom(fails, parameters("fc2.bias", per="arrival")),
    ]
    model = make(Three)
    for first, words in ((made, r"no.*stops here; .* changed: fc3\.(bias, fc3\.weight|weight, fc3\.bias)$"),
                         (made[1:], "changed: nothing else$")):  # fmt: skip
        with fxgrad.rewrite(model, first), pytest.raises(RuleError, match=words):
            train(model, 1)


def test_an_error_of_one_rewrite_does_not_speak_for_another() -> None:
    def fails(_: Tensor) -> Tensor:
        raise ValueError("no")  # noqa: EM101

    model = make(Three)
    with (
        fxgrad.rewrite(model, rules.scale(2.0, parameters())),
        fxgrad.rewrite(model, rules.custom(fails, parameters("fc1.bias"))),
        pytest.raises(RuleError, match=r"No gradient of a parameter was changed by this rewrite\."),
    ):
        train(model, 1)


@pytest.mark.parametrize("place", WHERE)
def test_from_and_until_a_step_and_under_a_condition(place: str) -> None:
    one, other = make(Three), make(Three)
    never = rules.given(
        lambda g: torch.stack([v.norm() for v in (g.values() if isinstance(g, dict) else [g])]).sum() < 0
    )
    with (
        fxgrad.rewrite(one, rules.scale(0.3, WHERE[place], never)),
        fxgrad.rewrite(one, rules.scale(0.3, WHERE[place], rules.steps(3))) as later,
    ):
        assert same(train(one, 3), train(other, 3))
        assert {record.ran for record in later.report().records} == {0}
        train(one, 1)
    assert sum(record.ran for record in later.report().records) > 0


@pytest.mark.parametrize(
    ("where", "names"),
    [
        (parameters(re.compile(r"fc[12]\.bias")), ["fc1.bias", "fc2.bias"]),
        (parameters("*.bias"), ["fc1.bias", "fc2.bias", "fc3.bias"]),
        (parameters(module_type=nn.Linear, path="fc3.*"), ["fc3.weight", "fc3.bias"]),
        (
            parameters(module_type="Linear", predicate=lambda _, p: p.ndim == 2),
            ["fc1.weight", "fc2.weight", "fc3.weight"],
        ),
        (parameters(dtype=torch.float64), ["fc2.weight", "fc2.bias"]),
        (layers(path=re.compile("fc[13]")), ["fc1", "fc3"]),
        (layers("Linear", predicate=lambda m: m.weight.dtype is torch.float64), ["fc2"]),
        (groups(re.compile("fc.")), ["fc1", "fc2", "fc3"]),
    ],
)
def test_selections_of_parameters(where: Any, names: list[str]) -> None:
    model = make(Three)
    model.fc2.double()
    with fxgrad.rewrite(model, rules.scale(2.0, where)) as rewrite:
        pass
    assert [record.place for record in rewrite.report().records] == names


# ---- together with everything around a step --------------------------------------------------------------------------


class Blocks(nn.Module):
    """A checkpointed block between two layers."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(1, 2), nn.Linear(2, 3), nn.Linear(3, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda v: F.relu(self.fc2(v)), F.relu(self.fc1(x)), use_reentrant=self.reentrant)
        return self.fc3(h)


def amp(model: nn.Module, *, hand: bool, steps: int = 4, micro: int = 2) -> list[list[Tensor]]:
    """Loss scaling, autocast, accumulation and two optimizers in one loop."""
    torch.manual_seed(2)
    first = [*model.fc1.parameters(), *model.fc2.parameters()]
    optimizers = [torch.optim.Adam(first, lr=0.05), torch.optim.SGD(model.fc3.parameters(), lr=0.05, momentum=0.9)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    seen = []
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(micro):
            x = torch.randn(4, 1)
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x).float()
            loss = F.mse_loss(out, 2 * x) * (float("inf") if step == 1 else 1.0)  # the scaler skips that step
            scaler.scale(loss).backward()
        if hand:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            fill_by_hand(model)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_checkpointing_loss_scale_accumulation_and_a_watch_at_once(reentrant: bool, capture: Any) -> None:
    torch.manual_seed(3)
    model, other = Blocks(reentrant=reentrant), Blocks(reentrant=reentrant)
    other.load_state_dict(model.state_dict())
    want = amp(other, hand=True)
    made = [rules.custom(lambda g: g, nodes()), rules.custom(lambda g: g, edges(optional=True)), rules.fill_zero()]
    options: Any = {"capture": capture}
    with fxgrad.rewrite(model, made, audit="full", **options), fxgrad.watch(model, sites="edge", **options) as watch:
        assert same(amp(model, hand=False), want)
        last = watch.flow()
    told = {record.name: record.rewritten for record in last.parameters}
    assert all(one.reason is None and one.after.l2_norm > 0 for one in told.values())


def halves(*, by_hand: bool, told: bool) -> list[Tensor]:
    """A layer whose weight and bias are in two optimizers, under a loss scale."""
    model = make(Three, 3)
    optimizers = [torch.optim.SGD([p for p in model.parameters() if p.ndim == dims], lr=0.05) for dims in (2, 1)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    torch.manual_seed(1)
    rewrite = None if by_hand else fxgrad.rewrite(model, rules.fill_zero())
    for _ in range(3):
        model.zero_grad()
        scaler.scale(model(torch.randn(4, 1)).sum()).backward()
        if told:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            if rewrite is None:
                fill_by_hand(model)
            else:
                rewrite.apply()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    if rewrite is not None:
        rewrite.remove()
    return [p.detach().clone() for p in model.parameters()]


def test_a_layer_in_two_optimizers_under_a_loss_scale_is_right_with_apply_and_told_without() -> None:
    assert same([halves(by_hand=False, told=True)], [halves(by_hand=True, told=True)])
    with pytest.warns(UserWarning, match=r"a layer is in several optimizers under a loss scale, .*and then apply\(\)"):
        halves(by_hand=False, told=False)
