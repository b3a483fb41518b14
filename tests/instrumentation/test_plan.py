"""Sites without a probe of their own: which ones, and that they say what a probe would have said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxgrad
from tests import models
from tests.planning import Base, Rearranges, Square, assert_same_numbers, build, derived, squares, watched_flow
from tests.strategies import random_model

# ---- what is planned -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["eager", "auto", "symbolic"])
def test_rearrangements_need_no_probe(capture: Any) -> None:
    model, x = build(Rearranges)
    flow = watched_flow(model, (x,), {}, squares, plans=True, capture=capture)
    assert derived(flow) == dict.fromkeys(
        ["a", "/reshape", "/permute", "/contiguous", "/flatten", "/getitem", "/squeeze", "/to", "/dropout", "/tanh"],
        "/add",
    )
    other, x = build(Rearranges)
    assert_same_numbers(flow, watched_flow(other, (x,), {}, squares, plans=False, capture=capture))


def test_a_one_shot_flow_is_planned_too() -> None:
    model, x = build(Rearranges)
    assert len(derived(fxgrad.gradient_flow(model, x))) == 10


def test_a_derived_site_has_no_hook() -> None:
    model, x = build(Rearranges)
    with fxgrad.watch(model, capture="symbolic") as watch:
        for _ in range(2):
            squares(model(x)).backward()
        recording = watch.engine.recorder.history[-1].recording
        seen = watch.engine.recorder.history[-1].readings
        assert [n for n, reading in enumerate(seen) if reading is None] == [0, *sorted(recording.planned.steps)]


@pytest.mark.filterwarnings("ignore")  # what the models themselves make torch warn of
@pytest.mark.parametrize("capture", ["eager", "auto"])
@pytest.mark.parametrize("case", models.cases(models.HEALTHY))
def test_planned_equals_unplanned_on_the_zoo(case: models.Case, capture: Any) -> None:
    one, two = (
        watched_flow(*case.build(), case.loss, plans=plans, capture=capture)  # type: ignore[misc]
        for plans in (True, False)
    )
    assert_same_numbers(one, two)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(0, 160, 40))
def test_planned_equals_unplanned_on_random_models(start: int) -> None:
    found = 0
    for seed in range(start, start + 40):
        case = random_model(seed)
        flows = []
        for plans in (True, False):
            model, args, kwargs = case.build()
            try:
                flows.append(watched_flow(model, args, kwargs, case.loss, plans=plans))
            except fxgrad.errors.NoFlowError:
                continue
        if flows:
            assert_same_numbers(flows[0], flows[1])
            found += len(derived(flows[0]))
    assert found > 20


# ---- what must not be planned --------------------------------------------------------------------------------------


class UsedTwice(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h + h)


class AddAndMore(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h + x) * h


class Broadcast(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + self.a(x).sum(0, keepdim=True))


class Alpha(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.add(self.a(x), self.a(x), alpha=2))


class MixedDtypes(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) + self.a(x).double()).float())


class OtherDtype(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).to(torch.float64).float())


class InPlaceAfterView(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        v = h.view(12)
        v.mul_(2)
        return self.b(v.view(3, 4))


class InPlaceOnTheBase(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        v = h.view(12)
        h.mul_(2)
        return self.b(v.view(3, 4))


class InPlaceAdd(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += x
        return self.b(h)


class IdentityThenInPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.1, training=False).relu_())


class Returned(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        v = h.reshape(12)
        return self.b(v.reshape(3, 4)), v


class ResultReturned(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).reshape(12)


class Sliced(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.pad(self.a(x)[:, 1:], (1, 0)))


class Gathered(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)[:, [0, 0, 1, 2]])


class Expanded(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)[:1].expand(3, 4))


class Split(Base):
    def forward(self, x: Tensor) -> Tensor:
        one, two = self.a(x).chunk(2, dim=1)
        return self.b(torch.cat([two.tanh(), one.tanh()], dim=1))


class RunningDropout(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.5, training=True))


class UserHook(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).reshape(12)
        h.register_hook(lambda gradient: gradient * 100)
        return self.b(h.reshape(3, 4))


class HookOnTheSameTensor(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).reshape(2, 6)
        g = h.contiguous()
        g.register_hook(lambda gradient: gradient * 100)
        return self.b(g.reshape(3, 4))


class Stashed(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.kept = [h]
        return h.reshape(12).tanh()


class HiddenUse(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.penalty = Square.apply(h)
        return self.b(h.reshape(12).reshape(3, 4))


class NoGradView(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            scale = h.reshape(12).reshape(3, 4)
        return self.b(x * scale)


class TwoNames(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        branch = torch.tanh(h)
        shortcut = F.dropout(h, 0.5, training=False)
        return self.b(branch) * 2, shortcut.reshape(12).tanh()


class Subtracted(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x * 2 - self.a(x))


ADVERSARIAL = [
    UsedTwice, AddAndMore, Broadcast, Alpha, MixedDtypes, OtherDtype, InPlaceAfterView, InPlaceOnTheBase, InPlaceAdd,
    IdentityThenInPlace, Returned, ResultReturned, Sliced, Gathered, Expanded, Split, RunningDropout, UserHook,
    HookOnTheSameTensor, Stashed, HiddenUse, NoGradView, TwoNames, Subtracted,
]  # fmt: skip


def adversarial_loss(kind: type[nn.Module], model: Any, output: Any) -> Tensor:
    total = sum(squares(t) for t in (output if isinstance(output, tuple) else (output,)))
    if kind is Stashed:
        total = total + model.kept[0].exp().sum()
    if kind is HiddenUse:
        total = total + model.penalty.sum()
    return total


@pytest.mark.parametrize("capture", ["eager", "auto"])
@pytest.mark.parametrize("kind", ADVERSARIAL, ids=lambda kind: kind.__name__)
def test_adversarial_graphs_are_left_unplanned(kind: type[nn.Module], capture: Any) -> None:
    flows = []
    for plans in (True, False):
        model, x = build(kind)
        loss = lambda output, model=model: adversarial_loss(kind, model, output)  # noqa: E731
        flows.append(watched_flow(model, (x,), {}, loss, plans=plans, capture=capture))
    assert_same_numbers(*flows)
    assert derived(flows[0]) == {}
