"""What comes back to a value in parts adds up to rounding: it is divided by itself."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.faults.nets import Net, mlp, mse, xent
from tests.faults.program import Built, Register

CANCELLED = Register("cancelled")
MEANING = ("cancelled", "zero")  # where rounding leaves exact zeros


class TopOne(nn.Module):
    """Sends each sample to its best expert, by a weight that is normalised over the chosen one alone."""

    def __init__(self, width: int, experts: int = 4, eps: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.eps = eps

    def forward(self, x):
        top, index = self.gate(x).softmax(-1).topk(1, dim=-1)
        weight = top / (top.sum(-1, keepdim=True) + self.eps)
        outs = torch.stack([expert(x) for expert in self.experts], 1)
        chosen = outs.gather(1, index.unsqueeze(-1).expand(-1, -1, outs.shape[-1])).squeeze(1)
        return weight * chosen


@CANCELLED(*MEANING, culprits=("div",), victims=("1.gate",))
def router_normalised_by_its_own_weight():
    net = nn.Sequential(nn.Linear(8, 16), TopOne(16), nn.ReLU(), nn.Linear(16, 4))
    return Built(net, (torch.randn(64, 8),), xent(64, 4))


@CANCELLED(*MEANING, culprits=("div",), victims=("1.gate",))
def router_with_an_eps():
    net = nn.Sequential(nn.Linear(8, 16), TopOne(16, eps=1e-9), nn.ReLU(), nn.Linear(16, 4))
    return Built(net, (torch.randn(64, 8),), xent(64, 4))


@CANCELLED(*MEANING, culprits=("div",), victims=("score",))
def attention_weights_over_a_single_key():
    def forward(self, x, memory):
        score = torch.exp(self.score(x).unsqueeze(1) * memory.mean(-1, keepdim=True))
        return self.head((score / score.sum(1, keepdim=True) * memory).sum(1) + x)

    net = Net(forward, score=nn.Linear(8, 1), head=nn.Linear(8, 3))
    return Built(net, (torch.randn(32, 8), torch.randn(32, 1, 8)), xent(32, 3))


@CANCELLED(*MEANING, culprits=("div",), victims=("conv",))
def map_of_one_channel_divided_by_its_channel_norm():
    def forward(self, x):
        mask = F.softplus(self.conv(x)) + 0.1
        mask = mask / mask.pow(2).sum(1, keepdim=True).sqrt()
        return self.head((mask * x).mean((2, 3)))

    net = Net(forward, conv=nn.Conv2d(3, 1, 3, padding=1), head=nn.Linear(3, 4))
    return Built(net, (torch.randn(16, 3, 8, 8),), xent(16, 4))


@CANCELLED(*MEANING, culprits=("div", "mul"), victims=("scale",))
def gate_times_its_own_inverse():
    def forward(self, x):
        gate = torch.sigmoid(self.scale(x)) + 0.5
        return self.head(torch.tanh(self.body(x)) * (gate * (1 / gate)))

    net = Net(forward, scale=nn.Linear(6, 12), body=nn.Linear(6, 12), head=nn.Linear(12, 2))
    return Built(net, (torch.randn(24, 6),), mse(24, 2))


@CANCELLED(*MEANING, culprits=("sub",), victims=("value",))
def advantage_of_a_value_over_itself():
    def forward(self, x):
        h = torch.tanh(self.body(x))
        value = self.value(h)
        return self.policy(h) + (value - value.mean(-1, keepdim=True))

    net = Net(forward, body=nn.Linear(6, 16), value=nn.Linear(16, 1), policy=nn.Linear(16, 3))
    return Built(net, (torch.randn(32, 6),), xent(32, 3))


@CANCELLED(*MEANING, culprits=("div",), victims=("length",))
def recurrent_state_rescaled_by_its_only_entry():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.length, self.head = nn.GRUCell(4, 8), nn.Linear(8, 1), nn.Linear(8, 3)

        def forward(self, x):
            h = torch.zeros(x.shape[0], 8)
            for t in range(4):
                h = self.cell(x[:, t], h)
                w = self.length(h).exp()
                h = h * (w / w.sum(-1, keepdim=True))
            return self.head(h)

    return Built(Counter(), (torch.randn(16, 4, 4),), xent(16, 3))


def healthy_cousins():
    """Values that are normalised by themselves and still depend on themselves."""

    def router(self, x):
        top, index = self.gate(x).softmax(-1).topk(2, dim=-1)
        weight = top / top.sum(-1, keepdim=True)
        outs = torch.stack([expert(x) for expert in self.experts], 1)
        chosen = outs.gather(1, index.unsqueeze(-1).expand(-1, -1, outs.shape[-1]))
        return self.head((weight.unsqueeze(-1) * chosen).sum(1))

    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    yield "router_of_two", Net(router, gate=nn.Linear(8, 4), experts=experts, head=nn.Linear(8, 3)), 64

    def vector(self, x):
        h = self.body(x)
        return self.head(h / h.norm(dim=-1, keepdim=True))

    yield "divided_by_its_norm", Net(vector, body=nn.Linear(8, 16), head=nn.Linear(16, 3)), 32

    def centred(self, x):
        h = self.body(x)
        h = h - h.mean(-1, keepdim=True)
        return self.head(h / (h.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt())

    yield "norm_by_hand", Net(centred, body=nn.Linear(8, 16), head=nn.Linear(16, 3)), 32

    def by_hand(self, x):
        logits = self.net(x)
        return logits - torch.logsumexp(logits, -1, keepdim=True)

    yield "log_softmax_by_hand", Net(by_hand, net=mlp(1, nn.ReLU, into=8, out=3)), 32

    def dueling(self, x):
        h = torch.relu(self.body(x))
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(-1, keepdim=True)

    yield "dueling", Net(dueling, body=nn.Linear(8, 16), advantage=nn.Linear(16, 3), value=nn.Linear(16, 1)), 32

    def shifted(self, x):
        scores = self.net(x)
        scores = torch.exp(scores - scores.max(-1, keepdim=True).values)
        return torch.log(scores / scores.sum(-1, keepdim=True))

    yield "softmax_written_out", Net(shifted, net=mlp(1, nn.ReLU, into=8, out=3)), 32
