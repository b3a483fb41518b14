"""Lightning, the Trainer of Transformers, Accelerate and Ignite: the real ones, with fxgrad in them and without."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import OptionError, WatchError
from tests.integrations.runs import STEPS, Kept, Net, data, differences, seed, state

lightning: Any = pytest.importorskip("lightning")
transformers: Any = pytest.importorskip("transformers")
accelerate: Any = pytest.importorskip("accelerate")
ignite: Any = pytest.importorskip("ignite.engine")

# Lightning's own use of what torch and itself have deprecated, and its advice on workers; the Trainer's default.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*LeafSpec:FutureWarning",
        "ignore:.*LeafSpec:DeprecationWarning",
        "ignore:The '.*_dataloader' does not have many workers",
        "ignore:.*litlogger",
        "ignore:'pin_memory' argument is set as true:UserWarning",
    )
]
LOGGED = [1, 11, 21, 31, 41, 50]


# ---- Lightning -----------------------------------------------------------------------------------------------------


class Lit(lightning.LightningModule):  # type: ignore[misc]
    """``training_step`` calls the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def predicted(self, x: Tensor) -> Tensor:
        return self(x)  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.predicted(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Parts(Lit):
    """It calls a part."""

    def predicted(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def fit(kind: type[Lit], callback: Any = None, steps: int = STEPS, **options: Any) -> list[tuple[str, Any]]:
    seed()
    model = kind()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data(steps * 4)), batch_size=4, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, gradient_clip_val=0.5, callbacks=[] if callback is None else [callback], **options,
    )  # fmt: skip
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer.fit(model, loader)
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.net)
    return state(model, trainer.optimizers)


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("kind", [Lit, Parts])
def test_lightning_trains_in_the_same_bits_and_is_logged(kind: type[Lit]) -> None:
    log = Kept()
    callback = fxgrad.integrations.LightningCallback(log_every=10, log_to=log)
    assert differences(fit(kind), fit(kind, callback)) == []
    assert log.steps == (LOGGED if kind is Lit else [2, 12, 22, 32, 42, 50])
    last = log.entries[-1]
    assert last.flow.capture.model == ("Lit" if kind is Lit else "Net")
    assert last.flow.optimizer is not None
    assert last.flow.optimizer.type == "AdamW"
    assert last.notes.keys() == {"loss"}
    assert callback.watch.flow() == last.flow


def test_lightning_counts_steps_of_the_optimizer_and_tells_accumulation() -> None:
    log = Kept()
    callback = fxgrad.integrations.LightningCallback(log_every=2, log_to=log)
    assert (
        differences(fit(Lit, None, 12, accumulate_grad_batches=2), fit(Lit, callback, 12, accumulate_grad_batches=2))
        == []
    )
    assert log.steps == [1, 3, 5, 6]
    assert all(entry.flow.event.accumulating for entry in log.entries)


def test_lightning_watches_the_part_that_is_named() -> None:
    callback = fxgrad.integrations.LightningCallback(module="net.body", statistics="full")
    fit(Lit, callback, 3)
    assert callback.watch.flow().capture.model == "Sequential"
    assert callback.watch.flow().event.level == "full"
    with pytest.raises(OptionError, match=r"LightningCallback\(module='nett'\): Lit has no such part. It has net"):
        fit(Lit, fxgrad.integrations.LightningCallback(module="nett"), 3)


class Rival(Lit):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.small = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor], _: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = self.small(self.net(batch[0])).square().mean()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.small.parameters(), lr=0.01), torch.optim.SGD(self.net.parameters(), lr=0.01)]


def fit_by_hand(callback: Any = None) -> list[tuple[str, Any]]:
    seed()
    model = Rival()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data(40)), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[] if callback is None else [callback],
    )  # fmt: skip
    trainer.fit(model, loader)
    return state(model, trainer.optimizers)


def test_lightning_with_optimizers_stepped_by_hand_watches_the_largest_part() -> None:
    callback = fxgrad.integrations.LightningCallback(log_every=1)
    assert differences(fit_by_hand(), fit_by_hand(callback)) == []
    assert callback.watch.flow().capture.model == "Net"


def test_lightning_gives_the_model_back_when_training_breaks_off() -> None:
    class Failing(Lit):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if index == 3:
                message = "broken"
                raise RuntimeError(message)
            return super().training_step(batch, index)

    log = Kept()
    callback = fxgrad.integrations.LightningCallback(log_to=log, log_every=100)
    with pytest.raises(RuntimeError, match="broken"):
        fit(Failing, callback)
    assert not callback.watch.active
    assert log.steps == [1, 3]


# ---- Transformers --------------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=32, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def trained(folder: Path, callback: Any = None, **options: Any) -> list[tuple[str, Any]]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    seed()
    model = gpt2()
    tokens = [{"input_ids": (torch.arange(6) * k) % 40, "labels": torch.arange(6)} for k in range(8)]
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, report_to=[], save_strategy="no", logging_steps=5,
        disable_tqdm=True, use_cpu=True, **{"max_steps": STEPS, **options},
    )  # fmt: skip
    callbacks = [] if callback is None else [callback]
    trainer = transformers.Trainer(model, arguments, train_dataset=tokens, callbacks=callbacks)
    trainer.train()
    assert "forward" not in vars(model)
    return state(model, [trainer.optimizer.optimizer])


@pytest.mark.usefixtures("recorder")
def test_the_trainer_trains_in_the_same_bits_and_is_logged(tmp_path: Path) -> None:
    log = Kept()
    callback = fxgrad.integrations.TransformersCallback(log_every=10, log_to=log)
    assert differences(trained(tmp_path), trained(tmp_path, callback)) == []
    assert log.steps == LOGGED
    last = log.entries[-1]
    assert last.flow.capture.model == "GPT2LMHeadModel"
    assert last.flow.optimizer is not None
    assert "AdamW" in last.flow.optimizer.type
    assert last.flow.parameters[0].update is not None
    assert last.notes.keys() == {"loss"}
    assert callback.watch.flow() == last.flow


def test_the_trainer_counts_steps_of_the_optimizer(tmp_path: Path) -> None:
    log = Kept()
    callback = fxgrad.integrations.TransformersCallback(log_every=2, log_to=log)
    trained(tmp_path, callback, gradient_accumulation_steps=2, max_steps=6)
    assert log.steps == [1, 3, 5, 6]
    assert all(entry.flow.event.accumulating for entry in log.entries)


# ---- Accelerate ----------------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh() -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def accelerated(log: Any = None, precision: str = "no", **options: Any) -> tuple[list[tuple[str, Any]], Any]:
    seed()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, **options)
    original = Net()
    loader = torch.utils.data.DataLoader(data(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(original, torch.optim.AdamW(original.parameters(), lr=0.01), loader)
    watch = None
    if log is not None:
        watch = fxgrad.integrations.watch_prepared(accelerator, model, optimizer, log_to=log, log_every=10)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).float().square().mean()
            accelerator.backward(loss)
            if watch is not None:
                watch.note(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    if watch is not None:
        watch.remove()
    return state(original, [optimizer.optimizer]), watch


@pytest.mark.usefixtures("_fresh", "recorder")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_trains_in_the_same_bits_and_is_logged(precision: str) -> None:
    log = Kept()
    plain, _ = accelerated(precision=precision)
    watched, watch = accelerated(log, precision)
    assert differences(plain, watched) == []
    assert log.steps == [0, 10, 20, 30, 40, 49]
    last = log.entries[-1].flow
    assert last == watch.flow()
    assert last.capture.model == "Net"
    assert last.optimizer is not None
    assert last.optimizer.type == "AdamW"


@pytest.mark.usefixtures("_fresh")
def test_accelerate_accumulation_is_told() -> None:
    plain, _ = accelerated(gradient_accumulation_steps=2)
    watched, watch = accelerated(Kept(), gradient_accumulation_steps=2)
    assert differences(plain, watched) == []
    assert [flow.event.accumulating for flow in watch.history[:4]] == [False, True, False, True]


@pytest.mark.usefixtures("_fresh")
def test_accelerate_trackers_get_the_curves(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("run")
    model = accelerator.prepare(Net())
    log = fxgrad.integrations.AccelerateLog(accelerator)
    with fxgrad.integrations.watch_prepared(accelerator, model, log_to=log, log_every=1):
        for _ in range(3):
            accelerator.backward(model(torch.randn(4, 4)).sum())
    accelerator.end_training()
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(tmp_path / "run"))
    found.Reload()
    assert [event.step for event in found.Scalars("gradient/head")] == [0, 1, 2]


# ---- Ignite --------------------------------------------------------------------------------------------------------


def ignited(log: Any = None, stop_at: int | None = None) -> tuple[list[tuple[str, Any]], Any]:
    seed()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(engine: Any, batch: Tensor) -> float:
        model.train()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        if engine.state.iteration == stop_at:
            engine.terminate()
        return loss.item()  # type: ignore[no-any-return]

    trainer = ignite.Engine(step)
    handler = None
    if log is not None:
        handler = fxgrad.integrations.IgniteHandler(model, optimizer, log_to=log, log_every=10)
        handler.attach(trainer)
    trainer.run(data().split(4), max_epochs=1)
    assert "forward" not in vars(model)
    return state(model, [optimizer]), handler


@pytest.mark.usefixtures("recorder")
def test_ignite_trains_in_the_same_bits_and_is_logged() -> None:
    log = Kept()
    plain, _ = ignited()
    watched, handler = ignited(log)
    assert differences(plain, watched) == []
    assert log.steps == LOGGED
    assert log.entries[-1].flow == handler.watch.flow()
    assert log.entries[-1].flow.optimizer is not None
    assert log.entries[-1].notes.keys() == {"loss"}


def test_ignite_that_is_terminated_gives_the_model_back() -> None:
    log = Kept()
    ignited(log, stop_at=5)
    assert log.steps == [1, 5]


# ---- all of them ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_said_when_the_callback_is_made() -> None:
    for make in (fxgrad.integrations.LightningCallback, fxgrad.integrations.TransformersCallback):
        with pytest.raises(OptionError, match="log_every must be"):
            make(log_every=0)
        with pytest.raises(OptionError, match="log_to= takes logs"):
            make(log_to="here")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="optimizer= takes"):
        fxgrad.integrations.IgniteHandler(nn.Linear(1, 1), "adam")  # type: ignore[arg-type]


def test_a_model_that_is_watched_already_is_refused_before_training() -> None:
    callback = fxgrad.integrations.LightningCallback()

    class Watched(Lit):
        def on_fit_start(self) -> None:
            self.watch = fxgrad.watch(self)

    with pytest.raises(WatchError, match="watched already"):
        fit(Watched, callback, 3)


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("fxgrad.integrations.ignite")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(vars(fxgrad.integrations), "IgniteHandler", raising=False)
    monkeypatch.setitem(sys.modules, "ignite.engine", None)
    with pytest.raises(ImportError, match=r"IgniteHandler cannot be used: .*pip install 'fxgrad\[ignite\]'") as caught:
        _ = fxgrad.integrations.IgniteHandler
    assert isinstance(caught.value, fxgrad.FxgradError)
