"""Parameters that no registered module has: their names, and what an optimizer that knows of them changes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import fxgrad


class Hidden(nn.Module):
    """Layers where the model does not see them, at the place of the caller's choice."""

    def __init__(self, **attributes) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)
        vars(self).update(attributes)  # past nn.Module, which would register modules

    def forward(self, x):
        for layer in self.layers():
            x = torch.relu(layer(x))
        return self.head(x)


def found(flow):
    return [one for one in flow.findings if one.rule == "unregistered"]


def one_of(model):
    torch.manual_seed(0)
    return found(fxgrad.gradient_flow(model, torch.randn(8, 8)))


def layer():
    return nn.Linear(8, 8, bias=False)


def places():
    yield "kept[1].weight", {"kept": ("no layer", layer())}, lambda m: [m.kept[1]]
    yield "kept['a'][0].weight", {"kept": {"a": [layer()]}}, lambda m: m.kept["a"]
    yield "kept.weight", {"kept": layer()}, lambda m: [m.kept]
    yield "kept.0.weight", {"kept": nn.Sequential(layer())}, lambda m: [m.kept]
    outside = layer()
    yield "a parameter of shape (8, 8)", {}, lambda _: [outside]


@pytest.mark.parametrize(("name", "attributes", "take"), list(places()))
def test_the_name_is_where_a_module_holds_it(name, attributes, take) -> None:
    model = Hidden(**attributes)
    model.layers = lambda: take(model)
    (finding,) = one_of(model)
    assert finding.affected == (name,)
    assert finding.severity == "warning" and finding.confidence == "exact"
    assert finding.source is not None and "test_unregistered.py" in finding.source


def test_several_are_one_finding_at_the_first() -> None:
    kept = [layer() for _ in range(3)]
    (finding,) = one_of(Hidden(kept=kept, layers=lambda: kept))
    assert finding.affected == tuple(f"kept[{n}].weight" for n in range(3))
    assert finding.node is not None and finding.node.key == "kept[0]"
    assert "nn.ModuleList" in finding.suggestion


def test_one_made_in_forward_is_told_apart() -> None:
    (finding,) = one_of(Hidden(layers=lambda: [layer()]))
    assert "__init__" in finding.suggestion and "ModuleList" not in finding.suggestion
    assert finding.node is not None and finding.node.key == "/linear"


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_an_optimizer_that_has_them_makes_it_information(known, native) -> None:
    kept = [layer()]
    model = Hidden(kept=kept, layers=lambda: kept)
    mine = itertools.chain(model.parameters(), kept[0].parameters() if known else ())
    optimizer = torch.optim.SGD(mine, lr=0.1)
    before = kept[0].weight.detach().clone()
    with fxgrad.watch(model, optimizer=optimizer, native=native) as watch:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
    assert torch.equal(before, kept[0].weight) is not known
    assert [one.severity for flow in watch.history for one in found(flow)] == ["info" if known else "warning"] * 4


def test_a_module_that_comes_in_the_first_forward_is_registered() -> None:
    class Late(nn.Module):
        def forward(self, x):
            if not hasattr(self, "made"):
                self.made = nn.Linear(x.shape[1], 4)
            return self.made(x)

    assert not one_of(Late())


def test_parameters_of_the_model_around_a_watched_part_are_not_its_own_affair() -> None:
    class Decoder(nn.Module):
        def __init__(self, whole) -> None:
            super().__init__()
            self.whole = [whole]
            self.norm = nn.LayerNorm(8)

        def forward(self, h):
            return nn.functional.linear(self.norm(h), self.whole[0].encoder.weight.T)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(4, 8)
            self.decoder = Decoder(self)

        def forward(self, x):
            return self.decoder(self.encoder(x))

    torch.manual_seed(0)
    model = Whole()
    with fxgrad.watch(model.decoder) as watch:
        model(torch.randn(8, 4)).square().mean().backward()
    assert not found(watch.history[-1])


def test_a_swapped_functional_call_is_no_alarm() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    given = {name: nn.Parameter(p.detach() * 0.5) for name, p in model.named_parameters()}
    with fxgrad.watch(model) as watch:
        torch.func.functional_call(model, given, (torch.randn(8, 8),)).square().mean().backward()
    assert all(not found(flow) for flow in watch.history)
