"""The words of the command line: TARGET with its arguments, --input, --loss."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxgrad.command.inputs import Arguments, make_arguments
from fxgrad.command.losses import NAMES, load_loss
from fxgrad.command.targets import load_model, parse_keywords
from fxgrad.errors import InputError, OptionError, TargetError

CPU = torch.device("cpu")
MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, 2)
    def forward(self, x):
        return self.layer(x)

net = Net()
number = 3

def make(width=4, act="relu"):
    model = Net(width)
    model.act = act
    return model

def make_pair():
    return Net(), 1

def broken():
    raise ValueError("no weights here")

def pair_of_inputs():
    return torch.ones(2, 4), torch.zeros(1)

def named_inputs():
    return {"x": torch.ones(2, 4)}

def both():
    return (torch.ones(2, 4),), {"mask": None}

def single():
    return torch.ones(2, 4)

def wrong_names():
    return {1: torch.ones(2, 4)}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with models.py to work in; what the imports leave behind is taken away."""
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def inputs(*words: str, seed: int = 0) -> Arguments:
    return make_arguments(words, seed, CPU)


class TestTarget:
    @pytest.mark.parametrize("name", ["net", "Net", "make"])
    def test_instance_class_and_function(self, folder: Path, name: str) -> None:
        assert load_model(f"models.py:{name}").layer.in_features == 4
        assert load_model(f"{folder}/models.py:{name}").layer.in_features == 4

    def test_module_in_the_current_folder(self, folder: Path) -> None:
        (folder / "my_own_models.py").write_text(MODELS)
        assert load_model("my_own_models:make").layer.in_features == 4

    def test_file_finds_its_neighbours(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "neighbour_of_main.py").write_text(MODELS)
        (folder / "sub" / "main.py").write_text("from neighbour_of_main import make")
        assert isinstance(load_model("sub/main.py:make"), nn.Module)

    def test_file_named_like_the_standard_library(self, folder: Path) -> None:
        (folder / "random.py").write_text(MODELS)
        assert isinstance(load_model("random.py:make"), nn.Module)
        assert sys.modules["random"].__name__ == "random"
        assert hasattr(sys.modules["random"], "randint")

    def test_installed_package(self) -> None:
        assert load_model("torch.nn:Linear", ["in_features=3", "out_features=2"]).in_features == 3

    def test_nested_name(self) -> None:
        assert isinstance(load_model("torch:nn.ReLU"), nn.ReLU)

    def test_keywords(self, folder: Path) -> None:
        model = load_model("models.py:make", ["width=8", "act=gelu"])
        assert (model.layer.in_features, model.act) == (8, "gelu")

    @pytest.mark.parametrize(
        ("target", "words", "cause", "way_out"),
        [
            ("models.py", [], "a training script is run as it is", "A model in it is models.py:name"),
            ("models.py:", [], "expected package.module:name", ""),
            ("nowhere.py:make", [], "there is no file nowhere.py", "looked in"),
            ("no_such_package:make", [], "no module 'no_such_package'", "Install the package"),
            ("torch.no_such:make", [], "no module 'torch.no_such'", "Install the package"),
            ("models.py:mak", [], "has no 'mak'", "Did you mean make"),
            ("models.py:zzz", [], "has no 'zzz'", "It has "),
            ("models.py:number", [], "is of type int", "torch.nn.Module"),
            ("models.py:make_pair", [], "returned tuple", "returns only the model"),
            ("models.py:broken", [], "raised ValueError", "no weights here"),
            ("models.py:make", ["depth=3"], "unexpected keyword argument 'depth'", "name=value"),
            ("models.py:make", ["3"], "'3' after TARGET", "name=value"),
            ("models.py:make", ["width=3", "width=4"], "given twice", "width=4"),
            ("models.py:net", ["width=3"], "is a model already", "width=3"),
            ("fails.py:make", [], "importing fails.py raised ZeroDivisionError", "division by zero"),
            ("lacks.py:make", [], "importing lacks.py raised ModuleNotFoundError", "no_such_dependency"),
            ("script.py:make", [], "ended the program", "__main__"),
            ("late.py:Model", [], "importing late.py.Model raised ImportError", "needs another package"),
        ],
    )
    def test_misuse(self, folder: Path, target: str, words: list[str], cause: str, way_out: str) -> None:
        (folder / "fails.py").write_text("1 / 0")
        (folder / "lacks.py").write_text("import no_such_dependency")
        (folder / "script.py").write_text("import sys; sys.exit()")
        (folder / "late.py").write_text("def __getattr__(name): raise ImportError('needs another package')")
        with pytest.raises(TargetError) as caught:
            load_model(target, words)
        assert cause in str(caught.value)
        assert way_out in str(caught.value)

    def test_words_are_python_literals_or_text(self) -> None:
        words = ["a=1", "b=None", "c=true", "d=relu", "e=[1, 2]", "f='true'", "g=", "h=x=y", "i=1e-3", "j=False"]
        expected: dict[str, Any] = {
            "a": 1, "b": None, "c": True, "d": "relu", "e": [1, 2], "f": "true", "g": "", "h": "x=y", "i": 1e-3,
            "j": False,
        }  # fmt: skip
        assert parse_keywords(words) == expected


class TestInput:
    @pytest.mark.parametrize(
        ("word", "shape", "dtype"),
        [
            ("2x3", (2, 3), torch.float32),
            ("5", (5,), torch.float32),
            ("scalar", (), torch.float32),
            ("scalar:float64", (), torch.float64),
            ("0x3", (0, 3), torch.float32),
            ("2x3:float16", (2, 3), torch.float16),
            ("2x3:bfloat16", (2, 3), torch.bfloat16),
            ("2x3:complex64", (2, 3), torch.complex64),
            ("2x3:bool", (2, 3), torch.bool),
            ("2x3:int64:0-10", (2, 3), torch.int64),
            ("2x3:uint8:0-255", (2, 3), torch.uint8),
            ("2x3:float32:0-1", (2, 3), torch.float32),
        ],
    )
    def test_described(self, word: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        (tensor,) = inputs(word).args
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)

    def test_range_leaves_out_its_end(self) -> None:
        (tokens,) = inputs("1000:int64:3-6").args
        assert set(tokens.tolist()) == {3, 4, 5}

    def test_range_below_zero(self) -> None:
        (tensor,) = inputs("1000:int64:-5--3").args
        assert set(tensor.tolist()) == {-5, -4}

    def test_range_of_floats(self) -> None:
        (tensor,) = inputs("1000:float32:0.5-1e1").args
        assert 0.5 <= tensor.min() < tensor.max() < 10

    def test_seed(self) -> None:
        first, again, other = inputs("9").args[0], inputs("9").args[0], inputs("9", seed=1).args[0]
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_global_random_stream_is_left_alone(self) -> None:
        before = torch.get_rng_state()
        inputs("9", "9:int64:0-3", "9:bool")
        assert torch.equal(torch.get_rng_state(), before)

    def test_several_and_named(self) -> None:
        arguments = inputs("2x3", "input_ids=2x4:int64:0-9", "5")
        assert [tuple(t.shape) for t in arguments.args] == [(2, 3), (5,)]
        assert tuple(arguments.kwargs["input_ids"].shape) == (2, 4)

    @pytest.mark.parametrize(
        ("saved", "args", "kwargs"),
        [
            (torch.ones(2), 1, []),
            ((torch.ones(2), torch.ones(3)), 2, []),
            ([torch.ones(2), torch.ones(3)], 2, []),
            ({"x": torch.ones(2)}, 0, ["x"]),
            (((torch.ones(2),), {"mask": torch.ones(2)}), 1, ["mask"]),
        ],
    )
    def test_saved(self, folder: Path, saved: object, args: int, kwargs: list[str]) -> None:
        torch.save(saved, folder / "batch.pt")
        arguments = inputs("batch.pt")
        assert len(arguments.args) == args
        assert list(arguments.kwargs) == kwargs

    def test_saved_and_named_is_one_argument(self, folder: Path) -> None:
        torch.save([torch.ones(2), torch.ones(3)], folder / "batch.pt")
        assert len(inputs("states=batch.pt").kwargs["states"]) == 2

    @pytest.mark.parametrize(
        ("name", "args", "kwargs"),
        [
            ("pair_of_inputs", 2, []),
            ("named_inputs", 0, ["x"]),
            ("both", 1, ["mask"]),
            ("single", 1, []),
        ],
    )
    def test_made_by_a_function(self, folder: Path, name: str, args: int, kwargs: list[str]) -> None:
        arguments = inputs(f"models.py:{name}")
        assert len(arguments.args) == args
        assert list(arguments.kwargs) == kwargs

    @pytest.mark.parametrize(
        ("words", "cause", "way_out"),
        [
            (["8x3xx2"], "is no shape", "8x3x224x224:float32"),
            (["8,3"], "is no shape", "8x3x224x224:float32"),
            (["-1x3"], "is no shape", "SHAPE[:DTYPE[:LOW-HIGH]]"),
            (["image"], "is no description of an input", "SHAPE[:DTYPE[:LOW-HIGH]]"),
            (["8:float31"], "no dtype 'float31'", "float32"),
            (["8:nn"], "no dtype 'nn'", "float32"),
            (["8:int64"], "needs a range", "8:int64:0-100"),
            (["8:int64:"], "is no range", "0-100"),
            (["8:int64:10"], "is no range", "0-100"),
            (["8:int64:0.5-2"], "whole numbers", "0.5-2"),
            (["8:int64:5-5"], "is empty", "LOW must be below HIGH"),
            (["8:bool:0-1"], "takes no range", ""),
            (["8:uint8:0-300"], "torch cannot make this tensor", ""),
            (["99999999x99999999x99999999"], "torch cannot make this tensor", ""),
            (["x=8", "x=9"], "'x' a second time", ""),
            (["nowhere.pt"], "there is no file nowhere.pt", "looked in"),
            (["damaged.pt"], "damaged.pt", "damaged"),
            (["whole_model.pt"], "could run code", "pass a function"),
            (["models.py:broken"], "raised ValueError", "no weights here"),
            (["models.py:mak"], "has no 'mak'", "Did you mean make"),
            (["models.py:wrong_names"], "the key 1", "are text"),
        ],
    )
    def test_misuse(self, folder: Path, words: list[str], cause: str, way_out: str) -> None:
        (folder / "damaged.pt").write_bytes(b"not a file of torch")
        torch.save(nn.Linear(1, 1), folder / "whole_model.pt")
        with pytest.raises(InputError) as caught:
            inputs(*words)
        assert str(caught.value).startswith(f"--input '{words[-1]}'")
        assert cause in str(caught.value)
        assert way_out in str(caught.value)


class TestLoss:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (t,), lambda t: {"mask": t > 0, "logits": t}])
    def test_every_name_gives_a_scalar_to_differentiate(self, name: str, wrap: Callable[[Any], Any]) -> None:
        output = torch.rand(4, 3, requires_grad=True).clamp(0.1, 0.9)
        loss = load_loss(name, 0)(wrap(output))
        assert loss.ndim == 0
        assert loss.requires_grad

    def test_sum_and_mean_run_over_all_outputs(self) -> None:
        outputs = {"a": torch.ones(2, requires_grad=True), "b": torch.full((3,), 2.0, requires_grad=True)}
        assert load_loss("sum", 0)(outputs).item() == 8
        assert load_loss("mean", 0)(outputs).item() == pytest.approx(8 / 5)

    def test_classes_along_dimension_1(self) -> None:
        loss = load_loss("cross_entropy", 0)
        assert loss(torch.zeros(2, 5, 4, 4, requires_grad=True)).item() == pytest.approx(torch.tensor(5.0).log().item())
        assert loss(torch.zeros(5, requires_grad=True)).item() == pytest.approx(torch.tensor(5.0).log().item())

    def test_seed(self) -> None:
        output = torch.ones(9, requires_grad=True)
        losses = [load_loss("mse_loss", seed)(output).item() for seed in (0, 0, 1)]
        assert losses[0] == losses[1] != losses[2]

    def test_words_of_the_flow(self) -> None:
        words = load_loss("cross_entropy", 3).__qualname__  # type: ignore[attr-defined]
        assert words == "cross_entropy of the first output against random classes along dimension 1, seed 3"

    def test_own(self, folder: Path) -> None:
        (folder / "losses.py").write_text("def first(output): return output[0]")
        assert load_loss("losses.py:first", 0)([7]) == 7

    @pytest.mark.parametrize(
        ("words", "cause", "way_out"),
        [
            ("cross_entropie", "not a known loss", "Did you mean cross_entropy"),
            ("zzz", "not a known loss", "The names are mean, sum"),
            ("models.py:number", "is of type int", "callable"),
            ("models.py:los", "has no 'los'", ""),
        ],
    )
    def test_misuse(self, folder: Path, words: str, cause: str, way_out: str) -> None:
        with pytest.raises(OptionError) as caught:
            load_loss(words, 0)
        assert cause in str(caught.value)
        assert way_out in str(caught.value)
