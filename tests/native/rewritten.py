"""Models that go several ways, and the same rewritten training under both recorders."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.errors import FxgradError, NoFlowError
from fxgrad.schema import GradientFlow, RewriteReport
from tests.native.parity import flow_differences, statistics_differences

Act = Callable[[Any, int], Any]


@dataclasses.dataclass
class Trained:
    """What a rewritten training left behind: by step, and at the end."""

    states: list[list[Tensor]] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    reports: list[RewriteReport] = dataclasses.field(default_factory=list)
    flows: list[GradientFlow | None] = dataclasses.field(default_factory=list)

    @property
    def recorders(self) -> list[str]:
        """Which recorder ran each step."""
        return [report.capture.recorder if report.capture is not None else "none" for report in self.reports]


def trained(  # the facts of a training
    make: Callable[[], nn.Module], rules: Sequence[Any], act: Act, steps: int, capture: Any, *, watched: bool = False
) -> Trained:
    """Train a new model under rules, perhaps under a watch as well."""
    torch.manual_seed(0)
    model, found = make(), Trained()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(fxgrad.watch(model, capture=capture)) if watched else None
        rewrite = stack.enter_context(fxgrad.rewrite(model, list(rules), capture=capture, audit="full"))
        for step in range(steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            error = ""
            try:
                act(model, step)
            except (FxgradError, ZeroDivisionError) as raised:
                error = f"{type(raised).__name__}: {raised}"
            optimizer.step()
            found.errors.append(error)
            state = [*model.state_dict().values(), torch.get_rng_state()]
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            found.states.append([tensor.detach().clone() for tensor in (*state, *grads)])
            found.reports.append(rewrite.report())
            with contextlib.suppress(NoFlowError):
                found.flows.append(None if watch is None or error else watch.flow())
    return found


def differences(
    make: Callable[[], nn.Module], rules: Callable[[], Sequence[Any]], act: Act, steps: int = 6, *,
    watched: bool = False,
) -> tuple[list[str], Trained]:  # fmt: skip
    """In what a training under the native recorder differs from one under Python's, and the former."""
    want = trained(make, rules(), act, steps, "eager", watched=watched)
    got = trained(make, rules(), act, steps, "auto", watched=watched)
    wrong = []
    for step in range(steps):
        mine, theirs = got.states[step], want.states[step]
        if len(mine) != len(theirs) or not all(map(_equal, mine, theirs)):
            wrong.append(f"step {step} ({got.recorders[step]}): weights, gradients or random numbers")
        if got.errors[step] != want.errors[step]:
            wrong.append(f"step {step}: {got.errors[step]!r} instead of {want.errors[step]!r}")
        one, other = (dataclasses.replace(t.reports[step], capture=None) for t in (got, want))
        if repr(one) != repr(other):
            wrong.append(f"step {step} ({got.recorders[step]}): {one} instead of {other}")
    if len(got.flows) != len(want.flows):
        return [*wrong, "a flow is missing"], got
    for step, (seen, known) in enumerate(zip(got.flows, want.flows, strict=True)):
        if seen is not None and known is not None:
            told = [*flow_differences(seen, known), *_rewritten_differences(seen, known)]
            wrong += [f"step {step} ({got.recorders[step]}): {words}" for words in told]
    return wrong, got


def _rewritten_differences(got: GradientFlow, want: GradientFlow) -> list[str]:
    """In what is told of the rules at each site."""
    wrong = []
    for one, other in zip(got.sites, want.sites, strict=True):
        mine, theirs = one.rewritten, other.rewritten
        if (mine is None) != (theirs is None):
            wrong.append(f"{one.id}: rewritten {mine} instead of {theirs}")
        elif mine is not None and theirs is not None:
            bare = [dataclasses.replace(told, before=None, after=None) for told in (mine, theirs)]
            if repr(bare[0]) != repr(bare[1]):
                wrong.append(f"{one.id}: {bare[0]} instead of {bare[1]}")
            for name in ("before", "after"):
                wrong += statistics_differences(f"{one.id} {name}", getattr(mine, name), getattr(theirs, name))
    return wrong


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or bool(
        (one.isnan() == other.isnan()).all() and one.nan_to_num().equal(other.nan_to_num())
    )


# ---- models: `step` is the number of the step, on which the way depends ---------------------------------------------


class Moving(nn.Module):
    """A model that may go another way in each step."""

    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.relu, self.other, self.same = nn.ReLU(), nn.ReLU(), nn.Identity()
        self.norm = nn.BatchNorm1d(6)


class Blocks(nn.Module):
    """A plain stack with skips, and module and functional activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.head(x)


class Functions(Moving):
    """Functions, methods, operators, attributes, parts and lists."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x).T.T
        left, right = torch.chunk(2 - h * 2, 2, dim=-1)
        h = torch.cat([left.relu(), F.gelu(right)], dim=1)
        h = h.add_(1.0).clone()
        h[:, 0] = h[:, 1].sigmoid()
        values, _ = torch.sort(self.b(h), dim=-1)
        assert values.shape[0] == x.shape[0]
        return {"relu": F.softsign(self.c(torch.relu_(values))), "rest": torch.stack([h, values]).mean(0)}


class Swapped(Moving):
    """Which of two modules that look alike runs depends on the step."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c((self.relu if self.step % 3 else self.other)(self.b(self.relu(self.a(x)))))


class Quiet(Moving):
    """A module that runs no operator is left out in some steps, and called twice in others."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for _ in range(self.step % 3):
            h = self.same(h)
        return self.c(h.relu())


class Deep(Moving):
    """Stochastic depth, and another order of blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.a, self.b, self.c, self.norm):
            if torch.rand(()).item() < 0.6:
                x = block(x).relu() + x
        return self.a(x)


class Late(Moving):
    """What a module returns, or whether an operator follows, is known late."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.late = nn.Linear(6, 6), False

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return h if self.late else h.tanh()

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def forward(self, x: Tensor) -> Tensor:
        self.part.late = self.step % 2 == 1
        return self.b(self.part(x)) if self.step < 4 else self.b(self.part(x).sigmoid())


class Hidden(Moving):
    """Values that no call returns, a region without gradients, functions of the user's own."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            del ctx
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            del ctx
            return gradient * 2

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.b(x).relu().mean()
        h = self.Double.apply(self.a(x).relu())
        if self.step % 2:
            h = self.Double.apply(h.relu())
        return self.c(h.relu() * scale).relu()


class Again(Moving):
    """Checkpointed regions, of either kind."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda v: self.b(self.relu(v)).relu(), self.a(x), use_reentrant=self.reentrant)
        return self.c(self.other(h))


class Reentrant(Again):
    """The kind that runs again under torch's own backward pass."""

    reentrant = True


class Views(Moving):
    """A value that is changed in place through a view of it in some steps."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        v = h.view(-1)
        if self.step >= 3:
            v.mul_(2.0)
        return self.c(h.relu() + v.view_as(h))


class Inner(Moving):
    """A backward pass inside of the forward, and a transform of torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        (inner,) = torch.autograd.grad(self.b(h).relu().sum(), h, create_graph=True)
        if self.step % 2:
            inner = torch.func.vmap(lambda row: row.relu() * 2)(inner)
        return self.c(inner.relu() + h)


class Raising(Moving):
    """Errors that the forward catches, and some that it doesn't."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        if self.step % 3 == 1:
            with contextlib.suppress(RuntimeError):
                self.b(h[:, :2])
            with contextlib.suppress(RuntimeError):
                h = torch.cat([h, h[:, :2].T])
        if self.step % 3 == 2:
            return self.c(h / (1 // (self.step // 5)))
        return self.c(h.relu())


class Parts(nn.Module):
    """Modules of torch's that return tuples, attention, keyword arguments and default values."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Any]:
        h, state = self.lstm(x.unsqueeze(1))
        h, _ = self.attention(query=h, key=h, value=h, need_weights=False)
        return F.relu(self.block(h), inplace=True).squeeze(1) * scale, state


class Hooked(Moving):
    """Hooks of the user's own, on values and on a module, before and behind those of rules."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 1.5)
        h = self.same(h)
        if h.requires_grad:
            h.register_hook(torch.sign)
        h = self.other(self.b(h.relu()))
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(max=1e-2))
        return self.c(h)


def batch(step: int, size: int = 5) -> Tensor:
    """Of a step; shapes vary."""
    return torch.randn(size + step % 2, 6, generator=torch.Generator().manual_seed(step))


def total(value: Any) -> Tensor:
    """A loss of all that a model returned."""
    if isinstance(value, Tensor):
        return value.square().mean()
    return sum((total(item) for item in (value.values() if isinstance(value, dict) else value)), torch.zeros(()))


def once(model: Any, step: int) -> None:
    """One forward and backward pass."""
    model.step = step
    total(model(batch(step))).backward()
