"""For the tests of users: ``assert_healthy`` fails where the gradient of a model has a fault.

``docs/diagnosis.md`` has examples for pytest.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fxgrad.api import gradient_flow
from fxgrad.diagnosis import Thresholds, diagnose
from fxgrad.errors import OptionError, UnhealthyError
from fxgrad.schema import RULES, Diagnosis

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["assert_healthy"]


def assert_healthy(  # noqa: PLR0913  # the model and its call, as of gradient_flow, and what counts
    model: nn.Module, args: Any = (), loss: Callable[[Any], Tensor] | str | None = None, *,
    kwargs: Mapping[str, Any] | None = None, thresholds: Thresholds | None = None, ignore: Iterable[str] = (),
) -> Diagnosis:  # fmt: skip
    """Run one forward and one backward pass of ``model``, and raise where a check finds an error or a warning.

    The model is given back as it was.  Seed it and its inputs yourself: a test should see the same numbers each time.

    Args:
        model: any module.
        args: positional arguments (a tuple), or the only one.
        loss: takes what the model returns and gives a scalar, or its name; None as of ``fxgrad.gradient_flow``.
        kwargs: keyword arguments.
        thresholds: other thresholds than the checks' own.
        ignore: names of checks whose findings are allowed, and with them what they explain.

    Returns:
        The diagnosis, in which may be findings that are information or ignored.

    Raises:
        UnhealthyError: an ``AssertionError`` that lists what is left, each with its source line.
        OptionError: ``ignore`` names no check.
        ModelError, InputError, CaptureError, WatchError: as of ``fxgrad.gradient_flow``.
    """
    __tracebackhide__ = True  # pytest shows the line of the test and not this one
    allowed = (ignore,) if isinstance(ignore, str) or not isinstance(ignore, Iterable) else tuple(ignore)
    flow = gradient_flow(model, args, kwargs, loss=loss)
    diagnosis = diagnose(flow, thresholds)
    _check_rules(allowed, {*RULES, *diagnosis.rules, *(one.rule for one in diagnosis.findings)})
    left = tuple(one for one in diagnosis.findings if one.severity != "info" and one.rule not in allowed)
    if left:
        words = f"the gradient of {flow.capture.model} is not healthy (loss: {flow.event.loss})"
        message = f"{words}\n{replace(diagnosis, findings=left)}"
        raise UnhealthyError(message)
    return diagnosis


def _check_rules(names: Iterable[Any], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4) or list(RULES)
            message = f"ignore={name!r}: there is no such check; near names are {', '.join(near)}"
            raise OptionError(message)
