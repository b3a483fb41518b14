"""The step of a run's first error, run again."""

from __future__ import annotations

import random
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fxgrad
from fxgrad.cli import app
from fxgrad.errors import InputError, OptionError, RunFileError
from tests.fidelity.harness import same

BREAKS = 7  # the step whose loss is far too large


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("factor", torch.tensor(1.0), persistent=False)

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.one(x)).relu(), 0.3, self.training)
        return self.two(hidden) * self.factor + (0.0 if shift is None else shift)


def train(
    path: Path | None, model: nn.Module | None = None, *, steps: int = 10, half: bool = False, **options: Any
) -> tuple[Any, list]:
    """Train until well behind the step that breaks; the watch and the losses, and what must not change."""
    torch.manual_seed(0)
    random.seed(0)
    model = Net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if path is not None:
        options = {"limits": {"l2_norm": 1e4}, "on_finding": lambda _: None, "capture_batch": True, **options}
    watch = fxgrad.watch(model, run_file=path, **options)
    losses = []
    for step in range(steps):
        x, shift = torch.randn(6, 4), torch.randn(6, 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            output = model(x, shift=shift)
        loss = (output - 1).square().mean() * (1e6 if step == BREAKS else 1.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch.note(loss=loss)
        losses.append((float(loss.detach()), output.detach().clone()))
        x.zero_()  # a loader that uses its memory again
    watch.remove()
    return watch, [losses, dict(model.state_dict()), torch.get_rng_state(), random.getstate()]


@pytest.mark.parametrize("native", [True, False])
def test_the_step_is_the_same_in_bits(native, tmp_path) -> None:
    path = tmp_path / "run.fxgrad"
    _, (losses, *_) = train(path, native=native)
    found = fxgrad.replay(path, Net())
    loss, output = losses[BREAKS]
    assert found.step == BREAKS and found.same is True
    assert torch.equal(found.outputs[""], output)
    assert float((found.outputs[""] - 1).square().mean() * 1e6) == loss
    with fxgrad.open_run(path) as run:
        flow = run.flow(BREAKS)
        assert [finding.backward for finding in run.findings if finding.severity == "error"] == [BREAKS]
    assert found.flow.event.level == "full" and found.flow.event.values
    norms = {record.name: record.l2_norm for record in found.flow.parameters}
    assert norms == pytest.approx({record.name: record.l2_norm for record in flow.parameters}, rel=1e-6)
    assert {site.id for site in found.flow.sites} == {site.id for site in flow.sites}


def test_what_is_given_is_left_as_it_was(tmp_path) -> None:
    train(tmp_path / "run.fxgrad")
    model = Net().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate()
    fxgrad.replay(tmp_path / "run.fxgrad", model)
    assert same(before, dict(model.state_dict())) and not model.norm.training
    assert same(list(drawn), [torch.get_rng_state(), random.getstate()])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("native", [True, False])
def test_training_does_not_see_the_copies(native, tmp_path) -> None:
    train(None, steps=1)  # what torch imports at its first step draws from Python's stream
    assert same(train(None)[1], train(tmp_path / "run.fxgrad", native=native)[1])


def test_a_model_that_returns_its_loss(tmp_path) -> None:
    class Own(Net):
        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            return super().forward(x, shift=shift).square().mean()

    _, (losses, *_) = train(tmp_path / "run.fxgrad", Own())
    found = fxgrad.replay(tmp_path / "run.fxgrad", Own())
    assert found.same and torch.equal(found.outputs[""], losses[BREAKS][1])


def test_under_autocast(tmp_path) -> None:
    class Half(Net):
        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(x, shift=shift).float()

    seen: list[bool] = []
    train(tmp_path / "run.fxgrad", Half(), half=True)
    found = fxgrad.replay(tmp_path / "run.fxgrad", Half())
    assert found.same and seen[-1]
    assert {site.dtype for site in found.flow.sites} >= {"bfloat16"}


def test_state_outside_of_parameters_and_buffers_is_told(tmp_path) -> None:
    class Counting(Net):
        calls = 0

        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x, shift=shift) * self.calls

    train(tmp_path / "run.fxgrad", Counting())
    found = fxgrad.replay(tmp_path / "run.fxgrad", Counting())
    assert found.same is False
    assert "something else than in training" in str(found)


# ---- what cannot be replayed ------------------------------------------------------------------------------------


def test_a_process_that_goes_to_another_folder(tmp_path, monkeypatch) -> None:
    """The batch lies beside the run file, which lies where the path said when it was given."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)

    class Goes(Net):
        def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
            monkeypatch.chdir(tmp_path / "other")
            return super().forward(x, shift=shift)

    train(Path("run.fxgrad"), Goes())
    assert not list((tmp_path / "other").iterdir())
    assert fxgrad.replay(tmp_path / "run.fxgrad", Net()).same


def test_nothing_was_kept(tmp_path) -> None:
    train(tmp_path / "run.fxgrad", capture_batch=False)
    with pytest.raises(RunFileError, match="capture_batch=True"):
        fxgrad.replay(tmp_path / "run.fxgrad", Net())


def test_a_batch_that_holds_something_else(tmp_path) -> None:
    class Wrapped(Net):
        def forward(self, x: Tensor, *, shift: Tensor, more: object = None) -> Tensor:
            return super().forward(x, shift=shift)

    class Strange:
        pass

    model = Wrapped()
    plain = model.forward
    model.forward = lambda x, shift: plain(x, shift=shift, more=Strange())
    train(tmp_path / "fine.fxgrad", model)
    del model.forward
    watch = fxgrad.watch(
        model, run_file=tmp_path / "run.fxgrad", capture_batch=True, limits={"l2_norm": 0.0}, on_finding=lambda _: None
    )
    model(torch.randn(6, 4), shift=torch.randn(6, 1), more=Strange()).sum().backward()
    watch.remove()
    with pytest.raises(RunFileError, match="cannot be replayed: TypeError: the batch holds a Strange"):
        fxgrad.replay(tmp_path / "run.fxgrad", Wrapped())


def test_another_model(tmp_path) -> None:
    train(tmp_path / "run.fxgrad")
    with pytest.raises(InputError, match=r"is not the model that was trained: .*0\.bias"):
        fxgrad.replay(tmp_path / "run.fxgrad", nn.Sequential(nn.Linear(4, 8)))


@pytest.mark.parametrize("content", [b"", b"PK not a zip file"])
def test_a_damaged_batch(content, tmp_path) -> None:
    train(tmp_path / "run.fxgrad")
    (tmp_path / "run.fxgrad.batch").write_bytes(content)
    with pytest.raises(RunFileError, match="damaged"):
        fxgrad.replay(tmp_path / "run.fxgrad", Net())


def test_a_copy_needs_a_run_file() -> None:
    with pytest.raises(OptionError, match="give run_file="):
        fxgrad.watch(Net(), capture_batch=True)


def test_the_command(tmp_path) -> None:
    (tmp_path / "net.py").write_text(
        textwrap.dedent("""
            import torch
            from torch import nn

            def make():
                return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        """)
    )
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    watch = fxgrad.watch(model, run_file=tmp_path / "run.fxgrad", capture_batch=True)
    for step in range(3):
        x = torch.randn(6, 4)
        if step == 1:
            x[0, 0] = float("nan")
        model(x).square().mean().backward()
    watch.remove()
    words = ["replay", str(tmp_path / "run.fxgrad"), f"{tmp_path / 'net.py'}:make", "-o", str(tmp_path / "flow.json")]
    done = CliRunner(env={"COLUMNS": "120"}).invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("step 1 again: the model returns the same bits as in training")
    assert "nonfinite" in done.output
    assert fxgrad.load(tmp_path / "flow.json").event.level == "full"
