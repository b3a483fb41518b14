"""More faults whose usual advice is wrong, so that each kind of advice is asked for on six architectures."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.faults.advice import Checkpointed, adam, case, chain, descent, half_cross_entropy
from tests.faults.bodies import BODIES
from tests.faults.nets import Block, Graph, Net, he, mse, xavier, xent
from tests.faults.program import Built

HISTORY = frozenset({"history"})


def halved(name, mended, *, optimizer, factor=1.0):
    """The model of that name in half precision, its loss in single precision, times a factor."""
    make, batch = BODIES[name]
    args, loss = batch(0)
    given = tuple(a.half() if a.is_floating_point() else a for a in args)
    return Built(make().half(), given, lambda out: loss(out.float()) * factor, optimizer)


# ---- half precision ------------------------------------------------------------------------------------------------


@case("update_size", "nonfinite", outside=True, forms=HISTORY, says=("eps",), culprits=("",))
def adam_of_half_words(mended):
    return halved("language", mended, optimizer=adam(eps=1e-4 if mended else 1e-8))


@case("update_size", "nonfinite", outside=True, forms=HISTORY, says=("eps",), culprits=("",))
def adam_of_a_half_graph(mended):
    return halved("nodes", mended, optimizer=adam(eps=1e-3 if mended else 1e-8))


@case("update_size", "nonfinite", outside=True, forms=HISTORY, says=("eps",), culprits=("",))
def adam_of_half_attention(mended):
    return halved("encoder", mended, optimizer=adam(eps=1e-3 if mended else 1e-8))


@case("update_size", "nonfinite", outside=True, forms=HISTORY, says=("eps",), culprits=("",))
def adam_with_decay_of_half_parameters(mended):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)).half()
    return Built(model, (torch.randn(32, 16).half(),), half_cross_entropy(32, 4),
                 lambda m: torch.optim.AdamW(m.parameters(), 1e-3, eps=1e-4 if mended else 1e-8))  # fmt: skip


@case("nonfinite", outside=True, says=("loss scale",))
def loss_scale_beyond_half_words(mended):
    return halved("language", mended, optimizer=descent(2e-3), factor=2.0 ** (6 if mended else 40))


@case("nonfinite", outside=True, says=("loss scale",))
def loss_scale_beyond_a_half_graph(mended):
    return halved("nodes", mended, optimizer=descent(2e-3), factor=2.0 ** (4 if mended else 38))


@case("nonfinite", outside=True, says=("loss scale",))
def loss_scale_beyond_half_attention(mended):
    return halved("encoder", mended, optimizer=descent(2e-3), factor=2.0 ** (4 if mended else 40))


@case("nonfinite", outside=True, says=("loss scale",))
def loss_scale_beyond_half_convolutions(mended):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)).half()
    loss = half_cross_entropy(16, 4)
    return Built(model, (torch.randn(16, 3, 6, 6).half(),), lambda out: loss(out) * 2.0 ** (4 if mended else 44),
                 descent(2e-3))  # fmt: skip


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@case("detached", culprits=("parts.0",), says=("use_reentrant=False",))
def reentrant_checkpoint_of_transformer_blocks(mended):
    head = nn.Sequential(nn.Flatten(), nn.Linear(5 * 16, 4))
    model = Checkpointed([Block(16), Block(16)], head, reentrant=not mended)
    return Built(model, (torch.randn(8, 5, 16),), xent(8, 4))


@case("detached", culprits=("gru",), says=("use_reentrant=False",))
def reentrant_checkpoint_of_a_recurrence(mended):
    def forward(self, x):
        out = checkpoint(lambda given: self.gru(given)[0], x, use_reentrant=not mended)
        return self.head(out[:, -1])

    net = Net(forward, gru=nn.GRU(6, 12, batch_first=True), head=nn.Linear(12, 3))
    return Built(net, (torch.randn(8, 7, 6),), xent(8, 3))


@case("detached", culprits=("branch",), says=("use_reentrant=False",))
def reentrant_checkpoint_of_one_branch(mended):
    def forward(self, x):
        side = checkpoint(self.branch, x, use_reentrant=not mended)
        return self.head(torch.relu(self.stem(x)) + side)

    net = Net(forward, stem=nn.Linear(8, 16), branch=nn.Sequential(nn.Linear(8, 16), nn.SiLU()), head=nn.Linear(16, 3))
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


# ---- normalisation -------------------------------------------------------------------------------------------------


@case("scale_break", culprits=("norm",), says=("running_var",))
def statistics_of_zero_over_time(mended):
    net = Net(lambda self, x: self.head(F.silu(self.norm(self.conv(x))).mean(-1)), conv=nn.Conv1d(3, 8, 3),
              norm=nn.BatchNorm1d(8), head=nn.Linear(8, 3))  # fmt: skip
    if not mended:
        net.norm.running_var.zero_()
    return Built(net.eval(), (torch.randn(8, 3, 10),), xent(8, 3))


@case("scale_break", culprits=("norm",), says=("running_var",))
def statistics_of_zero_in_front_of_the_head(mended):
    net = Net(lambda self, x: self.head(self.norm(F.gelu(self.body(x)))), body=nn.Linear(8, 24),
              norm=nn.BatchNorm1d(24), head=nn.Linear(24, 4))  # fmt: skip
    if not mended:
        net.norm.running_var.zero_()
    return Built(net.eval(), (torch.randn(16, 8),), xent(16, 4))


@case("scale_break", culprits=("norm",), says=("running_var",))
def statistics_of_zero_in_a_volume(mended):
    net = Net(lambda self, x: self.head(F.relu(self.norm(self.conv(x))).mean((2, 3, 4))), conv=nn.Conv3d(1, 6, 3),
              norm=nn.BatchNorm3d(6), head=nn.Linear(6, 3))  # fmt: skip
    if not mended:
        net.norm.running_var.zero_()
    return Built(net.eval(), (torch.randn(8, 1, 5, 5, 5),), xent(8, 3))


@case("vanishing", "zero", culprits=("norm",), says=("sum or mean",))
def mean_of_normalised_pictures(mended):
    """Every channel is normalised over space, and then averaged over space."""

    def forward(self, x):
        h = self.norm(self.conv(x))
        return self.head((h.relu() if mended else h).mean((2, 3)))

    net = Net(forward, conv=nn.Conv2d(3, 8, 3), norm=nn.InstanceNorm2d(8), head=nn.Linear(8, 3))
    return Built(net, (torch.randn(8, 3, 8, 8),), xent(8, 3))


@case("vanishing", "zero", culprits=("norm",), says=("sum or mean",))
def mean_of_normalised_tokens(mended):
    def forward(self, x):
        h = self.norm(self.stem(x) + self.mix(torch.tanh(self.stem(x))))
        return self.head((h.abs() if mended else h).mean(-1))

    net = Net(forward, stem=nn.Linear(8, 16), mix=nn.Linear(16, 16), norm=nn.LayerNorm(16, elementwise_affine=False),
              head=nn.Linear(5, 3))  # fmt: skip
    return Built(net, (torch.randn(16, 5, 8),), xent(16, 3))


@case("vanishing", "zero", culprits=("norm",), says=("sum or mean",))
def sum_of_normalised_groups(mended):
    def forward(self, x):
        h = self.norm(F.silu(self.conv(x)))
        return self.head((h.relu() if mended else h).sum((2, 3)).view(len(x), 2, 4).mean(-1))

    net = Net(forward, conv=nn.Conv2d(3, 8, 3), norm=nn.GroupNorm(2, 8, affine=False), head=nn.Linear(2, 3))
    return Built(net, (torch.randn(8, 3, 6, 6),), lambda out: out.square().mean() / 20000)


def with_zero(layer, index, mended):
    if not mended:
        layer.weight.data[index] = 0
    return weight_norm(layer)


@case("nonfinite", culprits=("weight", "conv"), says=("weight norm",))
def weight_norm_of_a_zero_picture_filter(mended):
    conv = with_zero(nn.Conv2d(3, 6, 3), 2, mended)
    net = Net(lambda self, x: self.head(F.silu(self.conv(x)).mean((2, 3))), conv=conv, head=nn.Linear(6, 3))
    return Built(net, (torch.randn(8, 3, 6, 6),), xent(8, 3))


@case("nonfinite", culprits=("weight", "head"), says=("weight norm",))
def weight_norm_of_a_zero_class(mended):
    net = Net(lambda self, x: self.head(torch.tanh(self.body(x))), body=nn.Linear(8, 16),
              head=with_zero(nn.Linear(16, 4), 1, mended))  # fmt: skip
    return Built(net, (torch.randn(16, 8),), xent(16, 4))


@case("nonfinite", culprits=("weight", "mix"), says=("weight norm",))
def weight_norm_of_a_zero_row_in_a_residual_net(mended):
    net = Net(lambda self, x: self.head(x + F.gelu(self.mix(x))), mix=with_zero(nn.Linear(8, 8), 5, mended),
              head=nn.Linear(8, 3))  # fmt: skip
    return Built(net, (torch.randn(16, 8),), xent(16, 3))


@case("nonfinite", culprits=("weight", "up"), says=("weight norm",))
def weight_norm_of_a_zero_transposed_filter(mended):
    net = Net(lambda self, x: self.out(F.relu(self.up(x))), up=with_zero(nn.ConvTranspose1d(4, 6, 2, 2), 3, mended),
              out=nn.Conv1d(6, 1, 1))  # fmt: skip
    return Built(net, (torch.randn(8, 4, 6),), mse(8, 1, 12))


# ---- over time -----------------------------------------------------------------------------------------------------


@case("vanishing", culprits=("cell",), says=("forget-gate", "orthogonal"))
def gated_recurrence_that_forgets(mended):
    """Closed update gates: the state is thrown away at each step."""

    def forward(self, x):
        h = x.new_zeros(len(x), 16)
        for t in range(x.shape[1]):
            h = self.cell(self.into(x[:, t]), h)
        return self.head(h)

    net = Net(forward, into=nn.Linear(6, 16), cell=nn.GRUCell(16, 16), head=nn.Linear(16, 3))
    net.cell.bias_ih.data[16:32].fill_(1.0 if mended else -6.0)
    return Built(net, (torch.randn(16, 6 if mended else 60, 6),), xent(16, 3))


@case("exploding", culprits=("cell", "add"), says=("clip",))
def recurrence_with_leaky_units_without_a_bound(mended):
    def forward(self, x):
        h = x.new_zeros(len(x), 16)
        for t in range(x.shape[1]):
            h = F.leaky_relu(self.into(x[:, t]) + self.cell(h), 0.5)
        return self.head(h)

    net = Net(forward, into=nn.Linear(6, 16), cell=nn.Linear(16, 16), head=nn.Linear(16, 3))
    nn.init.orthogonal_(net.cell.weight, gain=1.0 if mended else 2.2)
    return Built(net, (torch.randn(16, 10 if mended else 40, 6),), mse(16, 3))


# ---- attention -----------------------------------------------------------------------------------------------------


def attended(forward, mended, **parts):
    net = Net(forward, **parts)
    for name, parameter in net.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=12.0 if not mended and name[0] in "qk" else 0.08)
    return net


@case("saturated", culprits=("softmax",), says=("sqrt(d)",))
def attention_over_a_set_by_hand(mended):
    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(1, 2)
        return self.head((torch.softmax(scores / 8 if mended else scores, -1) @ v).mean(1))

    net = attended(
        forward, mended, q=nn.Linear(16, 64), k=nn.Linear(16, 64), v=nn.Linear(16, 32), head=nn.Linear(32, 3)
    )
    return Built(net, (torch.randn(16, 8, 16) * (1 if mended else 3),), xent(16, 3))


@case("saturated", culprits=("softmax",), says=("sqrt(d)",))
def cross_attention_onto_a_memory(mended):
    def forward(self, x):
        scores = self.q(x) @ self.k(self.memory).T
        return self.head(torch.softmax(scores / 8 if mended else scores, -1) @ self.v(self.memory))

    net = attended(forward, mended, q=nn.Linear(16, 64), k=nn.Linear(16, 64), v=nn.Linear(16, 32),
                   head=nn.Linear(32, 3), memory=nn.Parameter(torch.randn(12)))  # fmt: skip
    net.memory = nn.Parameter(torch.randn(12, 16))
    return Built(net, (torch.randn(32, 16),), xent(32, 3))


@case("saturated", culprits=("softmax",), says=("sqrt(d)",))
def attention_between_pixels(mended):
    def forward(self, x):
        q, k, v = (part(x).flatten(2) for part in (self.q, self.k, self.v))
        scores = q.transpose(1, 2) @ k
        return self.head((v @ torch.softmax(scores / 6 if mended else scores, -1).transpose(1, 2)).mean(-1))

    net = attended(forward, mended, q=nn.Conv2d(8, 32, 1), k=nn.Conv2d(8, 32, 1), v=nn.Conv2d(8, 16, 1),
                   head=nn.Linear(16, 3))  # fmt: skip
    return Built(net, (torch.randn(8, 8, 4, 4),), xent(8, 3))


# ---- chains --------------------------------------------------------------------------------------------------------


@case("vanishing", culprits=("layers", "sigmoid"), says=("sigmoid operations",))
def sixteen_sigmoids_of_each_token(mended):
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) if mended else torch.sigmoid(layer(x))
        return self.head(x.mean(1))

    net = Net(forward, layers=xavier(nn.ModuleList(nn.Linear(24, 24) for _ in range(16))), head=nn.Linear(24, 3))
    return Built(net, (torch.randn(8, 4, 24),), xent(8, 3))


@case("vanishing", culprits=("convs", "sigmoid"), says=("sigmoid operations",))
def twelve_sigmoids_of_pictures(mended):
    def forward(self, x):
        for conv in self.convs:
            x = torch.tanh(conv(x)) if mended else torch.sigmoid(conv(x))
        return self.head(x.mean((2, 3)))

    net = Net(forward, convs=xavier(nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(12)), 1.4),
              head=nn.Linear(8, 3))  # fmt: skip
    return Built(net, (torch.randn(8, 8, 6, 6),), xent(8, 3))


@case("vanishing", culprits=("graph",), says=("operations",))
def twelve_rounds_of_messages_through_sigmoids(mended):
    net = Net(lambda self, x: self.graph(x).mean(1), graph=xavier(Graph(4 if mended else 12, act=torch.sigmoid)))
    if mended:
        net.graph = xavier(Graph(4, act=torch.tanh))
    return Built(net, (torch.randn(8, 12, 16),), xent(8, 4))


@case("exploding", culprits=tuple(map(str, range(41))), says=("linear operations",))
def twenty_rectified_layers_of_four_times_he(mended):
    return Built(he(chain(20, nn.ReLU), 1.0 if mended else 2.5), (torch.randn(16, 32),), xent(16, 3))
