"""Edge sites: the part of a value's gradient that each consumer sends back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxgrad
from fxgrad.schema import Edge
from tests import models
from tests.runs import assert_same_run, plain_run
from tests.strategies import random_model


def parts(flow: fxgrad.GradientFlow, producer: str) -> dict[tuple[str, str], Edge]:
    return {(e.consumer.key, e.consumer.argument): e for e in flow.edges if e.producer == producer}


def norms(flow: fxgrad.GradientFlow, producer: str) -> dict[tuple[str, str], float | None]:
    return {name: edge.l2_norm for name, edge in parts(flow, producer).items()}


def reasons(flow: fxgrad.GradientFlow) -> dict[tuple[str, str, str], str]:
    return {
        (spot.key, spot.consumer.key, spot.consumer.argument): spot.reason
        for spot in flow.blind_spots
        if spot.consumer is not None
    }


class Residual(nn.Module):
    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.stem = nn.Linear(4, 4)
        self.branch = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=inplace), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        b = self.branch(h)
        if self.inplace:
            b += h
            return b.relu_()
        return (b + h).relu()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_skip_and_branch_are_told_apart(capture: Any, inplace: bool) -> None:
    torch.manual_seed(0)
    model, x = Residual(inplace=inplace), torch.randn(3, 4)
    with fxgrad.watch(model, capture=capture, sites="edge") as watch:
        for _ in range(3):
            model(x).square().sum().backward()
        flow = watch.flow()
    assert flow.event.sites == "edge"
    h = model.stem(x).detach()
    skip, branch = h.clone().requires_grad_(), h.clone().requires_grad_()
    want = torch.autograd.grad((model.branch(branch * 1) + skip).relu().square().sum(), [skip, branch])
    found = norms(flow, "stem")
    assert found == pytest.approx(
        {(f"/add{'_' * inplace}", "args[1]"): want[0].norm().item(), ("branch.0", "args[0]"): want[1].norm().item()}
    )
    assert reasons(flow) == {}


def apart(function: Callable[..., Tensor], h: Tensor, count: int) -> list[float]:
    """l2 norms of the gradient for each argument by itself: an oracle with separate leaves."""
    leaves = [h.detach().clone().requires_grad_() for _ in range(count)]
    weight = torch.linspace(0.1, 1, function(*leaves).numel())
    gradients = torch.autograd.grad((function(*leaves).flatten() * weight).sum(), leaves)
    return [gradient.norm().item() for gradient in gradients]


OPS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], int]] = {
    "mul": (torch.mul, (3, 3), 2),
    "sub": (lambda a, b: torch.sub(a, b, alpha=3), (3, 3), 2),
    "div": (torch.div, (3, 3), 2),
    "pow": (torch.pow, (3, 3), 2),
    "atan2": (torch.atan2, (3, 3), 2),
    "matmul": (torch.matmul, (3, 3), 2),
    "matmul_3d": (torch.matmul, (2, 3, 3), 2),
    "matmul_4d": (torch.matmul, (2, 2, 3, 3), 2),
    "bmm": (torch.bmm, (2, 3, 3), 2),
    "linear": (F.linear, (3, 3), 2),
    "linear_bias": (lambda a, b: F.linear(a, b, torch.ones(3)), (3, 3), 2),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (3, 3), 2),
    "cat": (lambda a, b: torch.cat([a, b], dim=1), (3, 3), 2),
    "stack": (lambda a, b: torch.stack([a, b]), (3, 3), 2),
    "where": (lambda a, b: torch.where(torch.eye(3) > 0, a, b), (3, 3), 2),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), (3, 3), 2),
    "addmm": (torch.addmm, (3, 3), 3),
    "attention": (F.scaled_dot_product_attention, (2, 3, 3), 3),
    "bilinear": (lambda a, b: F.bilinear(a, b, torch.linspace(0, 1, 18).reshape(2, 3, 3)), (3, 3), 2),
    "cosine": (F.cosine_similarity, (3, 3), 2),
    "mse": (F.mse_loss, (3, 3), 2),
    "addcmul": (lambda a, b, c: torch.addcmul(a, b, c, value=2), (3, 3), 3),
}


class Several(nn.Module):
    def __init__(self, function: Callable[..., Tensor], shape: tuple[int, ...], count: int) -> None:
        super().__init__()
        self.function = function
        self.count = count
        self.weight = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self) -> Tensor:
        h = self.weight * 1.5
        out = self.function(*[h] * self.count)
        return (out.flatten() * torch.linspace(0.1, 1, out.numel())).sum()


@pytest.mark.parametrize("name", OPS)
def test_an_edge_per_argument(name: str) -> None:
    """Each argument's part is right, or the edge says why it has none; never a wrong one."""
    function, shape, count = OPS[name]
    torch.manual_seed(0)
    model = Several(function, shape, count)
    flow = fxgrad.gradient_flow(model, sites="edge")
    want = apart(function, model.weight * 1.5, count)
    edges = [edge for edge in flow.edges if edge.producer == "/mul"]
    assert len(edges) == count
    named = reasons(flow)
    for edge, norm in zip(edges, want, strict=True):
        if edge.measured:
            assert edge.l2_norm == pytest.approx(norm, rel=1e-5, abs=1e-6)
        else:
            assert named["/mul", edge.consumer.key, edge.consumer.argument] == "untraceable_use"
    if name not in ("cosine", "einsum"):
        assert all(edge.measured for edge in edges)


def test_a_call_that_reads_its_argument_several_times_is_summed() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return F.normalize(h) * h.exp()

    torch.manual_seed(0)
    model, x = Normalised(), torch.randn(3, 4)
    flow = fxgrad.gradient_flow(model, x, loss=lambda out: out.square().sum(), sites="edge")
    one, two = (model.fc(x).detach().requires_grad_() for _ in range(2))
    want = torch.autograd.grad((F.normalize(one) * two.exp()).square().sum(), [one, two])
    assert norms(flow, "fc") == pytest.approx(
        {("/normalize", "args[0]"): want[0].norm().item(), ("/exp", "args[0]"): want[1].norm().item()}
    )


def test_reasons() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.fc(x)
            a, _ = self.attention(h, h, h, need_weights=False)
            return a * (h > 0) + h.detach(), h

    torch.manual_seed(0)
    flow = fxgrad.gradient_flow(Odd(), torch.randn(3, 2, 4), sites="edge")
    assert reasons(flow) == {
        ("fc", "/gt", "args[0]"): "detached",
        ("fc", "/detach", "args[0]"): "detached",
        ("fc", "output", "args[0][1]"): "used_outside",
        ("fc", "attention/multi_head_attention_forward", "args[1]"): "merged_use",
        ("fc", "attention/multi_head_attention_forward", "args[2]"): "merged_use",
    }
    assert all(edge.measured for edge in flow.edges if edge.consumer.key == "output" and edge.producer == "/add")


def test_a_value_with_one_use_sends_all_of_it() -> None:
    flow = fxgrad.gradient_flow(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4), sites="edge")
    (edge,) = [edge for edge in flow.edges if edge.producer == "0"]
    assert edge.statistics == flow.site("0").statistics


def test_without_asking_no_edge_is_measured() -> None:
    model, x = Residual(inplace=False), torch.randn(3, 4)
    with fxgrad.watch(model) as watch:
        model(x).sum().backward()
        watched = watch.flow()
    for flow in (watched, fxgrad.gradient_flow(model, x, sites="node")):
        assert not any(edge.measured for edge in flow.edges)
        assert flow.event.sites == "node"
    assert fxgrad.gradient_flow(model, x).event.sites == "edge"


# ---- the parts add up, and nothing changes -------------------------------------------------------------------------


class Collected:
    """Keeps the gradients of the latest event, by site and edge number."""

    def __init__(self, watch: Any) -> None:
        self.watch = watch
        self.seen: dict[int, Tensor] = {}
        observe = watch.engine.recorder.observe

        def keep(owner: Any, index: int, gradient: Tensor) -> None:
            if owner is not watch.engine.recorder.parameters:
                self.seen[index] = gradient.detach().clone()
            observe(owner, index, gradient)

        class Plain:
            """A hook that leaves everything to ``keep``, as a hook of a gradient of an unusual kind does."""

            __torch_unserializable__ = True

            def __init__(self, owner: Any, index: int) -> None:
                self.owner, self.index = owner, index

            def __call__(self, gradient: Tensor | None) -> None:
                if self.index >= 0 and gradient is not None:
                    keep(self.owner, self.index, gradient)

        watch.engine.recorder.observe = keep
        watch.engine.recorder.hook = Plain

    def check(self) -> int:
        """Compare the sum of the parts with the whole where all parts are there; how often."""
        forward_record = self.watch.engine.recorder.history[-1].forward_record
        call_graph = forward_record.call_graph
        if any(
            call.word == "grad" for call in call_graph.calls
        ):  # a gradient's own graph uses values where no call does
            return 0
        uses: dict[Any, list[int]] = defaultdict(list)
        for index, (ref, _, _) in enumerate(call_graph.fan_out):
            uses[ref].append(index)
        compared = 0
        silent = ("merged_use", "detached", "no_grad_region", "output_unused")
        for ref, numbers in uses.items():
            whole = self.seen.get(call_graph.site_numbers[ref])
            why = [forward_record.edges.unmeasured.get(n, ("detached",))[0] for n in numbers]
            if any(call_graph.calls[ref.call].same_object):
                continue  # the hook of a tensor with several names sees what all of them send back
            if whole is None or whole.is_sparse or not set(why) <= set(silent):
                continue  # a hook that never fired saw nothing come back
            found = [self.seen[len(call_graph.sites) + n] for n in numbers if len(call_graph.sites) + n in self.seen]
            if found:
                total = torch.stack(found).sum(0)
                torch.testing.assert_close(
                    total, whole, rtol=1e-5, atol=1e-6 * float(whole.abs().max()), equal_nan=True
                )
                compared += 1
        return compared


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("capture", ["eager", "auto"])
@pytest.mark.parametrize("case", models.cases(models.HEALTHY))
def test_parts_add_up_and_nothing_changes_on_the_zoo(case: models.Case, capture: Any) -> None:
    model, args, kwargs = case.build()
    watched, _, _ = case.build()
    with fxgrad.watch(watched, capture=capture, sites="edge") as watch:
        for step in range(3):
            collected = Collected(watch)
            want = plain_run(model, args, kwargs, case.loss, seed=step)
            assert_same_run(plain_run(watched, args, kwargs, case.loss, seed=step), want)
        watch.flow()
        collected.check()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(0, 120, 40))
def test_parts_add_up_and_nothing_changes_on_random_models(start: int) -> None:
    compared = 0
    for seed in range(start, start + 40):
        case = random_model(seed)
        model, args, kwargs = case.build()
        watched, _, _ = case.build()
        with fxgrad.watch(watched, sites="edge", native=False) as watch:
            for step in range(3):
                collected = Collected(watch)
                want = plain_run(model, args, kwargs, case.loss, seed=step)
                assert_same_run(plain_run(watched, args, kwargs, case.loss, seed=step), want)
            if watch.history:
                compared += collected.check()
    assert compared > 10


class SkipIntoAView(nn.Module):
    """As GhostNet: what is added to in place is a view."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)[:, :4].tanh()
        wide = torch.cat([h.exp(), h.sin()], dim=1)
        view = wide[:, 1:5]
        view += h
        if self.twice:
            other = wide[:, 2:6]
            other += h
            return other.square()
        return view.square()


@pytest.mark.parametrize("twice", [False, True])
def test_a_skip_that_is_added_into_a_view(twice: bool) -> None:
    torch.manual_seed(0)
    model, x = SkipIntoAView(twice=twice), torch.randn(3, 4)
    with fxgrad.watch(model, sites="edge", capture="eager") as watch:
        collected = Collected(watch)
        model(x).sum().backward()
        flow = watch.flow()
    skip = parts(flow, "/tanh")["/add_", "args[1]"]
    assert skip.measured != twice  # two calls change the memory, and the second holds the first's autograd node
    assert collected.check() or twice


OUT_OF_ORDER: dict[str, Callable[[Tensor], Tensor]] = {
    "keywords": lambda h: torch.sub(other=h, input=h, alpha=3),
    "mask": lambda h: F.scaled_dot_product_attention(h, h, h, attn_mask=h),
    "reflected": lambda h: h.__rpow__(h),
    "einsum": lambda h: torch.einsum("jk,ij->ik", h, h),
}


@pytest.mark.parametrize("name", OUT_OF_ORDER)
def test_parts_are_not_given_to_another_argument(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3, 3) + 0.5)

        def forward(self) -> Tensor:
            return OUT_OF_ORDER[name](self.weight * 1.5).sum()

    torch.manual_seed(0)
    with fxgrad.watch(Net(), sites="edge") as watch:
        collected = Collected(watch)
        watch._model().backward()
        flow = watch.flow()
    collected.check()
    uses = defaultdict(list)
    for edge in flow.edges:
        if edge.producer == "/mul":
            uses[edge.consumer.key].append(edge)
    assert all(len(edges) == 1 or not any(edge.measured for edge in edges) for edges in uses.values())


def test_a_tensor_with_two_names_has_a_part_for_each_use() -> None:
    class TwoNames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.drop = nn.Dropout()

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return h * 2 + self.drop(h).tanh()

    torch.manual_seed(0)
    model, x = TwoNames().eval(), torch.randn(3, 4)
    flow = fxgrad.gradient_flow(model, x, loss=lambda out: out.sum(), sites="edge")
    h = model.fc(x).detach().requires_grad_()
    (part,) = torch.autograd.grad(h.tanh().sum(), h)
    assert norms(flow, "drop") == pytest.approx({("/tanh", "args[0]"): part.norm().item()})
    assert norms(flow, "fc") == pytest.approx(
        {("/mul", "args[0]"): 12**0.5 * 2, ("drop", "args[0]"): part.norm().item()}
    )


def test_a_differentiated_backward_leaves_no_part_to_a_single_use() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.fc(x)).view(-1) ** 3

    model, x = Penalised(), torch.randn(3, 4, requires_grad=True)
    with fxgrad.watch(model, sites="edge") as watch:
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.square().sum()).backward()
        flow = watch.flow()
    (edge,) = [edge for edge in flow.edges if edge.producer == "/sigmoid"]
    assert not edge.measured
    assert flow.site("/sigmoid").measured
    assert {spot.id: spot.reason for spot in flow.blind_spots if spot.consumer}["/sigmoid"] == "untraceable_use"
