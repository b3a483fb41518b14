"""Faults of a second examiner: scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults_heldout.exam2_nets import Net, big, ce, he, lins, mse, params, tiny
from tests.faults_heldout.program import Case, fault


@fault("vanishing", "vanishing", r"/einsum.* /tanh.*", tiny("ws.0", "out.bias", 1e-6))
def einsum_chain_of_small_weights() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        for w in m.ws:
            x = torch.einsum("bi,io->bo", x, w).tanh()
        return m.out(x)

    return Case(Net(run, ws=params(12, 8, 8, std=0.05), out=nn.Linear(8, 3)), (torch.randn(16, 8),), ce(16, 3))


@fault("vanishing", "vanishing", r".*(linear|softsign|ls\.\d+).*", tiny("ls.0.weight", "out.weight", 1e-5))
def functional_linear_softsign_thirty() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        for lin in m.ls:
            x = F.softsign(F.linear(x, lin.weight, lin.bias))
        return m.out(x)

    return Case(Net(run, ls=lins(30, 16), out=nn.Linear(16, 4)), (torch.randn(9, 16),), ce(9, 4))


@fault("vanishing", "vanishing", r"(cell|/sigmoid).*", tiny("enter.weight", "out.weight", 1e-6))
def one_shared_cell_applied_thirty_times() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        x = m.enter(x)
        for _ in range(30):
            x = m.cell(x).sigmoid()
        return m.out(x)

    model = Net(run, enter=nn.Linear(6, 24), cell=nn.Linear(24, 24), out=nn.Linear(24, 2))
    return Case(model, (torch.randn(12, 6),), ce(12, 2))


@fault(
    "vanishing",
    "vanishing saturated",
    r".*(sigmoid|mul|add|cell|tanh|chunk|gates).*",
    tiny("enter.weight", "out.weight", 1e-8),
)
def hand_written_lstm_that_forgets() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        c, h = m.enter(x), torch.zeros(x.shape[0], 10)
        for _ in range(25):
            i, f, g, o = m.gates(h).chunk(4, -1)
            c = torch.sigmoid(f - 4) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return m.out(h)

    return Case(
        Net(run, enter=nn.Linear(5, 10), gates=nn.Linear(10, 40), out=nn.Linear(10, 1)), (torch.randn(8, 5),), mse(8, 1)
    )


@fault("vanishing", "vanishing", r"mix.*|/.*", tiny("mix.0.weight", "out.weight", 1e-5))
def tokens_mixed_by_their_mean() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        for lin in m.mix:
            x = lin(x)
            x = 0.5 * x + 0.5 * x.mean(1, keepdim=True)
        return m.out(x.mean(1))

    return Case(Net(run, mix=lins(30, 12), out=nn.Linear(12, 3)), (torch.randn(4, 7, 12),), ce(4, 3))


@fault("vanishing", "vanishing", r"net\.\d+", tiny("net.0.weight", "net.18.bias", 1e-5))
def wide_layers_of_std_five_thousandths() -> Case:
    m = nn.Sequential()
    m.net = nn.Sequential(*[x for _ in range(9) for x in (nn.Linear(512, 512), nn.ELU())], nn.Linear(512, 10))
    for p in m.parameters():
        nn.init.normal_(p, std=5e-3) if p.ndim > 1 else nn.init.zeros_(p)
    return Case(m, (torch.randn(4, 512),), ce(4, 10))


@fault("vanishing", "vanishing", r"(/mul|cs\.\d|/gelu).*", tiny("cs.0.weight", "out.weight", 1e-6))
def halved_after_each_convolution() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        for c in m.cs:
            x = F.gelu(c(x)).mul(0.2)
        return m.out(x.amax(-1))

    cs = nn.ModuleList(nn.Conv1d(6, 6, 3, padding=1) for _ in range(9))
    return Case(Net(run, cs=cs, out=nn.Linear(6, 2)), (torch.randn(5, 6, 20),), ce(5, 2))


@fault("vanishing", "vanishing scale_break", r".*\.bn|.*batch_norm.*", tiny("b.0.lin.weight", "out.weight", 1e-6))
def stale_running_variance_in_every_norm() -> Case:
    def part() -> nn.Module:
        return Net(lambda m, x: F.silu(m.bn(m.lin(x))), lin=nn.Linear(12, 12), bn=nn.BatchNorm1d(12))

    model = Net(lambda m, x: m.out(m.b(x)), b=nn.Sequential(*[part() for _ in range(5)]), out=nn.Linear(12, 4)).eval()
    for b in model.b:
        b.bn.running_var.fill_(1e4)
    return Case(model, (torch.randn(16, 12),), ce(16, 4))


@fault("vanishing", "vanishing saturated", r".*(sigmoid|mul|as_|gs|glu).*", tiny("as_.0.weight", "out.weight", 1e-6))
def gated_units_all_closed() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        for a, g in zip(m.as_, m.gs, strict=True):
            x = a(x) * torch.sigmoid(g(x))
        return m.out(x)

    model = Net(run, as_=lins(5, 16), gs=lins(5, 16), out=nn.Linear(16, 3))
    for g in model.gs:
        nn.init.constant_(g.bias, -5.0)
    return Case(model, (torch.randn(10, 16),), ce(10, 3))


@fault("exploding", "exploding", r"/einsum.* /relu.*", big("ws.0", "out.bias", 1e4))
def einsum_of_standard_normal_weights() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        for w in m.ws:
            x = torch.relu(torch.einsum("oi,bi->bo", w, x))
        return m.out(x)

    return Case(
        Net(run, ws=params(13, 32, 32, std=1.0), out=nn.Linear(32, 1)), (torch.randn(8, 32),), lambda o: o.mean()
    )


@fault("exploding", "exploding", r"(/add|fs).*", lambda g: g.finite and g.norm("enter.weight") > 1e5)
def residual_with_alpha_four() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.enter(x)
        for f in m.fs:
            h = h.add(f(h), alpha=4)
        return m.out(h)

    model = Net(run, enter=nn.Linear(4, 16), fs=he(lins(14, 16), 1.0), out=nn.Linear(16, 1))
    return Case(model, (torch.randn(8, 4),), lambda o: o.tanh().mean() + o.mean())


@fault("exploding", "exploding", r".*\d+.*", lambda g: g.finite and g.norm("0.weight") > 1e4)
def wide_gelu_std_point_three() -> Case:
    m = nn.Sequential(*[x for _ in range(9) for x in (nn.Linear(512, 512), nn.GELU())], nn.Linear(512, 4))
    for p in m.parameters():
        nn.init.normal_(p, std=0.3) if p.ndim > 1 else nn.init.zeros_(p)
    return Case(m, (torch.randn(3, 512),), lambda o: o.mean())


@fault("exploding", "exploding", r"/.*", lambda g: g.finite and g.norm("enter.weight") > 1e5)
def identity_recurrence_of_one_point_eight() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.enter(x[:, 0])
        for t in range(30):
            h = (h @ m.w + 0.01 * x[:, t].sum(-1, keepdim=True)).relu()
        return m.out(h)

    model = Net(run, enter=nn.Linear(3, 8), w=1.8 * torch.eye(8), out=nn.Linear(8, 1))
    return Case(model, (torch.randn(6, 30, 3),), lambda o: o.mean())


@fault("exploding", "exploding", r"up\.\d+.*", big("up.0.weight", "up.22.bias", 1e4))
def transposed_convolutions_too_loud() -> Case:
    ups = [x for _ in range(12) for x in (nn.ConvTranspose2d(8, 8, 3, padding=1), nn.LeakyReLU(0.2))]
    m = Net(lambda s, x: s.up(x).mean((2, 3)), up=nn.Sequential(*ups))
    for p in m.parameters():
        nn.init.normal_(p, std=1.0) if p.ndim > 1 else nn.init.zeros_(p)
    return Case(m, (torch.randn(2, 8, 6, 6),), lambda o: o.mean())


@fault("scale_break", "scale_break vanishing", r"/div.*", tiny("a.weight", "c.weight", 1e-4))
def divided_in_place_by_a_million() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.a(x).tanh()
        h = h.clone()
        h.div_(1e6)
        return m.c(F.softplus(m.b(h)))

    return Case(Net(run, a=nn.Linear(5, 9), b=nn.Linear(9, 9), c=nn.Linear(9, 2)), (torch.randn(7, 5),), ce(7, 2))


@fault("scale_break", "scale_break exploding", r"/conv1d.* w", big("a.weight", "out.bias", 1e3))
def one_functional_kernel_a_hundred_thousand() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = F.relu(m.a(x))
        h = F.conv1d(h, m.w, padding=1)
        h = F.relu(m.b(h * 1.0))
        return m.out(h.mean(-1))

    model = Net(run, a=nn.Conv1d(3, 8, 3), w=torch.randn(8, 8, 3) * 2e4, b=nn.Conv1d(8, 8, 3), out=nn.Linear(8, 2))
    return Case(model, (torch.randn(4, 3, 16),), lambda o: o.mean())


@fault("scale_break", "scale_break exploding", r"/mul.*", lambda g: g.finite and g.norm("a.weight") > 1e3)
def action_scale_of_a_million() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        return torch.tanh(m.b(F.elu(m.a(x)))) * 1e6

    return Case(Net(run, a=nn.Linear(4, 16), b=nn.Linear(16, 2)), (torch.randn(8, 4),), lambda o: o.mean())


@fault("scale_break", "scale_break vanishing", r"/(div|truediv|sub).* b_std", tiny("a.weight", "c.weight", 1e-4))
def features_standardised_by_a_wrong_buffer() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = F.hardswish(m.a(x))
        h = (h - m.b_mean) / m.b_std
        return m.c(F.mish(m.b(h)))

    model = Net(
        run,
        a=nn.Linear(6, 12),
        b=nn.Linear(12, 12),
        c=nn.Linear(12, 3),
        b_mean=torch.zeros(12),
        b_std=torch.full((12,), 3e6),
    )
    return Case(model, (torch.randn(10, 6),), ce(10, 3))


@fault("starved", "starved scale_break", r"/(mul|cat).*", tiny("audio.weight", "text.weight", 1e-5))
def concatenated_with_a_ten_millionth() -> Case:
    def run(m: Net, a: Tensor, b: Tensor) -> Tensor:
        return m.out(torch.cat([m.text(a), m.audio(b) * 1e-7], -1))

    model = Net(run, text=nn.Linear(6, 8), audio=nn.Linear(6, 8), out=nn.Linear(16, 2))
    return Case(model, (torch.randn(8, 6), torch.randn(8, 6)), ce(8, 2))


@fault("starved", "starved scale_break", r"/lerp.* student", tiny("student.weight", "base.weight", 1e-6))
def lerp_of_a_billionth() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.relu(m.enter(x))
        return m.out(torch.lerp(m.base(h), m.student(h), 1e-9))

    model = Net(run, enter=nn.Linear(6, 8), base=nn.Linear(8, 8), student=nn.Linear(8, 8), out=nn.Linear(8, 2))
    return Case(model, (torch.randn(8, 6),), ce(8, 2))
