"""Forward statistics: what values are said to have been is what they were, and measuring them changes nothing."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import fxgrad
from fxgrad.errors import CaptureError, ModelError, OptionError
from fxgrad.record import values as values_module
from fxgrad.schema import Statistics
from tests import models
from tests.oracle import At, run_twin
from tests.runs import plain_run

# ---- the numbers -------------------------------------------------------------------------------------------------


def by_hand(tensor: Tensor) -> dict[str, float]:
    """The scalars of one tensor in plain torch, one by one, in float64."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    modulus = flat.abs().double()
    finite = modulus[modulus.isfinite()]
    scale = max(finite.max().item(), 1e-300) if finite.numel() else 1.0  # the square of 1e200 is no float64
    real = flat.real if flat.is_complex() else flat
    tiny = torch.finfo(tensor.dtype).tiny
    return {
        "numel": flat.numel(),
        "l2_norm": (finite / scale).square().sum().sqrt().item() * scale,
        "max_abs": finite.max().item() if finite.numel() else 0.0,
        "sum": real.double()[modulus.isfinite()].sum().item(),
        "abs_sum": finite.sum().item(),
        "nan_count": int(flat.isnan().sum()),
        "inf_count": int(modulus.isinf().sum()),
        "zero_count": int((flat == 0).sum()),
        "subnormal_count": int(((finite < tiny) & (finite > 0)).sum()),
    }


def assert_value(found: Statistics | None, tensor: Tensor, where: str) -> None:
    assert found is not None, where
    for name, want in by_hand(tensor).items():
        assert getattr(found, name) == pytest.approx(want, rel=1e-5, abs=1e-6), (where, name)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("capture", ["auto", "eager"])
@pytest.mark.parametrize("case", models.cases(models.TWINS))
def test_values_equal_those_of_the_twin(
    case: models.Case, capture: Any, repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if repeats:  # look for rearrangements of earlier values among small ones too
        monkeypatch.setattr("fxgrad.record.values.LARGEST", 0)
    model, args, kwargs = case.build()
    assert case.twin is not None
    with fxgrad.watch(model, capture=capture, forward=True, native=False) as watch:
        for step in range(3):
            expected = At()
            run_twin(case.twin, model, expected, args, kwargs, seed=step)
            assert plain_run(model, args, kwargs, case.loss, seed=step).error is None
            flow = watch.flow()
            assert flow.event.values
            found = {site.id: site.value for site in flow.sites}
            for site, value in expected.values.items():
                if value.is_floating_point() or value.is_complex():
                    assert_value(found[site], value, f"{site} in step {step}")


@pytest.mark.parametrize("case", models.cases(models.SYMBOLIC))
def test_values_do_not_depend_on_the_front_end(case: models.Case) -> None:
    flows = []
    for traced in (False, True):
        model, args, kwargs = case.build()
        try:
            call: Any = fxgrad.instrument(model, forward=True) if traced else model
        except CaptureError as error:
            pytest.skip(str(error))  # needs real arguments
        watch: Any = call if traced else fxgrad.watch(model, forward=True)
        for step in range(2):
            assert plain_run(model, args, kwargs, case.loss, seed=step, call=call).error is None
        flows.append(watch.flow())
    eager, symbolic = flows
    assert [s.id for s in eager] == [s.id for s in symbolic]
    for one, two in zip(eager, symbolic, strict=True):
        norm = pytest.approx(two.value.l2_norm, rel=1e-9, nan_ok=True)  # the last bit depends on where memory lies
        assert one.value.l2_norm == norm, one.id
        assert dataclasses.replace(one.value, l2_norm=0.0) == dataclasses.replace(two.value, l2_norm=0.0), one.id
    assert {s.id: s.activity for s in eager} == {s.id: s.activity for s in symbolic}
    assert eager.parameters == symbolic.parameters
    assert eager.buffers == symbolic.buffers
    assert all(site.value is not None for site in eager)


class Rearranges(nn.Module):
    """Large values: some are others in another order or place, some only look like that."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = x * 2
        turned = h.view(4, -1).t()
        same = F.dropout(turned, training=False).contiguous()
        half = h.view(-1)[: h.numel() // 2]
        h.mul_(3.0)
        again = h.view(4, -1)
        h.data.mul_(2.0)  # counted by no version
        later = h.view(-1, 4)
        return same, half.expand(2, -1), again, later, -h


@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_values_in_the_memory_of_another_value(capture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[int] = []
    original = values_module.write_full

    def counting(tensor: Tensor, slots: Any, place: Any, library: Any, *, bins: bool) -> Any:
        reduced.append(place[0])
        return original(tensor, slots, place, library, bins=bins)

    monkeypatch.setattr(values_module, "write_full", counting)
    x = torch.randn(200, 200, requires_grad=True)
    model = Rearranges()
    with fxgrad.watch(model, capture=capture, forward=True, native=False) as watch:
        for _ in range(3):
            reduced.clear()
            model(x)[-1].sum().backward()
            flow = watch.flow()
            sums = {site.id: site.value.sum for site in flow if site.value is not None}
            twice, half = 2 * x.double(), 2 * x.double().view(-1)[:20000]
            want = {"/mul": twice, "/view": twice, "/t": twice, "/view#1": twice, "/view#2": twice * 3}
            want |= {
                "/getitem": half,
                "/expand": half * 12,
                "/mul_": twice * 3,
                "/view#3": twice * 6,
                "/neg": -twice * 6,
            }
            for name, value in want.items():
                assert sums[name] == pytest.approx(value.sum().item(), rel=1e-4, abs=1e-2), name
    ids = [site.id for site in flow]
    assert not {"/view", "/t", "/view#2"} & {ids[index] for index in reduced}
    assert {"/mul", "/getitem", "/expand", "/mul_", "/view#3", "/neg"} <= {ids[index] for index in reduced}


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x * 1
        v = h.view(-1)
        h.mul_(3.0)
        v[0] = 7.0
        with torch.no_grad():
            mask = (h > 3).float()
        return (h + mask).sum()


@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_a_value_is_what_it_was_before_it_was_changed(capture: Any) -> None:
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    with fxgrad.watch(InPlace(), capture=capture, forward=True) as watch:
        for _ in range(3):
            watch._model(x).backward()
            flow = watch.flow()
            sums = {site.id: site.value.sum for site in flow if site.value is not None}
            assert sums == {
                "input:x": 3.0, "/mul": 3.0, "/view": 3.0, "/mul_": 9.0, "/setitem": 7.0 + 6.0, "/float": 2.0,
                "/add": 15.0, "/sum": 15.0,
            }  # fmt: skip
            assert not flow.site("/float").measured


def test_values_of_unusual_kinds() -> None:
    class Kinds(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            turned = torch.complex(x, 2 * x).conj().imag  # negated by a bit, not in memory
            sparse = torch.eye(3).to_sparse()
            nested = torch.nested.nested_tensor([x[0], x[0, :2]], layout=torch.jagged)
            wide = x.expand(20000, 2, 3)
            return turned, sparse, nested, x.double() * 1e200, x[:0], wide, x.bfloat16(), x.to("meta")

    x = torch.arange(6.0).view(2, 3)
    model = nn.Sequential(Kinds())
    x.requires_grad_()
    flow = fxgrad.gradient_flow(model, x, loss=lambda out: out[0].sum())
    values = {site.id: site.value for site in flow}
    assert_value(values["0/imag"], -2 * x, "imag")
    sparse = values["0/to_sparse"]
    assert sparse is not None
    assert (sparse.numel, sparse.zero_count, sparse.sum) == (9, 6, 3.0)
    assert_value(values["0/mul#1"], x.double() * 1e200, "double")
    made = [value for name, value in values.items() if "nested" in name]
    assert made
    assert all(value is not None and (value.numel, value.sum) == (5, 4.0) for value in made)
    assert any(value is not None and value.numel == 0 for value in values.values())
    wide = values["0/expand"]
    assert wide is not None
    assert (wide.numel, wide.sum) == (120000, 15.0 * 20000)
    assert_value(values["0/bfloat16"], x.bfloat16(), "bfloat16")
    assert values["0/to#1"] is None


class Padded(nn.Module):
    """Takes a nested tensor of layout strided: torch gives neither its shape nor the place of a leaf in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x * 2) + x).relu().to_padded_tensor(0.0).sum()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_a_nested_leaf_of_layout_strided(capture: Any) -> None:
    torch.manual_seed(0)
    model = Padded()
    parts = [torch.randn(3, 4), torch.randn(5, 4)]

    def step() -> list[Tensor | None]:
        model.zero_grad()
        x = torch.nested.nested_tensor(parts, requires_grad=True)
        model(x).backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = step()
    with fxgrad.watch(model, capture=capture, sites="edge", statistics="full", forward=True) as watch:
        for _ in range(3):
            for want, got in zip(plain, step(), strict=True):
                assert want is not None
                assert got is not None
                assert torch.equal(want, got)
        flow = watch.flow()
    assert_value(flow.site("/mul").value, torch.cat(parts) * 2, "mul")
    assert {spot.key for spot in flow.blind_spots if spot.reason == "statistic_failed"} >= {"input:x", "/mul", "fc"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_call_that_fails_on_a_nested_tensor_is_told_of() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)])
    with pytest.raises(ModelError, match=r"Linear raised .*\(args\[0\]: nested\)"):
        fxgrad.gradient_flow(nn.Linear(5, 2), nested)


def test_parameters_and_buffers_are_those_of_the_beginning() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxgrad.watch(model, forward=True, statistics="full") as watch:
        for _ in range(3):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            buffers = {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
            flow = watch.flow()
            assert [record.name for record in flow.parameters] == list(before)
            for record in flow.parameters:
                assert_value(record.value, before[record.name], record.name)
            assert [record.name for record in flow.buffers] == ["1.running_mean", "1.running_var"]
            for buffer in flow.buffers:
                assert_value(buffer.value, buffers[buffer.name], buffer.name)
                assert (buffer.shape, buffer.dtype, buffer.device) == ((4,), "float32", "cpu")


def test_accumulating() -> None:
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    with fxgrad.watch(model) as watch:
        for clear in (True, False, True):
            if clear:
                model.zero_grad()
            model(x).sum().backward()
        assert [flow.event.accumulating for flow in watch.history] == [False, True, False]
        assert not any(flow.event.values for flow in watch.history)
    assert fxgrad.gradient_flow(model, x).event.accumulating is False


def test_every_backward_of_a_call_has_its_values() -> None:
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    with fxgrad.watch(model, forward=True) as watch:
        out = model(x).sum()
        out.backward(retain_graph=True)
        out.backward()
        first, second = watch.history
    assert first.sites == second.sites
    assert first.site("input:input").value is not None


def test_the_histogram_of_values_comes_with_that_of_gradients() -> None:
    flow = fxgrad.gradient_flow(nn.Linear(2, 2), torch.tensor([[1.0, 1e-9]]), statistics="histogram")
    value = flow.site("input:input").value
    assert value is not None
    assert value.level == "histogram"
    assert value.underflow_share("float16", 1.0) == (0.5, 0.5)


# ---- channels ----------------------------------------------------------------------------------------------------


class Units(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3)
        self.fc = nn.Linear(5, 3)
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).relu_().mean((2, 3))
        return (self.fc(h) @ self.weight).square().sum()

    def by_hand(self, x: Tensor) -> dict[str, list[float]]:
        """Squares of the gradient of each unit, by autograd and plain sums."""
        conv = self.conv(x)
        fc = self.fc(conv.relu().mean((2, 3)))
        last = fc @ self.weight
        found = torch.autograd.grad(last.square().sum(), [conv, fc, last])
        return {
            "conv": found[0].double().square().sum((0, 2, 3)).tolist(),
            "fc": found[1].double().square().sum(0).tolist(),
            "/matmul": found[2].double().square().sum(0).tolist(),
        }


@pytest.mark.parametrize("sites", ["node", "edge"])
@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_gradients_of_channels(capture: Any, sites: Any) -> None:
    torch.manual_seed(0)
    model = Units()
    with fxgrad.watch(model, capture=capture, sites=sites, forward=True, channels=True) as watch:
        for _ in range(4):
            x = torch.randn(3, 2, 6, 6)
            want = model.by_hand(x)
            out = model(x)
            out.backward(retain_graph=True)
            out.backward()
            first, second = watch.history[-2:]
            assert first.sites == second.sites
            found = {site.id: site.channels for site in second if site.channels is not None}
            assert found.keys() == want.keys()
            for name, channels in found.items():
                assert channels.square_sums == pytest.approx(want[name], rel=1e-4)
                site = second.site(name)
                assert len(channels.square_sums) == site.shape[channels.axis]
                assert sum(channels.square_sums) == pytest.approx(site.l2_norm**2, rel=1e-4)
        assert len(watch.history) == 8


def test_channels_leave_out_what_is_not_finite(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    scale = torch.tensor([math.inf, 2.0])
    flow = fxgrad.gradient_flow(model, torch.ones(3, 2), loss=lambda out: (out * scale).sum(), channels=True)
    channels = flow.site("0").channels
    assert channels is not None
    assert (channels.axis, channels.square_sums) == (1, (0.0, pytest.approx(12.0)))
    flow.to_json(tmp_path / "flow.json")
    assert fxgrad.load(tmp_path / "flow.json") == flow


def test_without_asking_no_channel_is_measured() -> None:
    flow = fxgrad.gradient_flow(Units(), torch.randn(3, 2, 6, 6))
    assert all(site.channels is None for site in flow)
    with pytest.raises(OptionError, match="channels=True needs forward=True"):
        fxgrad.watch(nn.Linear(2, 2), channels=True)


class Wrapped(Tensor):
    """A tensor without memory of its own, as research code writes them."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:  # noqa: PYI034  # the type is this one
        made: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map(lambda one: one.inner if isinstance(one, Wrapped) else one, (args, kwargs or {}))
        return tree_map(lambda one: Wrapped(one) if isinstance(one, Tensor) else one, func(*given[0], **given[1]))


def test_values_that_are_wrapped_say_so_and_do_not_stop_the_reading() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with fxgrad.watch(model, forward=True) as watch:
        model(Wrapped(torch.randn(2, 4))).sum().backward()
        flow = watch.flow()
    assert flow.site("1").l2_norm is not None or flow.site("1").reason is not None
    assert flow.site("1").activity is None
