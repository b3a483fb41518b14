"""``python -m fxgrad``: the same command line as the ``fxgrad`` script."""

from __future__ import annotations

from fxgrad.cli import main

if __name__ == "__main__":
    main()
