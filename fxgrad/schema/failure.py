"""A backward pass that raised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Why a backward pass raised: what it needs was changed in place; the graph was freed by an earlier pass; the backward
#: of a custom function; code of the user's that it called (a hook); not known.
FailureCause = Literal["changed_in_place", "second_backward", "custom_function", "python", "unknown"]


@dataclass(frozen=True, slots=True)
class Failure:
    """How far a backward pass came that raised, in one forward call that it went through.

    Attributes:
        exception: name of the exception's type; None where fxgrad did not see it.
        message: its first line; None likewise.
        site: ``Site.id`` of the last site that a gradient reached; None where none was reached.
        node: key of the node at which it stopped; None where that lies in another forward call or outside of the model.
        cause: why.
        detail: the same in words.
        culprit: key of the node that is the cause: the one that changed a value; None where there is none.
        value: the value, parameter or buffer that was changed, or carried on; None where there is none.
    """

    exception: str | None
    message: str | None
    site: str | None
    node: str | None
    cause: FailureCause
    detail: str
    culprit: str | None = None
    value: str | None = None
