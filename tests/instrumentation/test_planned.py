"""What makes a site get its probe after all: changes after the plan was made, and what happens around the call."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxgrad
from tests.planning import Base, Rearranges, Square, assert_same_numbers, build, derived, squares

# ---- what changes after the plan was made --------------------------------------------------------------------------


class Changes(Base):
    """Does what ``self.mode`` says, in the middle of a chain of rearrangements."""

    mode = ""
    alpha = 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h.reshape(12)
        if self.mode == "hook":
            h.register_hook(lambda gradient: gradient * 100)
        if self.mode == "stash":
            self.kept = h
        if self.mode == "hidden":
            self.kept = Square.apply(h)
        v = h.reshape(3, 4)
        if self.mode == "course":
            v = v.tanh()
        if self.mode == "reuse":
            v = v * h.reshape(3, 4)
        v = F.dropout(v, 0.5, training=self.mode == "dropout")
        return self.b(torch.add(v, torch.tanh(self.a(x)), alpha=self.alpha))


@pytest.mark.parametrize("mode", ["hook", "stash", "hidden", "course", "reuse", "dropout", "alpha"])
@pytest.mark.parametrize("capture", ["eager", "auto"])
def test_a_change_after_the_plan_is_noticed_or_named(mode: str, capture: Any) -> None:
    """In the very step: what is measured is right; what cannot be is a blind spot.  One step later all is measured."""
    flows: dict[bool, list[fxgrad.GradientFlow]] = {}
    for plans in (True, False):
        model, x = build(Changes)
        with fxgrad.watch(model, statistics="full", capture=capture) as watch:
            watch.engine.may_plan = plans
            for step in range(7):
                if step == 4:
                    model.mode, model.alpha = (mode, 1) if mode != "alpha" else ("", 3)
                torch.manual_seed(step)
                extra = (lambda m: m.kept.exp().sum()) if mode in ("stash", "hidden") and step >= 4 else None
                total = squares(model(x)) + (extra(model) if extra is not None else 0)
                total.backward()
                model.zero_grad()
            flows[plans] = list(watch.history)
    assert derived(flows[True][3])
    for planned, unplanned in zip(flows[True], flows[False], strict=True):
        wanted = {site.id: site for site in unplanned}
        named = {spot.id for spot in planned.blind_spots if spot.reason == "statistic_failed"}
        for site in planned:
            if site.id not in named:
                assert site.measured == wanted[site.id].measured
            if site.id not in named and site.measured:
                assert site.l2_norm == pytest.approx(wanted[site.id].l2_norm, rel=1e-6), (site.id, planned.event)
    assert_same_numbers(flows[True][-1], flows[False][-1])


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.flat = nn.Flatten()
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.flat(self.a(x)[:, :, None]))


@pytest.mark.parametrize("capture", ["eager", "auto", "symbolic"])
def test_a_module_hook_that_is_put_on_later_is_seen(capture: Any) -> None:
    model, x = build(Leaf)
    kept = []
    with fxgrad.watch(model, capture=capture) as watch:
        for _ in range(4):
            squares(model(x)).backward()
        assert derived(watch.flow()) == {"a": "flat", "/getitem": "flat"}
        model.flat.register_forward_hook(lambda module, args, output: kept.append(args[0]))
        (squares(model(x)) + kept[0].exp().sum()).backward()
        flow = watch.flow()
        assert derived(flow) == {}
        assert flow.site("a").l2_norm == pytest.approx(flow.site("/getitem").l2_norm)
        assert flow.site("a").l2_norm != pytest.approx(flow.site("flat").l2_norm)


# ---- what lies outside of the forward call -------------------------------------------------------------------------


def unequal(make: Any, steps: Any, **options: Any) -> list[str]:
    """Sites whose norm with a plan is another one than without, in any step; those that are named are left out."""
    flows = []
    for plans in (True, False):
        torch.manual_seed(0)
        model = make()
        with fxgrad.watch(model, statistics="full", **options) as watch:
            watch.engine.may_plan = plans
            for number in range(5):
                torch.manual_seed(number)
                steps(model, number)
                model.zero_grad()
            flows.append(list(watch.history))
    wrong = []
    for one, two in zip(*flows, strict=True):
        named = {spot.id for spot in one.blind_spots if spot.reason == "statistic_failed"}
        for site, want in zip(one, two, strict=True):
            same = site.l2_norm == pytest.approx(want.l2_norm, rel=1e-6) if want.measured else not site.measured
            if site.id not in named and not same:
                wrong.append(site.id)
    return wrong


class ViewReturned(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        v = self.a(x).view(-1)
        return v.unsqueeze(0), (v * 2).sum()


def change_the_output(model: nn.Module, _: int) -> None:
    view, rest = model(torch.randn(3, 4))
    view.mul_(3)
    (view.sum() + rest).backward()


class Penalised(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.a(x)).view(-1) ** 3


def penalise(model: nn.Module, _: int) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    out = model(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (out + slope.square().sum()).backward()


class TwoBranches(Base):
    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) + self.b(x)).view(-1) * 3


def freeze_late(model: Any, number: int) -> None:
    if number == 3:
        model.b.requires_grad_(False)
    model(torch.randn(3, 4)).sum().backward()


class GradFnHook(Base):
    def forward(self, x: Tensor) -> Tensor:
        v = self.a(x).view(-1)
        v.grad_fn.register_hook(lambda passed, received: tuple(g * 7 for g in passed))
        return v * 1


class LateChange(Base):
    late = ""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        v = h.view(-1)
        u = v * 3
        if self.late == "base":
            h.mul_(2)
            return u.sum() + h.sum()
        if self.late == "view":
            v.mul_(2)
            return u.sum() + h.sum()
        return u.sum()


def change_late(late: str) -> Any:
    def step(model: Any, number: int) -> None:
        model.late = late if number == 4 else ""
        model(torch.randn(3, 4)).backward()

    return step


def plain_step(model: nn.Module, _: int) -> None:
    model(torch.randn(3, 4)).sum().backward()


OUTSIDE = {
    "output changed in place": (ViewReturned, change_the_output), "gradient penalty": (Penalised, penalise),
    "frozen late": (TwoBranches, freeze_late), "hook on grad_fn": (GradFnHook, plain_step),
    "base changed late": (LateChange, change_late("base")), "view changed late": (LateChange, change_late("view")),
}  # fmt: skip


@pytest.mark.parametrize("capture", ["eager", "auto"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_happens_around_the_calls_is_seen(name: str, capture: Any) -> None:
    make, steps = OUTSIDE[name]
    assert unequal(make, steps, capture=capture) == []


def test_calls_that_only_have_the_name_of_a_rearrangement_keep_their_probe() -> None:
    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.flat = nn.Linear(4, 4), nn.Flatten(0)
            self.flat.forward = lambda x: x.flatten() * 4

        def forward(self, x: Tensor) -> Tensor:
            return self.flat(self.a(x)) * 1

    assert unequal(Flattened, plain_step, capture="eager") == []
    assert derived(fxgrad.gradient_flow(Flattened(), torch.randn(3, 4))) == {}


def test_a_view_with_two_item_assignments() -> None:
    class Assigns(Base):
        def forward(self, x: Tensor) -> Tensor:
            t = self.a(x).view(-1)
            t[0] = 0
            t[1] = 0
            return t.sum()

    for capture in ("eager", "auto"):
        assert unequal(Assigns, plain_step, capture=capture) == []


def test_a_leaf_that_many_forward_calls_take_has_one_hook() -> None:
    model, x = Rearranges(), torch.randn(3, 4, requires_grad=True)
    with fxgrad.watch(model) as watch:
        for _ in range(20):
            model(x)
        assert len(x._backward_hooks) == 1
        first, second = model(x).sum(), model(x).sum()
        first.backward(retain_graph=True)
        model(torch.randn(3, 4))
        first.backward()
        assert [flow.site("input:x").measured for flow in watch.history] == [True, True]
        second.backward()
        assert len(watch.history) == 3
    assert not x._backward_hooks


def test_a_forward_call_without_a_backward_leaves_nothing() -> None:
    model, x = Rearranges(), torch.randn(3, 4)
    with fxgrad.watch(model) as watch:
        gc.disable()
        try:
            for _ in range(10):
                model(x)
            assert len(watch.engine._live) == 0
        finally:
            gc.enable()
