"""What is cut off or unused in nets made of parts and a function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.faults.parts import Net, between, ce, fresh, none
from tests.faults.places import fault
from tests.faults.program import Built


class Forgot(torch.autograd.Function):
    """A backward that returns nothing."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 1.7

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:
        return None


@fault("detached zero", r"/(argsort|to|float).*", none("a.weight"))
def ranks_in_place_of_values() -> Built:
    return between(lambda h: h.argsort(-1).float())


@fault("detached zero", r"/(bucketize|embedding).*|emb.*", none("a.weight"))
def buckets_looked_up() -> Built:
    model = Net(
        lambda m, x: m.c(m.emb(torch.bucketize(m.a(x).squeeze(-1), m.b_edges))),
        a=nn.Linear(6, 1),
        emb=nn.Embedding(6, 8),
        c=nn.Linear(8, 3),
        b_edges=torch.linspace(-1, 1, 5),
    )
    return Built(model, (torch.randn(16, 6),), ce(16, 3))


@fault("detached zero", r"/(multinomial|embedding).*|emb.*", none("a.weight"))
def a_category_is_drawn() -> Built:
    model = Net(
        lambda m, x: m.c(m.emb(m.a(x).softmax(-1).multinomial(1)[:, 0])),
        a=nn.Linear(6, 5),
        emb=nn.Embedding(5, 8),
        c=nn.Linear(8, 3),
    )
    return Built(model, (torch.randn(16, 6),), ce(16, 3))


@fault("detached unused", r".*", none("a.weight"))
def wrapped_into_a_parameter() -> Built:
    return between(lambda h: nn.Parameter(h.clone()))


@fault("detached zero", r"/(?!linear)\w+", lambda g: not g.norm("a.weight"))
def own_backward_returns_none() -> Built:
    return between(Forgot.apply)


@fault("detached unused", r".*(checkpoint|first).*|/mul|/tanh.*", none("first.weight"))
def reentrant_checkpoint_of_plain_input() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = checkpoint(lambda z: torch.tanh(m.first(z)), x, use_reentrant=True)
        return m.c(h)

    return Built(Net(run, first=nn.Linear(6, 10), c=nn.Linear(10, 3)), (torch.randn(16, 6),), ce(16, 3))


@fault("unused", r"aux.*", none("aux.weight"))
def second_output_never_in_the_loss() -> Built:
    def run(m: Net, x: Tensor) -> dict[str, Tensor]:
        h = F.silu(m.a(x))
        return {"main": m.c(h), "aux": m.aux(h)}

    y = torch.randint(0, 3, (8,))
    model = Net(run, a=nn.Linear(6, 10), c=nn.Linear(10, 3), aux=nn.Linear(10, 2))
    return Built(model, (torch.randn(8, 6),), lambda o: F.cross_entropy(o["main"], y))


@fault("unused", r"(prelude|embed2).*", none("prelude.weight"))
def overwritten_before_it_is_used() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.prelude(x)
        h = m.a(x)
        return m.c(F.relu(h))

    return Built(
        Net(run, prelude=nn.Linear(6, 10), a=nn.Linear(6, 10), c=nn.Linear(10, 3)), (torch.randn(8, 6),), ce(8, 3)
    )


@fault("detached", r"q|k|/.*", none("q.weight"))
def attention_weights_under_no_grad() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            w = (m.q(x) @ m.k(x).mT / 3).softmax(-1)
        return m.c((w @ m.v(x)).mean(1))

    return Built(
        Net(run, q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8), c=nn.Linear(8, 3)),
        (torch.randn(6, 5, 8),),
        ce(6, 3),
    )


@fault("detached", r"/detach.*", lambda g: g.grads["a.weight"] is None, steps=8, each=fresh)
def detached_over_steps() -> Built:
    model = Net(lambda m, x: m.c(F.relu(m.a(x)).detach() * 2), a=nn.Linear(6, 8), c=nn.Linear(8, 3))
    return Built(model, (torch.randn(16, 6),), ce(16, 3))
