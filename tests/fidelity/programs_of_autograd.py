"""Programs that do more with autograd than one backward pass through layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.fidelity.harness import Program, program


class Straight(Program):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Clipped(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Clipped.calls += 1
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < ctx.limit * 2), None


@program
class FunctionOfOnesOwn(Program):
    @classmethod
    def reset(cls) -> None:
        Clipped.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Clipped.apply(self.a(x), 0.3))

    def state(self) -> Any:
        return Clipped.calls


class Checkpointed(Program):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh())
        self.runs = 0

    def segment(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(self.segment, self.a(x), use_reentrant=self.reentrant))

    def state(self) -> Any:
        return self.runs


@program
class CheckpointedNew(Checkpointed):
    pass


@program
class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Symmetric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return (weight + weight.T) / 2


@program
class Parametrised(Straight):
    def __init__(self) -> None:
        super().__init__()
        self.form = Symmetric()
        parametrize.register_parametrization(self.a, "weight", self.form)

    def change(self, i: int) -> None:
        if i == 4:
            parametrize.remove_parametrizations(self.a, "weight")

    def step(self, i: int) -> Any:
        with parametrize.cached():
            return super().step(i)

    def state(self) -> Any:
        return self.form.calls


@program
class WeightNormalised(Straight):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.a)


@program
class SpectrallyNormalised(Straight):
    """Its power iteration counts the forward calls."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.a, n_power_iterations=2)

    def change(self, i: int) -> None:
        self.train(i != 3)


@program
class OldSpectralNorm(Straight):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.spectral_norm(self.a)


@program
class AverageOfTheModel(Straight):
    """A deepcopy, updated step by step, is the teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers: list[nn.Module] = []

    def step(self, i: int) -> Any:
        if not self.teachers:
            self.teachers.append(copy.deepcopy(self).eval())
        (teacher,) = self.teachers
        x = self.inputs(i)
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), self.parameters(), strict=True):
                old.lerp_(new, 0.1)
            target = teacher(x)
        out = self(x)
        F.mse_loss(out, target + 1).backward()
        return out, target


@program
class CalledWithOtherParameters(Straight):
    def step(self, i: int) -> Any:
        x = self.inputs(i)
        own = {name: parameter * 0.5 for name, parameter in self.named_parameters()}
        out = functional_call(self, own, (x,)) + self(x)
        out.square().mean().backward()
        return out


@program
class GradientsPerSample(Straight):
    seen = False  # of functorch's wrapped values there are none

    def step(self, i: int) -> Any:
        own = {name: parameter.detach() for name, parameter in self.named_parameters()}

        def loss(own: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(self, own, (x[None],)).square().mean()

        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(own, self.inputs(i))
        for name, parameter in self.named_parameters():
            parameter.grad = gradients[name].mean(0)
        return gradients


@program
class ClosureOfLBFGS(Straight):
    def __init__(self) -> None:
        super().__init__()
        self.evaluations = 0
        self.optimizer = torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    def step(self, i: int) -> Any:
        x = self.inputs(i)

        def closure() -> Tensor:
            self.evaluations += 1
            self.zero_grad()
            loss = self(x).square().mean()
            loss.backward()
            return loss

        return self.optimizer.step(closure)

    def state(self) -> Any:
        return self.evaluations


@program
class GradientPenalty(Straight):
    def step(self, i: int) -> Any:
        x = self.inputs(i).requires_grad_()
        out = self(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        return out, slope, x.grad


@program
class InnerLoop(Straight):
    """MAML: the gradient through a step of gradient descent."""

    def step(self, i: int) -> Any:
        x = self.inputs(i)
        own = dict(self.named_parameters())
        first = torch.autograd.grad(self(x).square().mean(), list(own.values()), create_graph=True)
        moved = {name: own[name] - 0.1 * slope for name, slope in zip(own, first, strict=True)}
        out = functional_call(self, moved, (x,))
        out.square().mean().backward()
        return out


@program
class GradientInsideOfTheForward(Program):
    """A force as the derivative of an energy."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        energy = self.b(self.a(x).tanh()).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


@program
class Accumulated(Straight):
    def step(self, i: int) -> Any:
        outputs = []
        for _ in range(1 + i % 3):
            out = self(self.inputs(i))
            (out.square().mean() / 3).backward()
            outputs.append(out)
        return outputs


@program
class TwoLossesOfOneForward(Straight):
    def step(self, i: int) -> Any:
        out = self(self.inputs(i))
        out[:, 0].sum().backward(retain_graph=True)
        first = [p.grad.clone() for p in self.parameters()]
        out[:, 1].square().sum().backward()
        return out, first


@program
class TwoForwardsOfOneLoss(Straight):
    def step(self, i: int) -> Any:
        one, two = self(self.inputs(i)), self(self.inputs(i)[:2])
        (one.mean() + two.square().mean()).backward()
        return one, two
