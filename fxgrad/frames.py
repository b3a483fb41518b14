"""Flows as tidy tables: a row for each value (or parameter) and step, a column for each statistic.

Plain rows and CSV need nothing besides Python; frames and Parquet need pandas.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import fields
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any, Literal, get_args

from fxgrad.errors import OptionError
from fxgrad.schema import GradientFlow, ParameterRecord, Site, Statistics

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLUMNS", "Of", "check_parquet", "rows", "to_csv", "to_pandas", "to_parquet"]

Of = Literal["values", "parameters"]
Row = dict[str, str | int | float | None]

_NO_COLUMNS = ("level", "numel", "exponent_histogram", "placement")
_STATISTICS = ("rms", *(f.name for f in fields(Statistics) if f.name not in _NO_COLUMNS))
#: The columns, in order: which step, what it is, and the statistics of its gradient.
COLUMNS = (
    "step", "key", "output", "module", "kind", "shape", "dtype", "source", "level", "numel", *_STATISTICS,
    "value_l2_norm", "value_rms",
)  # fmt: skip


def rows(flows: Sequence[GradientFlow], of: Of = "values") -> list[Row]:
    """A row for each value of each flow, or for each parameter; None stands for what was not measured.

    ``step`` is the number of the backward pass.  Statistics are those of the gradient; ``value_l2_norm`` and
    ``value_rms`` those of the value itself, where the forward pass was measured.

    Raises:
        OptionError: ``of`` is unknown.
    """
    if of not in get_args(Of):
        message = f"of must be {' or '.join(map(repr, get_args(Of)))}, but is {of!r}"
        raise OptionError(message)
    if of == "values":
        return [_site_row(flow, site) for flow in flows for site in flow.sites]
    return [_parameter_row(flow, record) for flow in flows for record in flow.parameters]


def _site_row(flow: GradientFlow, site: Site) -> Row:
    kind = site.node.module_type if site.op == "call_module" else site.op.removeprefix("call_")
    head = (flow.event.backward, site.key, site.output_position, site.module_path, kind)
    tail = (_shape(site.shape), site.dtype, site.source)
    return _row((*head, *tail), site.statistics, site.value)


def _parameter_row(flow: GradientFlow, record: ParameterRecord) -> Row:
    head = (flow.event.backward, record.name, "", record.name.rpartition(".")[0], "parameter")
    return _row((*head, _shape(record.shape), record.dtype, None), record.statistics, record.value)


def _row(head: tuple[str | int | None, ...], gradient: Statistics | None, value: Statistics | None) -> Row:
    measured: list[Any] = [getattr(gradient, name, None) for name in ("level", "numel", *_STATISTICS)]
    own = [getattr(value, name, None) for name in ("l2_norm", "rms")]
    return dict(zip(COLUMNS, (*head, *measured, *own), strict=True))


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def to_csv(flows: Sequence[GradientFlow], of: Of = "values") -> str:
    """The rows as CSV with a line of names; an empty cell is what was not measured."""
    buffer = StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(flows, of))
    return buffer.getvalue()


def to_pandas(flows: Sequence[GradientFlow], of: Of = "values") -> pd.DataFrame:
    """The rows as a frame.

    Raises:
        OptionError: ``of`` is unknown, or pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        message = "to_pandas() needs pandas: pip install 'fxgrad[pandas]'; to_csv() needs nothing"
        raise OptionError(message) from error
    frame: pd.DataFrame = pandas.DataFrame(rows(flows, of), columns=list(COLUMNS))
    return frame


def check_parquet(asked: str) -> None:
    """Find out before the work whether Parquet could be written.

    Raises:
        OptionError: pandas or pyarrow is not installed; ``asked`` says what for.
    """
    for name in ("pandas", "pyarrow"):
        if importlib.util.find_spec(name) is None:
            message = f"{asked}: Parquet needs {name} (pip install 'fxgrad[pandas]'); .csv needs nothing"
            raise OptionError(message)


def to_parquet(flows: Sequence[GradientFlow], of: Of = "values") -> bytes:
    """The rows as a Parquet file.

    Raises:
        OptionError: ``of`` is unknown, or pandas and pyarrow are not installed.
    """
    check_parquet("to_parquet()")
    buffer = BytesIO()
    to_pandas(flows, of).to_parquet(buffer)
    return buffer.getvalue()
