"""The ready rules of ``fxgrad.rewrite``, and where and when they act."""

from fxgrad.rewriting.rules import *  # noqa: F403  # the names are listed there, once
from fxgrad.rewriting.rules import __all__  # noqa: F401  # for `from fxgrad.rules import *`
