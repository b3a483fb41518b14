"""Models whose Python decides at run time, or whose code no trace can see: right only where the Python itself runs."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import case, normal


class Body(nn.Module):
    """A linear body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)


def branch_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("/tanh", torch.tanh(at("body", model.body(at("input:x", x)))))
    at("/mean", x.mean())
    return at("head", model.head(at("grow", model.grow(h))))


@case("branch", lambda: (torch.randn(5, 4).abs(),), fx="raises", symbolic=False, twin=branch_twin)
class Branch(Body):
    def __init__(self) -> None:
        super().__init__()
        self.grow, self.shrink = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        h = self.grow(h) if x.mean() > 0 else self.shrink(h)
        return self.head(h)


@case("item", normal(5, 4), fx="raises", symbolic=False)
class Item(Body):
    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        scale = 1.0 / max(1.0, math.sqrt(h.detach().square().sum().item()))
        return self.head(h * scale)


@case("while_loop", normal(5, 4), fx="raises", symbolic=False)
class WhileLoop(Body):
    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        while float(h.detach().abs().max()) > 0.2:
            h = torch.tanh(h) * 0.7
        return self.head(h)


def shape_loop_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    x = at("input:x", x)
    total = at("/zeros", torch.zeros(3, 6))
    rows = []
    for step in range(4):
        index = f"#{step}" if step else ""
        row = at(f"body{index}", model.body(at(f"/getitem{index}", x[:, step])))
        total = at(f"/add{index}", total + row)
        rows.append(at(f"/relu{index}", F.relu(total)))
    return at("head", model.head(at("/stack", torch.stack(rows, 1))))


@case("shape_loop", normal(3, 4, 4), fx="raises", symbolic=False, twin=shape_loop_twin)
class ShapeLoop(Body):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(x.size(0), 6)
        rows = []
        for step in range(x.shape[1]):
            total = total + self.body(x[:, step])
            rows.append(F.relu(total))
        return self.head(torch.stack(rows, 1))


@case("made_in_forward", normal(5, 4), symbolic=False, fx="raises")
class MadeInForward(Body):
    def forward(self, x: Tensor) -> Tensor:
        h = nn.Softplus()(self.body(x))
        return self.head(nn.LayerNorm(6)(h))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.drop(F.gelu(self.fc1(x))))


def checkpoint_twin(model: Any, at: Any, x: Tensor) -> Tensor:
    h = at("/tanh", torch.tanh(at("body", model.body(at("input:x", x)))))
    block = model.block
    inner = at("block.fc1", block.fc1(h))
    inner = at("block.drop", block.drop(at("block/gelu", F.gelu(inner))))
    h = at("block/add", h + at("block.fc2", block.fc2(inner)))
    return at("head", model.head(h))


@case("checkpoint", normal(5, 4), symbolic=False, twin=checkpoint_twin)
class Checkpoint(Body):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.head(checkpoint(self.block, h, use_reentrant=self.reentrant))


@case("checkpoint_reentrant", normal(5, 4), symbolic=False, fx="same")
class CheckpointReentrant(Checkpoint):
    reentrant = True


@case("checkpoint_batchnorm", normal(6, 4), symbolic=False, fx="differs")
class CheckpointBatchnorm(Body):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, torch.tanh(self.body(x)), use_reentrant=False))


class Clipped(torch.autograd.Function):
    """Identity forward, clipped gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


@case("custom_function", normal(5, 4), symbolic=False, fx="differs")
class CustomFunction(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(Clipped.apply(self.body(x))))


def scripted(code: Any) -> Any:
    """``torch.jit.script`` without the warning that it is deprecated: users still have such models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(code)


def scale_in_steps(x: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        x = x * 0.9 + 0.1
    return x


scripted_scale = scripted(scale_in_steps)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))


@case("scripted_module", normal(5, 4), symbolic=None)
class ScriptedModule(Body):
    def __init__(self) -> None:
        super().__init__()
        self.inner = scripted(Inner())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.body(x)))


@case("scripted_function", normal(5, 4), symbolic=False, fx="raises")
class ScriptedFunction(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(scripted_scale(self.body(x), 2))


@case("hook_in_forward", normal(5, 4), symbolic=False, fx="raises")
class HookInForward(Body):
    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.5)
        return self.head(torch.tanh(h))


def double_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    del module, args
    return output * 2.0


@case("module_hook", normal(5, 4), symbolic=None, fx="same")
class ModuleHook(Body):
    def __init__(self) -> None:
        super().__init__()
        self.body.register_forward_hook(double_output)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


@case("block_hook", normal(5, 4), symbolic=None, fx="same")
class BlockHook(Body):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.inner.register_forward_hook(double_output)
        self.inner.register_full_backward_hook(lambda module, got, given: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.body(x)))


@case("counter", normal(5, 4), symbolic=False, fx="same")
class Counter(Body):
    """Python state that the forward reads and writes: a trace is right for one step only."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.alpha = 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.alpha *= 0.5
        return self.head(self.body(x) * self.alpha + self.steps)


@case("annealed", normal(5, 4), symbolic=None)
class Annealed(Body):
    """Python state that the training loop changes from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 0.3

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) * self.alpha)


@case("noise", normal(5, 4), symbolic=False, fx="raises")
class Noise(Body):
    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h + 0.1 * torch.randn(h.shape[0], 6))


@case("nonzero_mask", normal(5, 4), symbolic=None, fx="same")
class NonzeroMask(Body):
    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h[h[:, 0] > -5.0])


@case("autocast", normal(5, 4), symbolic=None, fx="differs")
class Autocast(Body):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.body(x)
        return self.head(h.float())


@case("physics", lambda: (torch.rand(5, 4, requires_grad=True),), symbolic=False, fx="same")
class Physics(Body):
    """A derivative of the network is part of the loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        u = self.head(torch.tanh(self.body(x)))
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u, slope


@case("functional_gradient", normal(5, 4), symbolic=False, fx="raises")
class FunctionalGradient(Body):
    def forward(self, x: Tensor) -> Tensor:
        def score(row: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(row))).sum()

        return torch.func.vmap(torch.func.grad(score))(x)


@case("parametrized", normal(5, 4), symbolic=None, fx="same")
class Parametrized(Body):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.weight_norm(self.body)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x)))


@case("set_grad_enabled", normal(5, 4), symbolic=False, fx="raises")
class SetGradEnabled(Body):
    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(bool(x.mean() > 100)):
            h = self.body(x)
        return self.head(h)


@case("inference_part", normal(5, 4), symbolic=None, fx="differs")
class InferencePart(Body):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 6)

    @torch.no_grad()
    def targets(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.teacher(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) - self.targets(x))


@case("forward_raises", normal(5, 4), symbolic=None, raises="ValueError", fx="raises")
class ForwardRaises(Body):
    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        message = "a batch of this size is not supported"
        raise ValueError(message)


@fx.wrap
def scaled_unless_none(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale


@case("wrapped_function", normal(5, 4), symbolic=True, fx="same")
class WrappedFunction(Body):
    """A function that torch.fx keeps as one node; the model's own run enters it."""

    def forward(self, x: Tensor) -> Tensor:
        h = scaled_unless_none(self.body(x), None)
        return self.head(scaled_unless_none(torch.tanh(h), h))
