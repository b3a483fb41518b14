"""The errors of fxgrad: ``FxgradError`` and one subclass per misuse, each also a fitting builtin."""

from __future__ import annotations


class FxgradError(Exception):
    """Base of all errors that fxgrad raises on purpose.

    The message says what was asked, where, what was found and what to try.
    """


class CaptureError(FxgradError, RuntimeError):
    """A front end cannot capture this model faithfully."""


class ModelError(FxgradError, RuntimeError):
    """The model or the loss raised, or gave nothing to differentiate; ``__cause__`` holds the original error."""


class NothingToDifferentiateError(ModelError):
    """Nothing that the loss depends on requires a gradient."""


class OptionError(FxgradError, ValueError):
    """An option has a value that is not one of the allowed ones."""


class InputError(FxgradError, ValueError):
    """The arguments for the model, or their description on the command line, cannot be used."""


class TargetError(FxgradError, LookupError):
    """A TARGET on the command line does not lead to a model."""


class SiteNotFoundError(FxgradError, KeyError):
    """No site with that id, key or name is in the flow."""

    def __str__(self) -> str:
        """The message itself: KeyError would show its repr."""
        return str(self.args[0]) if self.args else ""


class NoFlowError(FxgradError, LookupError):
    """A flow was asked for before a backward pass was recorded."""


class FlowFileError(FxgradError, ValueError):
    """A file is not a flow, is damaged, or was written by a newer version."""


class RunFileError(FxgradError, OSError):
    """A run file cannot be written or read, is something else or damaged, or was written by a newer version."""


class GraphvizMissingError(FxgradError, ImportError):
    """No Graphviz engine is installed, so that no picture can be laid out."""


class MissingPackageError(FxgradError, ImportError):
    """A package that an integration is for is not installed."""


class WatchError(FxgradError, RuntimeError):
    """A model cannot be watched in this way, or the watch was already removed."""


class RanksError(FxgradError, TimeoutError):
    """Some ranks of a distributed run did not answer in time, or asked for something else.

    Attributes:
        ranks: which did not answer, where that is known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class RuleError(FxgradError, ValueError):
    """A rewrite rule cannot be applied: it selects nothing, broke its contract, or raised (then see ``__cause__``)."""


class FindingWarning(UserWarning):
    """What ``fxgrad.watch(limits=...)`` warns with where it was given no ``on_finding``."""


class LogWarning(UserWarning):
    """What ``fxgrad.watch(log_to=...)`` warns with where a log failed, which gets no more entries."""


class UnhealthyError(FxgradError, AssertionError):
    """``fxgrad.testing.assert_healthy`` found an error or a warning; the message lists them."""
