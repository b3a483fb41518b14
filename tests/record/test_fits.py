"""Which share of a gradient fits another dtype: against a count in plain torch, exact or bounded as it says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import OptionError
from fxgrad.schema import Fit, Precision
from fxgrad.schema.histogram import LARGEST, RANGES

DTYPES = {"float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
LEVELS = ("histogram", "full", "norm")


def spread(seed: int, low: int, high: int, size: int = 500) -> Tensor:
    """Random entries over the binades from ``2**low`` to ``2**high``, some of them zero."""
    g = torch.Generator().manual_seed(seed)
    exponents = torch.rand(size, generator=g) * (high - low) + low
    signs = torch.randint(0, 2, (size,), generator=g) * 2 - 1
    return signs * torch.exp2(exponents) * (torch.rand(size, generator=g) > 0.1)


def counted(entries: Tensor, dtype: torch.dtype, scale: float) -> tuple[float, float]:
    """Shares of the non-zero entries that torch itself rounds to zero, and out of the range."""
    kept = entries[entries != 0].double() * scale
    largest = torch.finfo(dtype).max
    narrow = kept.float().to(dtype).double()
    out = kept.abs() > largest  # torch saturates some dtypes, and gives NaN or Inf for others
    high = RANGES[str(dtype).removeprefix("torch.")][1]
    return float((narrow == 0).double().mean()), float((out & (kept.abs() >= high)).double().mean())


def fit_of(entries: Tensor, level: str, dtype: str, scale: Any = 1.0) -> Fit:
    """Through the recorder: the gradient of a value that is multiplied by ``entries``."""
    model = nn.Sequential(nn.ReLU())
    x = torch.ones(entries.shape, requires_grad=True)
    flow = fxgrad.gradient_flow(model, x, loss=lambda out: (out * entries).sum(), statistics=level)
    found = flow.site("0").fits(dtype, scale)
    assert found is not None
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("low", "high"), [(-30, 4), (-12, -6), (5, 9), (-50, -40), (8, 20), (-8, 5)])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**-6, 3.7])
def test_the_count_lies_within(level: str, dtype: str, low: int, high: int, scale: float) -> None:
    entries = spread(low * 31 + high, low, high)
    fit = fit_of(entries, level, dtype, scale)
    under, over = counted(entries, DTYPES[dtype], scale)
    slack = 1e-9
    assert fit.underflow[0] - slack <= under <= fit.underflow[1] + slack
    assert fit.overflow[0] - slack <= over <= fit.overflow[1] + slack
    assert fit.share[0] - slack <= 1 - under - over <= fit.share[1] + slack
    power = math.log2(scale).is_integer()
    limit = math.log2(RANGES[dtype][0] / scale)
    if level == "histogram" and power and -46 <= limit <= 16:
        assert fit.underflow[0] == fit.underflow[1]
    if (level, dtype, scale) == ("full", "float16", 1.0):
        assert fit.underflow[0] == fit.underflow[1]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("entries", [[0.0, 0.0], [1.0], [1e-30], [1e30], [math.nan, 1.0], [math.inf, 2.0], [0.5, 1e9]])
def test_edges(level: str, entries: list[float]) -> None:
    given = torch.tensor(entries)
    finite = given[given.isfinite()]
    fit = fit_of(given, level, "float16")
    under, over = counted(finite, torch.float16, 1.0) if (finite != 0).any() else (0.0, 0.0)
    assert fit.underflow[0] <= under <= fit.underflow[1]
    assert fit.overflow[0] <= over <= fit.overflow[1]
    if level != "norm":
        assert fit.exact


def test_the_norm_alone_may_tell() -> None:
    small, tiny = torch.full((10,), 1e-3), torch.full((10,), 1e-9)
    assert fit_of(small, "norm", "float16").overflow == (0.0, 0.0)
    assert fit_of(tiny, "norm", "float8_e5m2").underflow == (1.0, 1.0)
    assert not fit_of(small, "norm", "float16").exact


@pytest.mark.parametrize("level", ["histogram", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_to_the_largest_entry(level: str, dtype: str) -> None:
    entries = spread(5, -40, -20)
    fit = fit_of(entries, level, dtype, "tensor")
    scale = LARGEST[dtype] / float(entries.abs().max())
    assert fit.scale == pytest.approx(scale)
    under, _ = counted(entries, DTYPES[dtype], scale)
    assert fit.overflow == (0.0, 0.0)
    assert fit.underflow[0] <= under <= fit.underflow[1]


def test_words() -> None:
    assert str(Fit("float8_e4m3fn", 1.0, (0.001, 0.001), (0.0, 0.0))) == "fits float8_e4m3fn: 99.9 % (0.1 % underflow)"
    assert str(Fit("float16", 1.0, (0.0, 0.0), (0.0, 0.0))) == "fits float16: 100 %"
    assert str(Fit("float16", 1.0, (0.0, 0.5), (0.0, 0.0))) == (
        "fits float16: 50.0 to 100.0 % (0.0 to 50.0 % underflow)"
    )
    assert "> 99.9 %" in str(Fit("float16", 1.0, (1e-6, 1e-6), (0.0, 0.0)))


def test_what_cannot_be_asked() -> None:
    with pytest.raises(OptionError, match="float64"):
        fit_of(torch.ones(2), "full", "float64")
    with pytest.raises(OptionError, match="positive number"):
        fit_of(torch.ones(2), "full", "float16", -1.0)
    with pytest.raises(OptionError, match="statistics='full'"):
        fit_of(torch.ones(2), "norm", "float16", "tensor")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))


def test_the_table_of_a_flow() -> None:
    model, x = net(), torch.randn(5, 6)
    flow = fxgrad.gradient_flow(model, x, loss=lambda out: out.square().mean(), statistics="histogram", forward=True)
    table = flow.precision()
    assert isinstance(table, Precision)
    assert [row.name for row in table] == ["0", "1", "2"]
    assert [fit.dtype for fit in table[0].fits] == ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
    assert table[0].zero == flow.site("0").zero_count / flow.site("0").statistics.numel  # type: ignore[operator,union-attr]
    lines = str(table).splitlines()
    assert "float8_e4m3fn" in lines[0] and lines[1].split()[:2] == ["0", "float32"] and len(lines) == 4
    assert [row.name for row in flow.precision(of="parameters")] == [r.name for r in flow.parameters]
    values = flow.precision(("float16",), of="values")
    assert [str(row.fits[0]) for row in values][-1] == "fits float16: 100 %"
    assert str(Precision()) == "" or "dtype" in str(Precision())
    with pytest.raises(OptionError, match="'gradients', 'parameters' or 'values'"):
        flow.precision(of="all")  # type: ignore[arg-type]


def test_the_loss_scale_is_divided_out() -> None:
    want, got = [], []
    for scale in (1.0, 4096.0):
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with fxgrad.watch(model, scaler=scaler, statistics="histogram", sites="edge") as watch:
            scaler.scale(model(torch.ones(5, 6)).square().mean()).backward()
        flow = watch.flow()
        assert flow.event.loss_scale == scale
        assert ("times the loss scale 4096" in str(flow)) == (scale != 1.0)
        plain = flow.unscaled()
        assert plain.event.loss_scale == 1.0
        got.append([(s.l2_norm, s.max_abs, s.nan_count, s.zero_count) for s in (*plain.sites, *plain.parameters)])
        want.append([(p.grad / scale).norm().item() for p in model.parameters()])
        tables = [flow.precision(scale=1.0), flow.precision(scale=4096.0)]
        got.append([[fit.underflow for row in table for fit in row.fits] for table in tables])
    assert got[0] == got[2] and got[1] == got[3] and want[0] == pytest.approx(want[1])
    assert [entry[0] for entry in got[2][-4:]] == pytest.approx(want[0])


def test_without_a_scale_nothing_is_divided() -> None:
    flow = fxgrad.gradient_flow(net(), torch.ones(5, 6), loss=lambda out: out.sum())
    assert flow.unscaled() is flow
