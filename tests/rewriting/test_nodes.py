"""Rules at the nodes of the graph, against gradients written by hand."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad import rules
from fxgrad.errors import RuleError, WatchError
from fxgrad.rules import nodes, outputs
from tests.rewriting.nets import Cnn, Shared, Three, grads, make, same, train

CAPTURES = ("auto", "eager")


class Wide(nn.Module):
    """Many ways to compute, each value used once."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 2)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc1(x))
        h = torch.tanh(h) * 2.0
        return self.fc2(F.relu(h))


@pytest.mark.parametrize("capture", CAPTURES)
def test_scaling_one_layer_scales_what_lies_below(capture: Any) -> None:
    model, x = make(Wide), torch.randn(5, 3)
    plain = grads(model, x)
    with fxgrad.rewrite(model, rules.scale(10.0, nodes("fc1")), capture=capture):
        for _ in range(3):
            got = grads(model, x)
            assert torch.allclose(got["fc1.weight"], 10 * plain["fc1.weight"])
            assert torch.equal(got["fc2.weight"], plain["fc2.weight"])
    assert all(torch.equal(grads(model, x)[name], plain[name]) for name in plain)


@pytest.mark.parametrize("kind", [Three, Cnn, Shared])
@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("function", [lambda g: g, lambda _: None], ids=["identity", "none"])
def test_identity_and_none_change_no_bit(kind: type[nn.Module], capture: Any, function: Any) -> None:
    want, model = train(make(kind)), make(kind)
    with fxgrad.rewrite(model, rules.custom(function, nodes()), capture=capture) as rewrite:
        assert same(train(model), want)
    assert sum(record.ran for record in rewrite.report().records) > 0


def test_removing_restores_training_bit_for_bit() -> None:
    model, other = make(Three), make(Three)
    before = dict(model.__dict__)
    rewrite = fxgrad.rewrite(model, [rules.scale(3.0, nodes("fc2")), rules.fill_zero()])
    train(model, 2)
    rewrite.remove()
    rewrite.remove()
    assert not rewrite.active
    assert model.__dict__.keys() == before.keys()
    assert all(not p._backward_hooks for p in model.parameters())
    other.load_state_dict(model.state_dict())
    assert same(train(model), train(other))


def test_removed_between_forward_and_backward() -> None:
    model, x = make(Wide), torch.randn(5, 3)
    plain = grads(model, x)
    model.zero_grad()
    with fxgrad.rewrite(model, rules.zero_out(nodes("fc1"))):
        out = model(x)
    out.sum().backward()
    assert torch.equal(model.fc1.weight.grad, plain["fc1.weight"])


# ---- selections ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "places"),
    [
        (nodes("fc1"), ["fc1"]),
        (nodes("fc*"), ["fc1", "fc2"]),
        (nodes(re.compile(r"fc\d")), ["fc1", "fc2"]),
        (nodes("act"), ["act"]),
        (nodes("act", call_index=1), []),
        (nodes(op="relu"), ["/relu"]),
        (nodes(op=["tanh", "mul"]), ["/tanh", "/mul"]),
        (nodes(op="call_module"), ["fc1", "act", "fc2"]),
        (nodes(target=F.relu), ["/relu"]),
        (nodes(target="*functional.relu"), ["/relu"]),
        (nodes(module_type=nn.Linear), ["fc1", "fc2"]),
        (nodes(module_type=("ReLU", nn.Linear)), ["fc1", "act", "fc2"]),
        (nodes(module_type=Wide), ["input:x", "/tanh", "/mul", "/relu"]),
        (nodes("/*", dtype=torch.float32), ["/tanh", "/mul", "/relu"]),
        (nodes(dtype="float16"), []),
        (nodes(predicate=lambda site: site.shape == (5, 2)), ["fc2"]),
        (outputs("act"), ["act"]),
        (outputs(""), ["fc2"]),
    ],
)
def test_selections(where: Any, places: list[str]) -> None:
    model = make(Wide)
    rule = rules.custom(lambda g: g, where)
    with fxgrad.rewrite(model, rule) as rewrite:
        if not places:
            with pytest.raises(RuleError, match="had no such site"):
                model(torch.randn(5, 3))
            return
        model(torch.randn(5, 3, requires_grad=True)).sum().backward()
    assert [record.place for record in rewrite.report().records] == places
    assert all(record.ran == 1 for record in rewrite.report().records)


def test_a_selection_that_finds_nothing_names_near_names() -> None:
    model = make(Wide)
    with (
        fxgrad.rewrite(model, rules.scale(2.0, nodes("fc_1"))),
        pytest.raises(RuleError, match=r"'scale\(2\)' selects nodes\('fc_1'\).*near names are 'fc1'"),
    ):
        model(torch.randn(5, 3))
    with fxgrad.rewrite(model, rules.scale(2.0, nodes("nowhere*", optional=True))):
        grads(model, torch.randn(5, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, _) = self.lstm(x)
        return out.sum() + 0 * h.sum()


def test_a_site_of_a_tuple_output() -> None:
    model, x = make(Recurrent), torch.randn(4, 1, 2)
    with fxgrad.rewrite(model, rules.zero_out(nodes("lstm[0]"))) as rewrite:
        found = grads(model, x)
    assert [record.place for record in rewrite.report().records] == ["lstm[0]"]
    assert all(not gradient.any() for gradient in found.values())


@pytest.mark.parametrize("given", [[], "scale", [lambda g: g], None])
def test_only_rules_are_rules(given: Any) -> None:
    with pytest.raises(RuleError, match=r"fxgrad\.rules"):
        fxgrad.rewrite(make(Wide), given)


def test_models_that_cannot_be_rewritten() -> None:
    rule = rules.scale(2.0, nodes())
    with pytest.raises(WatchError, match=r"fxgrad\.rewrite wants a torch\.nn\.Module"):
        fxgrad.rewrite(object(), rule)  # type: ignore[arg-type]
    with pytest.raises(WatchError, match="already compiled"):
        fxgrad.rewrite(torch.compile(make(Wide), backend="eager"), rule)  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="rewrite the model itself"):
        fxgrad.rewrite(fxgrad.instrument(make(Wide)), rule)


# ---- values that are changed in place, returned again, computed again ------------------------------------------------


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x * 3
        h.mul_(5.0)
        return h.sum()


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize(("place", "want"), [("/mul", 30.0), ("/mul_", 30.0)])
def test_the_value_before_and_after_an_in_place_change(capture: Any, place: str, want: float) -> None:
    seen: list[float] = []

    def double(g: Tensor) -> Tensor:
        seen.append(float(g.max()))
        return g * 2

    model, x = InPlace(), torch.ones(2, requires_grad=True)
    with fxgrad.rewrite(model, rules.custom(double, nodes(place)), capture=capture):
        for _ in range(3):
            x.grad = None
            model(x).backward()
            assert x.grad.tolist() == [want, want]
    assert set(seen) == ({5.0} if place == "/mul" else {1.0})


class ThroughView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        v = h.view(-1)
        v.relu_()
        return h.sum()


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_blind_spot_is_told(capture: Any) -> None:
    model, x = ThroughView(), torch.ones(2, 2, requires_grad=True)
    with fxgrad.rewrite(model, rules.zero_out(nodes(op="view")), capture=capture):
        for _ in range(3):
            with pytest.raises(RuleError, match=r"cannot rewrite /view: .* in place through a view"):
                model(x)
    with fxgrad.rewrite(model, rules.custom(lambda g: g, nodes()), capture=capture) as rewrite:
        for _ in range(3):
            model(x).backward()
    assert [(one.place, "view" in one.reason) for one in rewrite.report().not_rewritten] == [("/view", True)]
    assert {r.place: r.ran for r in rewrite.report().records}["/view"] == 0


class Returned(nn.Module):
    """``identity`` returns the very tensor that ``fc`` returned."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.identity = nn.Linear(2, 2), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.identity(self.fc(x)).sum()


@pytest.mark.parametrize("capture", CAPTURES)
def test_rules_on_one_tensor_run_from_its_last_site_to_its_first(capture: Any) -> None:
    model, x = Returned(), torch.randn(3, 2)
    rule = [rules.custom(lambda g: g + 1, nodes("fc")), rules.scale(10.0, nodes("identity"))]
    with fxgrad.rewrite(model, rule, capture=capture), fxgrad.watch(model, statistics="full") as watch:
        for _ in range(3):
            assert torch.equal(grads(model, x)["fc.bias"], torch.full((2,), 33.0))
            flow = watch.flow()
            assert (flow.site("identity").max_abs, flow.site("fc").max_abs) == (1.0, 10.0)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.a, self.block, self.c = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.c(checkpoint(self.block, self.a(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("place", ["a", "block.0", "block.1", "c"])
def test_checkpointed_regions(reentrant: bool, place: str) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(reentrant=reentrant), torch.randn(4, 2)
    plain = copy.deepcopy(model)
    plain.get_submodule(place).register_forward_hook(lambda _, __, out: out * 1.0)
    want = grads(model, x)
    with fxgrad.rewrite(model, rules.scale(3.0, nodes(place))) as rewrite:
        for _ in range(2):
            got = grads(model, x)
    order = ["a", "block.0", "block.1", "c"]
    for name, gradient in got.items():
        below = order.index(name.rpartition(".")[0]) <= order.index(place)
        assert torch.allclose(gradient, want[name] * (3 if below else 1)), name
    assert rewrite.report().records[0].ran == 2


class Inner(nn.Module):
    """A backward pass inside of the forward, as for forces."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.sin(self.fc(x)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_a_backward_pass_inside_of_the_forward(capture: Any) -> None:
    model, x = make(Inner), torch.randn(3, 2, requires_grad=True)
    want = model(x)
    with fxgrad.rewrite(model, rules.scale(2.0, nodes(op="sin")), capture=capture):
        for _ in range(2):
            assert torch.allclose(model(x), 2 * want)


def test_a_second_backward_and_create_graph() -> None:
    model, x = make(Wide), torch.randn(5, 3, requires_grad=True)
    with fxgrad.rewrite(model, rules.custom(lambda g: g * g, nodes("fc1"))):
        out = model(x).sum()
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        (second,) = torch.autograd.grad(out, x, retain_graph=True)
        assert torch.equal(first, second)
        first.square().sum().backward()  # the rule itself is differentiated
    assert model.fc1.weight.grad is not None


def test_a_leaf_input_is_given_back_without_hooks() -> None:
    model, x = make(Wide), torch.randn(5, 3, requires_grad=True)
    with fxgrad.rewrite(model, rules.scale(2.0, nodes("input:x"))):
        grads(model, x)
        plain = x.grad.clone()
        grads(model, x)
        assert torch.equal(x.grad, 2 * plain)
        assert len(x._backward_hooks) == 1  # the first one was taken off
    assert not x._backward_hooks


def test_torch_func_is_told() -> None:
    model = make(Wide)
    with fxgrad.rewrite(model, rules.scale(2.0, nodes("fc1"))):
        with pytest.warns(UserWarning, match=r"torch\.func"):
            torch.func.grad(lambda x: model(x).sum())(torch.randn(5, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.func.grad(lambda x: model(x).sum())(torch.randn(5, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).abs().sum()

    model, x = Product(), torch.ones(3, dtype=dtype, requires_grad=True)
    model(x).backward()
    plain = x.grad
    where = nodes("/mul")
    for rule in (
        rules.scale(2.0, where), rules.clip_by_norm(0.5, where), rules.unit_norm(where), rules.sign(where),
        rules.replace_zeros(1.0, where), rules.add_noise(0.1, where), rules.fill_zero(0.1, 0.2, where),
    ):  # fmt: skip
        x.grad = None
        with fxgrad.rewrite(model, rule, audit="full") as rewrite:
            model(x).backward()
        assert x.grad.dtype == dtype
        assert bool(x.grad.isfinite().all())
        assert rewrite.report().records[0].ran == 1
    assert plain.dtype == dtype


def test_autocast_and_a_loss_scale() -> None:
    model, x = make(Wide), torch.randn(5, 3)
    seen: list[Any] = []

    def look(g: Tensor) -> Tensor:
        seen.append((g.dtype, float(g.abs().max())))
        return g * 2

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1, 2):
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fxgrad.rewrite(model, rules.custom(look, nodes("fc2"))) if factor == 2 else torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        assert torch.equal(model.fc2.bias.grad, torch.full((2,), 5.0 * factor))
    assert seen == [(torch.bfloat16, 8.0)]  # at nodes the gradient is scaled still


def test_rules_act_in_the_instrumented_form_of_the_model() -> None:
    model, x = make(Wide), torch.randn(5, 3)
    plain = grads(model, x)
    instrumented = fxgrad.instrument(model)
    with fxgrad.rewrite(model, rules.scale(2.0, nodes("fc2"))):
        for _ in range(3):
            model.zero_grad()
            instrumented(x).sum().backward()
            assert torch.equal(model.fc2.bias.grad, 2 * plain["fc2.bias"])
        with pytest.raises(fxgrad.FxgradError):
            fxgrad.instrument(model)
    assert instrumented.flow().site("fc2").rewritten.rules == ("scale(2)",)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_rewritten_model_inside_of_a_compiled_one() -> None:
    model, x = make(Wide), torch.randn(5, 3)
    plain = grads(model, x)
    torch._dynamo.reset()
    with fxgrad.rewrite(model, rules.scale(2.0, nodes("fc2"))):
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            model.zero_grad()
            compiled(x).sum().backward()
            assert torch.equal(model.fc2.bias.grad, 2 * plain["fc2.bias"])
