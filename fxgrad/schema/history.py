"""The flows of a training run, oldest first."""

from __future__ import annotations

from fxgrad.schema.flow import GradientFlow
from fxgrad.schema.late import late

__all__ = ["History"]


class History(tuple[GradientFlow, ...]):
    """A tuple of flows, oldest first, that reads as one line for each of them."""

    __slots__ = ()

    def __repr__(self) -> str:
        """How many there are, and which."""
        if not self:
            return "History(no flow yet)"
        first, last = self[0].event.backward, self[-1].event.backward
        return f"History({len(self)} flows of {self[-1].capture.model[:40]}, backward {first} to {last})"

    def __str__(self) -> str:
        """A line for each backward pass: what went in at the loss side, what came to the inputs, and NaN or Inf."""
        text: str = late("fxgrad.render.lines", "history_text")(self)
        return text
