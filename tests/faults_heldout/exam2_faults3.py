"""More faults and traps of a second examiner."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.faults_heldout.exam2_nets import Net, bad, ce, lins, nil, none
from tests.faults_heldout.exam2_traps import INF, blank, trap
from tests.faults_heldout.program import Case, fault


@fault(
    "vanishing", "vanishing scale_break", r"(lns?|fs).*", lambda g: g.norm("fs.0.weight") < 1e-6 * g.norm("out.bias")
)
def norm_with_eps_of_a_thousand() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        for f, ln in zip(m.fs, m.lns, strict=True):
            x = F.gelu(ln(f(x)))
        return m.out(x)

    lns = nn.ModuleList(nn.LayerNorm(16, eps=1e3) for _ in range(5))
    return Case(Net(run, fs=lins(5, 16), lns=lns, out=nn.Linear(16, 3)), (torch.randn(12, 16),), ce(12, 3))


@fault("vanishing", "vanishing", r"(/mul|/add|fs).*", lambda g: g.norm("fs.0.weight") < 1e-6 * g.norm("out.bias"))
def residual_sum_quartered_each_time() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        for f in m.fs:
            x = (x + torch.tanh(f(x))) * 0.25
        return m.out(x)

    return Case(Net(run, fs=lins(16, 12), out=nn.Linear(12, 3)), (torch.randn(12, 12),), ce(12, 3))


@fault("vanishing", "vanishing", r".*\d", lambda g: g.norm("0.weight") < 1e-5 * g.norm("10.bias"))
def softmax_as_hidden_activation() -> Case:
    m = nn.Sequential(*[x for _ in range(5) for x in (nn.Linear(128, 128), nn.Softmax(-1))], nn.Linear(128, 4))
    return Case(m, (torch.randn(12, 128),), ce(12, 4))


@fault("scale_break", "scale_break vanishing", r".*b.*", lambda g: g.norm("a.weight") < 1e-5 * g.norm("c.bias"))
def weight_norm_gain_of_a_ten_millionth() -> Case:
    model = Net(
        lambda m, x: m.c(torch.tanh(m.b(torch.tanh(m.a(x))))),
        a=nn.Linear(6, 12),
        b=parametrizations.weight_norm(nn.Linear(12, 12)),
        c=nn.Linear(12, 3),
    )
    with torch.no_grad():
        model.b.parametrizations.weight.original0.fill_(1e-7)
    return Case(model, (torch.randn(12, 6),), ce(12, 3))


@fault("exploding", "exploding scale_break", r"/(cumprod|mul|add).*", lambda g: g.finite and g.norm("a.weight") > 1e6)
def running_product_of_threes() -> Case:
    model = Net(lambda m, x: m.c((3 + m.a(x)).cumprod(-1)), a=nn.Linear(6, 24), c=nn.Linear(24, 1))
    return Case(model, (torch.randn(12, 6),), lambda o: o.mean())


@fault("zero", "zero", r"/(getitem|narrow|sum).* a", nil("a.weight"))
def slice_that_is_empty() -> Case:
    model = Net(lambda m, x: m.c(m.a(x)[:, 10:].sum(-1, keepdim=True)), a=nn.Linear(6, 10), c=nn.Linear(1, 3))
    return Case(model, (torch.randn(12, 6),), ce(12, 3))


@fault("zero", "zero vanishing scale_break", r"gn", lambda g: g.norm("a.weight") < 1e-4 * g.norm("c.bias"))
def group_norm_of_single_values() -> Case:
    model = Net(lambda m, x: m.c(F.relu(m.gn(m.a(x)))), a=nn.Linear(6, 10), gn=nn.GroupNorm(10, 10), c=nn.Linear(10, 3))
    nn.init.ones_(model.gn.bias)
    return Case(model, (torch.randn(12, 6),), ce(12, 3))


@fault("no_grad", "detached", r"q|k|/.*", none("q.weight"))
def attention_weights_under_no_grad() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            w = (m.q(x) @ m.k(x).mT / 3).softmax(-1)
        return m.c((w @ m.v(x)).mean(1))

    return Case(
        Net(run, q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8), c=nn.Linear(8, 3)),
        (torch.randn(6, 5, 8),),
        ce(6, 3),
    )


@fault("saturated", "saturated", r".*(sigmoid|lerp).*|cell.*|gate", lambda g: g.finite and g.norm("cand.weight") < 1e-6)
def update_gate_always_carries() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.enter(x[:, 0])
        for t in range(6):
            z = torch.sigmoid(m.gate(x[:, t]))
            h = z * h + (1 - z) * torch.tanh(m.cand(x[:, t]))
        return m.c(h)

    model = Net(run, enter=nn.Linear(5, 10), gate=nn.Linear(5, 10), cand=nn.Linear(5, 10), c=nn.Linear(10, 3))
    nn.init.constant_(model.gate.bias, 25.0)
    return Case(model, (torch.randn(6, 6, 5),), ce(6, 3))


@fault("dead", "dead zero saturated", r"act", nil("a.weight"))
def relu_six_module_all_above() -> Case:
    model = Net(lambda m, x: m.c(m.act(m.a(x))), a=nn.Linear(6, 10), act=nn.ReLU6(), c=nn.Linear(10, 3))
    nn.init.constant_(model.a.bias, 30.0)
    return Case(model, (torch.randn(32, 6),), ce(32, 3))


@fault("dead", "dead zero", r"features\.1", nil("features.0.weight"))
def module_relu_after_negative_batch_of_one() -> Case:
    model = Net(
        lambda m, x: m.c(m.features(x).mean((2, 3))),
        features=nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(inplace=True)),
        c=nn.Linear(6, 3),
    )
    nn.init.constant_(model.features[0].bias, -30.0)
    return Case(model, (torch.randn(1, 2, 9, 9),), ce(1, 3))


def segments(h: Tensor) -> Tensor:
    dst = torch.tensor([0, 0, 1, 1, 3, 3])
    top = torch.full((5, 8), -INF).scatter_reduce(0, dst[:, None].expand(6, 8), h, "amax")
    return (top - top.amax(-1, keepdim=True)).exp()


def hard_gumbel(h: Tensor) -> Tensor:
    u = torch.linspace(0, 0.9, 8)
    return F.softmax(h - torch.log(-torch.log(u)) * 0 - torch.log(-torch.log(u)), -1)


trap("arccos_of_saturated_tanh", "/arccos /acos", lambda h: torch.arccos(torch.tanh(h * 1000)), "backward")
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
    "backward",
)
trap("average_pool_of_log_zero", "/log", lambda h: F.avg_pool1d(torch.log(F.relu(h))[None], 2)[0])
trap("softplus_inverse_of_zero", "/log", lambda h: torch.log(torch.expm1(F.relu(h))))


@fault("backward", "nonfinite", r"second/sqrt|/sqrt#1|.*sqrt.*", bad, "trap")
def only_the_second_root_is_guilty() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        good = torch.sqrt(h.square() + 1)
        return m.c(good + torch.sqrt(blank(h).square()))

    return Case(Net(run, a=nn.Linear(5, 8), c=nn.Linear(8, 3)), (torch.randn(6, 5),), ce(6, 3))
