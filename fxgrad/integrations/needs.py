"""The packages that integrations are for, none of which fxgrad requires."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fxgrad.errors import MissingPackageError

__all__ = ["needing"]


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Imports inside of it are those of an extra.

    Raises:
        MissingPackageError: one fails.
    """
    try:
        yield
    except ImportError as error:
        message = f"fxgrad.integrations.{what} cannot be used: {error}. Install it with pip install 'fxgrad[{extra}]'"
        raise MissingPackageError(message) from error
