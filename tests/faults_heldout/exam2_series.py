"""Programs over several steps of a second examiner."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults_heldout.exam2_healthy1 import Decoder
from tests.faults_heldout.exam2_healthy2 import mlp
from tests.faults_heldout.exam2_nets import Net, ce, lins, mse
from tests.faults_heldout.program import Case, fault, healthy


def fresh(case: Case, step: int) -> Case:
    """Another batch of floats each step."""
    torch.manual_seed(500 + step)
    args = tuple(torch.randn_like(a) if a.is_floating_point() else a[torch.randperm(len(a))] for a in case.args)
    return Case(case.model, args, case.loss)


def halving(case: Case, step: int) -> Case:
    """A loss scale that is halved and doubled on its way, as a scaler does."""
    now = fresh(case, step)
    factor = 65536.0 if step % 12 < 6 else 32768.0
    return Case(now.model, now.args, lambda o: case.loss(o) * factor)


def one_by_one(case: Case, step: int) -> Case:
    torch.manual_seed(900 + step)
    n = int(torch.randint(len(case.args[0]), ()))
    return Case(case.model, tuple(a[n : n + 1] for a in case.args), case.loss)


@healthy("series", steps=40, each=fresh)
def fresh_batches_with_heavy_dropout() -> Case:
    m = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Dropout(0.9), nn.Linear(128, 3))
    return Case(m, (torch.randn(16, 8),), ce(16, 3), trains=False)


@healthy("series", steps=40, each=halving)
def loss_scale_changes_on_the_way() -> Case:
    y = torch.randint(0, 3, (16,))
    m = mlp(8, 3)
    for p in m.parameters():
        p.register_hook(lambda g: g / 65536)  # so that plain SGD may use it
    return Case(m, (torch.randn(16, 8),), lambda o: F.cross_entropy(o, y), trains=False)


@healthy("series", steps=45, each=one_by_one)
def batch_of_one_each_step() -> Case:
    x = torch.randn(64, 6)

    def run(m: Net, a: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(m.f(a), y)

    return Case(Net(run, f=mlp(6, 1)), (x, x[:, :1] * 2 + x[:, 1:2]), trains=False)


@healthy("series", steps=12)
def decoder_over_steps() -> Case:
    return Case(Decoder(-float("inf"), True), (torch.randint(0, 30, (4, 12)),), trains=False)


@healthy("series", steps=12, each=fresh)
def rezero_by_lerp_over_steps() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        for f, a in zip(m.fs, m.alpha, strict=True):
            x = torch.lerp(x, torch.tanh(f(x)), a)
        return m.out(x)

    return Case(
        Net(
            run,
            fs=lins(4, 12),
            alpha=nn.ParameterList(nn.Parameter(torch.zeros(12)) for _ in range(4)),
            out=nn.Linear(12, 3),
        ),
        (torch.randn(16, 12),),
        ce(16, 3),
        trains=False,
    )


@healthy("series", steps=30)
def steep_regression_at_the_beginning() -> Case:
    return Case(mlp(4, 1), (torch.randn(32, 4),), mse(32, 1, scale=30.0), trains=False)


def some_masked(case: Case, step: int) -> Case:
    if step % 9 != 4:
        return case
    return Case(case.model, case.args, lambda o: case.loss(o) * 0.0)


@healthy("series", steps=40, each=some_masked)
def now_and_then_nothing_to_learn() -> Case:
    return Case(mlp(4, 3), (torch.randn(32, 4),), ce(32, 3), trains=False)


@healthy("series", steps=25, each=fresh)
def rarely_used_words() -> Case:
    def run(m: Net, x: Tensor, ids: Tensor) -> Tensor:
        return m.out(torch.cat([x, m.emb(ids)], -1))

    return Case(
        Net(run, emb=nn.Embedding(3000, 4), out=mlp(8, 3)),
        (torch.randn(16, 4), torch.randint(0, 3000, (16,))),
        ce(16, 3),
        trains=False,
    )


@fault("dead", "dead zero", r"/relu|act|/clamp.*", lambda g: g.norm("a.weight") == 0, steps=8, each=fresh)
def dead_without_a_cause_over_steps() -> Case:
    model = Net(lambda m, x: m.c(torch.relu(-m.a(x).abs() - 0.1)), a=nn.Linear(6, 8), c=nn.Linear(8, 3))
    return Case(model, (torch.randn(64, 6),), ce(64, 3))


@fault("vanishing", "vanishing", r".*\d", lambda g: g.norm("0.weight") < 1e-6 * g.norm("24.bias"), steps=8, each=fresh)
def logistic_chain_over_steps() -> Case:
    m = nn.Sequential(*[x for _ in range(12) for x in (nn.Linear(24, 24), nn.Sigmoid())], nn.Linear(24, 3))
    return Case(m, (torch.randn(16, 24),), ce(16, 3))


@fault("detached", "detached", r"/detach.*", lambda g: g.grads["a.weight"] is None, steps=8, each=fresh)
def detached_over_steps() -> Case:
    model = Net(lambda m, x: m.c(F.relu(m.a(x)).detach() * 2), a=nn.Linear(6, 8), c=nn.Linear(8, 3))
    return Case(model, (torch.randn(16, 6),), ce(16, 3))


@fault(
    "saturated", "saturated vanishing zero", r".*tanh.*|act", lambda g: g.norm("a.weight") < 0.1, steps=8, each=fresh
)
def tanh_saturates_over_steps() -> Case:
    model = Net(lambda m, x: m.c(m.act(m.a(x))), a=nn.Linear(6, 16), act=nn.Tanh(), c=nn.Linear(16, 3))
    with torch.no_grad():
        model.a.weight.mul_(200)
    return Case(model, (torch.randn(16, 6),), ce(16, 3))


def blows_up(case: Case, step: int) -> Case:
    if step == 6:
        with torch.no_grad():
            case.model.a.weight[0, 0] = float("nan")
    return case


@fault("parameter", "nonfinite", r"a|a\.weight", lambda g: g.finite, "trap", steps=8, each=blows_up)
def weight_turns_nan_on_the_way() -> Case:
    model = Net(lambda m, x: m.c(torch.tanh(m.a(x))), a=nn.Linear(6, 8), c=nn.Linear(8, 3))
    return Case(model, (torch.randn(16, 6),), ce(16, 3))


def zero_row(case: Case, step: int) -> Case:
    now = fresh(case, step)
    if step >= 7:
        now.args[0][2] = 0.0
    return now


@fault("backward", "nonfinite", r"/sqrt|/pow.*", lambda g: g.finite, "trap", steps=8, each=zero_row)
def blank_sample_meets_a_norm_on_the_way() -> Case:
    model = Net(
        lambda m, x: m.c(m.a(x).square().sum(-1, keepdim=True).sqrt()), a=nn.Linear(6, 8, bias=False), c=nn.Linear(1, 3)
    )
    return Case(model, (torch.randn(16, 6),), ce(16, 3))
