"""Causes that must lead over what they bring about, and losses that keep their reason, on six architectures each."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.bodies import BODIES
from tests.faults.healthy import HEALTHY
from tests.faults.nets import Graph, Net, he, normal
from tests.faults.practice import ADAMW, SGD, classes, fresh, huge, normals, sgd, tiny
from tests.faults.program import HISTORY, Built, Register

CAUSES = Register("causes")
EVERYTHING = lambda m: ADAMW(m.parameters(), 3e-3)  # noqa: E731  # as long as a name


def body(name, loss=F.cross_entropy, optimizer=EVERYTHING, *, odd=None, steps=20, at=12):
    """The model of that name; ``odd(args)`` makes another batch of step ``at``."""
    make, batch = BODIES[name]

    def of_step(step):
        args, loss_of = batch(step, functools.partial(loss, step=step) if loss in STEPPED else loss)
        return (args if odd is None or step != at else odd(args)), loss_of

    args, loss_of = of_step(0)
    return Built(make(), args, loss_of, optimizer, steps, of_step)


STEPPED = []  # losses that are told their step


def stepped(loss):
    STEPPED.append(loss)
    return loss


def on_all(word, build, *expect, healthy=None, skip=(), **answer):
    """The program on each architecture, and beside it what looks like it and is healthy."""
    for name in BODIES:
        if name not in skip:
            CAUSES.add(f"{word}_{name}", functools.partial(build, name), expect, **answer)
        if healthy is not None:
            HEALTHY.add(f"{word}_{name}_mended", functools.partial(healthy, name), forms=answer.get("forms", HISTORY))


# ---- the loss ------------------------------------------------------------------------------------------------------


def summed(out, target):
    return F.cross_entropy(out.repeat(40, 1), target.repeat(40), reduction="sum")


def over_a_thousandth(out, target):
    return F.cross_entropy(out / 1e-3, target)


def without_label(out, target):
    return F.cross_entropy(out, torch.full_like(target, -100))


def of_one_logit(out, target):
    return F.cross_entropy(out, torch.zeros_like(target))


def with_one_output(name):
    run = body(name, of_one_logit)
    run.model.head = nn.Linear(run.model.head.in_features, 1)
    return run


def mostly_without_label(out, target):
    return F.cross_entropy(out, torch.where(torch.arange(len(target)) < 3, target, -100))


def exploded(ran):
    return not all(way <= 1 for way in ran.moved.values())


on_all("summed_over_the_batch", lambda n: body(n, summed, lambda m: SGD(m.parameters(), 1.0)), "update_size",
       "nonfinite", culprits=("",), outside=True, forms=HISTORY, says=("reduction",), proof=exploded,
       healthy=lambda n: body(n, F.cross_entropy, lambda m: SGD(m.parameters(), 0.1)))  # fmt: skip
on_all("temperature_of_a_thousandth", lambda n: body(n, over_a_thousandth, lambda m: SGD(m.parameters(), 1.0)),
       "update_size", "nonfinite", culprits=("",), outside=True, forms=HISTORY, says=("temperature",), proof=exploded,
       healthy=lambda n: body(n, lambda o, t: F.cross_entropy(o / 0.5, t)))  # fmt: skip
on_all("no_label_at_all", lambda n: body(n, without_label), "loss_seed", outside=True, says=("ignore_index",),
       proof=lambda r: all(g is None or not g.any() for g in r.first.values()),
       healthy=lambda n: body(n, mostly_without_label))  # fmt: skip
on_all("cross_entropy_of_one_logit", with_one_output, "loss_seed", "zero", outside=True,
       says=("single logit",), proof=lambda r: not any(r.losses))  # fmt: skip


@stepped
def now_and_then_without_label(out, target, step):
    return F.cross_entropy(out, torch.full_like(target, -100) if step == 7 else target)


on_all("one_batch_without_label", lambda n: body(n, now_and_then_without_label), "loss_seed", outside=True,
       forms=HISTORY, info_ok=True, says=("ignore_index",), proof=lambda r: r.losses[7] != r.losses[7])  # fmt: skip


# ---- one batch -----------------------------------------------------------------------------------------------------


@stepped
def squared(out, target, step, factor=1e6):
    return F.mse_loss(out, F.one_hot(target, out.shape[-1]) * (factor if step == 12 else 1.0))


def steady(model):
    return SGD(model.parameters(), 0.02)


def large(args):
    return tuple(a * 1e4 if a.is_floating_point() else a for a in args)


def jumped(ran):
    return not max(ran.losses[12:]) < 20 * max(ran.losses[:12])


on_all("labels_of_one_batch_in_another_unit", lambda n: body(n, squared, steady), "spike", outside=True, forms=HISTORY,
       says=("labels",), proof=jumped,
       healthy=lambda n: body(n, functools.partial(squared, step=0), steady))  # fmt: skip
on_all("inputs_of_one_batch_in_another_unit", lambda n: body(n, functools.partial(squared, step=0), steady, odd=large),
       "spike", outside=True, forms=HISTORY, says=("the input",), proof=jumped,
       skip=("cnn", "encoder", "recurrent", "language", "nodes"))  # fmt: skip  # normalised or bounded


def odd_series(make, loss=classes, rate=0.02, factor=1e4):
    """Batches of normal numbers, of which number 12 is in another unit."""
    return lambda: fresh(lambda g, s: make(g, s) * (factor if s == 12 else 1.0), loss, 16, sgd(rate))


for _word, _net, _make in (
    ("convolution", lambda: Net(lambda self, x: self.head(torch.relu(self.conv(x)).mean((2, 3))),
                                conv=nn.Conv2d(3, 8, 3), head=nn.Linear(8, 4)), normals(16, 3, 6, 6)),
    ("residual_net", lambda: Net(lambda self, x: self.head(x + torch.relu(self.body(x))), body=nn.Linear(8, 8),
                                 head=nn.Linear(8, 4)), normals(32, 8)),
    ("sum_over_a_set", lambda: Net(lambda self, x: self.head(F.gelu(self.each(x)).sum(1)), each=nn.Linear(8, 16),
                                   head=nn.Linear(16, 4)), normals(16, 5, 8)),
    ("gated_net", lambda: Net(lambda self, x: self.head(F.silu(self.gate(x)) * self.up(x)), gate=nn.Linear(8, 16),
                              up=nn.Linear(8, 16), head=nn.Linear(16, 4)), normals(32, 8)),
):  # fmt: skip
    CAUSES.add(f"one_batch_in_another_unit_of_a_{_word}",
               lambda net=_net, make=_make: odd_series(make)()(net()), ("spike",), outside=True, forms=HISTORY,
               says=("the input",), proof=jumped)  # fmt: skip


# ---- what explodes, and at the first step --------------------------------------------------------------------------


def explodes(name, **answer):
    """Registers a net whose gradient explodes at initialisation and whose first step of plain descent ruins it."""

    def decorate(make):
        def build():
            net, draw = make()
            return fresh(draw, classes, 6, sgd(1e-3))(net)

        first = "stem.weight"
        CAUSES.add(f"{make.__name__}_at_the_first_step", build, ("exploding",), culprits=(name, "add", "mul", "linear"),
                   proof=lambda r: huge(r, first) and not r.losses[-1] < 1e3, **answer)  # fmt: skip
        return make

    return decorate


@explodes("layers")
def unit_normal_layers():
    def forward(self, x):
        x = torch.relu(self.stem(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)

    net = Net(forward, stem=nn.Linear(16, 64), layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(7)),
              head=nn.Linear(64, 4))  # fmt: skip
    return normal(net, 1.0), normals(32, 16)


@explodes("blocks")
def residual_blocks_without_norm():
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)

    net = Net(forward, stem=nn.Linear(8, 32), blocks=he(nn.ModuleList(nn.Linear(32, 32) for _ in range(30))),
              head=nn.Linear(32, 4))  # fmt: skip
    return net, normals(16, 8)


@explodes("again")
def recurrence_with_relu():
    def forward(self, x):
        h = torch.zeros(len(x), 16)
        for t in range(x.shape[1]):
            h = torch.relu(self.stem(x[:, t]) + self.again(h))
        return self.head(h)

    net = Net(forward, stem=nn.Linear(4, 16), again=nn.Linear(16, 16, bias=False), head=nn.Linear(16, 4))
    nn.init.normal_(net.again.weight, std=0.7)
    return net, normals(8, 30, 4)


@explodes("graph")
def graph_that_sums_over_neighbours():
    net = Net(lambda self, x: self.graph(self.stem(x)).mean(1), stem=nn.Linear(5, 16), graph=Graph(6, act=F.leaky_relu))
    net.graph.adjacency.copy_((net.graph.adjacency > 0).float())
    he(net.graph, 1.5)
    return net, normals(16, 12, 5)


@explodes("mix")
def mixing_of_tokens_without_norm():
    def forward(self, x):
        x = self.stem(x)
        for tokens, channels in zip(self.mix[::2], self.mix[1::2], strict=True):
            x = x + F.gelu(tokens(x.transpose(1, 2))).transpose(1, 2)
            x = x + F.gelu(channels(x))
        return self.head(x.mean(1))

    mix = nn.ModuleList(nn.Linear(size, size) for _ in range(8) for size in (6, 16))
    return Net(forward, stem=nn.Linear(8, 16), mix=he(mix, 2.0), head=nn.Linear(16, 4)), normals(8, 6, 8)


@explodes("convs")
def convolutions_with_large_filters():
    def forward(self, x):
        x = self.stem(x)
        for conv in self.convs:
            x = F.elu(conv(x))
        return self.head(x.mean((2, 3)))

    net = Net(forward, stem=nn.Conv2d(3, 16, 3), convs=he(nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1)
              for _ in range(9)), 3.0), head=nn.Linear(16, 4))  # fmt: skip
    return net, normals(8, 3, 8, 8)


# ---- learning rates ------------------------------------------------------------------------------------------------

on_all("rate_of_a_hundred_millionth", lambda n: body(n, optimizer=lambda m: ADAMW(m.parameters(), 1e-8)),
       "update_size", outside=True, forms=HISTORY, says=("learning rate",),
       proof=lambda r: r.moved["head.weight"] < 1e-5,
       healthy=lambda n: body(n, optimizer=lambda m: ADAMW(m.parameters(), 1e-4)))  # fmt: skip


# ---- normalisation over one entry ----------------------------------------------------------------------------------


def _normed(forward, make=lambda: {"norm": nn.LayerNorm(1)}):
    return lambda: Net(forward, stem=nn.Linear(8, 1), head=nn.Linear(1, 4), **make())


def _functional(self, x):
    return self.head(F.layer_norm(self.stem(x), (1,), bias=self.shift))


def _over_channels(self, x):
    h = self.norm(self.stem(x)[..., None].expand(-1, -1, 1))
    return self.head(h.flatten(1))


for _word, _net, _draw in (
    ("of_a_score", _normed(lambda self, x: self.head(self.norm(self.stem(x)))), normals(32, 8)),
    ("of_each_token", _normed(lambda self, x: self.head(self.norm(self.stem(x))).mean(1)),
     normals(16, 5, 8)),
    ("without_a_module", _normed(_functional, lambda: {"shift": nn.Parameter(torch.ones(1))}), normals(32, 8)),
    ("by_one_group_of_one_channel", _normed(_over_channels, lambda: {"norm": nn.GroupNorm(1, 1)}), normals(32, 8)),
    ("in_front_of_tanh", _normed(lambda self, x: self.head(torch.tanh(self.norm(self.stem(x))))), normals(32, 8)),
    ("of_a_sum_over_time", _normed(lambda self, x: self.head(self.norm(self.stem(x).sum(1)))),
     normals(16, 6, 8)),
):  # fmt: skip
    CAUSES.add(f"normalised_over_one_entry_{_word}", lambda net=_net, draw=_draw: fresh(draw, classes)(net()),
               ("zero",), culprits=("norm",), proof=lambda r: tiny(r, "stem.weight", "head.bias", 1e-3))  # fmt: skip


def _two(self, x):
    return self.head(self.norm(self.stem(x)))


def _of_width(width):
    net = Net(_two, stem=nn.Linear(8, width), norm=nn.LayerNorm(width), head=nn.Linear(width, 4))
    return fresh(normals(32, 8), classes)(net)


for _width in (2, 3, 4, 8, 16, 32):
    HEALTHY.add(f"normalised_over_{_width}_entries", functools.partial(_of_width, _width))
