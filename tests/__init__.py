"""Tests of fxgrad; a package, so that tests share helpers by ``from tests import oracle, models``."""
