"""More ways to NaN and Inf of a second examiner: inside of nets."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults_heldout.exam2_healthy1 import Attention
from tests.faults_heldout.exam2_nets import Net, Out, bad, ce, lins, mse
from tests.faults_heldout.program import Case, fault


class Scale(nn.Module):
    """An own normalisation by the root of the mean square, without eps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.pow(2).mean(-1, keepdim=True).sqrt() * self.g


@fault("net", "nonfinite", r"norms\.1/(div|sqrt).*", bad, "trap")
def own_norm_of_padding_in_second_place() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.norms[0](m.a(x))
        h = F.relu(h) * m.b_keep
        return m.c(m.norms[1](h).mean(1))

    keep = torch.ones(4, 6, 1)
    keep[:, 4:] = 0
    return Case(
        Net(run, a=nn.Linear(5, 8), norms=nn.ModuleList([Scale(8), Scale(8)]), c=nn.Linear(8, 3), b_keep=keep),
        (torch.randn(4, 6, 5),),
        ce(4, 3),
    )


@fault("net", "nonfinite", r"att/softmax", bad, "trap")
def attention_that_may_see_nothing() -> Case:
    return Case(
        Net(lambda m, x: m.c(x + m.att(x)), att=Wrong(), c=nn.Linear(24, 3)), (torch.randn(2, 6, 24),), mse(2, 6, 3)
    )


class Wrong(Attention):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q = self.q(x)
        k, v = self.kv(x).chunk(2, -1)
        s = q[..., :6] @ k.transpose(-2, -1) + torch.full((6, 6), -math.inf).triu(0)
        return self.o((s.softmax(-1) @ v).repeat(1, 1, 4))


@fault("net", "nonfinite", r"/(exp|mul|add)(#\d+)?", bad, "trap")
def unbounded_state_after_hundred_steps() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        for _ in range(40):
            h = h * h.abs().add(2).exp() + 1
        return m.c(h)

    return Case(Net(run, a=nn.Linear(5, 8), c=nn.Linear(8, 3)), (torch.randn(4, 5),), mse(4, 3))


@fault("net", "nonfinite", r".*(mul|exp|log_var|add).*", bad, "trap")
def variational_spread_of_hundreds() -> Case:
    def run(m: Net, x: Tensor) -> Out:
        mu, log_var = m.enc(x).chunk(2, -1)
        z = mu + (log_var * 100 + 200).exp() * 0.1
        return Out(F.mse_loss(m.dec(z), x), z)

    return Case(Net(run, enc=nn.Linear(6, 8), dec=nn.Linear(4, 6)), (torch.randn(8, 6),))


@fault("net", "nonfinite loss_seed", r"outside.*|/(log|mul|cross_entropy).*", bad, "trap")
def loss_inside_takes_log_of_clipped_zero() -> Case:
    def run(m: Net, x: Tensor, y: Tensor) -> Out:
        p = (m.f(x) * 50).clamp(0, 1)
        loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
        return Out(loss, p)

    return Case(Net(run, f=nn.Linear(5, 1)), (torch.randn(16, 5), torch.rand(16, 1).round()))


@fault("net", "nonfinite", r"emb.*", bad, "trap")
def embedding_of_inf_row() -> Case:
    model = Net(lambda m, i: m.c(m.emb(i).mean(1)), emb=nn.Embedding(9, 6), c=nn.Linear(6, 2))
    with torch.no_grad():
        model.emb.weight[4, 1] = math.inf
    return Case(model, (torch.tensor([[1, 4], [2, 3]]),), ce(2, 2))


@fault("net", "nonfinite", r"/sqrt", bad, "trap")
def energy_root_of_a_relaxed_structure() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        p = m.f(x).view(-1, 4, 2)
        d = (p[:, :, None] - p[:, None]).square().sum(-1)
        return m.c((torch.eye(4) * 1e3 + d.sqrt()).reciprocal().flatten(1))

    return Case(Net(run, f=nn.Linear(5, 8), c=nn.Linear(16, 1)), (torch.randn(6, 5),), mse(6, 1))


@fault("net", "nonfinite", r"/(div|normalize|sum|norm).*", bad, "trap")
def dead_code_is_normalised() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = F.relu(m.a(x) - 100)
        return m.c(h / h.sum(-1, keepdim=True))

    return Case(Net(run, a=nn.Linear(5, 8), c=nn.Linear(8, 3)), (torch.randn(6, 5),), ce(6, 3))


@fault("net", "nonfinite", r"blocks\.2.*", bad, "trap")
def third_block_overflows_in_half() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        for b in m.blocks:
            x = x + b(x)
        return m.c(x.float())

    blocks = lins(4, 16).half()
    with torch.no_grad():
        blocks[2].weight.fill_(3e4)
    return Case(Net(run, blocks=blocks, c=nn.Linear(16, 3)), (torch.randn(6, 16).abs().half() + 1,), ce(6, 3))


@fault("loss", "nonfinite loss_seed", r"outside.*", bad, "trap")
def likelihood_of_zero_spread_outside() -> Case:
    return Case(
        nn.Linear(5, 2),
        (torch.randn(6, 5),),
        lambda o: (
            -torch.distributions.Normal(o[:, 0], F.relu(o[:, 1] - 99), validate_args=False)
            .log_prob(torch.ones(6))
            .mean()
        ),
    )


@fault("loss", "nonfinite loss_seed", r"outside.*", bad, "trap")
def root_loss_of_a_copied_target() -> Case:
    m = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))
    x = torch.randn(8, 4)
    with torch.no_grad():
        y = m(x)
    return Case(m, (x,), lambda o: (o - y).norm(dim=-1).pow(0.5).sum())


@fault("input", "nonfinite", r"input:.*|outside.*", bad, "trap")
def second_input_holds_inf() -> Case:
    model = Net(lambda m, x, t: m.c(torch.cat([F.elu(m.a(x)), t / 10], -1)), a=nn.Linear(5, 8), c=nn.Linear(9, 3))
    t = torch.rand(6, 1)
    t[3] = math.inf
    return Case(model, (torch.randn(6, 5), t), ce(6, 3))
