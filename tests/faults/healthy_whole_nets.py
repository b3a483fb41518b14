"""Healthy nets: residual, language, recurrent, generative, and in several precisions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.faults.places import healthy
from tests.faults.program import Built
from tests.faults.whole_nets import GPT, ResNet, UNet, ce, image, lm, sq, tokens, trained


class Autocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


class LstmTagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 12, padding_idx=0)
        self.rnn, self.out = kind(12, 16, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(32, 5)

    def forward(self, i: Tensor, n: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.emb(i), n, batch_first=True)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=i.shape[1])
        return self.out(h).flatten(0, 1)


@healthy()
def small_resnet() -> Built:
    return Built(ResNet(), (image(8),), ce(8, 5))


@healthy()
def zero_gamma_resnet() -> Built:
    return Built(ResNet(4, zero_gamma=True), (image(8),), ce(8, 5))


@healthy()
def resnet_eval_mode() -> Built:
    case = trained(Built(ResNet(), (image(8),), ce(8, 5)), 20)
    case.model.eval()
    return case


@healthy()
def resnet_batch_two() -> Built:
    return Built(ResNet(), (image(2),), ce(2, 5))


@healthy()
def diffusion_unet_zero_out() -> Built:
    noise = torch.randn(4, 3, 16, 16)
    return Built(UNet(zero=True), (image(4, 16), torch.rand(4)), lambda o: F.mse_loss(o, noise))


@healthy()
def diffusion_unet_trained() -> Built:
    noise = torch.randn(4, 3, 16, 16)
    return trained(Built(UNet(zero=True), (image(4, 16), torch.rand(4)), lambda o: F.mse_loss(o, noise)))


@healthy()
def gpt_tied() -> Built:
    return Built(GPT(6, tied=True), (tokens(),), lm())


@healthy()
def gpt_post_norm() -> Built:
    return Built(GPT(6, post=True), (tokens(),), lm())


@healthy()
def gpt_loss_sum_65536() -> Built:
    loss = lm()
    return Built(GPT(4), (tokens(),), lambda o: loss(o) * 65536 * 36)


@healthy()
def gpt_loss_1e_minus_6() -> Built:
    loss = lm()
    return Built(GPT(4), (tokens(),), lambda o: loss(o) * 1e-6)


@healthy()
def gpt_overfitted() -> Built:
    return trained(Built(GPT(3, act=F.relu), (tokens(),), lm()), 150)


@healthy()
def gpt_one_sequence() -> Built:
    y = torch.randint(0, 40, (5,))
    return Built(GPT(2), (tokens(1, 5),), lambda o: F.cross_entropy(o.flatten(0, 1), y))


@healthy()
def gpt_bf16_autocast() -> Built:
    return Built(Autocast(GPT(3)), (tokens(),), lm())


@healthy()
def resnet_bf16_weights() -> Built:
    return Built(ResNet().bfloat16(), (image(8).bfloat16(),), ce(8, 5))


@healthy()
def half_mlp_scaled() -> Built:
    m = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).half()
    y = torch.randn(64, 8)
    return Built(m, (torch.randn(64, 16).half(),), lambda o: F.mse_loss(o.float(), y) * 1024, trains=False)


@healthy()
def double_lstm() -> Built:
    m = LstmTagger().double()
    return Built(m, (torch.randint(1, 20, (4, 9)), torch.tensor([9, 6, 4, 1])), ce(36, 5))


@healthy()
def bilstm_packed_padding() -> Built:
    i, n = torch.randint(1, 20, (4, 9)), torch.tensor([9, 6, 4, 1])
    i[torch.arange(9)[None] >= n[:, None]] = 0
    return Built(LstmTagger(), (i, n), ce(36, 5))


@healthy()
def gru_seq2seq_attention() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.src, self.tgt = nn.Embedding(20, 16, padding_idx=0), nn.Embedding(20, 16)
            self.enc, self.dec, self.key = nn.GRU(16, 24, batch_first=True), nn.GRUCell(40, 24), nn.Linear(24, 24)
            self.out = nn.Linear(24, 20)

        def forward(self, s: Tensor, t: Tensor) -> Tensor:
            mem, h = self.enc(self.src(s))
            h, outs = h[0], []
            mask = s == 0
            for k in range(t.shape[1]):
                score = (self.key(mem) @ h[..., None])[..., 0].masked_fill(mask, float("-inf"))
                ctx = (score.softmax(-1)[:, None] @ mem)[:, 0]
                h = self.dec(torch.cat([self.tgt(t[:, k]), ctx], -1), h)
                outs.append(self.out(h))
            return torch.stack(outs, 1)

    s = torch.randint(1, 20, (4, 8))
    s[2, 5:] = 0
    t = torch.randint(0, 20, (4, 7))
    return Built(M(), (s, t), lambda o: F.cross_entropy(o.flatten(0, 1), t.flatten()))


@healthy()
def lstm_hundred_steps() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.LSTMCell(4, 16), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = c = torch.zeros(x.shape[0], 16)
            for k in range(x.shape[1]):
                h, c = self.cell(x[:, k], (h, c))
            return self.out(h)

    return Built(M(), (torch.randn(4, 60, 4),), sq)


@healthy()
def vae() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.mu, self.lv = (
                nn.Sequential(nn.Linear(20, 32), nn.ReLU()),
                nn.Linear(32, 4),
                nn.Linear(32, 4),
            )
            self.dec = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 20))

        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)
            mu, lv = self.mu(h), self.lv(h)
            y = self.dec(mu + torch.randn_like(mu) * (0.5 * lv).exp())
            kl = -0.5 * (1 + lv - mu.pow(2) - lv.exp()).sum(-1).mean()
            return F.binary_cross_entropy_with_logits(y, (x > 0).float(), reduction="sum") / len(x) + kl

    return Built(M(), (torch.randn(32, 20),))


@healthy()
def gan_generator_through_frozen_critic() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh())
            self.d = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
            self.d.requires_grad_(False)

        def forward(self, z: Tensor) -> Tensor:
            return F.softplus(-self.d(self.g(z))).mean()

    return Built(M(), (torch.randn(16, 8),))


@healthy()
def gan_critic_detaches_fakes() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)).requires_grad_(False)
            self.d = nn.Sequential(
                nn.utils.parametrizations.spectral_norm(nn.Linear(16, 32)), nn.LeakyReLU(0.2), nn.Linear(32, 1)
            )

        def forward(self, z: Tensor, real: Tensor) -> Tensor:
            fake = self.g(z).detach()
            return F.softplus(self.d(fake)).mean() + F.softplus(-self.d(real)).mean()

    return Built(M(), (torch.randn(16, 8), torch.randn(16, 16)))


@healthy()
def realnvp_zero_init() -> Built:
    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 6))
            nn.init.zeros_(self.net[2].weight)
            nn.init.zeros_(self.net[2].bias)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = x.chunk(2, -1)
            s, t = self.net(a).chunk(2, -1)
            s = torch.tanh(s)
            return torch.cat([b * s.exp() + t, a], -1), s.sum(-1)

    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(Coupling() for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            logdet = 0.0
            for step in self.steps:
                x, d = step(x)
                logdet = logdet + d
            return (0.5 * x.pow(2).sum(-1) - logdet).mean()

    return Built(M(), (torch.randn(32, 6) * 2 + 1,))


@healthy()
def triplet_with_easy_ones() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))

        def forward(self, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
            return F.triplet_margin_loss(self.net(a), self.net(p), self.net(n), margin=0.5)

    a = torch.randn(32, 10)
    return Built(M(), (a, a + 0.3 * torch.randn(32, 10), torch.randn(32, 10)))


@healthy()
def contrastive_clip_scale() -> Built:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.scale = (
                nn.Linear(12, 16),
                nn.Linear(9, 16),
                nn.Parameter(torch.tensor(math.log(1 / 0.07))),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = (
                self.scale.exp().clamp(max=100) * F.normalize(self.a(x), dim=-1) @ F.normalize(self.b(y), dim=-1).t()
            )
            t = torch.arange(len(x))
            return (F.cross_entropy(logits, t) + F.cross_entropy(logits.t(), t)) / 2

    return Built(M(), (torch.randn(16, 12), torch.randn(16, 9)))
