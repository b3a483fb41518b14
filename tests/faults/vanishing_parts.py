"""Gradients that vanish in nets made of parts and a function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.parts import Net, ce, fresh, lins, mse, params, tiny
from tests.faults.places import fault
from tests.faults.program import Built


@fault("vanishing", r"/einsum.* /tanh.*", tiny("ws.0", "out.bias", 1e-6))
def einsum_chain_of_small_weights() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for w in m.ws:
            x = torch.einsum("bi,io->bo", x, w).tanh()
        return m.out(x)

    return Built(Net(run, ws=params(12, 8, 8, std=0.05), out=nn.Linear(8, 3)), (torch.randn(16, 8),), ce(16, 3))


@fault("vanishing", r".*(linear|softsign|ls\.\d+).*", tiny("ls.0.weight", "out.weight", 1e-5))
def functional_linear_softsign_thirty() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for lin in m.ls:
            x = F.softsign(F.linear(x, lin.weight, lin.bias))
        return m.out(x)

    return Built(Net(run, ls=lins(30, 16), out=nn.Linear(16, 4)), (torch.randn(9, 16),), ce(9, 4))


@fault("vanishing", r"(cell|/sigmoid).*", tiny("enter.weight", "out.weight", 1e-6))
def one_shared_cell_applied_thirty_times() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        x = m.enter(x)
        for _ in range(30):
            x = m.cell(x).sigmoid()
        return m.out(x)

    model = Net(run, enter=nn.Linear(6, 24), cell=nn.Linear(24, 24), out=nn.Linear(24, 2))
    return Built(model, (torch.randn(12, 6),), ce(12, 2))


@fault("vanishing saturated", r".*(sigmoid|mul|add|cell|tanh|chunk|gates).*", tiny("enter.weight", "out.weight", 1e-8))
def hand_written_lstm_that_forgets() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        c, h = m.enter(x), torch.zeros(x.shape[0], 10)
        for _ in range(25):
            i, f, g, o = m.gates(h).chunk(4, -1)
            c = torch.sigmoid(f - 4) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return m.out(h)

    return Built(
        Net(run, enter=nn.Linear(5, 10), gates=nn.Linear(10, 40), out=nn.Linear(10, 1)), (torch.randn(8, 5),), mse(8, 1)
    )


@fault("vanishing", r"mix.*|/.*", tiny("mix.0.weight", "out.weight", 1e-5))
def tokens_mixed_by_their_mean() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for lin in m.mix:
            x = lin(x)
            x = 0.5 * x + 0.5 * x.mean(1, keepdim=True)
        return m.out(x.mean(1))

    return Built(Net(run, mix=lins(30, 12), out=nn.Linear(12, 3)), (torch.randn(4, 7, 12),), ce(4, 3))


@fault("vanishing", r"net\.\d+", tiny("net.0.weight", "net.18.bias", 1e-5))
def wide_layers_of_std_five_thousandths() -> Built:
    m = nn.Sequential()
    m.net = nn.Sequential(*[x for _ in range(9) for x in (nn.Linear(512, 512), nn.ELU())], nn.Linear(512, 10))
    for p in m.parameters():
        nn.init.normal_(p, std=5e-3) if p.ndim > 1 else nn.init.zeros_(p)
    return Built(m, (torch.randn(4, 512),), ce(4, 10))


@fault("vanishing", r"(/mul|cs\.\d|/gelu).*", tiny("cs.0.weight", "out.weight", 1e-6))
def halved_after_each_convolution() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for c in m.cs:
            x = F.gelu(c(x)).mul(0.2)
        return m.out(x.amax(-1))

    cs = nn.ModuleList(nn.Conv1d(6, 6, 3, padding=1) for _ in range(9))
    return Built(Net(run, cs=cs, out=nn.Linear(6, 2)), (torch.randn(5, 6, 20),), ce(5, 2))


@fault("vanishing scale_break", r".*\.bn|.*batch_norm.*", tiny("b.0.lin.weight", "out.weight", 1e-6))
def stale_running_variance_in_every_norm() -> Built:
    def part() -> nn.Module:
        return Net(lambda m, x: F.silu(m.bn(m.lin(x))), lin=nn.Linear(12, 12), bn=nn.BatchNorm1d(12))

    model = Net(lambda m, x: m.out(m.b(x)), b=nn.Sequential(*[part() for _ in range(5)]), out=nn.Linear(12, 4)).eval()
    for b in model.b:
        b.bn.running_var.fill_(1e4)
    return Built(model, (torch.randn(16, 12),), ce(16, 4))


@fault("vanishing saturated", r".*(sigmoid|mul|as_|gs|glu).*", tiny("as_.0.weight", "out.weight", 1e-6))
def gated_units_all_closed() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for a, g in zip(m.as_, m.gs, strict=True):
            x = a(x) * torch.sigmoid(g(x))
        return m.out(x)

    model = Net(run, as_=lins(5, 16), gs=lins(5, 16), out=nn.Linear(16, 3))
    for g in model.gs:
        nn.init.constant_(g.bias, -5.0)
    return Built(model, (torch.randn(10, 16),), ce(10, 3))


@fault("vanishing scale_break", r"(lns?|fs).*", lambda g: g.norm("fs.0.weight") < 1e-6 * g.norm("out.bias"))
def norm_with_eps_of_a_thousand() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for f, ln in zip(m.fs, m.lns, strict=True):
            x = F.gelu(ln(f(x)))
        return m.out(x)

    lns = nn.ModuleList(nn.LayerNorm(16, eps=1e3) for _ in range(5))
    return Built(Net(run, fs=lins(5, 16), lns=lns, out=nn.Linear(16, 3)), (torch.randn(12, 16),), ce(12, 3))


@fault("vanishing", r"(/mul|/add|fs).*", lambda g: g.norm("fs.0.weight") < 1e-6 * g.norm("out.bias"))
def residual_sum_quartered_each_time() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for f in m.fs:
            x = (x + torch.tanh(f(x))) * 0.25
        return m.out(x)

    return Built(Net(run, fs=lins(16, 12), out=nn.Linear(12, 3)), (torch.randn(12, 12),), ce(12, 3))


@fault("vanishing", r".*\d", lambda g: g.norm("0.weight") < 1e-5 * g.norm("10.bias"))
def softmax_as_hidden_activation() -> Built:
    m = nn.Sequential(*[x for _ in range(5) for x in (nn.Linear(128, 128), nn.Softmax(-1))], nn.Linear(128, 4))
    return Built(m, (torch.randn(12, 128),), ce(12, 4))


@fault("vanishing", r".*\d", lambda g: g.norm("0.weight") < 1e-6 * g.norm("24.bias"), steps=8, each=fresh)
def logistic_chain_over_steps() -> Built:
    m = nn.Sequential(*[x for _ in range(12) for x in (nn.Linear(24, 24), nn.Sigmoid())], nn.Linear(24, 3))
    return Built(m, (torch.randn(16, 24),), ce(16, 3))
