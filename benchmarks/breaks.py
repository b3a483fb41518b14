"""What each tool sees of a model's gradients, and what it breaks: ``python -m benchmarks.breaks``, for the README.

Each tool runs one training step of three small models, and is compared with the plain step from the same seed:

- *in place*: a residual net with ``nn.ReLU(inplace=True)`` and ``h += x``;
- *functions*: one of functions and operators, without a module for each;
- *dropout*: a net whose random numbers must be those of the plain step.

What a tool that takes no training step (torchviz, torchview) sees is counted in its graph.  Costs are the business of
``benchmarks.run``; the seconds here are of one call on a ResNet-18, for tools that draw.
"""

from __future__ import annotations

import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.hooks import Anomaly, ModuleHooks, RetainGrad, TensorHooks
from benchmarks.models import Built
from benchmarks.ours import Watched
from benchmarks.peers import TorchLens, WandbWatch
from benchmarks.runners import Runner, SkippedError

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class InPlace(nn.Module):
    """Modules, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.mid, self.b = nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        h = self.mid(self.act(self.a(x)))
        h += x
        return self.b(h)


class Functions(nn.Module):
    """Functions and operators without a module: linear, relu, add, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 6) / 3), nn.Parameter(torch.randn(3, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        return F.linear(F.relu(F.linear(x, self.a)) + x, self.b)


class Dropped(nn.Module):
    """A net that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        return self.b(self.drop(torch.tanh(self.a(x))))


MODELS: dict[str, Callable[[], nn.Module]] = {"in place": InPlace, "functions": Functions, "dropout": Dropped}
TOOLS: dict[str, Callable[[Built], Runner]] = {
    "fxgrad.watch": lambda built: Watched(built, statistics="norm"),
    "full backward hooks": ModuleHooks,
    "forward hook and tensor hook": TensorHooks,
    "retain_grad": RetainGrad,
    "detect_anomaly": Anomaly,
    "wandb.watch": WandbWatch,
    "TorchLens": TorchLens,
}


def made(name: str) -> Built:
    """The model of this name, the same at every call."""
    torch.manual_seed(0)
    return Built(MODELS[name](), (X,), {}, lambda out: out.square().mean())


def trained(name: str, tool: Callable[[Built], Runner]) -> tuple[list[Tensor], int]:
    """Parameters and their gradients after one step, and how many values had their gradient told."""
    built = made(name)
    runner = tool(built)
    try:
        torch.manual_seed(1)
        runner.step()
        runner.read()
        seen = runner.seen().activations
    finally:
        runner.close()
    after = [part for p in built.model.parameters() for part in (p.detach(), p.grad) if part is not None]
    return [part.clone() for part in after], seen


def told(name: str, tool: Callable[[Built], Runner]) -> str:
    """What became of a model under a tool, in a cell."""
    want, _ = trained(name, Runner)
    try:
        got, seen = trained(name, tool)
    except SkippedError:
        raise
    except Exception as error:  # noqa: BLE001  # what breaks is the question
        return f"raises {type(error).__name__}: {str(error).splitlines()[0][:60]}"
    alike = len(got) == len(want) and all(map(torch.equal, got, want))
    return f"{seen} values" + ("" if alike else ", other bits")


def drawn() -> dict[str, str]:
    """What tools that draw see of the model of functions, and the seconds for a ResNet-18."""
    import torchvision

    x = torch.randn(1, 3, 64, 64)
    cells = {}
    for name, draw in (("torchviz", _torchviz), ("torchview", _torchview)):
        try:
            source = draw(Functions(), X)
            model = torchvision.models.resnet18()
            start = time.perf_counter()
            draw(model, x)
        except ImportError as error:
            cells[name] = f"skipped: {error}"
            continue
        nodes = len(re.findall(r"^\s*\w+ \[label=", source, re.MULTILINE))
        cells[name] = f"{nodes} boxes, no number of a gradient; {time.perf_counter() - start:.2f} s for a ResNet-18"
    return cells


def _torchviz(model: nn.Module, x: Tensor) -> str:
    from torchviz import make_dot

    return str(make_dot(model(x), params=dict(model.named_parameters())).source)


def _torchview(model: nn.Module, x: Tensor) -> str:
    from torchview import draw_graph

    return str(draw_graph(model, input_data=x).visual_graph.source)


def main() -> int:
    """Print the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| tool | " + " | ".join(MODELS) + " |\n|---|" + "---|" * len(MODELS))
    for tool, make in TOOLS.items():
        try:
            print(f"| {tool} | " + " | ".join(told(name, make) for name in MODELS) + " |", flush=True)
        except SkippedError as error:
            print(f"| {tool} | skipped: {error} |" + " |" * (len(MODELS) - 1))
        except Exception:  # noqa: BLE001  # a tool that breaks at its start must not hide the others
            traceback.print_exc()
    for tool, cell in drawn().items():
        print(f"| {tool} | {cell} |" + " |" * (len(MODELS) - 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
