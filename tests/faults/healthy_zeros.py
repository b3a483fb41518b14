"""Healthy programs with exact zeros: what begins at zero and leaves it, and what gets nothing in some steps only."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.always_zero import Experts, batches, run, zeroed
from tests.faults.healthy import HEALTHY
from tests.faults.nets import Block, Graph, Net, mse, xent
from tests.faults.program import HISTORY, Built

# ---- begun at zero -------------------------------------------------------------------------------------------------


@HEALTHY()
def residual_branch_that_begins_at_zero():
    net = Net(
        lambda self, x: self.head(F.relu(self.stem(x) + self.last(F.relu(self.first(F.relu(self.stem(x))))))),
        stem=nn.Linear(8, 16), first=nn.Linear(16, 16), last=nn.Linear(16, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    zeroed(net.last)
    return run(net, (32, 8), xent(32, 3))


@HEALTHY()
def convolution_with_a_gamma_of_zero():
    net = Net(
        lambda self, x: self.head(F.relu(self.stem(x) + self.norm(self.conv(F.relu(self.stem(x))))).mean((2, 3))),
        stem=nn.Conv2d(3, 8, 3, padding=1), conv=nn.Conv2d(8, 8, 3, padding=1, bias=False), norm=nn.BatchNorm2d(8),
        head=nn.Linear(8, 4),
    )  # fmt: skip
    nn.init.zeros_(net.norm.weight)
    return run(net, (16, 3, 6, 6), xent(16, 4))


@HEALTHY()
def low_rank_adapters_on_attention():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = Block(16), nn.Linear(16, 3)
            self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
            zeroed(self.up)
            for parameter in self.block.parameters():
                parameter.requires_grad_(False)

        def forward(self, x):
            return self.head((self.block(x) + self.up(self.down(x))).mean(1))

    return run(Adapted(), (16, 5, 16), xent(16, 3))


@HEALTHY()
def gate_that_begins_at_zero_behind_a_tanh():
    net = Net(
        lambda self, x: self.head(torch.tanh(self.stem(x)) + torch.tanh(self.gate(x)) * self.branch(x)),
        stem=nn.Linear(8, 16), gate=nn.Linear(8, 16), branch=nn.Linear(8, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    zeroed(net.gate)
    return run(net, (32, 8), xent(32, 3))


@HEALTHY()
def feed_forward_at_zero_before_a_gelu():
    net = Net(
        lambda self, x: self.head(x + self.outer(F.gelu(self.inner(x)))),
        inner=nn.Linear(8, 16), outer=nn.Linear(16, 8), head=nn.Linear(8, 3),
    )  # fmt: skip
    zeroed(net.inner)
    return run(net, (32, 8), xent(32, 3))


@HEALTHY()
def branch_under_a_scale_of_a_millionth():
    net = Net(
        lambda self, x: self.head((x + self.scale * self.block(x)).mean(1)),
        block=Block(16), scale=nn.Parameter(1e-6 * torch.ones(16)), head=nn.Linear(16, 3),
    )  # fmt: skip
    return run(net, (16, 5, 16), xent(16, 3))


@HEALTHY()
def graph_whose_readout_begins_at_zero():
    net = Graph(2)
    zeroed(net.readout)
    return run(net, (8, 12, 16), mse(8, 12, 4))


@HEALTHY(forms=HISTORY)
def adapters_while_the_rate_warms_up_from_zero():
    def loop(built, optimizer):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        for step in range(built.steps):
            optimizer.zero_grad()
            built.loss_at(step).backward()
            optimizer.step()
            schedule.step()

    net = Net(
        lambda self, x: self.head(torch.tanh(self.body(x) + self.up(self.down(x)))),
        body=nn.Linear(8, 16), down=nn.Linear(8, 2), up=nn.Linear(2, 16, bias=False), head=nn.Linear(16, 3),
    )  # fmt: skip
    zeroed(net.up)
    loss = xent(32, 3)
    return Built(net, (torch.randn(32, 8),), loss, lambda m: torch.optim.Adam(m.parameters(), 1e-3), 10,
                 batches((32, 8), loss), loop)  # fmt: skip


# ---- zeros that come in --------------------------------------------------------------------------------------------


@HEALTHY(forms=frozenset({"one_shot"}))
def recurrent_cell_from_a_state_of_zero():
    """The first step of an episode: the recurrent weight has nothing to work with yet."""
    net = Net(lambda self, x: self.head(self.cell(x)), cell=nn.GRUCell(8, 16), head=nn.Linear(16, 3))
    return run(net, (16, 8), xent(16, 3))


@HEALTHY(forms=HISTORY)
def context_that_is_empty_in_some_batches():
    net = Net(
        lambda self, x, context: self.head(torch.tanh(self.body(x)) + self.context(context)),
        body=nn.Linear(8, 16), context=nn.Linear(4, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    loss = xent(16, 3)

    def batch(step):
        return (torch.randn(16, 8), torch.randn(16, 4) * (step % 3 == 0)), loss

    return Built(net, batch(0)[0], loss, None, 9, batch)


@HEALTHY()
def padding_at_the_end_of_every_row():
    net = Net(
        lambda self, x: self.head(F.relu(self.body(x)).sum(1)), body=nn.Linear(8, 16), head=nn.Linear(16, 3)
    )  # fmt: skip
    x = torch.randn(8, 6, 8)
    x[:, 4:] = 0
    return Built(net, (x,), xent(8, 3))


@HEALTHY()
def sparse_features_of_words():
    x = (torch.rand(32, 40) < 0.05).float()
    net = nn.Sequential(nn.Linear(40, 16), nn.ReLU(), nn.Linear(16, 3))
    return Built(net, (x,), xent(32, 3))


# ---- what the loss leaves out --------------------------------------------------------------------------------------


def _weighted(loss, weight):
    return lambda out: loss(out[0]) + weight * sum(one.square().mean() for one in out[1:])


@HEALTHY()
def variational_encoder_before_its_divergence_counts():
    def forward(self, x):
        mean, log = self.enc(x).chunk(2, -1)
        return self.dec(mean + torch.randn_like(mean) * log.exp()), mean, log

    return run(Net(forward, enc=nn.Linear(8, 8), dec=nn.Linear(4, 8)), (16, 8), _weighted(mse(16, 8), 0.0))


@HEALTHY()
def vector_quantiser_with_an_estimator():
    def forward(self, x):
        z = self.enc(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        return self.dec(z + (code - z).detach()), code - z.detach()

    net = Net(forward, enc=nn.Linear(8, 6), codes=nn.Embedding(10, 6), dec=nn.Linear(6, 8))
    return run(net, (16, 8), _weighted(mse(16, 8), 1.0))


@HEALTHY()
def actor_whose_advantages_are_zero():
    def forward(self, x):
        body = torch.tanh(self.body(x))
        policy = torch.distributions.Categorical(logits=self.actor(body))
        return self.critic(body), policy.log_prob(policy.sample())

    net = Net(forward, body=nn.Linear(8, 16), actor=nn.Linear(16, 4), critic=nn.Linear(16, 1))
    value = mse(32, 1)

    def loss(out):
        return value(out[0]) - (torch.zeros(32) * out[1]).mean()

    return run(net, (32, 8), loss)


@HEALTHY()
def two_tasks_of_which_one_waits():
    net = Net(
        lambda self, x: (self.first(torch.tanh(self.body(x))), self.second(torch.tanh(self.body(x)))),
        body=nn.Linear(8, 16), first=nn.Linear(16, 3), second=nn.Linear(16, 2),
    )  # fmt: skip
    return run(net, (32, 8), _weighted(xent(32, 3), 0.0))


@HEALTHY()
def student_beside_a_moving_average():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
            self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                for mean, now in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mean.lerp_(now, 0.01)
            return self.student(x) - self.teacher(x + 0.1)

    return run(Pair(), (32, 8), lambda out: out.square().mean())


@HEALTHY()
def two_views_of_which_one_is_stopped():
    def forward(self, x):
        one, two = self.enc(x), self.enc(x + 0.1)
        return F.cosine_similarity(self.predict(one), two.detach()), F.cosine_similarity(
            self.predict(two), one.detach()
        )

    net = Net(forward, enc=nn.Sequential(nn.Linear(8, 16), nn.Tanh()), predict=nn.Linear(16, 16))
    return run(net, (32, 8), lambda out: -(out[0] + out[1]).mean())


# ---- softmax, experts ----------------------------------------------------------------------------------------------


@HEALTHY(forms=HISTORY)
def attention_over_sequences_of_which_one_is_short():
    net = Net(lambda self, x: self.head(self.attn(x).mean(1)), attn=Block(16).attn, head=nn.Linear(16, 3))
    loss = xent(8, 3)

    def batch(step):
        return (torch.randn(8, 1 if step % 4 == 3 else 5, 16),), loss

    return Built(net, batch(0)[0], loss, None, 8, batch)


@HEALTHY()
def softmax_over_two():
    net = Net(
        lambda self, x: self.head((F.softmax(self.mix(x), -1)[..., None] * self.parts(x).unflatten(-1, (2, 8))).sum(1)),
        mix=nn.Linear(8, 2), parts=nn.Linear(8, 16), head=nn.Linear(8, 3),
    )  # fmt: skip
    return run(net, (32, 8), xent(32, 3))


def _few(count, shape, samples, steps):
    """Few tokens for many experts, so that some idle in some steps."""
    return run(Experts(lambda: nn.Linear(8, 8), 8, count), shape, xent(samples, 4), steps)


HEALTHY.add("experts_in_their_first_steps", lambda: _few(8, (8, 8), 8, 6))
HEALTHY.add("many_experts_for_few_tokens", lambda: _few(12, (6, 8), 6, 7))
HEALTHY.add("experts_that_idle_now_and_then", lambda: _few(6, (8, 8), 8, 24), forms=HISTORY)


@HEALTHY()
def slopes_of_a_prelu_above_zero():
    """Nothing lies below zero, so that the slope for it has nothing to learn from."""
    net = Net(lambda self, x: self.head(self.act(F.softplus(self.body(x)))), body=nn.Linear(8, 16), act=nn.PReLU(),
              head=nn.Linear(16, 3))  # fmt: skip
    return run(net, (32, 8), xent(32, 3))
