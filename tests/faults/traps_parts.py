"""Ways to NaN and Inf inside of nets made of parts, in one step or on the way."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.parts import INF, Attention, Net, Out, bad, blank, ce, fresh, lins, mse, trap
from tests.faults.places import fault
from tests.faults.program import Built


def segments(h: Tensor) -> Tensor:
    dst = torch.tensor([0, 0, 1, 1, 3, 3])
    top = torch.full((5, 8), -INF).scatter_reduce(0, dst[:, None].expand(6, 8), h, "amax")
    return (top - top.amax(-1, keepdim=True)).exp()


def hard_gumbel(h: Tensor) -> Tensor:
    u = torch.linspace(0, 0.9, 8)
    return F.softmax(h - torch.log(-torch.log(u)) * 0 - torch.log(-torch.log(u)), -1)


def blows_up(case: Built, step: int) -> Built:
    if step == 6:
        with torch.no_grad():
            case.model.a.weight[0, 0] = float("nan")
    return case


def zero_row(case: Built, step: int) -> Built:
    now = fresh(case, step)
    if step >= 7:
        now.args[0][2] = 0.0
    return now


class Scale(nn.Module):
    """An own normalisation by the root of the mean square, without eps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.pow(2).mean(-1, keepdim=True).sqrt() * self.g


class Wrong(Attention):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q = self.q(x)
        k, v = self.kv(x).chunk(2, -1)
        s = q[..., :6] @ k.transpose(-2, -1) + torch.full((6, 6), -math.inf).triu(0)
        return self.o((s.softmax(-1) @ v).repeat(1, 1, 4))


trap("arccos_of_saturated_tanh", "/arccos /acos", lambda h: torch.arccos(torch.tanh(h * 1000)))
trap("segment_maximum_without_members", r"/sub.*", segments)
trap("gumbel_noise_of_uniform_zero", "/(mul|sub|log).*", hard_gumbel)
trap("layer_norm_module_eps_zero", "/(native_)?layer_norm", lambda h: F.layer_norm(blank(h), (8,), eps=0.0))
trap(
    "batch_norm_in_eval_over_no_variance",
    "/batch_norm",
    lambda h: F.batch_norm(h, torch.zeros(8), torch.zeros(8), training=False, eps=0.0),
)
trap("digamma_of_zero", "/digamma", lambda h: torch.digamma(F.relu(h)))
trap("std_mean_of_one_row", "/std_mean", lambda h: torch.std_mean(h[:1], 0)[0] + h)
trap(
    "spectral_norm_of_zero_matrix",
    "/.*(norm|svd).*",
    lambda h: (
        torch.linalg.matrix_norm(h * 0, "nuc") + torch.linalg.svd(h.t() @ h * 0 + torch.eye(8))[0] @ torch.ones(8)
    ),
)
trap("average_pool_of_log_zero", "/log", lambda h: F.avg_pool1d(torch.log(F.relu(h))[None], 2)[0])
trap("softplus_inverse_of_zero", "/log", lambda h: torch.log(torch.expm1(F.relu(h))))


@fault("nonfinite", r"second/sqrt|/sqrt#1|.*sqrt.*", bad)
def only_the_second_root_is_guilty() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        good = torch.sqrt(h.square() + 1)
        return m.c(good + torch.sqrt(blank(h).square()))

    return Built(Net(run, a=nn.Linear(5, 8), c=nn.Linear(8, 3)), (torch.randn(6, 5),), ce(6, 3))


@fault("nonfinite", r"a|a\.weight", lambda g: g.finite, steps=8, each=blows_up)
def weight_turns_nan_on_the_way() -> Built:
    model = Net(lambda m, x: m.c(torch.tanh(m.a(x))), a=nn.Linear(6, 8), c=nn.Linear(8, 3))
    return Built(model, (torch.randn(16, 6),), ce(16, 3))


@fault("nonfinite", r"/sqrt|/pow.*", lambda g: g.finite, steps=8, each=zero_row)
def blank_sample_meets_a_norm_on_the_way() -> Built:
    model = Net(
        lambda m, x: m.c(m.a(x).square().sum(-1, keepdim=True).sqrt()), a=nn.Linear(6, 8, bias=False), c=nn.Linear(1, 3)
    )
    return Built(model, (torch.randn(16, 6),), ce(16, 3))


@fault("nonfinite", r"norms\.1/(div|sqrt).*", bad)
def own_norm_of_padding_in_second_place() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.norms[0](m.a(x))
        h = F.relu(h) * m.b_keep
        return m.c(m.norms[1](h).mean(1))

    keep = torch.ones(4, 6, 1)
    keep[:, 4:] = 0
    return Built(
        Net(run, a=nn.Linear(5, 8), norms=nn.ModuleList([Scale(8), Scale(8)]), c=nn.Linear(8, 3), b_keep=keep),
        (torch.randn(4, 6, 5),),
        ce(4, 3),
    )


@fault("nonfinite", r"att/softmax", bad)
def attention_that_may_see_nothing() -> Built:
    return Built(
        Net(lambda m, x: m.c(x + m.att(x)), att=Wrong(), c=nn.Linear(24, 3)), (torch.randn(2, 6, 24),), mse(2, 6, 3)
    )


@fault("nonfinite", r"/(exp|mul|add)(#\d+)?", bad)
def unbounded_state_after_hundred_steps() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        for _ in range(40):
            h = h * h.abs().add(2).exp() + 1
        return m.c(h)

    return Built(Net(run, a=nn.Linear(5, 8), c=nn.Linear(8, 3)), (torch.randn(4, 5),), mse(4, 3))


@fault("nonfinite", r".*(mul|exp|log_var|add).*", bad)
def variational_spread_of_hundreds() -> Built:
    def run(m: Net, x: Tensor) -> Out:
        mu, log_var = m.enc(x).chunk(2, -1)
        z = mu + (log_var * 100 + 200).exp() * 0.1
        return Out(F.mse_loss(m.dec(z), x), z)

    return Built(Net(run, enc=nn.Linear(6, 8), dec=nn.Linear(4, 6)), (torch.randn(8, 6),))


@fault("nonfinite loss_seed", r"outside.*|/(log|mul|cross_entropy).*", bad)
def loss_inside_takes_log_of_clipped_zero() -> Built:
    def run(m: Net, x: Tensor, y: Tensor) -> Out:
        p = (m.f(x) * 50).clamp(0, 1)
        loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
        return Out(loss, p)

    return Built(Net(run, f=nn.Linear(5, 1)), (torch.randn(16, 5), torch.rand(16, 1).round()))


@fault("nonfinite", r"emb.*", bad)
def embedding_of_inf_row() -> Built:
    model = Net(lambda m, i: m.c(m.emb(i).mean(1)), emb=nn.Embedding(9, 6), c=nn.Linear(6, 2))
    with torch.no_grad():
        model.emb.weight[4, 1] = math.inf
    return Built(model, (torch.tensor([[1, 4], [2, 3]]),), ce(2, 2))


@fault("nonfinite", r"/sqrt", bad)
def energy_root_of_a_relaxed_structure() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        p = m.f(x).view(-1, 4, 2)
        d = (p[:, :, None] - p[:, None]).square().sum(-1)
        return m.c((torch.eye(4) * 1e3 + d.sqrt()).reciprocal().flatten(1))

    return Built(Net(run, f=nn.Linear(5, 8), c=nn.Linear(16, 1)), (torch.randn(6, 5),), mse(6, 1))


@fault("nonfinite", r"/(div|normalize|sum|norm).*", bad)
def dead_code_is_normalised() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = F.relu(m.a(x) - 100)
        return m.c(h / h.sum(-1, keepdim=True))

    return Built(Net(run, a=nn.Linear(5, 8), c=nn.Linear(8, 3)), (torch.randn(6, 5),), ce(6, 3))


@fault("nonfinite", r"blocks\.2.*", bad)
def third_block_overflows_in_half() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for b in m.blocks:
            x = x + b(x)
        return m.c(x.float())

    blocks = lins(4, 16).half()
    with torch.no_grad():
        blocks[2].weight.fill_(3e4)
    return Built(Net(run, blocks=blocks, c=nn.Linear(16, 3)), (torch.randn(6, 16).abs().half() + 1,), ce(6, 3))


@fault("nonfinite loss_seed", r"outside.*", bad)
def likelihood_of_zero_spread_outside() -> Built:
    return Built(
        nn.Linear(5, 2),
        (torch.randn(6, 5),),
        lambda o: (
            -torch.distributions.Normal(o[:, 0], F.relu(o[:, 1] - 99), validate_args=False)
            .log_prob(torch.ones(6))
            .mean()
        ),
    )


@fault("nonfinite loss_seed", r"outside.*", bad)
def root_loss_of_a_copied_target() -> Built:
    m = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))
    x = torch.randn(8, 4)
    with torch.no_grad():
        y = m(x)
    return Built(m, (x,), lambda o: (o - y).norm(dim=-1).pow(0.5).sum())


@fault("nonfinite", r"input:.*|outside.*", bad)
def second_input_holds_inf() -> Built:
    model = Net(lambda m, x, t: m.c(torch.cat([F.elu(m.a(x)), t / 10], -1)), a=nn.Linear(5, 8), c=nn.Linear(9, 3))
    t = torch.rand(6, 1)
    t[3] = math.inf
    return Built(model, (torch.randn(6, 5), t), ce(6, 3))
