"""Parts of a watched model that the user compiled: dynamo sees nothing of ours."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # loaded by torch.compile at any rate
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook  # torch's own question before it warns
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import fxgrad

Part = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """``kind``: how the part in the middle is compiled."""

    def __init__(self, kind: str, backend: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        part = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.a, self.part, self.c = nn.Linear(4, 6), part, nn.Linear(6, 2)
        compile_it: Any = lambda function: torch.compile(function, backend=backend, fullgraph=True)  # noqa: E731
        self.middle: Part
        if kind == "module":
            self.part = compile_it(part)
            self.middle = self.part
        elif kind == "module in place":
            part.compile(backend=backend, fullgraph=True)
            self.middle = part.__call__
        elif kind == "function with a module":
            self.middle = compile_it(lambda x: part(x) * 2)
        else:
            self.middle = compile_it(lambda x: torch.relu(x * 2) + 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.c(self.middle(self.a(x)))
        return result


KINDS = ("module", "module in place", "function with a module", "function")


def train(kind: str, watching: Callable[[nn.Module], Any]) -> tuple[list[Any], list[str], list[Tensor], Any]:
    """The graphs that were compiled, the warnings, the gradients, and the watch."""
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append([str(node.target).split(" at ")[0] for node in module.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    model = Net(kind, backend)
    gradients = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with watching(model) as watch:
            for _ in range(4):
                model.zero_grad()
                model(torch.randn(3, 4)).square().mean().backward()
                gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model(torch.randn(3, 4))  # what was compiled while watched is good for the time after
    return graphs, [str(warning.message) for warning in said], gradients, watch


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_dynamo_sees_what_it_sees_without_us(kind: str, *, native: bool) -> None:
    graphs, said, gradients, _ = train(kind, lambda _: contextlib.nullcontext())
    torch._dynamo.reset()
    ours = train(kind, lambda model: fxgrad.watch(model, native=native))
    assert ours[0] == graphs
    assert ours[1] == said == []
    assert all(torch.equal(one, two) for one, two in zip(ours[2], gradients, strict=True))
    assert not _has_any_global_hook()


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_around_it_is_observed(kind: str) -> None:
    flow = train(kind, lambda model: fxgrad.watch(model, native=False))[3].flow()
    made = "part" if kind == "module" else "/CompiledFunction"
    assert [site.key for site in flow.sites] == ["input:x", "a", made, "c"]
    assert all(site.l2_norm for site in flow.sites[1:])


class Named(TorchFunctionMode):
    """Writes down what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class Around(nn.Module):
    """Runs compiled code inside of a mode of its own, which stands above ours, and raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function: Part = torch.compile(self.inside, backend="eager")
        self.mode = Named()
        self.fails = False

    def inside(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        if self.fails:
            raise KeyError(x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        with self.mode:
            with contextlib.suppress(KeyError):
                x = self.function(x)
            x = torch.cos(x)
        return self.b(x * 3)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own
@pytest.mark.parametrize("fails", [False, True])
def test_modes_of_the_users_stay_where_they_are(*, fails: bool) -> None:
    plain, watched = Around(), Around()
    plain.fails = watched.fails = fails
    x = torch.randn(2, 4)
    plain(x).sum().backward()
    torch._dynamo.reset()
    with fxgrad.watch(watched, native=False) as watch:
        watched(x).sum().backward()
    assert watched.mode.seen == plain.mode.seen
    assert [site.key for site in watch.flow().sites][-3:] == ["/cos", "/mul", "b"]


def test_a_watch_inside_of_a_watch() -> None:
    model = Net("function with a module", "eager")
    outer = nn.Sequential(model, nn.ReLU())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with fxgrad.watch(outer, native=False) as one, fxgrad.watch(model, native=False) as two:
            outer(torch.randn(3, 4)).sum().backward()
    assert not said
    assert next(site.key for site in two.flow().sites if site.l2_norm is not None) == "a"
    assert one.flow().sites[-1].key == "1"
    assert not _has_any_global_hook()


def test_code_that_is_told_to_run_as_written_is_observed() -> None:
    model = Net("function", "eager")
    with torch.compiler.set_stance("force_eager"), fxgrad.watch(model, native=False) as watch:
        model(torch.randn(3, 4)).sum().backward()
    assert [site.key for site in watch.flow().sites] == ["input:x", "a", "/mul", "/relu", "/add", "c"]


def test_a_disabled_function_is_observed() -> None:
    @torch.compiler.disable
    def shifted(x: Tensor) -> Tensor:
        return torch.sin(x) + 1

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(torch.tanh, shifted(x), use_reentrant=False)

    with fxgrad.watch(Model(), native=False) as watch:
        watch._model(torch.randn(2, requires_grad=True)).sum().backward()
    assert [site.key for site in watch.flow().sites] == ["input:x", "/sin", "/add", "/tanh"]
