"""``fxgrad run train.py``: the script does what it does under Python, and is watched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks
from typer.testing import CliRunner

import fxgrad
from fxgrad.cli import app

PACKAGE = Path(fxgrad.__file__).parents[1]

VANISHING = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(4, 4), nn.Sigmoid())), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""
HEALTHY = VANISHING.replace("range(12)", "range(0)")


class Ran:
    """What a run in this process gave."""

    def __init__(self, folder: Path, script: str, options: tuple[str, ...], arguments: tuple[str, ...]) -> None:
        (folder / "train.py").write_text(script)
        line = ["run", "--run-file", str(folder / "run.fxgrad"), *options, str(folder / "train.py"), *arguments]
        before = sys.argv, list(sys.path), sys.modules["__main__"]
        found = CliRunner().invoke(app, line, prog_name="fxgrad")
        assert (sys.argv, sys.path, sys.modules["__main__"]) == before
        assert not _global_optimizer_pre_hooks
        self.code, self.out, self.err = found.exit_code, found.stdout, found.stderr


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return lambda script, *options, arguments=(): Ran(tmp_path, script, options, arguments)


def process(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new Python, as a user starts it."""
    set_here = {"PYTHONPATH": str(PACKAGE), "FXGRAD_NATIVE": "prebuilt", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **set_here, **environment}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def test_the_verdict_comes_at_the_end_with_the_model_that_trains(ran: Any) -> None:
    found = ran(VANISHING)
    assert found.code == 0
    assert found.out == ""
    assert "fxgrad: Sequential: 5 backward passes watched" in found.err
    assert "1 error: vanishing at 1" in found.err
    assert "1. ERROR vanishing at 1 (" in found.err


def test_check_makes_findings_an_exit_code(ran: Any) -> None:
    assert ran(VANISHING, "--check").code == 1
    assert ran(VANISHING, "--fail-on", "vanishing").code == 1
    assert ran(VANISHING, "--fail-on", "nonfinite").code == 0
    assert ran(HEALTHY, "--check").code == 0


def test_what_was_found_on_the_way_counts_too(ran: Any) -> None:
    script = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for step in range(400):
    optimizer.zero_grad()
    out = model(torch.ones(8, 4))
    (out.sum() * (float("nan") if 96 <= step < 104 else 1.0)).backward()
    optimizer.step()
"""
    found = ran(script, "--check", "--fail-on", "nonfinite")
    assert found.code == 1
    assert "earlier, at backward " in found.err


def test_files_are_written(ran: Any, tmp_path: Path) -> None:
    found = ran(VANISHING, "-o", str(tmp_path / "flow.json"), "--findings", str(tmp_path / "found.json"))
    assert found.code == 0
    assert fxgrad.load(tmp_path / "flow.json").capture.model == "Sequential"
    assert "vanishing" in (tmp_path / "found.json").read_text()
    run = fxgrad.open_run(tmp_path / "run.fxgrad")
    assert len(run) == 5
    assert run[-1].optimizer is not None
    assert run[-1].optimizer.type == "AdamW"


FACTS = """
import os, pathlib, pickle, random, sys, __main__
import helper

class Item:
    pass

print(sys.argv, __name__, __file__, sys.path[0], os.getcwd(), helper.VALUE)
print(__main__.Item is Item, type(pickle.loads(pickle.dumps(Item()))) is Item, __spec__, __builtins__ is not None)
import torch
print("first", random.random(), torch.rand(1).item(), torch.get_num_threads())
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(50):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), random.getstate()], sys.argv[1])
print(torch.rand(1).item(), sum(p.double().sum().item() for p in model.parameters()))
sys.exit(3)
"""


@pytest.mark.parametrize("native", ["0", "prebuilt"])
def test_the_script_sees_what_it_sees_under_python_and_ends_in_the_same_bits(tmp_path: Path, native: str) -> None:
    script = FACTS.replace('print("first", random', 'random.seed(0); torch.manual_seed(0); print("first", random')
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "train.py").write_text(script)
    (tmp_path / "there" / "helper.py").write_text("VALUE = 7\n")
    words = ["there/train.py", "saved.pt", "--lr", "0.1", "--check", "--", "-o"]
    plain = process(tmp_path, *words)
    saved = torch.load(tmp_path / "saved.pt", weights_only=False)
    watched = process(tmp_path, "-m", "fxgrad", "run", *words, FXGRAD_NATIVE=native)
    assert plain.stdout == watched.stdout
    assert plain.stdout.startswith("['there/train.py', 'saved.pt', '--lr', '0.1', '--check', '--', '-o'] __main__ ")
    assert (plain.returncode, watched.returncode) == (3, 3), watched.stderr
    assert "Sequential: 49 backward passes watched" in watched.stderr
    from tests.fidelity.harness import same, snapshot

    assert same(snapshot(saved), snapshot(torch.load(tmp_path / "saved.pt", weights_only=False)))
    assert (tmp_path / "run.fxgrad").is_file()


def test_a_script_that_raises_prints_its_own_traceback_and_keeps_its_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(VANISHING + "\ndef f():\n    raise KeyError('lost')\nf()\n")
    plain = process(tmp_path, "train.py")
    watched = process(tmp_path, "-m", "fxgrad", "run", "--check", "train.py")
    assert watched.returncode == plain.returncode == 1
    assert watched.stderr.startswith(plain.stderr)
    assert "vanishing" in watched.stderr


def test_ctrl_c_brings_the_verdict(tmp_path: Path) -> None:
    script = VANISHING.replace("range(6)", "range(10**9)").replace("step()\n", "step()\n    print(step, flush=True)\n")
    (tmp_path / "train.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "FXGRAD_NATIVE": "prebuilt"}
    running = subprocess.Popen(
        [sys.executable, "-m", "fxgrad", "run", "train.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    for line in running.stdout:
        if line.strip() == "20":
            break
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "KeyboardInterrupt" in err
    assert "backward passes watched" in err
    assert "ERROR vanishing" in err


@pytest.mark.parametrize(
    ("code", "wanted"), [("raise SystemExit", 0), ("raise SystemExit(4)", 4), ("raise SystemExit('no data')", 1)]
)
def test_exit_codes(ran: Any, code: str, wanted: int) -> None:
    found = ran(f"import torch\n{code}")
    assert found.code == wanted
    assert ("no data" in found.err) == (wanted == 1)
    assert "fxgrad: nothing was watched: no torch.optim optimizer was stepped" in found.err


def test_without_anything_to_watch_check_has_not_passed(ran: Any) -> None:
    assert ran("import torch", "--check").code == 2


RIVALS = """
import torch
from torch import nn

torch.manual_seed(0)

class Big(nn.Sequential): pass
class Small(nn.Sequential): pass

class Loss(nn.Module):
    def forward(self, x): return x.square().mean()

nets = {"big": Big(nn.Linear(4, 64), nn.Linear(64, 4))}
small, criterion = Small(nn.Linear(4, 4)), Loss()
optimizer = torch.optim.SGD([*nets["big"].parameters(), *small.parameters()], lr=0.01)
other = torch.optim.SGD(small.parameters(), lr=0.01)
for step in range(4):
    optimizer.zero_grad()
    criterion(small(nets["big"](torch.randn(8, 4)))).backward()
    optimizer.step()
    other.step()
"""


def test_of_several_the_largest_is_watched_and_the_others_are_named(ran: Any) -> None:
    found = ran(RIVALS)
    assert "fxgrad: Big: 3 backward passes" in found.err
    assert "trained too, and not watched: Small (name one with --module)" in found.err
    assert "Loss" not in found.err


@pytest.mark.parametrize("name", ["small", "Small"])
def test_a_module_is_named_by_its_name_in_the_script_or_by_its_class(ran: Any, tmp_path: Path, name: str) -> None:
    found = ran(RIVALS, "--module", name)
    assert "fxgrad: Small: 3 backward passes" in found.err
    optimizer = fxgrad.open_run(tmp_path / "run.fxgrad")[0].optimizer
    assert optimizer is not None
    assert optimizer.type == "SGD"
    assert len(optimizer.steps) == 2


def test_a_name_that_leads_nowhere_is_told_with_what_was_called(ran: Any) -> None:
    found = ran(RIVALS, "--module", "medium", "--check")
    assert found.code == 2
    assert "--module medium: no such name in the script leads to a module" in found.err
    assert "Trained are Big, Small" in found.err


SCALED = VANISHING.replace("range(12)", "range(1)").replace(
    "model(torch.randn(8, 4)).square().mean().backward()\n    optimizer.step()",
    "scaler.scale(model(torch.ones(8, 4)).sum()).backward()\n    scaler.step(optimizer)\n    scaler.update()",
).replace("for step", "scaler = torch.amp.GradScaler('cpu', init_scale=256.0)\nfor step")  # fmt: skip


def test_the_scaler_is_found(ran: Any, tmp_path: Path) -> None:
    assert ran(SCALED).code == 0
    assert fxgrad.open_run(tmp_path / "run.fxgrad")[-1].event.loss_scale == 256.0


def test_a_closure_is_found_after_its_first_step(ran: Any) -> None:
    script = VANISHING.replace("AdamW(model.parameters())", "LBFGS(model.parameters(), max_iter=2)").replace(
        "    model(torch.randn(8, 4)).square().mean().backward()\n    optimizer.step()",
        """
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(8, 4)).square().mean()
        loss.backward()
        return loss
    optimizer.step(closure)""",
    )
    assert "fxgrad: Sequential: " in ran(script).err


def test_of_several_processes_the_first_one_writes_and_tells(
    ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    found = ran(VANISHING, "--check")
    assert (found.code, found.err) == (0, "")
    assert not (tmp_path / "run.fxgrad").exists()
    monkeypatch.setenv("RANK", "0")
    assert ran(VANISHING, "--check").code == 1


def test_torch_is_not_loaded_before_the_script_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, os\nprint('torch' in sys.modules)\nimport torch\nprint(torch.ones(1))\n"
    )
    found = process(tmp_path, "-m", "fxgrad", "run", "train.py")
    assert found.stdout.splitlines()[0] == "False"
    assert "no torch.optim optimizer was stepped" in found.stderr


def test_a_script_without_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('done')\n")
    found = process(tmp_path, "-m", "fxgrad", "run", "train.py")
    assert found.stdout == "done\n"
    assert "nothing was watched: it never imported torch" in found.stderr


def test_a_script_that_is_not_there(ran: Any, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["run", "nowhere.py"], prog_name="fxgrad")
    assert found.exit_code == 2
    assert "nowhere.py: cannot be read: No such file or directory" in found.stderr


def test_options_of_the_other_command_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(VANISHING)
    found = CliRunner().invoke(app, ["run", "--input", "8x4", "train.py"], prog_name="fxgrad")
    assert found.exit_code == 2
    assert "a training script is run as it is: fxgrad run [OPTIONS] train.py [ARGS]" in found.stderr


COMPILED = VANISHING.replace("range(12)", "range(1)").replace(
    "optimizer =", "model = torch.compile(model, backend='{backend}', fullgraph={fullgraph})\noptimizer ="
)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_model_is_watched_and_trains_as_it_does(ran: Any, fullgraph: bool) -> None:
    script = COMPILED.format(backend="aot_eager", fullgraph=fullgraph)
    script += "print(*(p.double().sum().item() for p in model.parameters()))\n"
    plain, watched = ran(script, "--module", "nothing"), ran(script)
    assert plain.code == watched.code == 0
    assert plain.out == watched.out
    assert "nothing was watched" in plain.err
    assert "fxgrad: Sequential: 5 backward passes watched" in watched.err


LIGHTNING = """
import logging, warnings
warnings.simplefilter("ignore")
import lightning, torch
from torch import nn
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 4)), batch_size=4)
lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                  enable_checkpointing=False).fit(Lit(), data)
"""


def test_a_script_with_lightning(ran: Any, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    assert "fxgrad: Sequential: 5 backward passes" in ran(LIGHTNING).err
    assert fxgrad.open_run(tmp_path / "run.fxgrad")[-1].optimizer is not None


TRAINER = """
import torch, transformers
transformers.logging.set_verbosity_error()
config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=1,
                                 eos_token_id=2)
tokens = [{"input_ids": torch.arange(6), "labels": torch.arange(6)} for _ in range(4)]
options = transformers.TrainingArguments("out", max_steps=4, report_to=[], save_strategy="no", disable_tqdm=True,
                                         use_cpu=True, dataloader_pin_memory=False)
transformers.Trainer(transformers.GPT2LMHeadModel(config), options, train_dataset=tokens).train()
"""


def test_a_script_with_the_trainer_of_transformers(ran: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = ran(TRAINER)
    assert "GPT2LMHeadModel: 3 backward passes" in found.err, found.err
    optimizer = fxgrad.open_run(tmp_path / "run.fxgrad")[-1].optimizer
    assert optimizer is not None
    assert optimizer.type == "AdamW"


def test_a_model_that_the_script_watches_itself(ran: Any) -> None:
    script = HEALTHY.replace("optimizer =", "import fxgrad\nwatch = fxgrad.watch(model)\noptimizer =")
    found = ran(script)
    assert found.code == 0
    assert "nothing was watched: this Sequential is watched already" in found.err
