"""Healthy training as it happens at work: what looks odd in it is meant, and it learns."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.faults.healthy import HEALTHY
from tests.faults.nets import Gpt, Net, Vit
from tests.faults.practice import ADAM, ADAMW, Encoder, adam, classes, fresh, normals, sgd
from tests.faults.program import HISTORY, Built


def learns(*, at_least=0.0, forms=None):
    """Registers the decorated builder, whose loss falls in plain torch."""

    def fell(ran):
        quarter = max(1, len(ran.losses) // 4)
        begin, end = sum(ran.losses[:quarter]) / quarter, sum(ran.losses[-quarter:]) / quarter
        return end < begin - at_least

    more = {} if forms is None else {"forms": forms}

    def decorate(make):
        HEALTHY.add(make.__name__, make, proof=fell, **more)
        return make

    return decorate


@learns()
def cross_entropy_of_log_probabilities():
    """A log-softmax of a log-softmax is the same."""
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4), nn.LogSoftmax(-1))
    return fresh(normals(64, 8), classes)(net)


@learns(forms=HISTORY)
def truncated_backpropagation_through_time():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head, self.state = nn.GRUCell(4, 16), nn.Linear(16, 1), None

        def forward(self, x):
            h = torch.zeros(len(x), 16) if self.state is None else self.state.detach()
            outs = []
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
                outs.append(self.head(h))
            self.state = h
            return torch.cat(outs, 1)

    return fresh(normals(16, 8, 4), lambda x, out: F.mse_loss(out, x[:, :, 0]), 25)(Stateful())


@learns()
def cosine_classifier():
    net = Net(lambda self, x: 16 * F.normalize(torch.relu(self.body(x)), dim=-1) @ F.normalize(self.proto, dim=0),
              body=nn.Linear(8, 32), proto=nn.Parameter(torch.randn(32, 4)))  # fmt: skip
    return fresh(normals(64, 8), classes, 25)(net)


@learns(forms=HISTORY)
def codebook_by_moving_average():
    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = nn.Linear(8, 4), nn.Linear(4, 8)
            self.register_buffer("codes", torch.randn(32, 4))

        def forward(self, x):
            h = self.enc(x)
            ids = torch.cdist(h, self.codes).argmin(-1)
            found = self.codes[ids]
            with torch.no_grad():
                self.codes.index_add_(0, ids, 0.05 * (h - found))
            return self.dec(h + (found - h).detach()), (h - found.detach()).square().mean()

    return fresh(normals(64, 8), lambda x, out: F.mse_loss(out[0], x) + 0.25 * out[1], 30)(Codes())


@learns()
def actor_and_critic_with_entropy():
    def loss_of(x, out):
        logits, value = out
        returns = x[:, :1]
        log = F.log_softmax(logits, -1)
        chosen = log.gather(1, (x.abs() * 3).long()[:, :1] % 4)
        advantage = (returns - value).detach()
        return -(chosen * advantage).mean() + 0.5 * F.mse_loss(value, returns) + 0.01 * (log.exp() * log).sum(-1).mean()

    net = Net(lambda self, x: (self.policy(h := torch.tanh(self.body(x))), self.value(h)),
              body=nn.Linear(8, 64), policy=nn.Linear(64, 4), value=nn.Linear(64, 1))  # fmt: skip
    nn.init.normal_(net.policy.weight, std=0.01)
    return fresh(normals(128, 8), loss_of, 30, adam(3e-3))(net)


@learns()
def autoencoder_of_a_few_seen_patches():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Linear(4, 16), nn.Linear(16, 4)
            self.mask, self.position = nn.Parameter(torch.zeros(16)), nn.Parameter(0.02 * torch.randn(16, 16))
            self.encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
            self.decoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)

        def forward(self, x):
            seen = torch.tensor([0, 5, 10, 15])
            h = self.encoder((self.embed(x) + self.position)[:, seen])
            full = (self.mask + self.position).repeat(len(x), 1, 1).index_copy(1, seen, h)
            return self.out(self.decoder(full))

    def pictures(g, step):
        return torch.randn(32, 1, 4, generator=g).repeat(1, 16, 1) + 0.1 * torch.randn(32, 16, 4, generator=g)

    return fresh(pictures, lambda x, out: (out - x)[:, 1::2].square().mean(), 25)(Masked())


@learns(forms=HISTORY)
def two_views_and_a_slow_teacher():
    class Byol(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
            self.predictor = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            self.target = copy.deepcopy(self.online).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
                goal = self.target(x + 0.1)
            return F.cosine_similarity(self.predictor(self.online(x - 0.1)), goal, dim=-1)

    return fresh(normals(64, 8), lambda x, out: (2 - 2 * out).mean(), 30, adam(3e-3))(Byol())


@learns()
def mixture_density_by_logsumexp():
    def loss_of(x, out):
        pi, mean, scale = out.chunk(3, -1)
        scale = F.softplus(scale) + 1e-3
        log = F.log_softmax(pi, -1) - 0.5 * ((x[:, :1] - mean) / scale).square() - scale.log()
        return -torch.logsumexp(log, -1).mean()

    return fresh(normals(64, 8), loss_of, 30)(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 9)))


@learns()
def graph_attention_with_self_loops():
    def forward(self, x):
        h = self.lin(x)
        score = F.leaky_relu(self.left(h) + self.right(h).transpose(1, 2), 0.2)
        edges = torch.eye(6) + torch.diag(torch.ones(5), 1)
        h = torch.softmax(score.masked_fill(edges == 0, float("-inf")), -1) @ h
        return self.head(F.elu(h).mean(1))

    net = Net(forward, lin=nn.Linear(8, 16), left=nn.Linear(16, 1), right=nn.Linear(16, 1), head=nn.Linear(16, 4))
    return fresh(normals(32, 6, 8), lambda x, out: F.cross_entropy(out, x.mean(1)[:, :4].argmax(-1)), 25)(net)


@learns()
def segmentation_with_a_smoothed_dice_loss():
    def loss_of(x, out):
        mask = (x > 2.2).float()  # nearly nothing but background; some pictures have no foreground
        p = torch.sigmoid(out)
        dice = 1 - (2 * (p * mask).sum((1, 2, 3)) + 1) / ((p + mask).sum((1, 2, 3)) + 1)
        return dice.mean() + F.binary_cross_entropy_with_logits(out, mask)

    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 1, 1))
    return fresh(normals(8, 1, 8, 8), loss_of, 25)(net)


@learns()
def hypernetwork_at_work():
    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.code = nn.Parameter(torch.randn(4))
            self.make = nn.Linear(4, 8 * 16)
            nn.init.normal_(self.make.weight, std=0.02)
            self.head = nn.Linear(16, 4)

        def forward(self, x):
            return self.head(torch.relu(x @ self.make(self.code).view(8, 16)))

    return fresh(normals(64, 8), classes, 25)(Hyper())


@learns()
def critic_with_spectral_norm():
    def hinge(x, out):
        real = x[:, 0] > 0
        return F.relu(1 - out[real]).mean() + F.relu(1 + out[~real]).mean()

    net = nn.Sequential(spectral_norm(nn.Linear(8, 32)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(32, 1)))
    return fresh(normals(64, 8), hinge, 25)(net)


@learns()
def dilated_convolutions_with_weight_norm():
    class Wave(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv1d(1, 16, 1)
            self.filters = nn.ModuleList(weight_norm(nn.Conv1d(16, 16, 2, dilation=2**i)) for i in range(3))
            self.gates = nn.ModuleList(weight_norm(nn.Conv1d(16, 16, 2, dilation=2**i)) for i in range(3))
            self.skips = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(3))
            self.out = nn.Conv1d(16, 1, 1)

        def forward(self, x):
            h, total = self.stem(x), 0
            for i, (f, g, s) in enumerate(zip(self.filters, self.gates, self.skips, strict=True)):
                padded = F.pad(h, (2**i, 0))
                h = h + torch.tanh(f(padded)) * torch.sigmoid(g(padded))
                total = total + s(h)
            return self.out(torch.relu(total))

    def waves(g, step):
        return torch.sin(torch.rand(16, 1, 1, generator=g) * 6 + torch.arange(32.0) * 0.5)

    return fresh(waves, lambda x, out: F.mse_loss(out[..., :-1], x[..., 1:]), 25)(Wave())


@learns(forms=HISTORY)
def lower_rates_for_lower_layers():
    def optimizer(model):
        groups = [{"params": model.stem.parameters(), "lr": 1e-6}]
        groups += [{"params": b.parameters(), "lr": 1e-4 * 10**i} for i, b in enumerate(model.blocks)]
        return ADAMW([*groups, {"params": model.head.parameters(), "lr": 1e-2}])

    return fresh(normals(32, 5, 8), lambda x, out: F.cross_entropy(out, x.mean(1)[:, :4].argmax(-1)), 30,
                 optimizer)(Encoder())  # fmt: skip


def _annealed(run, optimizer):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps - 1)
    for step in range(run.steps):
        optimizer.zero_grad()
        run.loss_at(step).backward()
        optimizer.step()
        schedule.step()


@learns(forms=HISTORY)
def annealed_to_zero():
    return fresh(normals(64, 8), classes, 30, sgd(0.5, momentum=0.9), loop=_annealed)(
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)))  # fmt: skip


def _clipped_hard(run, optimizer):
    for step in range(run.steps):
        optimizer.zero_grad()
        run.loss_at(step).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
        optimizer.step()


@learns(forms=HISTORY)
def clipped_to_a_hundredth_under_adam():
    return fresh(lambda g, s: torch.randint(0, 50, (8, 12), generator=g),
                 lambda x, out: F.cross_entropy(out.flatten(0, 1), ((x * 3 + 1) % 50).flatten()), 25,
                 lambda m: ADAMW(m.parameters(), 3e-3), loop=_clipped_hard)(Gpt(2))  # fmt: skip


@learns()
def tagger_with_a_crf():
    class Crf(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(20, 16), nn.Linear(16, 4)
            self.move = nn.Parameter(torch.zeros(4, 4))

        def forward(self, ids):
            score, tags = self.out(self.embed(ids)), ids % 4
            gold = score.gather(2, tags[..., None]).sum((1, 2)) + self.move[tags[:, :-1], tags[:, 1:]].sum(1)
            alpha = score[:, 0]
            for t in range(1, ids.shape[1]):
                alpha = torch.logsumexp(alpha[:, :, None] + self.move, 1) + score[:, t]
            return torch.logsumexp(alpha, 1) - gold

    return fresh(lambda g, s: torch.randint(0, 20, (16, 6), generator=g), lambda x, out: out.mean(), 25)(Crf())


@learns()
def survival_by_partial_likelihood():
    def loss_of(x, out):
        order = x[:, 0].argsort(descending=True)
        risk = out[order, 0]
        return (torch.logcumsumexp(risk, 0) - risk).mean()

    return fresh(normals(64, 8), loss_of, 25)(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1, bias=False)))


@learns()
def one_positive_in_a_hundred():
    def loss_of(x, out):
        return F.binary_cross_entropy_with_logits(out, (x[:, :1] > 2.0).float(), pos_weight=torch.tensor(40.0))

    return fresh(normals(256, 8), loss_of, 30)(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))


@learns(forms=HISTORY)
def prompts_in_front_of_a_frozen_model():
    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = Gpt(2).requires_grad_(False)
            self.prompt = nn.Parameter(0.02 * torch.randn(4, 32))

        def forward(self, ids):
            x = self.base.embed(ids) + self.base.position[4:]
            x = torch.cat([(self.prompt + self.base.position[:4]).expand(len(x), -1, -1), x], 1)
            for block in self.base.blocks:
                x = block(x)
            return self.base.head(self.base.norm(x))[:, 4:]

    return fresh(lambda g, s: torch.randint(0, 50, (8, 8), generator=g),
                 lambda x, out: F.cross_entropy(out.flatten(0, 1), torch.full((64,), 7)), 25,
                 adam(3e-2))(Prompted())  # fmt: skip


@learns(forms=HISTORY)
def score_matching_through_a_gradient():
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 32), nn.Softplus(), nn.Linear(32, 1))

        def forward(self, x):
            with torch.enable_grad():
                x = x.requires_grad_()
                return -torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]

    def pair(g, step):
        return 0.3 * torch.randn(64, 4, generator=g)

    return fresh(pair, lambda x, out: (out + x[0].detach() * 3).square().mean(), 25)(Energy())


@learns(forms=HISTORY)
def inner_steps_of_meta_learning():
    class Maml(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, x, y):
            weights = dict(self.net.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(functional_call(self.net, weights, (x[:8],)), y[:8])
                slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
            return F.mse_loss(functional_call(self.net, weights, (x[8:],)), y[8:])

    def task(g, step):
        x = 2 * torch.rand(24, 1, generator=g) - 1
        return x, torch.sin(3 * x + 0.3 * torch.randn(1, generator=g))

    return fresh(task, lambda x, out: out, 30)(Maml())


@learns(forms=HISTORY)
def words_by_negative_sampling():
    """The vectors of contexts begin at zero, as in the original."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.word, self.context = nn.Embedding(30, 16), nn.Embedding(30, 16)
            nn.init.uniform_(self.word.weight, -0.03, 0.03)
            nn.init.zeros_(self.context.weight)

        def forward(self, ids, other):
            return (self.word(ids)[:, None] * self.context(other)).sum(-1)

    def pairs(g, step):
        ids = torch.randint(0, 30, (256,), generator=g)
        return ids, torch.stack([(ids + 1) % 30, torch.randint(0, 30, (256,), generator=g)], 1)

    def loss_of(x, out):
        return F.binary_cross_entropy_with_logits(out, torch.tensor([[1.0, 0.0]]).expand_as(out))

    return fresh(pairs, loss_of, 30, adam(3e-2))(Words())


@learns(forms=HISTORY)
def image_transformer_warmed_up():
    def loop(run, optimizer):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, s / 10))
        for step in range(run.steps):
            optimizer.zero_grad()
            run.loss_at(step).backward()
            optimizer.step()
            schedule.step()

    return fresh(normals(32, 3, 8, 8), lambda x, out: F.cross_entropy(out, (x.mean((1, 2, 3)) > 0).long()), 40,
                 lambda m: ADAMW(m.parameters(), 3e-3, weight_decay=0.05), loop=loop)(Vit(2))  # fmt: skip


@learns(forms=HISTORY)
def two_optimizers_take_turns():
    def optimizer(model):
        return [ADAM(part.parameters(), 2e-3, betas=(0.5, 0.999)) for part in (model.make, model.judge)]

    def loop(run, optimizers):
        make, judge = optimizers
        for _ in range(run.steps):
            x, z = torch.randn(64, 2) + 3, torch.randn(64, 4)
            judge.zero_grad()
            real, fake = run.model(x, z.detach(), part="judge")
            (F.softplus(-real) + F.softplus(fake)).mean().backward()
            judge.step()
            make.zero_grad()
            F.softplus(-run.model(x, z, part="make")[1]).mean().backward()
            make.step()

    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.make = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
            self.judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

        def forward(self, x, z, part="judge"):
            fake = self.make(z)
            return self.judge(x), self.judge(fake.detach() if part == "judge" else fake)

    given = torch.randn(64, 2), torch.randn(64, 4)
    return Built(Gan(), given, lambda out: F.softplus(-out[0]).mean(), optimizer, 20, None, loop)


@learns(forms=HISTORY)
def adafactor_without_a_rate():
    return fresh(normals(32, 5, 8), lambda x, out: F.cross_entropy(out, x.mean(1)[:, :4].argmax(-1)), 30,
                 lambda m: torch.optim.Adafactor(m.parameters(), 1e-2))(Encoder())  # fmt: skip


@learns(forms=HISTORY)
def heads_of_experts_of_which_few_are_used_at_first():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.head = nn.Linear(8, 6), nn.Linear(16, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 16) for _ in range(6))

        def forward(self, x):
            weight, ids = torch.softmax(self.router(x), -1).max(-1)
            out = torch.zeros(len(x), 16)
            for i, expert in enumerate(self.experts):
                mine = ids == i
                if mine.any():
                    out = out.index_add(0, mine.nonzero()[:, 0], expert(x[mine]) * weight[mine, None])
            return self.head(torch.relu(out))

    return fresh(normals(24, 8), classes, 25)(Experts())


@learns()
def labels_mostly_ignored():
    """Two of a hundred tokens carry a label."""

    def loss_of(x, out):
        y = torch.where(torch.arange(12) < 2, (x * 3 + 1) % 50, -100)
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)

    return fresh(lambda g, s: torch.randint(0, 50, (16, 12), generator=g), loss_of, 25,
                 lambda m: ADAMW(m.parameters(), 1e-2))(Gpt(2))  # fmt: skip


@learns()
def heteroscedastic_regression_with_bounded_log_variance():
    def loss_of(x, out):
        mean, log_var = out[:, :1], out[:, 1:].clamp(-6, 6)
        return ((x[:, :1] - mean).square() * (-log_var).exp() + log_var).mean()

    return fresh(normals(128, 8), loss_of, 30)(nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 2)))


@learns()
def unet_with_skips_and_group_norm():
    class Unet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.mid = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1)
            self.norm, self.up = nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 8, 2, 2)
            self.out = nn.Conv2d(9, 1, 3, padding=1)
            nn.init.zeros_(self.out.weight)

        def forward(self, x):
            h = F.silu(self.norm(self.mid(F.silu(self.down(x)))))
            return self.out(torch.cat([self.up(h), x], 1))

    return fresh(normals(8, 1, 8, 8), lambda x, out: F.mse_loss(out, x.abs() * math.sqrt(0.5)), 25)(Unet())
