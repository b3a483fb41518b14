"""The histogram of exponents of a gradient, on its device."""

from __future__ import annotations

import torch
from torch import Tensor

from fxgrad.schema.histogram import BINS, LOWEST


def write_histogram(gradient: Tensor, slot: Tensor) -> None:
    """Count the finite, non-zero moduli by exponent into ``slot`` of shape (64,); see ``fxgrad.schema.histogram``."""
    moduli = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).abs().reshape(-1)
    exponents: Tensor = torch.frexp(moduli).exponent  # of the power of two above the modulus
    bins = (exponents.to(torch.int64) - LOWEST).clamp_(0, BINS - 1)
    bins.masked_fill_(~torch.isfinite(moduli) | (moduli == 0), BINS)  # counted apart and left out
    counts = torch.zeros(BINS + 1, dtype=torch.int64, device=bins.device)
    slot.copy_(counts.scatter_add_(0, bins, torch.ones_like(bins))[:BINS])
