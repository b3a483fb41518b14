"""The run file: the flows of a whole training run in one SQLite file, written while training, read meanwhile.

    ``RunFile``      writes one: ``RunFile.create(path)``, ``append(flow)``, ``note(step, notes)``, ``close()``
    ``open_run``     gives a ``Run``: the flows as a sequence, one step, one number over all steps, notes, findings

How a flow lies in it: ``numbers`` takes it apart into a prototype that most steps share and the numbers of the step;
``tables`` has the prototype once and a row of numbers for each step; ``blocks`` turns older rows into columns, so that
one number over all steps is read at once.  Nothing is lost: numbers are float64, counts exact up to 2**53.
"""

from __future__ import annotations

from fxgrad.run_file.reading import Run, Session, open_run
from fxgrad.run_file.writing import RunFile

__all__ = ["Run", "RunFile", "Session", "open_run"]
