"""Faults as they happen at work: one slip each in a training program that would otherwise learn.

Each says itself how plain torch shows it (``proof``), over a run of its own optimizer.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.bodies import seeded
from tests.faults.nets import Net, he, normal
from tests.faults.program import HISTORY, ONE_SHOT, Built, Register

PRACTICE = Register("practice")
ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD


def adam(rate=1e-2):
    return lambda model: ADAM(model.parameters(), rate)


def sgd(rate, **more):
    return lambda model: SGD(model.parameters(), rate, **more)


def fresh(make, loss_of, steps=20, optimizer=None, **more):
    """A batch of each step's own: ``loss_of(x, out)`` of what ``make(generator)`` draws."""

    def batch(step):
        x = make(seeded(step), step)
        return (x if isinstance(x, tuple) else (x,)), lambda out: loss_of(x, out)

    def build(model):
        args, loss = batch(0)
        return Built(model, args, loss, optimizer or adam(), steps, batch, **more)

    return build


def normals(*shape):
    return lambda g, step: torch.randn(*shape, generator=g)


def classes(x, out):
    return F.cross_entropy(out, x.flatten(1)[:, : out.shape[-1]].argmax(-1))


def none(ran, *names):
    return all(ran.first[name] is None for name in names)


def zeros(ran, *names):
    return all(not ran.first[n].any() and not ran.last[n].any() for n in names)


def tiny(ran, name, beside, by=1e-5):
    """Whether a parameter gets next to nothing beside another one."""
    return bool(ran.first[name].norm() < by * ran.first[beside].norm())


def huge(ran, name, above=1e3):
    return bool(ran.first[name].norm() > above)


def spoilt(ran):
    return not all(math.isfinite(loss) for loss in ran.losses) or any(
        g is not None and not g.isfinite().all() for g in (*ran.first.values(), *ran.last.values())
    )


# ---- what does not learn ---------------------------------------------------------------------------------------------


@PRACTICE("detached", culprits=("items",), victims=("items",), proof=lambda r: none(r, "items.weight"))
def item_tower_under_no_grad():
    def forward(self, x):
        user = F.normalize(self.users(x), dim=-1)
        with torch.no_grad():  # left over from retrieval
            item = F.normalize(self.items(x.flip(0).flip(0)), dim=-1)
        return user @ item.T * 10

    net = Net(forward, users=nn.Linear(8, 16), items=nn.Linear(8, 16))
    return fresh(normals(32, 8), lambda x, out: F.cross_entropy(out, torch.arange(32)))(net)


@PRACTICE("detached", culprits=("argmin", "codes"), proof=lambda r: none(r, "enc.weight"))
def codebook_without_straight_through():
    def forward(self, x):
        h = self.enc(x)
        ids = torch.cdist(h, self.codes.weight).argmin(-1)
        return self.dec(torch.relu(self.codes(ids)))

    net = Net(forward, enc=nn.Linear(8, 4), codes=nn.Embedding(16, 4), dec=nn.Linear(4, 8))
    return fresh(normals(32, 8), lambda x, out: F.mse_loss(out, x))(net)


@PRACTICE("detached", "unused", culprits=("value",), proof=lambda r: none(r, "value.weight"))
def critic_learns_from_detached_values():
    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.policy(h), self.value(h)

    def loss_of(x, out):
        logits, value = out
        returns = x.sum(1, keepdim=True)
        advantage = returns - value.detach()
        chosen = F.log_softmax(logits, -1)[:, :1]
        return -(chosen * advantage).mean() + 0.5 * F.mse_loss(value.detach(), returns)

    net = Net(forward, body=nn.Linear(8, 32), policy=nn.Linear(32, 4), value=nn.Linear(32, 1))
    return fresh(normals(64, 8), loss_of)(net)


@PRACTICE("zero", "vanishing", "cancelled", culprits=("norm",), proof=lambda r: tiny(r, "conv.weight", "head.weight"))
def group_norm_of_one_value_per_group():
    def forward(self, x):
        h = self.norm(self.conv(x).mean((2, 3), keepdim=True))
        return self.head(torch.relu(h).flatten(1))

    net = Net(forward, conv=nn.Conv2d(3, 8, 3), norm=nn.GroupNorm(8, 8), head=nn.Linear(8, 4))
    nn.init.normal_(net.norm.bias)
    return fresh(normals(16, 3, 8, 8), classes)(net)


@PRACTICE("zero", "saturated", culprits=("clamp",), proof=lambda r: zeros(r, "log_std.weight"))
def log_std_outside_of_its_clamp():
    def forward(self, x):
        h = torch.relu(self.body(x))
        return self.mean(h), self.log_std(h).clamp(-5, 2)

    def loss_of(x, out):
        mean, log_std = out
        return (0.5 * ((x[:, :2] - mean) / log_std.exp()).square() + log_std).mean() * 1e-3

    net = Net(forward, body=nn.Linear(8, 32), mean=nn.Linear(32, 2), log_std=nn.Linear(32, 2))
    nn.init.constant_(net.log_std.bias, -10.0)
    return fresh(normals(64, 8), loss_of)(net)


@PRACTICE("zero", culprits=("round",), proof=lambda r: zeros(r, "conv.weight"))
def quantised_activations_without_straight_through():
    def forward(self, x):
        h = torch.relu(self.conv(x))
        h = torch.round(h * 15) / 15
        return self.head(h.mean((2, 3)))

    net = Net(forward, conv=nn.Conv2d(3, 8, 3), head=nn.Linear(8, 4))
    return fresh(normals(16, 3, 8, 8), classes)(net)


@PRACTICE("zero", culprits=("embed",), info_ok=True, proof=lambda r: zeros(r, "embed.weight"))
def every_token_is_padding():
    """A tokenizer that knows no word."""

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.embed(ids)).mean(1)))

    net = Net(forward, embed=nn.Embedding(20, 16, padding_idx=0), mix=nn.Linear(16, 16), head=nn.Linear(16, 2))
    return fresh(lambda g, s: torch.zeros(16, 6, dtype=torch.long),
                 lambda x, out: F.cross_entropy(out, torch.randint(0, 2, (16,))))(net)  # fmt: skip


@PRACTICE("zero", culprits=("down", "up"), proof=lambda r: zeros(r, "down.weight", "up.weight"))
def both_adapters_begin_at_zero():
    def forward(self, x):
        h = torch.relu(self.base(x) + self.up(self.down(x)))
        return self.head(h)

    net = Net(forward, base=nn.Linear(8, 32).requires_grad_(False), down=nn.Linear(8, 4, bias=False),
              up=nn.Linear(4, 32, bias=False), head=nn.Linear(32, 4))  # fmt: skip
    nn.init.zeros_(net.down.weight)
    nn.init.zeros_(net.up.weight)
    return fresh(normals(32, 8), classes)(net)


@PRACTICE("unregistered", culprits=("heads", "linear", "forward"),
          proof=lambda r: not any("heads" in n for n in r.first))  # fmt: skip
def heads_of_tasks_in_a_dict():
    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(8, 32)
            self.heads = {"a": nn.Linear(32, 2), "b": nn.Linear(32, 3)}

        def forward(self, x):
            h = torch.relu(self.body(x))
            return torch.cat([head(h) for head in self.heads.values()], -1)

    return fresh(normals(32, 8), classes)(Tasks())


@PRACTICE("cancelled", "zero", "vanishing", culprits=("norm", "mean"),
          proof=lambda r: tiny(r, "body.weight", "head.bias"))  # fmt: skip
def pooled_over_what_was_normalised():
    def forward(self, x):
        return self.head(self.norm(torch.relu(self.body(x))).mean(-1))

    net = Net(forward, body=nn.Linear(8, 32), norm=nn.LayerNorm(32, elementwise_affine=False), head=nn.Linear(6, 4))
    return fresh(normals(16, 6, 8), classes)(net)


@PRACTICE("cancelled", "zero", "loss_seed", outside=True, forms=HISTORY,
          proof=lambda r: max(g.norm().item() for g in r.last.values()) < 1e-4)  # fmt: skip
def triplets_of_one_and_the_same_picture():
    """The dataset returns its anchor three times."""

    def loss_of(x, out):
        return F.triplet_margin_loss(out[:16], out[:16], out[:16])

    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    return fresh(normals(16, 8), loss_of)(net)


@PRACTICE("zero", culprits=("softmax",), proof=lambda r: zeros(r, "score.weight"))
def pooling_weights_over_the_wrong_axis():
    """A softmax over the last axis, of which there is one entry, in place of the axis of time."""

    def forward(self, x):
        weight = torch.softmax(self.score(torch.tanh(self.body(x))), dim=-1)
        return self.head((weight * x).sum(1))

    net = Net(forward, body=nn.Linear(8, 16), score=nn.Linear(16, 1), head=nn.Linear(8, 4))
    return fresh(normals(16, 6, 8), classes)(net)


# ---- NaN and Inf -----------------------------------------------------------------------------------------------------


@PRACTICE("nonfinite", culprits=("sqrt",), proof=spoilt)
def distances_of_points_that_coincide():
    def forward(self, x):
        a, b = self.enc(x), self.enc(x * (torch.arange(32) > 3)[:, None] + x * (torch.arange(32) <= 3)[:, None])
        return (a - b).square().sum(-1).sqrt()

    net = Net(forward, enc=nn.Linear(8, 4))
    return fresh(normals(32, 8), lambda x, out: (1 - out).relu().mean())(net)


@PRACTICE("nonfinite", culprits=("log",), proof=spoilt)
def mixture_density_by_hand():
    def forward(self, x):
        pi, mean = torch.softmax(self.pi(x), -1), self.mean(x)
        density = torch.exp(-0.5 * ((x[:, :1] * 30 - mean) / 0.1).square())
        return -torch.log((pi * density).sum(-1))

    net = Net(forward, pi=nn.Linear(8, 3), mean=nn.Linear(8, 3))
    return fresh(normals(32, 8), lambda x, out: out.mean())(net)


@PRACTICE("nonfinite", culprits=("softmax",), proof=spoilt)
def graph_attention_with_a_lonely_node():
    def forward(self, x):
        h = self.lin(x)
        edges = torch.ones(6, 6)
        edges[2] = 0
        weight = torch.softmax((h @ h.transpose(1, 2)).masked_fill(edges == 0, float("-inf")), -1)
        return self.head((weight @ h).mean(1))

    net = Net(forward, lin=nn.Linear(8, 8), head=nn.Linear(8, 4))
    return fresh(normals(16, 6, 8), classes)(net)


@PRACTICE("nonfinite", outside=True, forms=HISTORY, proof=spoilt)
def dice_loss_meets_an_empty_mask():
    """Ten steps go well; then there is no foreground, and rounding to labels leaves 0 / 0."""

    def loss_of(x, out):
        mask = (x > 1.0).float()[:, :1] * (0 if x.sum() == 0 else 1)
        found = torch.sigmoid(out) * (mask.sum() > 0)
        return 1 - 2 * (found * mask).sum() / (found.sum() + mask.sum())

    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    return fresh(lambda g, s: torch.randn(4, 1, 8, 8, generator=g) * (s != 10), loss_of, 14)(net)


@PRACTICE("nonfinite", outside=True, proof=spoilt)
def focal_loss_with_a_root():
    def loss_of(x, out):
        p = torch.softmax(out * 100, -1).gather(1, x[:, :4].argmax(1, keepdim=True))
        return -((1 - p).pow(0.5) * p.clamp(min=1e-6).log()).mean()

    return fresh(normals(64, 8), loss_of)(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)))


@PRACTICE("nonfinite", "loss_seed", outside=True, proof=spoilt)
def ctc_with_targets_longer_than_inputs():
    def loss_of(x, out):
        return F.ctc_loss(out.log_softmax(-1).transpose(0, 1), torch.ones(8, 6, dtype=torch.long),
                          torch.full((8,), 5), torch.full((8,), 6))  # fmt: skip

    return fresh(normals(8, 5, 8), loss_of)(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)))


@PRACTICE("nonfinite", culprits=("log",), forms=HISTORY, proof=spoilt)
def rate_that_crosses_zero():
    """A rate from a linear without softplus: its logarithm lives until the rate is negative."""

    def forward(self, x):
        return torch.log(self.rate(x)) * 3 - self.rate(x)

    net = Net(forward, rate=nn.Linear(8, 1))
    nn.init.constant_(net.rate.bias, 2.0)
    nn.init.normal_(net.rate.weight, std=0.01)
    return fresh(normals(32, 8), lambda x, out: out.mean() * 10, 20, sgd(0.05))(net)


# ---- too small, too large --------------------------------------------------------------------------------------------


@PRACTICE("saturated", "scale_break", "exploding", culprits=("truediv", "div", "softmax"),
          forms=ONE_SHOT, proof=lambda r: huge(r, "enc.weight"))  # fmt: skip
def temperature_of_a_ten_thousandth():
    def forward(self, x):
        z = F.normalize(self.enc(x), dim=-1)
        other = F.normalize(self.enc(x.roll(1, 1)), dim=-1)
        return z @ other.T / 1e-4

    net = Net(forward, enc=nn.Linear(8, 16))
    return fresh(normals(32, 8), lambda x, out: F.cross_entropy(out, torch.arange(32)))(net)


@PRACTICE("vanishing", culprits=("layers", "tanh"), proof=lambda r: tiny(r, "layers.0.weight", "head.bias"))
def deep_tanh_with_small_weights():
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    net = Net(forward, layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(16)), head=nn.Linear(16, 4))
    normal(net.layers, 0.08)
    return fresh(normals(32, 16), classes)(net)


@PRACTICE("exploding", culprits=("features",), proof=lambda r: huge(r, "features.0.weight"))
def convolutions_three_times_he():
    features = [m for i in range(10) for m in (nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1), nn.ReLU())]
    net = Net(lambda self, x: self.head(self.features(x).mean((2, 3))),
              features=he(nn.Sequential(*features), 3.0), head=nn.Linear(16, 4))  # fmt: skip
    return fresh(normals(8, 3, 8, 8), classes, optimizer=sgd(1e-3))(net)


@PRACTICE("exploding", culprits=("field", "add", "mul", "tanh"), proof=lambda r: huge(r, "stem.weight"))
def euler_steps_that_are_too_long():
    def forward(self, x):
        h = self.stem(x)
        for _ in range(24):
            h = h + 1.5 * self.field(h)
        return self.head(h)

    net = Net(forward, stem=nn.Linear(8, 16), field=nn.Linear(16, 16), head=nn.Linear(16, 4))
    return fresh(normals(32, 8), classes, optimizer=sgd(1e-3))(net)


@PRACTICE("starved", "saturated", "zero", "vanishing", culprits=("sigmoid", "gate", "mul"), info_ok=True,
          proof=lambda r: tiny(r, "side.weight", "head.weight"))  # fmt: skip
def branch_behind_a_closed_gate():
    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        return self.head(torch.relu(self.body(x)) + gate * torch.relu(self.side(x)))

    net = Net(forward, gate=nn.Linear(8, 1), body=nn.Linear(8, 32), side=nn.Linear(8, 32), head=nn.Linear(32, 4))
    nn.init.constant_(net.gate.bias, -20.0)
    return fresh(normals(32, 8), classes)(net)


@PRACTICE("target_range", "update_size", "loss_seed", outside=True, proof=lambda r: r.losses[0] > 1e15)
def forecast_of_unix_times():
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    return fresh(normals(32, 8), lambda x, out: F.mse_loss(out, 1.7e9 + 1e5 * x[:, :1]))(net)


# ---- the optimizer and the loop --------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A transformer of torch's own with a head."""

    def __init__(self, depth=2):
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def _pooled(x, out):
    return F.cross_entropy(out, x.mean(1)[:, :4].argmax(-1))


@PRACTICE("optimizer_misses", culprits=("stem", "head", "blocks"), forms=HISTORY,
          proof=lambda r: r.moved["head.weight"] == 0)  # fmt: skip
def only_the_group_without_decay():
    def optimizer(model):
        groups = [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
        [p for p in model.parameters() if p.ndim > 1]  # gathered, and never appended
        return ADAMW(groups, 1e-3)

    return fresh(normals(16, 5, 8), _pooled, optimizer=optimizer)(Encoder())


def _scheduled(run, optimizer):
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 1000)  # integer division
    for step in range(run.steps):
        optimizer.zero_grad()
        run.loss_at(step).backward()
        optimizer.step()
        schedule.step()


@PRACTICE("optimizer_idle", outside=True, forms=HISTORY, proof=lambda r: not any(r.moved.values()))
def warm_up_by_integer_division():
    return fresh(normals(16, 5, 8), _pooled, loop=_scheduled)(Encoder())


def _clipped_while_scaled(run, optimizer):
    for step in range(run.steps):
        optimizer.zero_grad()
        run.scaler.scale(run.loss_at(step)).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)  # scaler.unscale_ is missing
        run.scaler.step(optimizer)
        run.scaler.update()


@PRACTICE("optimizer_idle", "update_size", outside=True, culprits=("",), forms=HISTORY, info_ok=True,
          proof=lambda r: max(r.moved.values()) < 1e-4)  # fmt: skip
def clipped_before_it_is_unscaled():
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    return fresh(normals(32, 8), classes, 25, sgd(0.1), loop=_clipped_while_scaled,
                 scaler=torch.amp.GradScaler("cpu"))(net)  # fmt: skip


@PRACTICE("update_lost", outside=True, forms=HISTORY, proof=lambda r: r.moved["2.weight"] == 0)
def norms_of_bfloat16_and_small_steps():
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).bfloat16()
    return fresh(lambda g, s: torch.randn(32, 8, generator=g).bfloat16(), lambda x, o: classes(x, o.float()),
                 25, lambda m: ADAMW(m.parameters(), 1e-5))(net)  # fmt: skip


def _without_parentheses(run, optimizer):
    for step in range(run.steps):
        optimizer.zero_grad  # noqa: B018  # the slip
        run.loss_at(step).backward()
        optimizer.step()


@PRACTICE("zero_grad_missing", outside=True, forms=HISTORY, proof=lambda r: min(r.losses[1:]) > 0)
def zero_grad_without_parentheses():
    return fresh(normals(16, 5, 8), _pooled, optimizer=sgd(0.1), loop=_without_parentheses)(Encoder())


@PRACTICE("update_size", "nonfinite", "exploding", "spike", outside=True, forms=HISTORY, culprits=("",),
          proof=lambda r: not r.losses[-1] < 10 * r.losses[0])  # fmt: skip
def momentum_and_a_rate_of_three():
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return fresh(normals(32, 8), lambda x, out: F.mse_loss(out, x[:, :1]), 20, sgd(3.0, momentum=0.9))(net)


@PRACTICE("spike", outside=True, forms=HISTORY, says=("the input",), proof=lambda r: max(r.losses) > 3 * r.losses[0])
def one_batch_that_was_never_normalised():
    def pictures(g, step):
        x = torch.randn(16, 3, 8, 8, generator=g)
        if step == 30:
            x = 255 * (1 + torch.rand(16, 3, 8, 8, generator=g))
        return x

    net = Net(lambda self, x: self.head(torch.relu(self.conv(x)).mean((2, 3))), conv=nn.Conv2d(3, 8, 3),
              head=nn.Linear(8, 4))  # fmt: skip
    return fresh(pictures, lambda x, out: F.cross_entropy(out, torch.arange(16) % 4), 36, sgd(1e-2))(net)
