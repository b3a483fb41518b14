"""The names of a call that left the known courses are those that the Python recorder gives, or claim nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.schema import GradientFlow

pytestmark = [pytest.mark.usefixtures("recorder"), pytest.mark.filterwarnings("ignore")]


class Square(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2 * ctx.saved_tensors[0]


class Same(torch.autograd.Function):
    """Another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Sub(Tensor):
    """A class of tensors without a behaviour of its own."""


class Base(nn.Module):
    """``changed`` in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.changed = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.middle(self.a(self.first(x) if self.changed else x)))
        return out

    def first(self, x: Tensor) -> Tensor:
        return x

    def middle(self, x: Tensor) -> Tensor:
        return x


class Packed(Base):
    """A leaf whose output is a tuple of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.GRU(6, 6, batch_first=True)

    def first(self, x: Tensor) -> Tensor:
        return x.tanh()

    def middle(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x.unsqueeze(0).expand(3, -1, -1), [4, 3, 1], batch_first=True)
        return pad_packed_sequence(self.g(packed)[0], batch_first=True)[0]


class Bag(Base):
    """A leaf of one operator with four outputs, of which it returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 6)

    def first(self, x: Tensor) -> Tensor:
        return x.tanh()

    def middle(self, x: Tensor) -> Tensor:
        return x + self.bag(torch.tensor([[0, 1], [2, 3], [1, 1], [4, 0]]))


class NewBag(Bag):
    """Which no known course ran."""

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) if self.changed else x


class Hooked(Base):
    """A leaf module with a forward hook that calculates."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda *given: given[2] * 1.5 if self.changed else None)


class Class(Base):
    """Another class of tensors comes."""

    def first(self, x: Tensor) -> Tensor:
        return x.as_subclass(Sub)


class Twice(Base):
    """A leaf is called again, on what it returned."""

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) if self.changed else x
        return out


class Function(Base):
    """A function with a backward of its own, in the forward of the model."""

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = Square.apply(x) if self.changed else x  # type: ignore[no-untyped-call]
        return out


class Checkpoint(Base):
    """A reentrant checkpoint, which is such a function."""

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(torch.tanh, x, use_reentrant=True) if self.changed else x
        return out


class Functions(Base):
    """Two functions, and which made what cannot be told."""

    def middle(self, x: Tensor) -> Tensor:
        if not self.changed:
            return x
        one, other = Square.apply(x), Same.apply(x)  # type: ignore[no-untyped-call]
        return other + one  # type: ignore[no-any-return]


def flow_of(make: Callable[[], Base], *, native: bool) -> GradientFlow:
    """Of the step that takes the new course."""
    torch.manual_seed(0)
    model = make()
    with fxgrad.watch(model, native=native) as watch:
        for step in range(3):
            model.changed = step == 2
            model(torch.randn(4, 6)).square().mean().backward()
        return watch.flow()


@pytest.mark.parametrize("make", [Packed, Bag, NewBag, Hooked, Class, Twice])
def test_modules_are_called_as_often_as_they_are(make: type[Base]) -> None:
    mine, theirs = (flow_of(make, native=native) for native in (True, False))
    assert mine.capture.reason.startswith("left the known courses")
    calls = [[(call.path, call.call_index) for call in flow.calls] for flow in (mine, theirs)]
    assert calls[0] == calls[1]
    for module in ("a", "b", "g", "bag"):
        want = {site.id: site.l2_norm for site in theirs.sites if site.module_path == module}
        have = {site.id: site.l2_norm for site in mine.sites if site.module_path == module}
        assert have == {name: norm if norm is None else pytest.approx(norm, rel=1e-5) for name, norm in want.items()}


# Python sees what a checkpoint runs inside; C++ sees the checkpoint.
@pytest.mark.parametrize(
    ("make", "name", "inner"), [(Function, "/Square", "/Square"), (Checkpoint, "/CheckpointFunction", "/tanh")]
)
def test_a_function_has_the_module_and_the_line_of_who_applied_it(make: type[Base], name: str, inner: str) -> None:
    mine, theirs = (flow_of(make, native=native) for native in (True, False))
    assert mine.capture.reason.startswith("left the known courses")
    assert mine.site(name).l2_norm == pytest.approx(theirs.site(inner).l2_norm, rel=1e-5)
    assert mine.site(name).source == theirs.site(inner).source


def test_of_several_functions_none_is_named() -> None:
    flow = flow_of(Functions, native=True)
    made = [site for site in flow.sites if "external" in site.id]
    assert [site.module_path for site in made] == ["", ""]
    assert [site.source for site in made] == [None, None]
    assert all(site.l2_norm is not None for site in made)


class Experts(nn.Module):
    """Those that have rows run, one after the other; their operators are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.rows: list[tuple[int, list[int]]] = []

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).softmax(-1)
        y = torch.zeros_like(x)
        for one, rows in self.rows:
            y = y.index_add(0, torch.tensor(rows), self.experts[one](x[rows]) * gate[rows, one : one + 1])
        return x + y


def test_what_the_run_file_wrote_keeps_its_names_whatever_is_learnt_later(tmp_path: Path) -> None:
    """The thread that writes has read the event before the history does, which then may not name it anew."""
    torch.manual_seed(0)
    model = Experts()
    steps = [[(0, [0, 1, 3]), (2, [2])], [(0, [1]), (1, [0, 2]), (2, [3])], [(0, [2]), (1, [0]), (2, [1, 3])]]
    want: list[dict[str, float]] = []
    for index, expert in enumerate(model.experts):

        def put(_: nn.Module, __: Any, output: Tensor, key: str = f"experts.{index}") -> None:
            output.register_hook(lambda gradient: want[-1].__setitem__(key, float(gradient.norm())))

        expert.register_forward_hook(put)
    with fxgrad.watch(model, run_file=tmp_path / "run.fxgrad") as watch:
        for rows in steps:
            model.rows = rows
            want.append({})
            model(torch.randn(4, 6)).square().mean().backward()
        watch.flow()  # the writer has had its time
    with fxgrad.open_run(tmp_path / "run.fxgrad") as run:
        for flows in (watch.history, [run.flow(step) for step in run.steps]):
            for flow, norms in zip(flows, want, strict=True):
                assert {key: flow.site(key).l2_norm for key in norms} == pytest.approx(norms, rel=1e-5)
