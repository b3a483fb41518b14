"""A watched model in the hands of other tools: compilers, copies, pickles, replicas."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import WatchError
from tests.engine.test_forward_patch import Net, step
from tests.watched import WATCH


@pytest.fixture
def x() -> Tensor:
    return torch.ones(3, 4)


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> None:
    torch.compiler.reset()


# ---- compilers -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_a_trace_is_of_the_plain_model(x: Tensor) -> None:
    model = Net()
    want = model(x)
    with fxgrad.watch(model, **WATCH) as watch:
        step(model)
        traced = torch.jit.trace(model, x)
        assert torch.equal(traced(x), want)
        data = io.BytesIO()
        torch.jit.save(traced, data)
        step(model)
        assert len(watch.history) == 2  # a trace is no call of the user's
    plain = torch.jit.trace(model, x)
    assert [node.kind() for node in traced.graph.nodes()] == [node.kind() for node in plain.graph.nodes()]
    data.seek(0)
    assert torch.equal(torch.jit.load(data)(x), want)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("parent", [False, True])
def test_scripting_is_refused_with_what_to_do(x: Tensor, parent: bool) -> None:
    model = Net()
    whole = nn.Sequential(nn.Identity(), model) if parent else model
    with fxgrad.watch(model, **WATCH) as watch:
        with pytest.raises(WatchError, match=r"Script copy\.deepcopy\(model\).*or call remove\(\) first"):
            torch.jit.script(whole)
        step(whole)
        assert len(watch.history) == 1  # all is as it was
    if parent:
        assert whole[1] is model


class Scriptable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).relu()


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_what_the_refusal_advises_works(x: Tensor) -> None:
    model = Scriptable()
    with fxgrad.watch(model, **WATCH):
        assert torch.equal(torch.jit.script(copy.deepcopy(model))(x), model(x))
    assert torch.equal(torch.jit.script(model)(x), model(x))


def test_compiling_a_watched_model_leaves_its_forward_to_python(x: Tensor) -> None:
    model = Net()
    want = model(x)
    with fxgrad.watch(model, **WATCH) as watch:
        compiled = torch.compile(model, backend="eager")
        with pytest.warns(RuntimeWarning, match=r"runs uncompiled.*Compile first"):
            assert torch.equal(step(compiled), want)
        for _ in range(2):  # said once, and never an error
            assert torch.equal(step(compiled), want)
        assert len(watch.history) == 3
        assert torch.equal(torch.compile(model.forward, backend="eager")(x), want)
    assert torch.equal(compiled(x), want)


def test_a_full_graph_of_a_watched_model_is_refused_with_what_to_do(x: Tensor) -> None:
    model = Net()
    with fxgrad.watch(model, **WATCH) as watch:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(RuntimeError, match=r"backend='fxgrad'.*or call remove\(\) first"):
            compiled(x)
        step(model)
        assert len(watch.history) == 1
    assert torch.equal(compiled(x), model(x))


def test_watching_what_was_compiled_before(x: Tensor) -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    want = compiled(x)
    with fxgrad.watch(model, **WATCH) as watch:
        assert torch.equal(step(compiled), want)
        assert len(watch.history) == 1
    assert torch.equal(compiled(x), want)


def test_exporting_a_watched_model_is_as_without(x: Tensor) -> None:
    model = Net()
    plain = torch.export.export(model, (x,))
    with fxgrad.watch(model, **WATCH) as watch:
        exported = torch.export.export(model, (x,))
        step(model)
        assert len(watch.history) == 1
    assert str(exported.graph) == str(plain.graph)
    assert torch.equal(exported.module()(x), model(x))


def test_symbolic_traces_go_through_a_watched_child() -> None:
    whole = nn.Sequential(Net(), nn.ReLU())
    plain = str(torch.fx.symbolic_trace(whole).graph)
    with fxgrad.watch(whole[0], **WATCH) as watch:
        assert str(torch.fx.symbolic_trace(whole).graph) == plain
        assert not watch.history


# ---- copies --------------------------------------------------------------------------------------------------------


def by_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"fxgrad" not in file.getvalue()
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def by_pickle(model: nn.Module) -> nn.Module:
    data = pickle.dumps(model)
    assert b"fxgrad" not in data
    loaded: nn.Module = pickle.loads(data)  # noqa: S301  # our own bytes
    return loaded


COPIES = pytest.mark.parametrize("make", [copy.deepcopy, copy.copy, by_pickle, by_torch])


@COPIES
def test_a_copy_is_the_plain_model(make: Any, x: Tensor) -> None:
    model = Net()
    with fxgrad.watch(model, **WATCH) as watch:
        step(model)
        copied = make(model)
        assert vars(copied).keys() == vars(Net()).keys()
        assert type(copied) is Net
        assert torch.equal(copied(x), model(x))
        count = len(watch.history)
        copied(x).sum().backward()
        assert len(watch.history) == count
        step(model)
        assert len(watch.history) == count + 1


@COPIES
def test_a_copy_under_a_forward_that_stands_on_top(make: Any, x: Tensor) -> None:
    model = Net()
    with fxgrad.watch(model, **WATCH) as watch:
        under = model.forward.__func__
        model.forward = on_top(under).__get__(model)  # type: ignore[method-assign]
        model.kept = model.forward.__func__.__wrapped__.__get__(model)
        copied = make(model)
        with torch.no_grad():
            copied.fc.bias.fill_(7.0)
            if make is not copy.copy:  # which shares its parameters, as it does without us
                assert not torch.equal(copied.kept(x), model.kept(x))
            assert torch.equal(copied.kept(x), Net.forward(copied, x))
        step(model)
        assert len(watch.history) == 1


def on_top(under: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return under(self, x) * 1

    forward.__wrapped__ = under
    return forward


_LOADS = """
import sys
sys.path[:] = [{folder!r}, *sys.path]
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "fxgrad":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import pickle, torch, plain_model
for model in (pickle.load(open({pickled!r}, "rb")), torch.load({saved!r}, weights_only=False)):
    print(type(model).__name__, model(torch.ones(3, 4)).tolist(), "forward" in vars(model))
"""


def test_what_was_saved_loads_where_there_is_no_fxgrad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain_model.py").write_text(
        "import torch\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a = torch.nn.Linear(4, 2)\n    def forward(self, x):\n        return self.a(x).relu()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import plain_model  # type: ignore[import-not-found]

    model = plain_model.Model()
    with fxgrad.watch(model, **WATCH), (tmp_path / "p").open("wb") as file:
        step(model)
        pickle.dump(model, file)
        torch.save(model, tmp_path / "t")
    code = _LOADS.format(folder=str(tmp_path), pickled=str(tmp_path / "p"), saved=str(tmp_path / "t"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    want = f"Model {model(torch.ones(3, 4)).tolist()} False"
    assert (done.returncode, done.stdout.splitlines()) == (0, [want, want]), done.stderr


def test_a_replica_of_data_parallel_runs_its_own_forward(x: Tensor) -> None:
    model = Net()
    with fxgrad.watch(model, **WATCH) as watch:
        replica = model._replicate_for_data_parallel()
        replica.fc = nn.Linear(8, 2)
        assert torch.equal(replica(x), Net.forward(replica, x))
        assert "forward" not in vars(replica)
        assert torch.equal(nn.DataParallel(model)(x), model(x))
        step(nn.DataParallel(model))
        assert len(watch.history) == 1


def test_threads_hold_each_their_own(x: Tensor) -> None:
    def work(number: int) -> None:
        model = Net()
        for _ in range(5):
            with fxgrad.watch(model, **WATCH) as watch:
                step(model)
                copy.deepcopy(model)
            counts[number] += len(watch.history)
        clean[number] = "forward" not in vars(model)

    counts, clean = [0] * 4, [False] * 4
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [5] * 4
    assert all(clean)
