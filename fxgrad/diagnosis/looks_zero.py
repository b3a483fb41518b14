"""Norms of 0, where only norms were measured: parameters that look as if they got exact zeros."""

from __future__ import annotations

from collections.abc import Iterator

from fxgrad.diagnosis.check import Draft, Evidence, listed
from fxgrad.schema import Finding

_PLAIN = 1e-10  # l2 norm of other gradients from which on one of 0 stands out


def looks_zero(evidence: Evidence) -> Iterator[Finding]:
    """Parameters with a norm of 0 in every flow, at a level that cannot tell zeros from what float32 cannot square."""
    rows = [{r.name: s for r in v.flow.parameters if (s := r.statistics) is not None} for v in evidence.views]
    quiet = [n for n, s in rows[-1].items() if s.level == "norm" and s.numel
             and all(n in row and row[n].l2_norm == 0 for row in rows)]  # fmt: skip
    largest = max((s.l2_norm for s in rows[-1].values()), default=0.0)
    if not quiet or not largest:
        return
    matrices = [name for name in quiet if len(evidence.view.parameters[name].shape) > 1]
    clear = evidence.several and bool(matrices) and largest > _PLAIN
    count = len(rows)
    draft = Draft(
        evidence, "zero", "warning" if clear else "info",
        f"the gradient of {listed(quiet)} has a norm of 0 in all {count} backward passes: it is exactly zero, or each "
        "of its entries lies below about 1e-23, whose square float32 cannot hold",
        "read again: what had a norm of 0 is measured in full from now on; or give statistics='full'",
        {"parameters": len(quiet), "backwards": count},
    )  # fmt: skip
    yield draft.at(None, parameter=(matrices or quiet)[0], affected=tuple(quiet))


__all__ = ["looks_zero"]
