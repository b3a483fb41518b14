"""Watched models in the loops of Hugging Face, Accelerate and Lightning: the real ones, with small models."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from tests.watched import WATCH

transformers: Any = pytest.importorskip("transformers")
accelerate: Any = pytest.importorskip("accelerate")
lightning: Any = pytest.importorskip("lightning")


class Tagger(nn.Module):
    """A custom model, whose argument names tell the Trainer which columns and extras it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(40, 8), nn.Linear(8, 40)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.out(self.embedding(input_ids))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=32, bos_token_id=1, eos_token_id=2,
        initializer_range=0.5,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def trained(make: Any, folder: Path, watched: bool) -> tuple[dict[str, Tensor], Any, int]:
    torch.manual_seed(0)
    model = make()
    data = [
        {"input_ids": (torch.arange(6) * k) % 40, "labels": torch.arange(6), "unknown": torch.ones(1)} for k in range(8)
    ]
    watch = fxgrad.watch(model, **WATCH) if watched else None
    options = transformers.TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, report_to=[], save_steps=2, logging_steps=1,
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, options, train_dataset=data)
    trainer.train()
    log = [{key: entry[key] for key in ("loss", "grad_norm") if key in entry} for entry in trainer.state.log_history]
    count = 0
    if watch is not None:
        count = len(watch.history)
        assert all(p.measured for p in watch.flow().parameters)
        watch.remove()
        assert "forward" not in vars(model)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, log, count


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # the Trainer's default
@pytest.mark.parametrize("make", [Tagger, gpt2])
def test_the_trainer_of_hugging_face(make: Any, tmp_path: Path) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    plain, plain_log, _ = trained(make, tmp_path / "plain", watched=False)
    watched, log, count = trained(make, tmp_path / "watched", watched=True)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    assert log == plain_log
    assert count == 3
    kept, other = (sorted(p.name for p in (tmp_path / run / "checkpoint-2").iterdir()) for run in ("plain", "watched"))
    assert kept == other


def test_generate_with_left_padding_gives_the_same_tokens() -> None:
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [9, 8, 7, 6, 5, 4]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])

    def tokens(watched: bool, **how: Any) -> list[list[int]]:
        torch.manual_seed(0)
        model: Any = gpt2().eval()
        watch = fxgrad.watch(model, **WATCH) if watched else None
        torch.manual_seed(1)
        found: list[list[int]] = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, pad_token_id=0, **how
        ).tolist()
        if watch is not None:
            watch.remove()
        return found

    for how in ({"do_sample": False}, {"do_sample": True, "top_k": 20}, {"num_beams": 3, "do_sample": False}):
        assert tokens(watched=True, **how) == tokens(watched=False, **how)


# ---- Accelerate ----------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


@pytest.fixture
def _fresh() -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def accelerated(order: str, precision: str, keep: bool) -> tuple[list[Tensor], list[int], Any]:
    """Train, unwrap, train, read, train; ``order`` is when the watch is put on."""
    torch.manual_seed(0)
    model = Small()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    watch = fxgrad.watch(model, **WATCH) if order == "before" else None
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    watch = fxgrad.watch(model, **WATCH) if order == "after" else watch
    results, counts = [], []

    def steps() -> None:
        for _ in range(2):
            out = prepared(torch.randn(4, 8))
            accelerator.backward(out.float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
            results.append(out.detach())
        counts.append(len(watch.history) if watch is not None else 0)

    steps()
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=keep)
    assert unwrapped is model
    steps()
    steps()  # after the history was read
    results.append(unwrapped(torch.ones(2, 8)).detach())
    if watch is not None:
        watch.remove()
    again = accelerate.utils.extract_model_from_parallel(prepared, keep_fp32_wrapper=keep)
    results += [again(torch.ones(2, 8)).detach(), *(p.detach() for p in model.parameters())]
    return results, counts, model


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_accelerate_prepares_and_unwraps(order: str, precision: str, keep: bool) -> None:
    plain, _, _ = accelerated("never", precision, keep)
    watched, counts, model = accelerated(order, precision, keep)
    assert [(one.dtype, one.shape) for one in plain] == [(one.dtype, one.shape) for one in watched]
    assert all(map(torch.equal, plain, watched))
    assert counts[0] == 2
    stripped = order == "after" and precision == "bf16" and not keep  # Accelerate takes off what it finds on top
    assert counts[1:] == ([2, 4] if stripped else [4, 6])
    model(torch.ones(2, 8)).sum().backward()


# ---- Lightning -----------------------------------------------------------------------------------------------------


class Lit(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = Small()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = self(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("valid", self(batch[0]).abs().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


# Lightning's own use of what torch and itself have deprecated, and its advice on workers and on small epochs.
@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:.*LeafSpec:DeprecationWarning",
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:.*litlogger",
)
@pytest.mark.parametrize("part", ["module", "net"])
def test_lightning(part: str, tmp_path: Path) -> None:
    def fitted(watched: bool) -> tuple[Any, int]:
        lightning.seed_everything(0, verbose=False)
        model = Lit()
        watch = fxgrad.watch(model if part == "module" else model.net, **WATCH) if watched else None
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.randn(12, 8)), batch_size=4, shuffle=True
        )
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path / str(watched), accumulate_grad_batches=2, gradient_clip_val=0.5,
            log_every_n_steps=1,
        )  # fmt: skip
        trainer.fit(model, loader, torch.utils.data.DataLoader(loader.dataset, batch_size=4))
        found = [model.losses, trainer.callback_metrics["valid"], *(p.detach().clone() for p in model.parameters())]
        count = 0
        if watch is not None:
            count = len(watch.history)
            watch.remove()
        return found, count

    (plain, _), (watched, count) = fitted(False), fitted(True)
    assert plain[0] == watched[0]
    assert all(map(torch.equal, plain[1:], watched[1:]))
    assert count == 6
