"""Parameters that get exact zeros in every step, and what merely begins so."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Block, Graph, Net, mse, xent
from tests.faults.program import HISTORY, Built, Register

#: Begun at zero before a ReLU; fed with zeros; on a way that is cut; behind a softmax over one entry; never routed to.
STUCK, UNFED, CUT = Register("stuck"), Register("unfed"), Register("cut")
SINGLE, UNROUTED = Register("single"), Register("unrouted")


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)


def zeroed(*modules):
    for module in modules:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)


def batches(shape, loss):
    """Fresh inputs in each step, the same targets."""
    return lambda step: ((torch.randn(*shape, generator=torch.Generator().manual_seed(step)),), loss)


def run(net, shape, loss, steps=20, optimizer=sgd):
    return Built(net, (torch.randn(*shape),), loss, optimizer, steps, batches(shape, loss))


# ---- begun at zero before a ReLU -----------------------------------------------------------------------------------


@STUCK("zero", culprits=("0", "2"), victims=("0.", "2.", "4.weight"))
def hidden_layers_at_zero():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    zeroed(net[0], net[2])
    return run(net, (32, 8), xent(32, 3))


@STUCK("zero", culprits=("conv2",), victims=("conv1", "conv2", "head.weight"))
def second_convolution_at_zero():
    net = Net(
        lambda self, x: self.head(F.relu(self.conv2(F.relu(self.conv1(x)))).mean((2, 3))),
        conv1=nn.Conv2d(3, 8, 3), conv2=nn.Conv2d(8, 8, 3), head=nn.Linear(8, 4),
    )  # fmt: skip
    zeroed(net.conv2)
    return run(net, (16, 3, 8, 8), xent(16, 4))


@STUCK("zero", culprits=("gate",), victims=("gate", "branch"))
def gate_whose_last_linear_begins_at_zero():
    """relu(0) lets nothing through, either way: the branch is shut for ever."""
    net = Net(
        lambda self, x: self.head(torch.tanh(self.stem(x)) + F.relu(self.gate(x)) * torch.tanh(self.branch(x))),
        stem=nn.Linear(8, 16), gate=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 16)),
        branch=nn.Linear(8, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    zeroed(net.gate[2])
    return run(net, (32, 8), xent(32, 3))


@STUCK("zero", culprits=("excite",), victims=("excite", "squeeze"))
def channel_attention_with_a_relu():
    """Squeeze and excitation whose last activation is a ReLU, begun at zero, beside a skip."""
    net = Net(
        lambda self, x: _excited(self, F.silu(self.conv(x))),
        conv=nn.Conv1d(4, 8, 3), squeeze=nn.Linear(8, 4), excite=nn.Linear(4, 8), head=nn.Linear(8, 3),
    )  # fmt: skip
    zeroed(net.excite)
    return run(net, (16, 4, 12), xent(16, 3))


def _excited(self, h):
    scale = torch.relu(self.excite(torch.tanh(self.squeeze(h.mean(-1)))))
    return self.head((h + h * scale[:, :, None]).mean(-1))


@STUCK("zero", culprits=("mlp.0", "blocks.1"), victims=("blocks.1.mlp.0", "blocks.1.mlp.2.weight"))
def feed_forward_of_a_block_at_zero():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
            self.blocks = nn.ModuleList(Block(16) for _ in range(2))
            for block in self.blocks:
                block.mlp[1] = nn.ReLU()
            zeroed(self.blocks[1].mlp[0])

        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(1))

    return run(Encoder(), (16, 5, 6), xent(16, 3))


@STUCK("zero", culprits=("message", "own"), victims=("own.0", "message.0", "own.1.weight", "message.1.weight"))
def graph_convolution_at_zero():
    net = Graph(2)
    zeroed(net.own[0], net.message[0])
    return run(net, (8, 12, 16), mse(8, 12, 4))


@STUCK("zero", culprits=("inner",), victims=("inner", "outer.weight"))
def recurrent_cell_at_zero():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer, self.skip, self.head = (nn.Linear(8, 8) for _ in range(4))
            zeroed(self.inner)
            nn.init.zeros_(self.outer.bias)
            self.outer.bias.requires_grad_(False)

        def forward(self, x):
            h = torch.zeros(x.shape[0], 8)
            for t in range(x.shape[1]):
                h = torch.tanh(self.skip(x[:, t]) + h) + self.outer(F.relu(self.inner(x[:, t])))
            return self.head(h)

    return run(Cell(), (16, 4, 8), mse(16, 8))


# ---- fed with zeros ------------------------------------------------------------------------------------------------


@UNFED("zero", culprits=("mul",), victims=("aux.weight",))
def auxiliary_head_fed_zeros():
    net = Net(
        lambda self, x: _with_aux(self, torch.relu(self.body(x))),
        body=nn.Linear(8, 16), head=nn.Linear(16, 3), aux=nn.Linear(16, 3),
    )  # fmt: skip
    return run(net, (32, 8), xent(32, 3))


def _with_aux(self, h):
    return self.head(h) + self.aux(h.detach() * 0)


@UNFED("zero", "loss_seed", culprits=("input", "x"), victims=("0.weight",))
def all_inputs_are_zero():
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    loss, x = xent(16, 3), torch.zeros(16, 8)
    return Built(net, (x,), loss, sgd, 20)


@UNFED("zero", culprits=("input", "images"), victims=("conv.weight",))
def images_cast_to_integers():
    """Values between 0 and 1 that became whole numbers on their way."""
    net = Net(
        lambda self, x: self.head(F.gelu(self.conv(x)).mean((2, 3))), conv=nn.Conv2d(3, 8, 3), head=nn.Linear(8, 4)
    )
    images = torch.rand(8, 3, 8, 8).int().float()
    return Built(net, (images,), xent(8, 4), sgd, 20)


@UNFED("zero", culprits=("mul", "context"), victims=("context",), forms=HISTORY)
def features_under_a_mask_of_zeros():
    net = Net(
        lambda self, x: self.head(torch.tanh(self.body(x)) + self.context(x * self.mask)),
        body=nn.Linear(8, 16), context=nn.Linear(8, 16, bias=False), head=nn.Linear(16, 3), mask=torch.zeros(8),
    )  # fmt: skip
    return run(net, (32, 8), xent(32, 3))


@UNFED("zero", culprits=("zeros", "memory", "keys", "sub"), victims=("keys.weight",), forms=HISTORY)
def memory_that_is_never_written():
    net = Net(
        lambda self, x: self.head(torch.tanh(self.body(x)) + self.keys(torch.zeros(x.shape[0], 16))),
        body=nn.Linear(8, 16), keys=nn.Linear(16, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    return run(net, (32, 8), xent(32, 3))


@UNFED("zero", culprits=("sub", "diff"), victims=("motion.weight",), forms=HISTORY)
def difference_of_a_frame_with_itself():
    net = Net(
        lambda self, x: self.head(torch.tanh(self.frame(x[:, 0])) + self.motion(x[:, 0] - x[:, 0])),
        frame=nn.Linear(8, 16), motion=nn.Linear(8, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    return run(net, (16, 4, 8), xent(16, 3))


@UNFED("zero", "dead", culprits=("relu",), victims=("late.weight",), forms=HISTORY)
def features_of_a_frozen_part_that_never_fire():
    net = Net(
        lambda self, x: self.head(torch.tanh(self.own(x)) + self.late(F.relu(self.frozen(x)))),
        own=nn.Linear(8, 16), frozen=nn.Linear(8, 12), late=nn.Linear(12, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    for parameter in net.frozen.parameters():
        parameter.requires_grad_(False)
    nn.init.constant_(net.frozen.bias, -30.0)
    return run(net, (32, 8), xent(32, 3))


# ---- the way is cut, a term of weight 0 reaches it -----------------------------------------------------------------


def with_term_of_zero(loss):
    """The loss of the first output; the others come with weight 0."""
    return lambda out: loss(out[0]) + 0.0 * sum(one.square().mean() for one in out[1:])


def cut(name, sample, **answer):
    """A variational encoder whose sample leaves the graph."""

    def make():
        net = Net(
            lambda self, x: _coded(self, sample, x),
            enc=nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)), dec=nn.Linear(4, 8),
        )  # fmt: skip
        return run(net, (16, 8), with_term_of_zero(mse(16, 8)))

    CUT.add(name, make, ("detached",), victims=("enc",), **answer)


def _coded(self, sample, x):
    mean, log = self.enc(x).chunk(2, -1)
    return self.dec(sample(mean, log)), mean, log


def _no_grad(mean, log):
    with torch.no_grad():
        return mean + torch.randn_like(mean) * log.exp()


cut("sample_made_anew_from_an_array", lambda m, s: torch.tensor((m + s.exp()).detach().numpy()),
    culprits=("tensor", "detach"))  # fmt: skip
cut("sample_without_gradients", _no_grad, culprits=("add", "mul", "exp", "randn_like"))
cut("sample_from_data", lambda m, s: m.data + s.data.exp(), culprits=("data",))
cut("sample_detached", lambda m, s: (m + s.exp()).detach(), culprits=("detach",))
cut("sample_through_a_list", lambda m, s: torch.tensor((m + s.exp()).tolist()), culprits=("tensor", "add"))
cut("sample_of_classes", lambda m, s: F.one_hot((m + s).argmax(-1), 4).float(), culprits=("argmax", "one_hot"))


@CUT("detached", culprits=("mean", "item", "mul"), victims=("scale",))
def learnt_scale_read_as_a_number():
    def forward(self, x):
        scale = self.scale(x.mean(0))
        return self.head(torch.tanh(self.body(x)) * scale.mean().item()), scale

    net = Net(forward, scale=nn.Linear(8, 4), body=nn.Linear(8, 16), head=nn.Linear(16, 3))
    return run(net, (32, 8), with_term_of_zero(xent(32, 3)))


@CUT("detached", culprits=("argmin",), victims=("enc",))
def codes_looked_up_without_an_estimator():
    def forward(self, x):
        z = self.enc(x).transpose(1, 2)
        index = torch.cdist(z, self.codes.weight.detach()).argmin(-1)
        return self.dec(self.codes(index)), z

    net = Net(forward, enc=nn.Conv1d(4, 6, 1), codes=nn.Embedding(10, 6), dec=nn.Linear(6, 4))
    return run(net, (8, 4, 5), with_term_of_zero(mse(8, 5, 4)))


# ---- a softmax over one entry --------------------------------------------------------------------------------------


def pooled(self, scores, values):
    """The values weighted by a softmax of the scores along dimension 1."""
    return self.head((torch.softmax(scores, 1) * values).sum(1))


@SINGLE("zero", culprits=("softmax",), victims=("score",), forms=HISTORY)
def attention_pooling_over_one_frame():
    net = Net(
        lambda self, x: pooled(self, self.score(x), torch.tanh(self.value(x))),
        score=nn.Linear(8, 1), value=nn.Linear(8, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    return run(net, (32, 1, 8), xent(32, 3))


@SINGLE("zero", culprits=("softmax",), victims=("gate",))
def gate_with_a_softmax():
    net = Net(
        lambda self, x: self.head(torch.tanh(self.body(x)) * F.softmax(self.gate(x), -1)),
        body=nn.Linear(8, 16), gate=nn.Linear(8, 1), head=nn.Linear(16, 3),
    )  # fmt: skip
    return run(net, (32, 8), xent(32, 3))


@SINGLE("zero", culprits=("softmax",), victims=("attn.q", "attn.k"), forms=HISTORY)
def self_attention_over_one_token():
    net = Net(lambda self, x: self.head(self.attn(self.embed(x)).mean(1)), embed=nn.Linear(8, 16),
              attn=Block(16).attn, head=nn.Linear(16, 3))  # fmt: skip
    return run(net, (16, 1, 8), xent(16, 3))


@SINGLE("zero", culprits=("softmax",), victims=("mix",), forms=HISTORY)
def mixture_of_one_component():
    net = Net(
        lambda self, x: self.head((F.softmax(self.mix(x), -1)[..., None] * self.part(x)[:, None]).sum(1)),
        mix=nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), part=nn.Linear(8, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    return run(net, (32, 8), xent(32, 3))


@SINGLE("zero", culprits=("softmax",), victims=("spatial",), forms=HISTORY)
def spatial_attention_over_one_channel():
    """The softmax runs over the channel of a one-channel map, in place of its pixels."""
    net = Net(
        lambda self, x: self.head((F.relu(self.conv(x)) * F.softmax(self.spatial(x), 1)).mean((2, 3))),
        conv=nn.Conv2d(3, 8, 3, padding=1), spatial=nn.Conv2d(3, 1, 1), head=nn.Linear(8, 4),
    )  # fmt: skip
    return run(net, (8, 3, 6, 6), xent(8, 4))


@SINGLE("zero", culprits=("softmax",), victims=("query",), forms=HISTORY)
def memory_of_one_slot():
    def forward(self, x):
        weights = F.softmax(self.query(x) @ self.slots.T, -1)
        return self.head(torch.tanh(self.body(x)) + weights @ self.slots)

    net = Net(forward, query=nn.Linear(8, 16), body=nn.Linear(8, 16), slots=nn.Parameter(torch.randn(1, 16)),
              head=nn.Linear(16, 3))  # fmt: skip
    return run(net, (32, 8), xent(32, 3))


# ---- experts that nothing is routed to -----------------------------------------------------------------------------


class Experts(nn.Module):
    """Top-1 routing of tokens to experts, beside a skip; ``skips`` those that get none."""

    def __init__(self, expert, width, count=4, bias=0.0, skips=False):
        super().__init__()
        self.skips = skips
        self.router, self.out = nn.Linear(width, count), nn.Linear(width, 4)
        self.experts = nn.ModuleList(expert() for _ in range(count))
        with torch.no_grad():
            self.router.bias[0] += bias

    def forward(self, x):
        tokens = x.flatten(0, -2)
        gates, chosen = torch.sigmoid(self.router(tokens)).max(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if self.skips and not len(rows):
                continue
            mixed = mixed.index_add(0, rows, expert(tokens[rows]) * gates[rows, None])
        return self.out((tokens + mixed).view(x.shape).flatten(1, -2).mean(1) if x.ndim > 2 else tokens + mixed)


def unrouted(name, expert, width, shape, samples):
    for skips in (False, True):
        UNROUTED.add(
            name + "_left_out" * skips,
            lambda skips=skips: run(Experts(expert, width, bias=4.0, skips=skips), shape, xent(samples, 4), 14),
            ("zero", "unused", "saturated"), culprits=("experts", "sigmoid", "router"),
            victims=("experts.1", "experts.2", "experts.3"), forms=HISTORY,
        )  # fmt: skip


class Dense(nn.Module):
    """Every expert works on every token, and a mask of the chosen one is multiplied in."""

    def __init__(self, expert, count=4):
        super().__init__()
        self.router, self.out = nn.Linear(8, count), nn.Linear(8, 4)
        self.experts = nn.ModuleList(expert() for _ in range(count))
        with torch.no_grad():
            self.router.bias[0] += 4

    def forward(self, x):
        gates = torch.sigmoid(self.router(x))
        mask = F.one_hot(gates.argmax(-1), len(self.experts)) * gates
        return self.out(x + sum(mask[..., k : k + 1] * expert(x) for k, expert in enumerate(self.experts)))


for _name, _expert in (
    ("linear", lambda: nn.Linear(8, 8)),
    ("two_layer", lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))),
):
    UNROUTED.add(
        f"masked_{_name}_experts", lambda expert=_expert: run(Dense(expert), (32, 8), xent(32, 4), 14),
        ("zero", "unused"), culprits=("experts", "mul", "router"),
        victims=("experts.1", "experts.2", "experts.3"), forms=HISTORY,
    )  # fmt: skip


unrouted("linear_experts", lambda: nn.Linear(8, 8), 8, (32, 8), 32)
unrouted("two_layer_experts", lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), 8, (32, 8), 32)
unrouted(
    "gelu_experts_on_tokens", lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), 8, (8, 6, 8), 8
)
unrouted("normed_experts", lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), 8, (8, 6, 8), 8)
unrouted("tanh_experts", lambda: nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 12)), 12, (24, 12), 24)
unrouted("experts_without_bias", lambda: nn.Linear(16, 16, bias=False), 16, (6, 4, 3, 16), 6)
