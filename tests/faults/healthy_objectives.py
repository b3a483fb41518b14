"""Healthy nets made of parts: tasks, losses and training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.faults.parts import Net, Out, ce, fit, lins, mlp, mse
from tests.faults.places import healthy
from tests.faults.program import Built


@healthy()
def targets_of_a_thousand_huber() -> Built:
    y = torch.randn(32, 1) * 1e3
    return Built(mlp(6, 1), (torch.randn(32, 6),), lambda o: F.huber_loss(o, y, delta=10.0))


@healthy()
def targets_of_a_thousand_mse() -> Built:
    return Built(mlp(6, 1), (torch.randn(32, 6),), mse(32, 1, scale=1e3))


@healthy()
def targets_of_a_thousand_half_fitted() -> Built:
    return fit(Built(mlp(6, 1), (torch.randn(32, 6),), mse(32, 1, scale=1e3)), 50, 1e-2)


@healthy()
def thousand_classes_summed() -> Built:
    y = torch.randint(0, 1000, (16,))
    return Built(mlp(12, 1000, 64), (torch.randn(16, 12),), lambda o: F.cross_entropy(o, y, reduction="sum"))


@healthy()
def label_smoothing_and_imbalance() -> Built:
    y = (torch.rand(64) < 0.03).long()
    y[0] = 1
    w = torch.tensor([0.02, 1.0])
    return Built(mlp(6, 2), (torch.randn(64, 6),), lambda o: F.cross_entropy(o, y, w, label_smoothing=0.1))


@healthy()
def focal_loss_by_hand_trained() -> Built:
    y = (torch.rand(64) < 0.1).float()

    def focal(o: Tensor) -> Tensor:
        p = torch.sigmoid(o[:, 0])
        b = F.binary_cross_entropy_with_logits(o[:, 0], y, reduction="none")
        return ((1 - (p * y + (1 - p) * (1 - y))) ** 2 * b).mean()

    return fit(Built(mlp(6, 1), (torch.randn(64, 6),), focal))


@healthy()
def info_nce_at_one_hundredth_inside() -> Built:
    def run(m: Net, a: Tensor, b: Tensor) -> Out:
        s = F.normalize(m.f(a), dim=-1) @ F.normalize(m.g(b), dim=-1).T / 0.01
        return Out((F.cross_entropy(s, torch.arange(8)) + F.cross_entropy(s.T, torch.arange(8))) / 2, s)

    x = torch.randn(8, 10)
    return Built(Net(run, f=mlp(10, 16), g=mlp(10, 16, 24, nn.GELU)), (x, x + 0.1 * torch.randn(8, 10)))


@healthy()
def triplet_margin_of_embeddings() -> Built:
    def run(m: Net, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
        return F.triplet_margin_loss(m.f(a), m.f(p), m.f(n), margin=1.0)

    return Built(Net(run, f=mlp(5, 4, 16, nn.SiLU)), tuple(torch.randn(12, 5) for _ in range(3)))


@healthy()
def divergence_with_log_targets() -> Built:
    t = torch.randn(8, 20).log_softmax(-1)
    return Built(
        mlp(6, 20),
        (torch.randn(8, 6),),
        lambda o: F.kl_div(F.log_softmax(o / 4, -1), t, reduction="batchmean", log_target=True) * 16,
    )


@healthy()
def pinball_of_nine_quantiles() -> Built:
    y, q = torch.randn(32, 1), torch.linspace(0.1, 0.9, 9)
    return Built(mlp(4, 9), (torch.randn(32, 4),), lambda o: torch.maximum(q * (y - o), (q - 1) * (y - o)).mean())


@healthy()
def ctc_over_a_conv_net() -> Built:
    y = torch.randint(1, 6, (3, 4))
    m = nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.Hardswish(), nn.Conv1d(16, 6, 1))
    return Built(
        m,
        (torch.randn(3, 8, 24),),
        lambda o: F.ctc_loss(o.permute(2, 0, 1).log_softmax(-1), y, torch.full((3,), 24), torch.full((3,), 4)),
    )


@healthy()
def poisson_counts_of_hundreds() -> Built:
    y = torch.poisson(torch.rand(32, 1) * 300)
    return Built(mlp(4, 1), (torch.randn(32, 4),), lambda o: F.poisson_nll_loss(o, y))


@healthy()
def gaussian_likelihood_learned_spread() -> Built:
    y = torch.randn(32)
    return fit(Built(mlp(4, 2), (torch.randn(32, 4),), lambda o: F.gaussian_nll_loss(o[:, 0], y, F.softplus(o[:, 1]))))


@healthy()
def dice_and_entropy_of_a_mask() -> Built:
    y = (torch.rand(2, 1, 12, 12) < 0.2).float()
    m = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.LeakyReLU(0.1, inplace=True), nn.Conv2d(12, 1, 1)
    )

    def dice(o: Tensor) -> Tensor:
        p = o.sigmoid()
        return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1) + F.binary_cross_entropy_with_logits(o, y)

    return Built(m, (torch.randn(2, 3, 12, 12),), dice)


@healthy()
def cnn_loss_times_65536_momentum() -> Built:
    y = torch.randint(0, 4, (6,))
    m = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )
    x = torch.randn(6, 3, 12, 12)
    m(x)
    case = fit(Built(m, (x,), lambda o: F.cross_entropy(o, y)), 50, 1e-2, momentum=True)
    return Built(m, case.args, lambda o: F.cross_entropy(o, y) * 65536)


@healthy()
def recurrent_loss_times_a_millionth() -> Built:
    y = torch.randint(0, 3, (6,))
    model = Net(lambda m, x: m.c(m.rnn(x)[1][-1]), rnn=nn.GRU(4, 16, 2, batch_first=True), c=nn.Linear(16, 3))
    return Built(model, (torch.randn(6, 25, 4),), lambda o: F.cross_entropy(o, y) * 1e-6)


@healthy()
def dictionary_of_summed_losses() -> Built:
    def run(m: Net, x: Tensor) -> dict[str, Tensor]:
        h = m.body(x)
        return {"a": m.a(h), "b": m.b(h)}

    y = torch.randn(32, 3)
    model = Net(run, body=mlp(6, 24, 24, nn.Tanh), a=nn.Linear(24, 3), b=nn.Linear(24, 2))
    return Built(model, (torch.randn(32, 6),), lambda o: (o["a"] - y).abs().sum() + 0.01 * o["b"].square().sum())


@healthy()
def fitted_two_moons_momentum() -> Built:
    x = torch.randn(64, 2)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return fit(Built(mlp(2, 2, 24), (x,), lambda o: F.cross_entropy(o, y)), 200, 5e-2, momentum=True)


@healthy()
def linear_least_squares_done() -> Built:
    x = torch.randn(40, 3)
    y = x @ torch.randn(3, 1)
    return fit(Built(nn.Linear(3, 1), (x,), lambda o: F.mse_loss(o, y)), 400, 3e-2)


@healthy()
def overfitted_conv_classifier() -> Built:
    m = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 4),
    )
    return fit(Built(m, (torch.randn(8, 1, 16, 16),), ce(8, 4)), 120, 5e-3)


@healthy()
def trained_then_eval_batch_one() -> Built:
    case = fit(
        Built(
            nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)),
            (torch.randn(32, 6),),
            ce(32, 3),
        )
    )
    return Built(case.model.eval(), (torch.randn(1, 6),), ce(1, 3))


@healthy()
def lstm_language_model_fifty_steps() -> Built:
    ids = torch.randint(0, 20, (4, 30))

    def run(m: Net, x: Tensor) -> Out:
        logits = m.rnn(m.emb(x))[0] @ m.emb.weight.t()
        return Out(F.cross_entropy(logits[:, :-1].reshape(-1, 20), x[:, 1:].reshape(-1)), logits)

    return fit(Built(Net(run, emb=nn.Embedding(20, 16), rnn=nn.LSTM(16, 16, batch_first=True)), (ids,)), 50, 1e-2)


@healthy()
def momentum_regression_small_widths() -> Built:
    return fit(Built(mlp(3, 1, 4, nn.Softplus), (torch.randn(64, 3),), mse(64, 1)), 50, 1e-2, momentum=True)


@healthy()
def bottleneck_adapters_in_frozen_stack() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for f, a, b in zip(m.fs, m.down, m.up, strict=True):
            x = torch.tanh(f(x))
            x = x + b(F.relu(a(x)))
        return m.out(x)

    model = Net(
        run,
        fs=lins(4, 16),
        down=nn.ModuleList(nn.Linear(16, 4) for _ in range(4)),
        up=nn.ModuleList(nn.Linear(4, 16) for _ in range(4)),
        out=nn.Linear(16, 3),
    )
    model.fs.requires_grad_(False)
    return Built(model, (torch.randn(16, 16),), ce(16, 3))


@healthy()
def bias_only_tuning() -> Built:
    m = mlp(6, 3)
    for name, p in m.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return Built(m, (torch.randn(16, 6),), ce(16, 3))


@healthy()
def prompt_tuning_of_a_frozen_encoder() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = torch.cat([m.prompt.expand(x.shape[0], -1, -1), x], 1)
        return m.out(m.enc(h)[:, 0])

    enc = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True),
        3,
        enable_nested_tensor=False,
    )
    enc.requires_grad_(False)
    return Built(
        Net(run, prompt=torch.randn(1, 4, 16) * 0.02, enc=enc, out=nn.Linear(16, 3)), (torch.randn(6, 7, 16),), ce(6, 3)
    )


@healthy()
def frozen_embedding_random_features() -> Built:
    emb = nn.Embedding(50, 16)
    emb.weight.requires_grad_(False)
    model = Net(
        lambda m, x: m.f(torch.cos(m.emb(x).mean(1) @ m.b_w)), emb=emb, f=nn.Linear(64, 2), b_w=torch.randn(16, 64)
    )
    return Built(model, (torch.randint(0, 50, (12, 9)),), ce(12, 2))


@healthy()
def sparse_embedding_padding_mean() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        keep = (x != 0).float().unsqueeze(-1)
        return m.f((m.emb(x) * keep).sum(1) / keep.sum(1).clamp(min=1))

    ids = torch.randint(1, 5000, (8, 10))
    ids[:, 6:] = 0
    ids[3] = 0
    return Built(Net(run, emb=nn.Embedding(5000, 12, padding_idx=0), f=mlp(12, 3)), (ids,), ce(8, 3))


@healthy()
def one_hot_matrix_product_tied() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = F.one_hot(x, 40).float() @ m.table
        return F.layer_norm(m.f(h), (16,)) @ m.table.mT

    return Built(
        Net(run, table=torch.randn(40, 16) * 0.05, f=nn.Linear(16, 16)), (torch.randint(0, 40, (24,)),), ce(24, 40)
    )


@healthy()
def soft_mixture_by_einsum() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        p = torch.softmax(m.router(x), -1)
        h = F.gelu(torch.einsum("bi,eio->beo", x, m.w1))
        return m.out(torch.einsum("be,beo,eoi->bi", p, h, m.w2) + x)

    model = Net(
        run,
        router=nn.Linear(12, 6),
        w1=torch.randn(6, 12, 20) * 0.28,
        w2=torch.randn(6, 20, 12) * 0.2,
        out=nn.Linear(12, 3),
    )
    return Built(model, (torch.randn(16, 12),), ce(16, 3))


@healthy()
def top_two_experts_loop_with_branches() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        p, i = m.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(m.experts):
            rows, slot = (i == e).nonzero(as_tuple=True)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * p[rows, slot, None])
        return m.out(x + y)

    model = Net(
        run, router=nn.Linear(12, 6), experts=nn.ModuleList(mlp(12, 12, 16) for _ in range(6)), out=nn.Linear(12, 3)
    )
    return Built(model, (torch.randn(7, 12),), ce(7, 3))


@healthy()
def gate_times_zero_at_first() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        for f, s in zip(m.fs, m.scales, strict=True):
            x = torch.addcmul(x, s, F.gelu(f(x)))
        return m.out(x)

    scales = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(6))
    return Built(Net(run, fs=lins(6, 16), scales=scales, out=nn.Linear(16, 3)), (torch.randn(16, 16),), ce(16, 3))


@healthy()
def half_regions_with_scaled_loss() -> Built:
    def run(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        with torch.autocast("cpu", torch.float16):
            h = m.b(F.gelu(h))
        return m.c(F.silu(h.float()))

    y = torch.randint(0, 3, (16,))
    return Built(
        Net(run, a=nn.Linear(8, 24), b=nn.Linear(24, 24), c=nn.Linear(24, 3)),
        (torch.randn(16, 8),),
        lambda o: F.cross_entropy(o, y) * 1024,
    )


@healthy()
def bfloat_weights_residual_net() -> Built:
    m = nn.Sequential(
        nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
    ).bfloat16()
    return Built(m, (torch.randn(16, 8).bfloat16(),), ce(16, 3))


@healthy()
def weight_and_spectral_norm_parametrized() -> Built:
    m = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 24)),
        nn.LeakyReLU(0.2),
        parametrizations.spectral_norm(nn.Linear(24, 24)),
        nn.LeakyReLU(0.2),
        nn.Linear(24, 1),
    )
    return Built(m, (torch.randn(32, 8),), lambda o: F.softplus(-o).mean())
