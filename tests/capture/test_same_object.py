"""A node that returns the very tensor that it took: one hook serves both sites."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxgrad


class Same(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.keep = nn.Linear(4, 4), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.keep(self.fc(x))
        h = F.dropout(h, 0.5, training=False).to(torch.float32).contiguous()
        return torch.relu_(h).view(-1)


def test_they_name_the_site_that_has_the_hook() -> None:
    model, x = Same(), torch.randn(3, 4)
    with fxgrad.watch(model, statistics="full") as watch:
        for _ in range(3):
            model(x).sum().backward()
            flow = watch.flow()
            origin = {site.id: site.derived_from for site in flow.sites}
            same = ["keep", "/dropout", "/to", "/contiguous"]
            assert {key for key, source in origin.items() if source} == set(same)
            assert {origin[key] for key in same} == {"fc"}
            for key in same:
                assert flow.site(key).statistics == flow.site("fc").statistics
            assert flow.site("/relu_").l2_norm is not None  # changed in place: another value
            assert flow.site("/relu_").l2_norm >= flow.site("fc").l2_norm


def test_with_rules_every_site_has_its_own_hook() -> None:
    model, x = Same(), torch.randn(3, 4)
    seen: list[Tensor] = []
    rule = fxgrad.rules.custom(seen.append, fxgrad.rules.nodes())
    with fxgrad.rewrite(model, rule), fxgrad.watch(model) as watch:
        model(x).sum().backward()
    assert not any(site.derived_from for site in watch.flow().sites)
    assert len(seen) == len(watch.flow().sites) - 1  # the input requires none


def test_a_view_that_is_changed_in_place_is_told_under_all_its_names() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            v = h.view(2, 2)
            w = F.dropout(v, 0.5, training=False)
            w.mul_(3)
            return h.sum()

    flow = fxgrad.gradient_flow(Views(), torch.ones(4, requires_grad=True))
    reasons = {spot.id: spot.reason for spot in flow.blind_spots}
    assert reasons["/view"] == reasons["/dropout"] == "changed_through_view"


class Region(nn.Module):
    """A view that is changed in place, in a part that may be run a second time."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.again = nn.Linear(4, 4), nn.Linear(4, 2), again

    def part(self, x: Tensor) -> Tensor:
        h = self.a(x) * 2
        h.view(-1).relu_()
        return h + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(self.part, x, use_reentrant=True) if self.again else self.part(x))


def test_a_view_that_is_changed_in_place_in_a_checkpoint_stops_no_backward_pass() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    once, again = (fxgrad.gradient_flow(Region(again=again), x) for again in (False, True))
    measured = {site.id: site.l2_norm for site in again.sites if site.measured}
    assert {"a", "/mul", "/add", "b"} <= measured.keys()
    assert measured == {site.id: site.l2_norm for site in once.sites if site.id in measured}
    assert {"/view", "/relu_"} <= {spot.id for spot in again.blind_spots}
