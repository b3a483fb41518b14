"""Rules at parameters and layers: once per optimizer step, on what the optimizer would see."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations

import fxgrad
from fxgrad import rules
from fxgrad.rules import groups, layers, nodes, parameters
from tests.rewriting.nets import Cnn, Shared, Three, batch, fill_by_hand, grads, make, same, train

KINDS = (nn.Linear, nn.Conv2d)


# ---- fill_zero against a loop written by hand ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Three, Cnn, Shared])
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_fill_zero_equals_a_hand_loop_bit_for_bit(kind: type[nn.Module], micro: int, seed: int) -> None:
    def by_hand(model: nn.Module) -> None:
        fill_by_hand(model, kinds=KINDS)

    want = train(make(kind, seed), hand=by_hand, micro=micro)
    assert not same(want, train(make(kind, seed), micro=micro)) or kind is Cnn
    model = make(kind, seed)
    with fxgrad.rewrite(model, rules.fill_zero(all_zero=1.0, some_zero=0.5, where=layers(KINDS))) as rewrite:
        assert same(train(model, micro=micro), want)
    assert {record.ran for record in rewrite.report().records} == {10}


@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_beside_a_watch_and_node_rules(capture: Any) -> None:
    want = train(make(Three), hand=fill_by_hand)
    model = make(Three)
    made = [rules.custom(lambda g: g, nodes()), rules.fill_zero()]
    with fxgrad.watch(model, capture=capture) as watch, fxgrad.rewrite(model, made):
        assert same(train(model), want)
    assert len(watch.history) == 10


def by_hand_gradients(values: dict[str, list[float]], dtype: torch.dtype) -> nn.Linear:
    model = nn.Linear(2, 2).to(dtype)
    model.weight.grad = torch.tensor(values["weight"], dtype=dtype).reshape(2, 2)
    if "bias" in values:
        model.bias.grad = torch.tensor(values["bias"], dtype=dtype)
    return model


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({"weight": [0, 0, 0, 0], "bias": [0, -0.0]}, {"weight": [1.1] * 4, "bias": [1.1] * 2}),
        ({"weight": [0, 0, 0, 0], "bias": [0, 3]}, {"weight": [0.3] * 4, "bias": [0.3, 3]}),
        ({"weight": [0, 1, 2, 0], "bias": [4, 5]}, {"weight": [0.3, 1, 2, 0.3], "bias": [4, 5]}),
        ({"weight": [1, 1, 2, 7], "bias": [4, 5]}, {"weight": [1, 1, 2, 7], "bias": [4, 5]}),
        ({"weight": [0, 0, 0, 0]}, {"weight": [1.1] * 4}),
        ({"weight": [0, 0, 0, 2]}, {"weight": [0.3, 0.3, 0.3, 2]}),
    ],
)
def test_fill_zero_entry_by_entry(dtype: torch.dtype, given: Any, want: Any) -> None:
    model = by_hand_gradients(given, dtype)
    with fxgrad.rewrite(model, rules.fill_zero(1.1, 0.3)) as rewrite:
        rewrite.apply()
    assert torch.equal(model.weight.grad, torch.tensor(want["weight"], dtype=dtype).reshape(2, 2))
    if "bias" in given:
        assert torch.equal(model.bias.grad, torch.tensor(want["bias"], dtype=dtype))
    else:
        assert model.bias.grad is None  # without a gradient it is not counted, and gets none


def test_nan_is_not_zero() -> None:
    model = by_hand_gradients({"weight": [float("nan"), 0, 0, 0], "bias": [0, 0]}, torch.float32)
    with fxgrad.rewrite(model, rules.fill_zero()) as rewrite:
        rewrite.apply()
    assert model.weight.grad.flatten()[1:].tolist() == [0.5] * 3


def test_layers_without_any_gradient_are_left_out() -> None:
    model = make(Three)
    model.fc2.requires_grad_(False)
    with fxgrad.rewrite(model, rules.fill_zero()) as rewrite:
        train_sgd(model)
    assert model.fc2.weight.grad is None
    assert {r.place: r.ran for r in rewrite.report().records} == {"fc1": 1, "fc2": 0, "fc3": 1}


def train_sgd(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    stepping = optimizers or (torch.optim.SGD(model.parameters(), lr=0.1),)
    x, y = batch(model)
    F.mse_loss(model(x), y).backward()
    for optimizer in stepping:
        optimizer.step()


def test_thawed_and_new_parameters_are_followed() -> None:
    model = make(Three)
    model.fc2.requires_grad_(False)
    with fxgrad.rewrite(model, rules.scale(0.0, layers())) as rewrite:
        train_sgd(model)
        model.fc2.requires_grad_(True)
        model.fc3 = nn.Linear(3, 1)
        train_sgd(model)
    assert all(not p.grad.any() for p in model.parameters())
    assert [record.ran for record in rewrite.report().records] == [2, 1, 2]


def test_binarised_and_parametrized_layers() -> None:
    class Binary(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, torch.sign(self.weight), self.bias)

    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)), Binary(2, 2), nn.Linear(2, 1))
    names = {u.name: [name for name, _ in u.members] for u in layers().units(model)}
    assert names["1"] == ["weight", "bias"]  # a subclass
    assert set(names["0"]) == {
        "bias", "parametrizations.weight.original0", "parametrizations.weight.original1",
    }  # fmt: skip
    assert [u.name for u in layers(Binary).units(model)] == [u.name for u in layers("Binary").units(model)] == ["1"]
    assert [u.name for u in layers(predicate=lambda m: m.out_features == 1).units(model)] == ["2"]


# ---- selections and joint norms --------------------------------------------------------------------------------------


def test_clip_by_norm_per_parameter_layer_and_group() -> None:
    for where, parts in (
        (parameters(), [[n] for n in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias")]),
        (layers(), [["fc1.weight", "fc1.bias"], ["fc2.weight", "fc2.bias"], ["fc3.weight", "fc3.bias"]]),
        (groups(""), [["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias"]]),
    ):
        model, x = make(Three, 3), torch.randn(8, 1)
        plain = grads(model, x)
        with fxgrad.rewrite(model, rules.clip_by_norm(0.1, where)) as rewrite:
            rewrite.apply()
        found = {name: p.grad for name, p in model.named_parameters()}
        for part in parts:
            before = torch.cat([plain[n].flatten() for n in part]).norm()
            after = torch.cat([found[n].flatten() for n in part])
            want = torch.cat([plain[n].flatten() for n in part]) * min(1.0, 0.1 / float(before) if before else 1.0)
            assert torch.allclose(after, want)


def test_a_tied_weight_belongs_to_both_its_layers_in_order() -> None:
    model = make(Shared)
    assert [[name for name, _ in u.members] for u in layers().units(model)] == [["weight", "bias"]] * 3
    assert [u.name for u in parameters("*weight").units(model)] == ["a.weight", "c.weight"]
    assert [u.name for u in parameters("b.weight").units(model)] == ["a.weight"]  # each name selects it
    grads(model, torch.randn(4, 2))
    weight = model.a.weight.grad.clone()
    with fxgrad.rewrite(model, rules.scale(2.0, parameters())) as rewrite:
        rewrite.apply()
        assert torch.equal(model.a.weight.grad, 2 * weight)
    with fxgrad.rewrite(model, rules.scale(2.0, layers())) as rewrite:
        rewrite.apply()
        assert torch.equal(model.a.weight.grad, 8 * weight)


# ---- optimizers ------------------------------------------------------------------------------------------------------


def test_a_layer_in_two_optimizers_is_rewritten_once() -> None:
    model, x = make(Three), torch.randn(4, 1)
    weights = torch.optim.SGD([p for n, p in model.named_parameters() if "weight" in n], lr=0.1)
    biases = torch.optim.SGD([p for n, p in model.named_parameters() if "bias" in n], lr=0.1)
    with fxgrad.rewrite(model, rules.scale(2.0, layers())) as rewrite:
        for count in range(1, 4):
            plain = grads(model, x)
            weights.step()
            clip_grad_norm_([model.fc3.bias], 1e9)  # touches the gradient in between
            biases.step()
            assert all(torch.equal(p.grad, 2 * plain[n]) for n, p in model.named_parameters())
            assert {record.ran for record in rewrite.report().records} == {count}
            assert rewrite.step == count


def test_two_optimizers_that_step_in_turn() -> None:
    model, x = make(Three), torch.randn(4, 1)
    weights = torch.optim.SGD([p for n, p in model.named_parameters() if "weight" in n], lr=0.0)
    biases = torch.optim.SGD([p for n, p in model.named_parameters() if "bias" in n], lr=0.0)
    with fxgrad.rewrite(model, rules.scale(2.0, layers())) as rewrite:
        for count, optimizer in enumerate((weights, biases, biases, weights), 1):
            plain = grads(model, x)
            optimizer.step()
            assert all(torch.equal(p.grad, 2 * plain[n]) for n, p in model.named_parameters())
            assert rewrite.step == count


def test_other_optimizers_are_left_alone() -> None:
    model, other = make(Three), make(Three)
    with fxgrad.rewrite(model, rules.fill_zero()) as rewrite:
        assert same(train(other), train(make(Three)))
    assert {record.ran for record in rewrite.report().records} == {0}
    assert rewrite.step == 0


def test_gradients_set_by_hand_are_rewritten_at_each_step() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.zeros(1, 1)
    with fxgrad.rewrite(model, rules.fill_zero()):
        for _ in range(3):
            before = model.weight.detach().clone()
            model.weight.grad.zero_()
            optimizer.step()
            assert torch.equal(before - model.weight, torch.ones(1, 1))


def test_before_clip_grad_norm_by_hand_and_after_it_by_default() -> None:
    def by_hand(model: nn.Module, *, first: bool) -> Any:
        def work(_: nn.Module) -> None:
            for fill in (first, not first):
                if fill:
                    fill_by_hand(model)
                else:
                    clip_grad_norm_(model.parameters(), 0.1)

        return work

    for first in (True, False):
        model, other = make(Three), make(Three)
        want = train(other, hand=by_hand(other, first=first))
        with fxgrad.rewrite(model, rules.fill_zero()) as rewrite:

            def work(model: nn.Module, rewrite: Any = rewrite, first: bool = first) -> None:
                if first:
                    rewrite.apply()
                clip_grad_norm_(model.parameters(), 0.1)

            assert same(train(model, hand=work), want)


def test_a_closure_computes_gradients_inside_of_the_step() -> None:
    def run(model: nn.Module, *, by_keyword: bool, hand: bool) -> list[Tensor]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        torch.manual_seed(2)
        x, y = batch(model)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if hand:
                fill_by_hand(model)
            return loss

        for _ in range(3):
            optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
        return [p.detach().clone() for p in model.parameters()]

    want = run(make(Three), by_keyword=False, hand=True)
    for by_keyword in (False, True):
        model = make(Three)
        with fxgrad.rewrite(model, rules.fill_zero()) as rewrite:
            assert same([run(model, by_keyword=by_keyword, hand=False)], [want])
        assert rewrite.step == 3


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_is_divided_out_before(fused: bool) -> None:
    def run(model: nn.Module, *, hand: bool) -> list[Tensor]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        torch.manual_seed(2)
        for step in range(6):
            optimizer.zero_grad()
            x, y = batch(model)
            loss = F.mse_loss(model(x), y) * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            if hand:
                scaler.unscale_(optimizer)
                fill_by_hand(model)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in model.parameters()]

    want, model = run(make(Three), hand=True), make(Three)
    with fxgrad.rewrite(model, rules.fill_zero()):
        assert same([run(model, hand=False)], [want])


def test_what_never_ran_is_told() -> None:
    model = make(Three)
    rewrite = fxgrad.rewrite(model, rules.fill_zero())
    grads(model, torch.randn(4, 1))
    with pytest.warns(UserWarning, match=r"no torch\.optim optimizer .* so 'fill_zero\(1, 0.5\)' never ran"):
        rewrite.remove()


def test_the_optimizer_hooks_go_with_the_model() -> None:
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_pre_hooks)
    model = make(Three)
    fxgrad.rewrite(model, rules.fill_zero())
    assert len(optimizer._global_optimizer_pre_hooks) == before + 1
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert len(optimizer._global_optimizer_pre_hooks) == before
