"""Parameters get no gradient since something cuts them off."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Attention, Net, mse, xent
from tests.faults.program import Built, Register

DETACHED = Register("detached")
UNUSED = Register("unused")


@DETACHED("detached", culprits=("detach",), victims=("frontend",))
def detach_in_the_middle():
    net = Net(
        lambda self, x: self.head(torch.relu(self.encoder(torch.tanh(self.frontend(x)).mean(2).detach()))),
        frontend=nn.Conv1d(1, 3, 3), encoder=nn.Linear(3, 8), head=nn.Linear(8, 1),
    )  # fmt: skip
    return Built(net, (torch.randn(8, 1, 12),), mse(8, 1))


@DETACHED("detached", culprits=("argmax", "one_hot"), victims=("choose",))
def one_hot_of_argmax():
    class Hard(nn.Module):
        def __init__(self):
            super().__init__()
            self.choose, self.values = nn.Linear(8, 4), nn.Linear(4, 3)

        def forward(self, x):
            choice = self.choose(x).argmax(dim=-1)
            return self.values(F.one_hot(choice, 4).float())

    return Built(Hard(), (torch.randn(32, 8),), xent(32, 3))


@DETACHED("detached", culprits=("embed", "relu", "backbone", "no_grad", "linear", "0"), victims=("backbone",))
def block_under_no_grad():
    class Careless(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            with torch.no_grad():
                h = self.backbone(x)
            return self.head(h)

    return Built(Careless(), (torch.randn(16, 8),), xent(16, 3))


@DETACHED("detached", culprits=("long", "to", "int"), victims=("first",))
def cast_to_integers():
    net = Net(
        lambda self, x: self.head((self.first(x) * 10).long().float() / 10),
        first=nn.Linear(8, 16),
        head=nn.Linear(16, 3),
    )
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


@DETACHED("detached", culprits=("gt", "ge", "lt", "le"), victims=("score",))
def hard_gate_by_comparison():
    net = Net(
        lambda self, x: self.head(torch.tanh(self.body(x)) * (self.score(x) > 0).float()),
        body=nn.Linear(8, 16), score=nn.Linear(8, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


@DETACHED("detached", culprits=("detach",), victims=("carry", "front"))
def recurrent_state_detached_each_step():
    class Truncated(nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.carry, self.head = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)

        def forward(self, x):
            h = torch.tanh(self.front(x))
            for _ in range(3):
                h = torch.tanh(self.carry(h)).detach()
            return self.head(h)

    return Built(Truncated(), (torch.randn(16, 6),), xent(16, 3))


@DETACHED(
    "detached",
    culprits=("tensor", "numpy", "from_numpy", "detach", "as_tensor", "input", "external"),
    victims=("encoder",),
)
def round_trip_through_numpy():
    class Numpy(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            h = self.encoder(x)
            return self.head(torch.from_numpy(h.detach().numpy().clip(-1, 1)))

    return Built(Numpy(), (torch.randn(16, 6),), xent(16, 3))


@DETACHED("detached", culprits=("detach",), victims=("memory",))
def memory_bank_of_a_transformer():
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory = nn.Linear(8, 8)
            self.attn = Attention(8)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            bank = self.memory(x).detach()
            return self.head(self.attn(torch.cat([bank, x], dim=1)).mean(1))

    return Built(Memory(), (torch.randn(8, 5, 8),), xent(8, 3))


@DETACHED("detached", culprits=("topk", "argsort", "sort", "getitem", "gather", "index"), victims=("score",))
def selection_by_score():
    class Select(nn.Module):
        def __init__(self):
            super().__init__()
            self.score, self.value, self.head = nn.Linear(6, 1), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            order = self.score(x).squeeze(-1).argsort(dim=1)
            kept = order[:, :3]
            value = torch.tanh(self.value(x))
            return self.head(torch.gather(value, 1, kept[..., None].expand(-1, -1, 8)).mean(1))

    return Built(Select(), (torch.randn(8, 6, 6),), xent(8, 3))


@DETACHED("detached", culprits=("detach", "data"), victims=("own",))
def graph_features_through_data():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.message, self.readout = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)
            self.register_buffer("links", torch.rand(10, 10).softmax(dim=1))

        def forward(self, h):
            h = torch.tanh(self.own(h)).detach().clone()
            return self.readout(torch.relu(self.links @ self.message(h)))

    return Built(Cached(), (torch.randn(10, 5),), xent(10, 2))


@DETACHED("detached", "unused", culprits=("item", "mul", "scale", "mean"), victims=("scale",))
def scale_read_as_a_python_number():
    class Number(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.body, self.head = nn.Linear(6, 1), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            factor = self.scale(x).abs().mean().item()
            return self.head(torch.tanh(self.body(x)) * factor)

    return Built(Number(), (torch.randn(16, 6),), xent(16, 3))


class _Forgetful(torch.autograd.Function):
    """A step function whose author returned no gradient."""

    @staticmethod
    def forward(ctx, h):
        return h.round()

    @staticmethod
    def backward(ctx, gradient):
        return None


@DETACHED("detached", "zero", culprits=("_Forgetful", "Forgetful", "external", "apply", "round"), victims=("encoder",))
def own_function_that_returns_none():
    net = Net(
        lambda self, x: self.head(_Forgetful.apply(self.encoder(x))), encoder=nn.Linear(6, 8), head=nn.Linear(8, 3)
    )
    return Built(net, (torch.randn(16, 6),), xent(16, 3))


@DETACHED("detached", culprits=("detach",), victims=("items", "users"))
def negative_and_positive_both_detached():
    """A two-tower model in which the normalised vectors were detached to save memory."""

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.Embedding(30, 8), nn.Embedding(40, 8)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, u, i):
            a = F.normalize(self.users(u), dim=-1).detach()
            b = F.normalize(self.items(i), dim=-1).detach()
            return self.scale * (a * b).sum(-1)

    args = (torch.randint(0, 30, (16,)), torch.randint(0, 40, (16,)))
    return Built(Towers(), args, mse(16))


# ---- part of the model takes no part --------------------------------------------------------------------------


@UNUSED("unused", "detached", culprits=("aux",), victims=("aux",))
def head_never_called():
    net = Net(
        lambda self, x: self.main(torch.tanh(self.body(x))),
        body=nn.Linear(3, 6), main=nn.Linear(6, 1), aux=nn.Linear(6, 2),
    )  # fmt: skip
    return Built(net, (torch.randn(8, 3),), mse(8, 1))


@UNUSED("unused", "detached", culprits=("refine",), victims=("refine",))
def result_dropped():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.refine, self.head = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)

        def forward(self, x):
            h = torch.relu(self.body(x))
            torch.relu(self.refine(h))
            return self.head(h)

    return Built(Dropped(), (torch.randn(16, 6),), xent(16, 3))


@UNUSED("unused", "detached", culprits=("layers.3", "layers.4"), victims=("layers.3", "layers.4"), info_ok=True)
def loop_that_ends_early():
    class Short(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            for layer in list(self.layers)[:3]:
                x = F.silu(layer(x))
            return self.head(x)

    return Built(Short(), (torch.randn(16, 8),), xent(16, 3))


@UNUSED("unused", "detached", culprits=("scale",), victims=("scale",))
def parameter_forgotten():
    net = Net(
        lambda self, x: self.head(F.gelu(self.body(x))),
        body=nn.Linear(8, 8), head=nn.Linear(8, 3), scale=nn.Parameter(torch.ones(8)),
    )  # fmt: skip
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


@UNUSED("unused", "detached", culprits=("boxes",), victims=("boxes",))
def output_left_out_of_the_loss():
    net = Net(
        lambda self, x: _two(self, torch.relu(self.stem(x).mean(-1))),
        stem=nn.Conv1d(2, 8, 3), classes=nn.Linear(8, 3), boxes=nn.Linear(8, 4),
    )  # fmt: skip
    base = xent(8, 3)
    return Built(net, (torch.randn(8, 2, 12),), lambda out: base(out["classes"]))


def _two(net, h):
    return {"classes": net.classes(h), "boxes": net.boxes(h)}
