"""Loops in which a step is more than forward, backward, step."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fxgrad.schema import GradientFlow
from tests.fidelity.loops import Loop, batch, loop
from tests.fidelity.loops_of_precision import Simple

Flows = Mapping[str, Sequence[GradientFlow]]


def differentiated(flows: Sequence[GradientFlow]) -> list[bool]:
    """Of each flow, whether its backward pass was itself recorded."""
    return [flow.event.differentiated for flow in flows]


@loop
class Alternating(Loop):
    """Two networks against each other, each with an optimizer: the critic's step, then the generator's."""

    events = None

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer_g = torch.optim.Adam(self.generator.parameters(), 1e-2, (0.5, 0.9))
        self.optimizer_c = torch.optim.Adam(self.critic.parameters(), 1e-2, (0.5, 0.9))

    def watched(self) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
        return {
            "generator": (self.generator, {"optimizer": self.optimizer_g}),
            "critic": (self.critic, {"optimizer": self.optimizer_c}),
        }

    def step(self, i: int) -> Any:
        real, noise = batch(i), torch.randn(5, 4)
        self.optimizer_c.zero_grad()
        fake = self.generator(noise)
        loss_c = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        loss_c.backward()
        self.optimizer_c.step()
        self.optimizer_g.zero_grad()
        loss_g = F.softplus(-self.critic(fake)).mean()
        loss_g.backward()
        self.optimizer_g.step()
        return loss_c, loss_g

    def check(self, flows: Flows) -> None:
        assert len(flows["generator"]) == self.steps
        critic = flows["critic"]  # real and fake in the first pass, fake alone in the second
        assert len(critic) == 3 * self.steps
        passes: dict[int, int] = {}
        for flow in critic:
            passes[flow.event.backward] = passes.get(flow.event.backward, 0) + 1
        assert list(passes.values()) == [2, 1] * self.steps


@loop
class GradientPenalty(Loop):
    """WGAN-GP: the norm of the critic's gradient at its input is part of the loss."""

    events = None

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)

    def step(self, i: int) -> Any:
        self.optimizer.zero_grad()
        x = batch(i).requires_grad_()
        out = self.model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss, x.grad

    def check(self, flows: Flows) -> None:
        assert len(flows["model"]) == 2 * self.steps  # the pass to the input, and that of the loss
        assert all(flow.event.differentiated for flow in flows["model"])
        inner, outer = flows["model"][0], flows["model"][1]
        assert all(record.statistics is None for record in inner.parameters)
        assert all(record.statistics is not None for record in outer.parameters)


@loop
class HessianVector(Loop):
    """A product with the Hessian beside the step: double backward through the parameters' gradients."""

    events = None

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)

    def step(self, i: int) -> Any:
        self.optimizer.zero_grad()
        parameters = list(self.model.parameters())
        loss = self.model(batch(i)).square().mean()
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        product = torch.autograd.grad(sum((g * g.detach()).sum() for g in grads), parameters)
        for parameter, g, h in zip(parameters, grads, product, strict=True):
            parameter.grad = g.detach() + 0.1 * h
        self.optimizer.step()
        return loss, product

    def check(self, flows: Flows) -> None:
        assert len(flows["model"]) == 2 * self.steps


@loop
class Meta(Loop):
    """MAML: one inner step by hand through ``functional_call``, and the gradient through it."""

    events = None

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)

    def step(self, i: int) -> Any:
        self.optimizer.zero_grad()
        named = dict(self.model.named_parameters())
        inner = torch.func.functional_call(self.model, named, (batch(i),)).square().mean()
        grads = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        adapted = {name: p - 0.1 * g for (name, p), g in zip(named.items(), grads, strict=True)}
        outer = torch.func.functional_call(self.model, adapted, (batch(i + 500),)).square().mean()
        outer.backward()
        self.optimizer.step()
        return inner, outer


@loop
class SeveralBackwards(Loop):
    """Three losses of one graph, each with a backward pass of its own; their gradients add up in ``.grad``."""

    events = 3

    def step(self, i: int) -> Any:
        self.optimizer.zero_grad()
        out = self.model(batch(i))
        losses = [out[:, k].square().mean() for k in range(3)]
        for k, loss in enumerate(losses):
            loss.backward(retain_graph=k < 2)
        self.optimizer.step()
        return losses

    def check(self, flows: Flows) -> None:
        events = [(flow.event.forward, flow.event.backward) for flow in flows["model"]]
        assert events == [(n // 3, n) for n in range(3 * self.steps)]
        assert [flow.optimizer.step for flow in flows["model"] if flow.optimizer] == [n // 3 for n in range(150)]


@loop
class Validating(Simple):
    """Evaluation without gradients, and a pass in train mode that nobody differentiates, in between."""

    def step(self, i: int) -> Any:
        found = super().step(i)
        if i % 5 == 0:
            self.model.eval()
            with torch.no_grad():
                found = found, self.model(batch(i + 100))
            with torch.inference_mode():
                self.model(batch(i + 101))
            self.model.train()
        if i % 7 == 0:
            self.model(batch(i + 200))  # a loss that is only logged
        return found


class Broken(RuntimeError):
    """What goes wrong in ``Raising``."""


@loop
class Raising(Loop):
    """Something raises in the middle, somewhere else each time, is caught, and training goes on."""

    events = None
    by_parameter = False  # a pass that raised has arrived at some

    PLACES = ("forward", "loss", "backward", "hook", "optimizer", "nothing")

    def __init__(self) -> None:
        super().__init__()
        self.place = "nothing"
        self.model.add_module("last", Trapped(self))
        self.model[4].register_forward_hook(lambda *_: self.trap("hook"))
        self.optimizer.register_step_pre_hook(lambda *_: self.trap("optimizer"))

    def trap(self, here: str) -> None:
        """Raise, if this is the place."""
        if self.place == here:
            raise Broken(here)

    def step(self, i: int) -> Any:
        self.place = self.PLACES[i % len(self.PLACES)]
        self.optimizer.zero_grad()
        try:
            loss = self.model(batch(i)).square().mean()
            self.trap("loss")
            loss.backward()
            self.optimizer.step()
        except Broken as error:
            return str(error)
        return loss

    def check(self, flows: Flows) -> None:
        at = [self.PLACES[i % len(self.PLACES)] for i in range(self.steps)]
        begun = [place for place in at if place in ("backward", "optimizer", "nothing")]
        assert len(flows["model"]) == len(begun)
        for flow, place in zip(flows["model"], begun, strict=True):
            assert (flow.event.failed is not None) == (place == "backward")
            assert (flow.optimizer.step is not None) == (place == "nothing")
        failed = next(flow.event.failed for flow in flows["model"] if flow.event.failed)
        assert failed is not None and (failed.cause, failed.site) == ("custom_function", "last/Trap")


class Trap(torch.autograd.Function):
    """Raises in the backward pass, where it is to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Any) -> Tensor:
        ctx.owner = owner
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.owner.trap("backward")
        return grads[0], None


class Trapped(nn.Module):
    def __init__(self, owner: Raising) -> None:
        super().__init__()
        object.__setattr__(self, "owner", owner)

    def forward(self, x: Tensor) -> Tensor:
        self.owner.trap("forward")
        return Trap.apply(x, self.owner)  # type: ignore[no-any-return]


@loop
class LateUnfreezing(Simple):
    """The first part is frozen for twenty steps, then trained with a rate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], 1e-2)

    def change(self, i: int) -> None:
        if i == 20:
            self.model[0].requires_grad_(True)
            self.optimizer.add_param_group({"params": list(self.model[0].parameters()), "lr": 1e-3})

    def check(self, flows: Flows) -> None:
        first = [flow.parameters[0] for flow in flows["model"]]
        assert [record.statistics is not None for record in first] == [False] * 20 + [True] * 30
        assert [record.reason for record in first[:20]] == ["frozen"] * 20
        assert [record.update is not None for record in first] == [False] * 20 + [True] * 30


@loop
class ParametersAdded(Simple):
    """The head is replaced by a wider one at step 15, and a branch comes in at step 30."""

    def change(self, i: int) -> None:
        if i == 15:
            self.model[6] = nn.Linear(8, 5)
            self.optimizer.add_param_group({"params": list(self.model[6].parameters())})
        if i == 30:
            self.model.append(nn.Linear(5, 2))
            self.optimizer.add_param_group({"params": list(self.model[7].parameters())})

    def check(self, flows: Flows) -> None:
        counts = [len(flow.parameters) for flow in flows["model"]]
        assert counts == [8] * 30 + [10] * 20
        shapes = [flow.parameters[-2].shape for flow in flows["model"]]
        assert shapes == [(3, 8)] * 15 + [(5, 8)] * 15 + [(2, 5)] * 20


@loop
class ShapesChange(Simple):
    """Each batch has another size; the last one of an epoch is small."""

    def loss(self, i: int) -> Tensor:
        return self.model(batch(i, 2 + i * 7 % 5, 6)).square().mean()

    def check(self, flows: Flows) -> None:
        got = [flow.site("0").shape for flow in flows["model"]]
        assert got == [(2 + i * 7 % 5, 8) for i in range(self.steps)]


@loop
class Averages(Simple):
    """An average of the weights by torch, one by hand, and copies made in the middle of the watch."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.by_hand = copy.deepcopy(self.model).eval().requires_grad_(False)

    def step(self, i: int) -> Any:
        found = super().step(i)
        self.average.update_parameters(self.model)
        if i == 10:
            self.by_hand = copy.deepcopy(self.model).eval().requires_grad_(False)
            self.late = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        with torch.no_grad():
            for mine, own in zip(self.by_hand.parameters(), self.model.parameters(), strict=True):
                mine.lerp_(own, 0.1)
        return found, self.by_hand(batch(i)), self.average(batch(i)).detach()


@loop
class Teacher(Loop):
    """A teacher that follows the student, which learns from its answers to another view (BYOL, mean teacher)."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model)

    def step(self, i: int) -> Any:
        if i == 5:
            self.teacher = copy.deepcopy(self.model)  # of a model that is watched by now
        self.optimizer.zero_grad()
        with torch.no_grad():
            target = self.teacher(batch(i) + 0.1 * torch.randn(5, 6))
        loss = F.mse_loss(self.model(batch(i)), target.detach()) + 0.1 * F.cross_entropy(
            self.model(batch(i + 1)), torch.arange(5) % 3
        )
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for mine, own in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                mine.mul_(0.9).add_(own, alpha=0.1)
        return loss

    events = 2

    def check(self, flows: Flows) -> None:
        passes = [flow.event.backward for flow in flows["model"]]
        assert passes == [n // 2 for n in range(2 * self.steps)]


@loop
class Distilled(Simple):
    """A frozen teacher of another kind inside of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).eval().requires_grad_(False)

    def loss(self, i: int) -> Tensor:
        want = F.softmax(self.teacher(batch(i)) / 2, 1)
        return F.kl_div(F.log_softmax(self.model(batch(i)) / 2, 1), want, reduction="batchmean") * 4


@loop
class InBackward(Loop):
    """An optimizer for each parameter, which steps as soon as its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = None
        self.optimizers = tuple(torch.optim.Adam([p], 1e-2) for p in self.model.parameters())
        for parameter, optimizer in zip(self.model.parameters(), self.optimizers, strict=True):
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: stepped(optimizer))

    def watched(self) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
        return {"model": (self.model, {"optimizer": self.optimizers})}

    def step(self, i: int) -> Any:
        loss = self.model(batch(i)).square().mean()
        loss.backward()
        return loss, [optimizer.state_dict() for optimizer in self.optimizers]

    def check(self, flows: Flows) -> None:
        for n, flow in enumerate(flows["model"]):
            assert flow.optimizer is not None
            assert [step.number for step in flow.optimizer.steps] == [n] * 8
            assert all(record.update is not None for record in flow.parameters)


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """Step and clear."""
    optimizer.step()
    optimizer.zero_grad()


@loop
class Lbfgs(Loop):
    """The step calls forward and backward as often as it likes."""

    events = None
    steps = 12

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        self.calls = 0

    def step(self, i: int) -> Any:
        def closure() -> Tensor:
            self.calls += 1
            self.optimizer.zero_grad()
            loss = self.model(batch(0)).square().mean()
            loss.backward()
            return loss

        return self.optimizer.step(closure)

    def check(self, flows: Flows) -> None:
        numbers = [flow.event.backward for flow in flows["model"]]
        assert numbers == list(range(len(numbers))) and len(numbers) > 2 * self.steps
        steps = [flow.optimizer.step for flow in flows["model"] if flow.optimizer]
        assert sorted(set(steps)) == list(range(self.steps)) and steps == sorted(steps)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware: climb, take the gradient there, come back, step."""

    def __init__(self, parameters: Any, rho: float = 0.05, **of_base: Any) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, **of_base)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        for p in found:
            self.state[p]["there"] = p.clone()
            p.add_(p.grad, alpha=0.05 / (float(norm) + 1e-12))
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for p in found:
            p.copy_(self.state[p]["there"])
        self.base.step()
        return loss


@loop
class SharpnessAware(Loop):
    events = 2

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = Sam(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self, i: int) -> Any:
        def closure() -> Tensor:
            loss = self.model(batch(i)).square().mean()
            loss.backward()
            return loss

        self.optimizer.zero_grad()
        first = closure()
        return first, self.optimizer.step(closure)

    def check(self, flows: Flows) -> None:
        assert [f.optimizer.step for f in flows["model"] if f.optimizer] == [n // 2 for n in range(2 * self.steps)]


@loop
class ActorCritic(Loop):
    """A trunk with two heads, three losses added up, an episode of several forward calls in one pass."""

    events = 4

    def __init__(self) -> None:
        super().__init__()
        self.model = Heads()
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), 1e-3)

    def step(self, i: int) -> Any:
        logs, values, entropies, rewards = [], [], [], []
        for t in range(4):
            logits, value = self.model(batch(10 * i + t, 1, 6))
            law = torch.distributions.Categorical(logits=logits)
            action = law.sample()
            logs.append(law.log_prob(action))
            values.append(value.squeeze())
            entropies.append(law.entropy())
            rewards.append(float(action) - 1)
        returns = torch.tensor([sum(rewards[t:]) for t in range(4)])
        advantage = returns - torch.stack(values)
        policy = -(torch.cat(logs) * advantage.detach()).sum()
        loss = policy + 0.5 * advantage.square().sum() - 0.01 * torch.cat(entropies).sum()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss, rewards

    def check(self, flows: Flows) -> None:
        assert [flow.event.backward for flow in flows["model"]] == [n // 4 for n in range(4 * self.steps)]
        assert [flow.event.forward for flow in flows["model"]] == list(range(4 * self.steps))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.policy(h), self.value(h)


@loop
class SeparateLosses(Loop):
    """Actor and critic each with a backward pass and an optimizer of its own, over one graph; epochs over a batch."""

    events = 2

    def __init__(self) -> None:
        super().__init__()
        self.model = Heads()
        self.optimizer = torch.optim.Adam([*self.model.trunk.parameters(), *self.model.policy.parameters()], 1e-3)
        self.of_value = torch.optim.Adam(self.model.value.parameters(), 1e-2)

    def watched(self) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
        return {"model": (self.model, {"optimizer": [self.optimizer, self.of_value]})}

    def step(self, i: int) -> Any:
        logits, value = self.model(batch(i // 3))
        self.optimizer.zero_grad()
        self.of_value.zero_grad()
        (-F.log_softmax(logits, 1)[:, i % 3]).mean().backward(retain_graph=True)
        value.square().mean().backward(inputs=list(self.model.value.parameters()))
        self.optimizer.step()
        self.of_value.step()
        return logits

    by_parameter = False  # a pass with ``inputs=`` has other ends


@loop
class Truncated(Loop):
    """A recurrent model over a long sequence, cut every four steps; its state is carried over."""

    events = 4

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.GRUCell(6, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
        self.hidden = torch.zeros(5, 8)

    def step(self, i: int) -> Any:
        self.hidden = self.hidden.detach()
        losses = []
        for t in range(4):
            self.hidden = self.model(batch(4 * i + t), self.hidden)
            losses.append(self.hidden.square().mean())
        self.optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        self.optimizer.step()
        return losses


@loop
class ThrownAway(Loop):
    """Steps with too large a gradient, or a loss that is not finite, are left out."""

    def step(self, i: int) -> Any:
        loss = self.model(batch(i)).square().mean() * (math.inf if i % 9 == 4 else 1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if torch.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def check(self, flows: Flows) -> None:
        taken = [flow.optimizer.step is not None for flow in flows["model"] if flow.optimizer]
        assert taken == [i % 9 != 4 for i in range(self.steps)]
