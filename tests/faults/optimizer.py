"""What the optimizer does not do, or does by itself, on six architectures each."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn

from tests.faults.bodies import BODIES, built
from tests.faults.healthy import HEALTHY
from tests.faults.program import HISTORY, Register

MISSES, IDLE, UNCLEARED = Register("misses"), Register("idle"), Register("uncleared")
ROUNDING, DECAY, SPOILT = Register("rounding"), Register("decay"), Register("spoilt")
PARTS = ("stem", "head", "mid", "norm", "conv", "blocks", "rnn", "mix", "graph")
ADAMW, ADAM, SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD


def everything(model):
    return ADAMW(model.parameters(), 3e-3)


def on_all(register, word, make, *expect, bodies=tuple(BODIES), **answer):
    """A program of each architecture; ``make(name)`` builds it."""
    for name in bodies:
        answer.setdefault("outside", True)
        register.add(f"{word}_{name}", functools.partial(make, name), expect, forms=HISTORY, **answer)


# ---- parameters that no optimizer has ------------------------------------------------------------------------------


def _head_replaced(model):
    optimizer = everything(model)
    model.head = copy.deepcopy(model.head)
    return optimizer


def _stem_replaced(model):
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    model.stem = copy.deepcopy(model.stem)
    return optimizer


def _only_the_head(model):
    return ADAM(model.head.parameters(), 1e-2)


def _of_a_copy(model):
    return everything(copy.deepcopy(model))


for _word, _make, _victims in (
    ("head_replaced_behind_the_optimizer", _head_replaced, ("head",)),
    ("stem_replaced_behind_the_optimizer", _stem_replaced, ("stem",)),
    ("only_the_head_is_handed_over", _only_the_head, ("stem",)),
    ("optimizer_of_a_copy", _of_a_copy, ("stem", "head")),
):
    on_all(MISSES, _word, functools.partial(built, optimizer=_make), "optimizer_misses",
           outside=False, culprits=PARTS, victims=_victims)  # fmt: skip


# ---- nothing moves -------------------------------------------------------------------------------------------------


def between(run, optimizer):
    for step in range(run.steps):
        run.loss_at(step).backward()
        optimizer.zero_grad()
        optimizer.step()


def between_to_zeros(run, optimizer):
    for step in range(run.steps):
        run.loss_at(step).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()


def never(run, optimizer):
    for step in range(run.steps):
        optimizer.zero_grad()
        run.loss_at(step).backward()


def clipped(limit):
    def loop(run, optimizer):
        for step in range(run.steps):
            optimizer.zero_grad()
            run.loss_at(step).backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), limit)
            optimizer.step()

    return loop


def scaled(run, optimizer):
    """Losses overflow in half precision whatever the scale, as a loss of infinite slope would."""
    for step in range(run.steps):
        optimizer.zero_grad()
        loss = run.loss_at(step)
        run.scaler.scale(loss * 1e37).backward()
        run.scaler.step(optimizer)
        run.scaler.update()


def _skipping(name):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    return built(name, everything, 20, loop=scaled, scaler=scaler)


_STILL = ("stem", "head")
on_all(IDLE, "rate_of_zero", lambda n: built(n, lambda m: ADAMW(m.parameters(), 0.0)), "optimizer_idle", victims=_STILL)
on_all(IDLE, "zero_grad_between", lambda n: built(n, lambda m: SGD(m.parameters(), 0.1), loop=between),
       "optimizer_idle", victims=_STILL)  # fmt: skip
on_all(IDLE, "zeros_between", lambda n: built(n, lambda m: ADAM(m.parameters(), 0.1), loop=between_to_zeros),
       "optimizer_idle", victims=_STILL)  # fmt: skip
on_all(IDLE, "never_stepped", lambda n: built(n, everything, loop=never), "optimizer_idle", victims=_STILL)
on_all(IDLE, "every_step_skipped", _skipping, "optimizer_idle", "nonfinite", victims=_STILL)
on_all(IDLE, "clipped_to_nothing", lambda n: built(n, lambda m: SGD(m.parameters(), 0.05), loop=clipped(1e-6)),
       "optimizer_idle", victims=_STILL)  # fmt: skip
on_all(IDLE, "clipped_below_epsilon", lambda n: built(n, lambda m: ADAM(m.parameters(), 1e-3), loop=clipped(1e-9)),
       "optimizer_idle", victims=_STILL)  # fmt: skip


# ---- gradients that are never cleared ------------------------------------------------------------------------------


def uncleared(run, optimizer):
    for step in range(run.steps):
        run.loss_at(step).backward()
        optimizer.step()


def uncleared_and_clipped(run, optimizer):
    for step in range(run.steps):
        run.loss_at(step).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        optimizer.step()


on_all(UNCLEARED, "sgd", lambda n: built(n, lambda m: SGD(m.parameters(), 0.1), loop=uncleared), "zero_grad_missing")
on_all(UNCLEARED, "adam", lambda n: built(n, everything, loop=uncleared), "zero_grad_missing")
on_all(UNCLEARED, "clipped", lambda n: built(n, everything, loop=uncleared_and_clipped), "zero_grad_missing")


# ---- rounding ------------------------------------------------------------------------------------------------------


def lowered(name, optimizer, dtype=torch.bfloat16):
    """The program in a low precision, ids left as they are."""
    run = built(name, optimizer)
    run.model.to(dtype)

    def batch(step):
        args, loss = BODIES[name][1](step)
        return tuple(a.to(dtype) if a.is_floating_point() else a for a in args), lambda out: loss(out.float())

    args, loss = batch(0)
    return type(run)(run.model, args, loss, optimizer, run.steps, batch)


on_all(ROUNDING, "adamw_of_fine_tuning", lambda n: lowered(n, lambda m: ADAMW(m.parameters(), 1e-6)), "update_lost",
       outside=False, culprits=("weight", "bias"))  # fmt: skip
on_all(ROUNDING, "sgd_in_half", lambda n: lowered(n, lambda m: SGD(m.parameters(), 1e-6), torch.float16),
       "update_lost", outside=False, culprits=("weight", "bias"))  # fmt: skip


# ---- decay ---------------------------------------------------------------------------------------------------------

on_all(DECAY, "decoupled", lambda n: built(n, lambda m: ADAMW(m.parameters(), 1e-3, weight_decay=400.0)),
       "weight_decay", outside=False, culprits=("weight",))  # fmt: skip
on_all(DECAY, "coupled", lambda n: built(n, lambda m: SGD(m.parameters(), 0.01, weight_decay=60.0)),
       "weight_decay", outside=False, culprits=("weight",))  # fmt: skip


# ---- the step itself makes it NaN ----------------------------------------------------------------------------------

on_all(SPOILT, "epsilon_is_zero_in_half", lambda n: lowered(n, lambda m: ADAM(m.parameters(), 1e-3), torch.float16),
       "nonfinite", outside=False, culprits=PARTS)  # fmt: skip


# ---- what looks like it --------------------------------------------------------------------------------------------


def accumulated(run, optimizer):
    for step in range(run.steps):
        (run.loss_at(step) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def cleared_behind_the_forward(run, optimizer):
    for step in range(run.steps):
        loss = run.loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def warmed_up(run, optimizer):
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n / 8))
    for step in range(run.steps):
        optimizer.zero_grad()
        run.loss_at(step).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        optimizer.step()
        schedule.step()


def decayed_to_zero(run, optimizer):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps // 2)
    for step in range(run.steps):
        optimizer.zero_grad()
        run.loss_at(step).backward()
        optimizer.step()
        if step < run.steps // 2:
            schedule.step()


def alternating(run, optimizers):
    for step in range(run.steps):
        optimizer = optimizers[step % 2]
        optimizer.zero_grad()
        run.loss_at(step).backward()
        optimizer.step()


def others(model):
    return [p for n, p in model.named_parameters() if not n.startswith("head")]


def two_of_which_one_is_given(model):
    model.other = torch.optim.SGD(model.head.parameters(), 0.05)
    return ADAM(others(model), 1e-3)


def both(run, optimizer):
    for step in range(run.steps):
        optimizer.zero_grad()
        run.model.other.zero_grad()
        run.loss_at(step).backward()
        optimizer.step()
        run.model.other.step()


def calibrated(run, optimizer):
    """The scale begins too high, and falls until nothing overflows."""
    for step in range(run.steps):
        optimizer.zero_grad()
        run.scaler.scale(run.loss_at(step) * 1e25).backward()
        run.scaler.step(optimizer)
        run.scaler.update()


def frozen_backbone(name):
    run = built(name, lambda m: ADAM(m.head.parameters(), 1e-2))
    for parameter in run.model.stem.parameters():
        parameter.requires_grad_(False)
    for other, parameter in run.model.named_parameters():
        parameter.requires_grad_(other.startswith("head"))
    return run


for _name in BODIES:
    for _word, _loop, _optimizer in (
        ("accumulated", accumulated, everything),
        ("cleared_behind_the_forward", cleared_behind_the_forward, everything),
        ("warmed_up_and_clipped", warmed_up, lambda m: SGD(m.parameters(), 0.05)),
        ("decayed_to_zero", decayed_to_zero, everything),
        ("alternating_optimizers", alternating,
         lambda m: [ADAM(m.head.parameters(), 1e-3), SGD(others(m), 0.01)]),
        ("one_of_two_optimizers_given", both, two_of_which_one_is_given),
    ):  # fmt: skip
        HEALTHY.add(f"{_word}_{_name}", functools.partial(built, _name, _optimizer, loop=_loop), forms=HISTORY)
    HEALTHY.add(f"frozen_backbone_{_name}", functools.partial(frozen_backbone, _name), forms=HISTORY)
    HEALTHY.add(
        f"usual_decay_{_name}",
        functools.partial(built, _name, lambda m: ADAMW(m.parameters(), 1e-2, weight_decay=0.1)),
        forms=HISTORY,
    )
    HEALTHY.add(
        f"bfloat16_{_name}", functools.partial(lowered, _name, lambda m: SGD(m.parameters(), 0.1)), forms=HISTORY
    )
    HEALTHY.add(
        f"clipped_as_usual_{_name}",
        functools.partial(built, _name, lambda m: SGD(m.parameters(), 0.1), loop=clipped(0.5)),
        forms=HISTORY,
    )
