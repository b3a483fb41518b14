"""Faults of a second examiner: dead, zero, cut, saturated, and the rest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.faults_heldout.exam2_nets import Net, Out, ce, mse, nil, none
from tests.faults_heldout.program import Case, fault


def between(op, n: int = 16, width: int = 10, bias: float | None = None) -> Case:
    """Linear a, the operation, linear c."""
    model = Net(lambda m, x: m.c(op(m.a(x))), a=nn.Linear(6, width), c=nn.Linear(width, 3))
    if bias is not None:
        nn.init.constant_(model.a.bias, bias)
    return Case(model, (torch.randn(n, 6),), ce(n, 3))


@fault("dead", "dead zero", r"/relu_?.*", nil("w"))
def functional_bias_of_minus_forty() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        return m.c(torch.relu_(F.linear(x, m.w, m.bias)))

    model = Net(run, w=torch.randn(10, 6), bias=torch.full((10,), -40.0), c=nn.Linear(10, 3))
    return Case(model, (torch.randn(16, 6),), ce(16, 3))


@fault("dead", "dead zero saturated", r"/_?threshold.*", nil("a.weight"))
def threshold_of_fifty() -> Case:
    return between(lambda h: F.threshold(h, 50.0, 0.0))


@fault("dead", "dead zero saturated", r"/hardshrink.*", nil("a.weight"))
def hard_shrinkage_of_everything() -> Case:
    return between(lambda h: F.hardshrink(h, 100.0))


@fault("dead", "dead zero", r"/(relu|square|pow).*", nil("a.weight"))
def squared_relu_never_on() -> Case:
    return between(lambda h: F.relu(h).square(), bias=-25.0)


@fault("dead", "dead zero", r"/maximum.*", nil("a.weight"))
def maximum_with_zero_never_on() -> Case:
    return between(lambda h: torch.maximum(h, torch.zeros(())), bias=-25.0)


@fault("dead", "dead zero saturated", r"/hardswish.*", nil("a.weight"))
def hard_swish_far_left() -> Case:
    return between(F.hardswish, bias=-25.0)


@fault("dead", "dead zero", r"(router|/relu).*", nil("experts.0.weight"))
def relu_router_never_routes() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        gate = F.relu(m.router(x))
        y = torch.stack([e(x) for e in m.experts], 1)
        return m.c((gate.unsqueeze(-1) * y).sum(1))

    model = Net(
        run, router=nn.Linear(6, 3), experts=nn.ModuleList(nn.Linear(6, 8) for _ in range(3)), c=nn.Linear(8, 3)
    )
    nn.init.constant_(model.router.bias, -20.0)
    return Case(model, (torch.randn(16, 6),), ce(16, 3))


@fault("dead", "dead zero", r"/(where|gt).*", nil("a.weight"))
def relu_by_where_never_on() -> Case:
    return between(lambda h: torch.where(h > 0, h, torch.zeros_like(h)), bias=-25.0)


@fault("dead", "dead zero", r"/(relu|neg|sub|abs).*", nil("a.weight"))
def relu_of_what_is_always_negative() -> Case:
    return between(lambda h: torch.relu(-h.abs() - 1))


@fault("zero", "zero", r"/trunc.*", nil("a.weight"))
def truncated_towards_zero() -> Case:
    return between(torch.trunc)


@fault("zero", "zero", r"/(sub|clone).* a", nil("a.weight"))
def subtracted_from_itself() -> Case:
    return between(lambda h: h - h)


@fault("zero", "zero", r"/(sub|mean).* a", nil("a.weight", 1e-9))
def centred_over_a_batch_of_one() -> Case:
    return between(lambda h: h - h.mean(0, keepdim=True), n=1)


@fault("zero", "dead zero saturated", r"/clamp.*", nil("a.weight"))
def clamped_in_place_from_thirty() -> Case:
    return between(lambda h: h.clone().clamp_(min=30.0))


@fault("zero", "zero", r"/div.*", nil("a.weight"))
def divided_with_floor_rounding() -> Case:
    return between(lambda h: torch.div(h, 0.1, rounding_mode="floor"))


@fault(
    "zero",
    "zero",
    r".*(up|down|lora|mul|add).*",
    lambda g: g.finite and g.norm("up.weight") == g.norm("down.weight") == 0,
)
def adapter_with_both_factors_zero() -> Case:
    model = Net(
        lambda m, x: m.c(F.gelu(m.a(x) + m.up(m.down(x)))),
        a=nn.Linear(6, 10),
        down=nn.Linear(6, 2, bias=False),
        up=nn.Linear(2, 10, bias=False),
        c=nn.Linear(10, 3),
    )
    nn.init.zeros_(model.up.weight)
    nn.init.zeros_(model.down.weight)
    model.a.requires_grad_(False)
    return Case(model, (torch.randn(16, 6),), ce(16, 3))


@fault("cut", "detached zero", r"/(argsort|to|float).*", none("a.weight"))
def ranks_in_place_of_values() -> Case:
    return between(lambda h: h.argsort(-1).float())


@fault("cut", "detached zero", r"/(bucketize|embedding).*|emb.*", none("a.weight"))
def buckets_looked_up() -> Case:
    model = Net(
        lambda m, x: m.c(m.emb(torch.bucketize(m.a(x).squeeze(-1), m.b_edges))),
        a=nn.Linear(6, 1),
        emb=nn.Embedding(6, 8),
        c=nn.Linear(8, 3),
        b_edges=torch.linspace(-1, 1, 5),
    )
    return Case(model, (torch.randn(16, 6),), ce(16, 3))


@fault("cut", "detached zero", r"/(multinomial|embedding).*|emb.*", none("a.weight"))
def a_category_is_drawn() -> Case:
    model = Net(
        lambda m, x: m.c(m.emb(m.a(x).softmax(-1).multinomial(1)[:, 0])),
        a=nn.Linear(6, 5),
        emb=nn.Embedding(5, 8),
        c=nn.Linear(8, 3),
    )
    return Case(model, (torch.randn(16, 6),), ce(16, 3))


@fault("detached", "detached unused", r".*", none("a.weight"))
def wrapped_into_a_parameter() -> Case:
    return between(lambda h: nn.Parameter(h.clone()))


class Forgot(torch.autograd.Function):
    """A backward that returns nothing."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 1.7

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:
        return None


@fault("detached", "detached zero", r"/(?!linear)\w+", lambda g: not g.norm("a.weight"))
def own_backward_returns_none() -> Case:
    return between(Forgot.apply)


@fault("detached", "detached unused", r".*(checkpoint|first).*|/mul|/tanh.*", none("first.weight"))
def reentrant_checkpoint_of_plain_input() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = checkpoint(lambda z: torch.tanh(m.first(z)), x, use_reentrant=True)
        return m.c(h)

    return Case(Net(run, first=nn.Linear(6, 10), c=nn.Linear(10, 3)), (torch.randn(16, 6),), ce(16, 3))


@fault("saturated", "saturated scale_break vanishing zero", r"/(softsign|mul).*", nil("a.weight", 1.0))
def softsign_of_ten_thousands() -> Case:
    return between(lambda h: F.softsign(h * 1e5))


@fault("saturated", "saturated scale_break vanishing zero", r"/(erf|mul).*", nil("a.weight", 0.5))
def erf_of_hundreds() -> Case:
    return between(lambda h: torch.erf(h * 20 + 200))


@fault("saturated", "saturated dead zero", r"act", nil("a.weight"))
def hard_sigmoid_outside() -> Case:
    model = Net(lambda m, x: m.c(m.act(m.a(x))), a=nn.Linear(6, 10), act=nn.Hardsigmoid(), c=nn.Linear(10, 3))
    nn.init.constant_(model.a.bias, 50.0)
    return Case(model, (torch.randn(16, 6),), ce(16, 3))


@fault("saturated", "saturated", r"/(softmax|div).*", lambda g: g.finite)
def attention_at_temperature_a_thousandth() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        q, k, v = m.q(x), m.k(x), m.v(x)
        w = F.softmax(torch.einsum("bqd,bkd->bqk", q, k) / 1e-3, dim=-1)
        return m.c(torch.einsum("bqk,bkd->bqd", w, v).mean(1))

    return Case(
        Net(run, q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8), c=nn.Linear(8, 3)),
        (torch.randn(6, 9, 8),),
        ce(6, 3),
    )


@fault("loss", "zero loss_seed dead", r"/mul.*|outside.*|.*loss.*", nil("a.weight"))
def loss_inside_times_zero() -> Case:
    def run(m: Net, x: Tensor, y: Tensor) -> Out:
        logits = m.c(F.gelu(m.a(x)))
        return Out(F.cross_entropy(logits, y) * 0.0, logits)

    return Case(Net(run, a=nn.Linear(6, 10), c=nn.Linear(10, 3)), (torch.randn(8, 6), torch.randint(0, 3, (8,))))


@fault("loss", "loss_seed zero", r"outside.*|.*loss.*", nil("a.weight"))
def sample_weights_all_zero() -> Case:
    case = between(F.gelu)
    return Case(case.model, case.args, lambda o: (o.log_softmax(-1)[:, 0] * torch.zeros(16)).mean())


@fault("underflow", "underflow", r".* outside.*", lambda g: float((g.grads["a.weight"] == 0).float().mean()) > 0.5)
def half_gated_unit_scaled_down() -> Case:
    model = Net(
        lambda m, x: m.c(m.a(x) * torch.sigmoid(m.g(x))), a=nn.Linear(16, 32), g=nn.Linear(16, 32), c=nn.Linear(32, 4)
    ).half()
    y = torch.randint(0, 4, (64,))
    return Case(model, (torch.randn(64, 16).half(),), lambda o: F.cross_entropy(o.float(), y) * 1e-5)


@fault("underflow", "underflow", r".* outside.*", lambda g: float((g.grads["w"] == 0).float().mean()) > 0.5)
def half_recurrence_averaged_over_pixels() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 12, dtype=torch.half)
        for t in range(x.shape[1]):
            h = torch.tanh(F.linear(x[:, t], m.u) + h @ m.w)
        return m.c(h)

    model = Net(run, u=torch.randn(12, 5) * 0.4, w=torch.randn(12, 12) * 0.25, c=nn.Linear(12, 2)).half()
    return Case(model, (torch.randn(6, 8, 5).half(),), lambda o: o.float().square().mean() * 1e-6)


@fault("unused", "unused", r"aux.*", none("aux.weight"))
def second_output_never_in_the_loss() -> Case:
    def run(m: Net, x: Tensor) -> dict[str, Tensor]:
        h = F.silu(m.a(x))
        return {"main": m.c(h), "aux": m.aux(h)}

    y = torch.randint(0, 3, (8,))
    model = Net(run, a=nn.Linear(6, 10), c=nn.Linear(10, 3), aux=nn.Linear(10, 2))
    return Case(model, (torch.randn(8, 6),), lambda o: F.cross_entropy(o["main"], y))


@fault("unused", "unused", r"(prelude|embed2).*", none("prelude.weight"))
def overwritten_before_it_is_used() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.prelude(x)
        h = m.a(x)
        return m.c(F.relu(h))

    return Case(
        Net(run, prelude=nn.Linear(6, 10), a=nn.Linear(6, 10), c=nn.Linear(10, 3)), (torch.randn(8, 6),), ce(8, 3)
    )


@fault("symmetry", "symmetry", r".*(w1|w2|linear|tanh|matmul).*", lambda g: float(g.grads["w1"].std(0).max()) < 1e-6)
def functional_constant_weights() -> Case:
    def run(m: Net, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, m.w1)), m.w2)

    model = Net(run, w1=torch.full((12, 6), 0.2), w2=torch.full((1, 12), 0.2))
    return Case(model, (torch.randn(16, 6),), mse(16, 1))


def summed(case: Case, step: int) -> Case:
    if step != 35:
        return case
    return Case(case.model, case.args, lambda o: case.loss(o) * 4096)


@fault("spike", "spike", r".*", lambda g: g.finite, steps=38, each=summed)
def one_step_with_a_summed_loss() -> Case:
    case = between(F.leaky_relu)
    return Case(case.model, case.args, case.loss)
