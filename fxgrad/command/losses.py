"""``--loss``: a name, or a callable that takes what the model returns and gives a scalar."""

from __future__ import annotations

from fxgrad.command.references import Asked, resolve
from fxgrad.errors import OptionError
from fxgrad.losses import NAMES, SHORT, Loss, named_loss, offer

__all__ = ["NAMES", "load_loss"]


def load_loss(words: str, seed: int) -> Loss:
    """The loss called ``words``: a name of ``fxgrad.losses``, ``package.module:name`` or ``file.py:name``.

    Raises:
        OptionError: there is no such loss.
    """
    if words in NAMES or words in SHORT:
        return named_loss(words, seed)
    asked = Asked(words, "--loss", OptionError)
    if ":" not in words:
        asked.refuse(f"is not a known loss. {offer(words)} Your own is written package.module:name or file.py:name")
    found = resolve(asked)
    if not callable(found):
        asked.refuse(f"is of type {type(found).__name__}, not a callable that takes the model's output")
    loss: Loss = found
    return loss
