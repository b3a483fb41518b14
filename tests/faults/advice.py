"""Faults whose usual advice is wrong: each beside the same program with the right remedy, which is healthy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.faults.healthy import HEALTHY
from tests.faults.nets import Gpt, Net, Vit, mse, tokens, xavier, xent
from tests.faults.program import Built, Register

ADVICE = Register("advice")


def case(*expect: str, **answer: Any) -> Callable[[Callable[[bool], Built]], None]:
    """Registers the fault, and under ``..._mended`` the healthy program."""

    def decorate(make: Callable[[bool], Built]) -> None:
        ADVICE.add(make.__name__, partial(make, False), expect, **answer)
        HEALTHY.add(f"{make.__name__}_mended", partial(make, True))

    return decorate


# ---- half precision ----------------------------------------------------------------------------------------------


def adam(lr: float = 1e-3, **options: Any):
    return lambda model: torch.optim.Adam(model.parameters(), lr=lr, **options)


def descent(lr: float):
    """Plain descent by steps that half parameters can take."""
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr)


def half_cross_entropy(samples: int, classes: int):
    loss = xent(samples, classes)
    return lambda out: loss(out.float())


@case("update_size", "nonfinite", outside=True, forms=frozenset({"history"}), says=("eps",), culprits=("",))
def adam_of_half_parameters(mended):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).half()
    return Built(model, (torch.randn(32, 16).half(),), half_cross_entropy(32, 4),
                 adam(eps=1e-4 if mended else 1e-8))  # fmt: skip


@case("update_size", "nonfinite", outside=True, forms=frozenset({"history"}), says=("eps",), culprits=("",))
def adam_of_a_half_convolution(mended):
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)).half()
    return Built(model, (torch.randn(16, 1, 8, 8).half(),), half_cross_entropy(16, 3),
                 adam(eps=1e-3 if mended else 1e-8))  # fmt: skip


@case("nonfinite", outside=True, says=("loss scale",))
def loss_scale_beyond_half(mended):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).half()
    loss = half_cross_entropy(32, 4)
    return Built(model, (torch.randn(32, 16).half(),), lambda out: loss(out) * 2.0 ** (8 if mended else 40),
                 descent(2e-3))  # fmt: skip


@case("nonfinite", culprits=("float", "to"), says=("loss scale", "float16"))
def loss_scale_beyond_a_half_model_that_returns_singles(mended):
    net = Net(lambda self, x: self.body(x).float(), body=nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)))
    loss = xent(16, 3)
    return Built(net.half(), (torch.randn(16, 8).half(),), lambda out: loss(out) * 2.0 ** (4 if mended else 36),
                 descent(2e-2))  # fmt: skip


# ---- checkpoints -------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, parts, head, *, reentrant):
        super().__init__()
        self.parts, self.head, self.reentrant = nn.ModuleList(parts), head, reentrant

    def forward(self, x):
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return self.head(x)


@case("detached", culprits=("parts.0",), says=("use_reentrant=False",))
def reentrant_checkpoint_of_the_first_part(mended):
    model = Checkpointed([nn.Sequential(nn.Linear(8, 16), nn.Tanh())], nn.Linear(16, 3), reentrant=not mended)
    return Built(model, (torch.randn(16, 8),), xent(16, 3))


@case("detached", culprits=("parts.0",), says=("enable_input_require_grads",))
def reentrant_checkpoints_one_behind_the_other(mended):
    parts = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
    return Built(Checkpointed(parts, nn.Linear(8, 2), reentrant=not mended), (torch.randn(16, 8),), mse(16, 2))


@case("detached", culprits=("parts.0",), says=("use_reentrant=False",))
def reentrant_checkpoint_of_convolutions(mended):
    parts = [nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), nn.Sequential(nn.Conv2d(6, 6, 3), nn.ReLU())]
    head = nn.Sequential(nn.Flatten(), nn.Linear(6 * 16, 3))
    return Built(Checkpointed(parts, head, reentrant=not mended), (torch.randn(8, 3, 8, 8),), xent(8, 3))


# ---- normalisation -----------------------------------------------------------------------------------------------


@case("scale_break", culprits=("1",), says=("running_var",))
def statistics_of_zero_in_eval_mode(mended):
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    if not mended:
        model[1].running_var.zero_()
    return Built(model.eval(), (torch.randn(16, 8),), mse(16, 2))


@case("scale_break", culprits=("norm",), says=("running_var",))
def frozen_statistics_of_zero_in_a_residual_net(mended):
    def forward(self, x):
        x = F.relu(self.stem(x))
        return self.head((x + F.relu(self.norm(self.conv(x)))).mean((2, 3)))

    net = Net(forward, stem=nn.Conv2d(3, 8, 3), conv=nn.Conv2d(8, 8, 3, padding=1), norm=nn.BatchNorm2d(8),
              head=nn.Linear(8, 3))  # fmt: skip
    net.norm.eval()
    if not mended:
        net.norm.running_var.zero_()
    return Built(net, (torch.randn(8, 3, 8, 8),), xent(8, 3))


@case("scale_break", culprits=("4",), says=("running_var",))
def second_of_two_statistics_is_zero(mended):
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(),
        nn.Linear(16, 3),
    ).eval()  # fmt: skip
    if not mended:
        model[4].running_var.zero_()
    return Built(model, (torch.randn(16, 8),), xent(16, 3))


@case("vanishing", "zero", culprits=("1",), says=("sum or mean",))
def sum_of_a_normalised_vector(mended):
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))
    weight = torch.randn(16)
    return Built(model, (torch.randn(16, 8),), lambda out: (out * weight).sum() / 16 if mended else out.sum() / 16)


@case("vanishing", "zero", culprits=("norm",), says=("sum or mean",))
def mean_of_a_normalised_vector_in_front_of_the_head(mended):
    def forward(self, x):
        h = self.norm(self.body(x))
        return self.head(h.square().mean(-1, keepdim=True) * h if mended else h.mean(-1, keepdim=True))

    net = Net(forward, body=nn.Linear(8, 16), norm=nn.LayerNorm(16, elementwise_affine=False),
              head=nn.Linear(16 if mended else 1, 2))  # fmt: skip
    return Built(net, (torch.randn(16, 8),), mse(16, 2))


@case("vanishing", "zero", culprits=("1",), says=("sum or mean",))
def mean_of_a_normalised_batch(mended):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    weight = torch.randn(16, 8, 6, 6)
    return Built(model, (torch.randn(16, 3, 8, 8),), lambda out: (out * weight if mended else out).mean())


@case("nonfinite", culprits=("weight", "0"), says=("weight norm",))
def weight_norm_of_a_zero_row(mended):
    layer = nn.Linear(8, 8)
    if not mended:
        layer.weight.data[3] = 0
    return Built(nn.Sequential(weight_norm(layer), nn.ReLU(), nn.Linear(8, 2)), (torch.randn(16, 8),), mse(16, 2))


@case("nonfinite", culprits=("weight", "conv"), says=("weight norm",))
def weight_norm_of_a_zero_filter(mended):
    conv = nn.Conv1d(3, 6, 3)
    if not mended:
        conv.weight.data[0] = 0
    net = Net(lambda self, x: self.head(F.relu(self.conv(x)).mean(-1)), conv=weight_norm(conv), head=nn.Linear(6, 3))
    return Built(net, (torch.randn(8, 3, 10),), xent(8, 3))


# ---- over time ---------------------------------------------------------------------------------------------------


class Unrolled(nn.Module):
    """A recurrence over cells or by hand, read out at the end, with a trained embedding of its inputs."""

    def __init__(self, cell: nn.Module | None, gain: float) -> None:
        super().__init__()
        self.into = nn.Linear(6, 16)
        self.cell, self.head = cell or nn.Linear(16, 16), nn.Linear(16, 3)
        recurrent = self.cell.weight if isinstance(self.cell, nn.Linear) else self.cell.weight_hh
        nn.init.orthogonal_(recurrent, gain=gain)

    def forward(self, x):
        h = c = x.new_zeros(len(x), 16)
        for t in range(x.shape[1]):
            given = self.into(x[:, t])
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(given, (h, c))
            elif isinstance(self.cell, nn.Linear):
                h = torch.tanh(0.1 * given + self.cell(h))
            else:
                h = self.cell(0.1 * given, h)
        return self.head(h)


def series(steps: int = 60):
    return (torch.randn(16, steps, 6),)


@case("vanishing", culprits=("cell",), says=("orthogonal",))
def plain_recurrence_that_forgets(mended):
    return Built(Unrolled(nn.RNNCell(16, 16), 1.0 if mended else 0.4), series(12 if mended else 60), xent(16, 3))


@case("vanishing", culprits=("cell", "tanh"), says=("fewer steps",))
def recurrence_by_hand_that_forgets(mended):
    return Built(Unrolled(None, 1.0 if mended else 0.3), series(12 if mended else 60), xent(16, 3))


@case("exploding", culprits=("cell", "tanh"), says=("clip",))
def recurrence_by_hand_without_a_bound(mended):
    model = Unrolled(None, 1.0 if mended else 1.6)
    model.forward = partial(_linear_recurrence, model)
    return Built(model, series(12 if mended else 40), mse(16, 3))


def _linear_recurrence(self, x):
    h = x.new_zeros(len(x), 16)
    for t in range(x.shape[1]):
        h = self.into(x[:, t]) + self.cell(h)
    return self.head(h)


@case("vanishing", culprits=("cell",), says=("forget-gate",))
def long_short_term_memory_that_forgets(mended):
    cell = nn.LSTMCell(16, 16)
    cell.bias_ih.data[16:32].fill_(1.0 if mended else -8.0)
    return Built(Unrolled(cell, 1.0), series(8 if mended else 60), xent(16, 3))


# ---- attention ---------------------------------------------------------------------------------------------------


def wide(model: nn.Module, std: float) -> nn.Module:
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=std if ".q." in name or ".k." in name else 0.05)
    return model


@case("saturated", culprits=("blocks.0.attn",), says=("sqrt(d)",))
def language_model_with_wide_queries(mended):
    ids, loss = tokens()
    return Built(wide(Gpt(3), 0.05 if mended else 2.0), (ids,), loss)


@case("saturated", culprits=("blocks.0.attn",), says=("sqrt(d)",))
def image_transformer_without_the_root(mended):
    return Built(wide(Vit(3, scale=None if mended else 32.0), 0.05 if mended else 0.6), (torch.randn(8, 3, 8, 8),),
                 xent(8))  # fmt: skip


@case("exploding", "saturated", culprits=("layers.0",), says=("scores", "sqrt(d)"))
def fused_attention_with_weights_of_one(mended):
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4)
    )

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    net = Net(forward, embed=nn.Embedding(50, 64), layers=layers, head=nn.Linear(64, 50))
    for parameter in net.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.05 if mended else 1.2)
    ids, loss = tokens()
    return Built(net, (ids,), loss)


# ---- chains ------------------------------------------------------------------------------------------------------


def chain(depth: int, act: Callable[[], nn.Module], width: int = 32) -> nn.Sequential:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), act())]
    return nn.Sequential(*layers, nn.Linear(width, 3))


@case("vanishing", culprits=tuple(map(str, range(41))), says=("all 20 sigmoid operations",))
def twenty_sigmoids(mended):
    return Built(xavier(chain(20, nn.Tanh if mended else nn.Sigmoid)), (torch.randn(16, 32),), xent(16, 3))


@case("exploding", culprits=tuple(map(str, range(61))), says=("all 31 linear operations", "all 30 linear operations"))
def thirty_wide_layers(mended):
    model = xavier(chain(30, nn.Tanh if mended else nn.Identity), 1.0 if mended else 2.0)
    return Built(model, (torch.randn(16, 32),), mse(16, 3))


# ---- losses ------------------------------------------------------------------------------------------------------


def steep(lr: float):
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))


@case("update_size", culprits=("weight",), forms=frozenset({"history"}), says=("reduction",))
def error_summed_over_the_batch(mended):
    target, reduction = torch.randint(0, 5, (4096,)), "mean" if mended else "sum"
    return Built(small(), (torch.randn(4096, 8),), lambda o: F.cross_entropy(o, target, reduction=reduction),
                 steep(0.1))  # fmt: skip


@case("update_size", culprits=("weight",), forms=frozenset({"history"}), says=("temperature",))
def temperature_of_a_thousandth(mended):
    loss = xent(64, 5)
    return Built(small(), (torch.randn(64, 8),), lambda o: loss(o / (1.0 if mended else 1e-3)), steep(0.1))


@case("loss_seed", outside=True, says=("ignore_index",))
def no_label_is_left(mended):
    target = torch.full((32,), -100) if not mended else torch.randint(0, 5, (32,))
    return Built(small(), (torch.randn(32, 8),), lambda o: F.cross_entropy(o, target, reduction="sum") / 32)


# ---- the same, where nothing is wrong ----------------------------------------------------------------------------


@HEALTHY()
def reentrant_checkpoints_behind_an_embedding():
    model = Checkpointed([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)], nn.Linear(8, 3), reentrant=True)
    net = Net(lambda self, ids: self.body(self.embed(ids)), embed=nn.Embedding(20, 8), body=model)
    return Built(net, (torch.randint(20, (16,)),), xent(16, 3))


@HEALTHY()
def half_parameters_by_plain_descent():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).half()
    return Built(model, (torch.randn(32, 16).half(),), half_cross_entropy(32, 4), descent(0.1))


@HEALTHY()
def fresh_statistics_in_training_mode():
    """The running variance begins at zero, and is not what training divides by."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    model[1].running_var.zero_()
    return Built(model, (torch.randn(32, 8),), mse(32, 2))


@HEALTHY()
def mean_behind_an_affine_normalisation():
    """Its scale is learnt, so that the mean is no constant."""
    net = Net(lambda self, x: self.head(self.norm(self.body(x)).mean(1)), body=nn.Linear(8, 16), norm=nn.LayerNorm(16),
              head=nn.Linear(16, 3))  # fmt: skip
    return Built(net, (torch.randn(16, 5, 8),), xent(16, 3))
