"""All programs of the suite."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.faults import (
    advice,
    advice_nets,
    advice_steps,
    always_zero,
    cancelled,
    causes,
    dead,
    detached,
    exploding,
    healthy,
    healthy_layers,
    healthy_losses,
    healthy_models,
    healthy_nets,
    healthy_noise,
    healthy_parameters,
    healthy_practice,
    healthy_tasks,
    healthy_training,
    healthy_zeros,
    losses,
    optimizer,
    practice,
    saturated,
    scale,
    training,
    traps,
    traps_more,
    traps_nets,
    underflow,
    unregistered,
    vanishing,
    zero,
)  # fmt: skip
from tests.faults.places import UNSEEN as PLACED
from tests.faults.program import Program, Register

for _file in sorted(Path(__file__).parent.glob("*.py")):
    if not _file.stem.startswith("test_") and "tests.faults.places import" in _file.read_text(encoding="utf-8"):
        importlib.import_module(f"tests.faults.{_file.stem}")  # registers its programs

REGISTERS: tuple[Register, ...] = (
    vanishing.VANISHING, exploding.EXPLODING, scale.SCALE, dead.DEAD, zero.ZERO, saturated.SATURATED,
    detached.DETACHED, detached.UNUSED, underflow.UNDERFLOW, training.TRAINING, unregistered.UNREGISTERED,
    always_zero.STUCK, always_zero.UNFED, always_zero.CUT, always_zero.SINGLE, always_zero.UNROUTED,
    optimizer.MISSES, optimizer.IDLE, optimizer.UNCLEARED, optimizer.ROUNDING, optimizer.DECAY, optimizer.SPOILT,
    losses.TWICE, losses.TARGETS, cancelled.CANCELLED, advice.ADVICE, practice.PRACTICE, causes.CAUSES,
    traps.TRAPS, healthy.HEALTHY,
)  # fmt: skip
PROGRAMS: tuple[Program, ...] = tuple(program for register in REGISTERS for program in register.programs)
UNSEEN: tuple[Program, ...] = tuple(PLACED.programs)
TRAPS = tuple(program for program in PROGRAMS if program.kind == "traps")
HEALTHY = tuple(program for program in PROGRAMS if not program.expect)
FAULTS = tuple(program for program in PROGRAMS if program.expect and program.kind != "traps")
__all__ = [
    "FAULTS", "HEALTHY", "PROGRAMS", "REGISTERS", "TRAPS", "UNSEEN",
    # imported for what they register
    "advice_nets", "advice_steps",
    "healthy_layers", "healthy_losses", "healthy_models", "healthy_nets", "healthy_noise", "healthy_parameters",
    "healthy_practice",
    "healthy_tasks", "healthy_training", "healthy_zeros", "traps_more", "traps_nets",
]  # fmt: skip
