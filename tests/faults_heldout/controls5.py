"""Healthy nets as people write them: nothing here deserves a warning."""

from __future__ import annotations

from tests.faults_heldout.controls2 import Lora
from tests.faults_heldout.nets import (
    GPT,
    lm,
    tokens,
)
from tests.faults_heldout.program import Case, healthy


@healthy("series", steps=12)
def lora_over_steps() -> Case:
    m = GPT(2).requires_grad_(False)
    for b in m.blocks:
        b.qkv = Lora(b.qkv)
    return Case(m, (tokens(),), lm(), trains=False)
