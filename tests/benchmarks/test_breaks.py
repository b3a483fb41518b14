from __future__ import annotations

import pytest

from benchmarks.breaks import MODELS, TOOLS, made, told
from benchmarks.hooks import ModuleHooks, RetainGrad
from benchmarks.runners import Runner, Seen


@pytest.mark.parametrize("name", MODELS)
def test_a_watched_step_has_the_bits_of_the_plain_one_and_tells_every_value(name: str) -> None:
    modules = len(list(made(name).model.children()))
    cell = told(name, TOOLS["fxgrad.watch"])
    assert cell.endswith(" values") and int(cell.split()[0]) > modules


def test_what_breaks_is_told() -> None:
    assert told("in place", ModuleHooks).startswith("raises RuntimeError: ")
    assert told("in place", RetainGrad) == "4 values"
    assert told("functions", RetainGrad) == "0 values"


def test_other_random_numbers_are_other_bits() -> None:
    class Draws(Runner):
        def forward(self):
            made("dropout").model(*self.built.args)  # as a tool does that runs the forward once more
            return super().forward()

        def seen(self) -> Seen:
            return Seen(activations=3)

    assert told("dropout", Draws) == "3 values, other bits"
