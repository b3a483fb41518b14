"""Every fault is real and every control healthy, shown in plain torch: the library takes no part here."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.faults import traps_more
from tests.faults.catalogue import FAULTS, HEALTHY, PROGRAMS, TRAPS, UNSEEN
from tests.faults.counts import counted
from tests.faults.places import plain_step, trains
from tests.faults.program import SEEDS, Built, Program
from tests.faults.replay import Call, calls_of, gain, origins, ran

#: In the sweep: these check the programs themselves, which change when somebody changes them only.
pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore")]  # torch warns of some of the faults itself
IDLE = ("experts.3",)  # the one control with a module that is left out on purpose


def named(programs: Any, *kinds: str) -> list[Any]:
    return [pytest.param(p, id=f"{p.kind}-{p.name}") for p in programs if not kinds or p.kind in kinds]


def step(built: Built) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and parameter gradients of one step, in double precision."""
    loss = built.loss(built.model(*built.args))
    loss.backward()
    return loss.item(), {
        name: None if p.grad is None else p.grad.to_dense().to(torch.complex128 if p.is_complex() else torch.float64)
        for name, p in built.model.named_parameters()
        if p.requires_grad
    }


def of_victims(program: Program, gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    found = {name: g for name, g in gradients.items() if name.startswith(program.victims)}
    assert found, f"no parameter of {program.name} begins with one of {program.victims}"
    return found


def arrivals(calls: list[Call]) -> list[float]:
    """L2 norm of the gradient at the output of each call that got one, in the order of the calls."""
    return [next(iter(c.arrived.values())).double().norm().item() for c in calls if c.arrived]


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 60 and len(TRAPS) >= 50 and len(HEALTHY) >= 45
    assert len({p.name for p in PROGRAMS}) == len(PROGRAMS)
    for kind in {p.kind for p in PROGRAMS}:
        halves = [p.half for p in PROGRAMS if p.kind == kind]
        assert abs(halves.count("tune") - halves.count("report")) <= 1


def test_there_are_six_of_each_kind() -> None:
    few = {kind: count for kind, count in counted().items() if count < 6}
    assert few.keys() <= {"unused"}, few


@pytest.mark.parametrize("program", named(UNSEEN))
def test_plain_torch_says_the_same_of_a_program_with_a_proof_of_its_own(program: Program) -> None:
    built = program.build(0)
    torch.manual_seed(program.seed_offsets[1])
    assert program.real is None or program.real(plain_step(built))
    assert program.expect or not built.trains or trains(built)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named([p for p in PROGRAMS if p.proof is not None]))
def test_a_run_in_plain_torch_shows_what_a_program_says_of_itself(program: Program, seed: int) -> None:
    built = program.build(seed)
    torch.manual_seed(seed)
    assert program.proof is not None and program.proof(ran(built))


@pytest.mark.parametrize("program", named(PROGRAMS))
def test_a_seed_gives_the_same_program_each_time(program: Program) -> None:
    first, second = (program.build(1) for _ in range(2))
    pairs = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first.args, second.args, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(TRAPS))
def test_a_trap_springs_at_the_operation_that_is_said(
    program: Program, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traps_more, "checkpoint", lambda function, *args, **_: function(*args))
    found = origins(program.build(seed))
    loss, gradients = step(program.build(seed))
    assert not math.isfinite(loss) or any(g is not None and not g.isfinite().all() for g in gradients.values())
    if program.outside:
        assert found == []
    elif program.name.startswith("own_function"):  # no torch function: seen by what its neighbours send and get
        before, behind = (c.arrived[0].isfinite().all() for c in calls_of(program.build(seed)) if c.name == "linear")
        assert found == [] and behind and not before
    else:
        modules = [w for w in program.culprits if w.startswith("blocks.")]
        assert program.blames(found[0], *modules), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "vanishing"))
def test_vanishing_gradients_lose_four_decades(program: Program, seed: int) -> None:
    norms = arrivals(calls_of(program.build(seed)))
    assert norms[0] < 1e-4 * norms[-1]
    assert all(g is not None and g.isfinite().all() for g in step(program.build(seed))[1].values())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "exploding"))
def test_exploding_gradients_gain_three_decades(program: Program, seed: int) -> None:
    norms = arrivals(calls_of(program.build(seed)))
    assert max(norms[:3]) > 1e3 * norms[-1] and all(map(math.isfinite, norms))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "scale"))
def test_a_scale_break_is_one_call_or_the_loss(program: Program, seed: int) -> None:
    calls = calls_of(program.build(seed))
    if program.outside:
        entered = calls[-1].arrived[0].double().square().mean().sqrt() * calls[-1].arrived[0].numel()
        assert not 1e-6 < entered / len(calls[-1].arrived[0]) < 1e4
        return
    guilty = [c for c in calls if c.arrived and not 1e-3 < gain(c) < 1e3]
    assert guilty and all(program.blames(c.name, *program.culprits) for c in guilty)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named([p for p in FAULTS if "history" in p.forms and len(p.forms) == 2], "dead"))
def test_dead_units_get_no_gradient(program: Program, seed: int) -> None:
    suffering = of_victims(program, step(program.build(seed))[1])
    rows = [g.flatten(1).abs().sum(1) for g in suffering.values() if g is not None and g.ndim > 1]
    assert rows and all((r == 0).double().mean() > 0.5 for r in rows)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "zero"))
def test_zero_gradients_are_exact_zeros(program: Program, seed: int) -> None:
    suffering = of_victims(program, step(program.build(seed))[1])
    assert all(g is not None and not g.any() for g in suffering.values())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "saturated"))
def test_saturated_activations_pass_next_to_nothing(program: Program, seed: int) -> None:
    calls = [c for c in calls_of(program.build(seed)) if c.name in {"sigmoid", "tanh", "softmax", "clamp"}]
    assert min(gain(c) for c in calls if c.arrived and c.arrived[0].any()) < 0.25
    assert min(slope(c) for c in calls) < 0.12


def slope(call: Call) -> float:
    """Mean derivative; for a softmax the mean of what its largest entry leaves to the others."""
    out = call.outputs[0].detach().double()
    if call.name == "softmax":
        return 1 - (out.square().sum() / out.sum()).item()
    return (
        {"sigmoid": out * (1 - out), "tanh": 1 - out * out, "clamp": (out.abs() < 1).double()}[call.name].mean().item()
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "detached", "unused"))
def test_cut_parameters_get_none(program: Program, seed: int) -> None:
    _, gradients = step(program.build(seed))
    assert {name for name, g in gradients.items() if g is None} == set(of_victims(program, gradients))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "unregistered"))
def test_the_loss_reaches_parameters_that_the_model_does_not_list(program: Program, seed: int) -> None:
    built = program.build(seed)
    loss = built.loss(built.model(*built.args))
    loss.backward()
    listed = {id(p) for p in built.model.parameters()}
    others = [leaf for leaf in leaves_of(loss) if id(leaf) not in listed]
    assert others and all(leaf.grad is not None and leaf.grad.any() for leaf in others)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "cancelled"))
def test_cancelled_parts_leave_rounding_and_the_value_changes_nothing(program: Program, seed: int) -> None:
    built = program.build(seed)
    _, gradients = step(built)
    victims = of_victims(program, gradients)
    usual = max(g.norm() for g in gradients.values() if g is not None)
    assert all(g is not None and g.norm() < 1e-5 * usual for g in victims.values())
    loss = built.loss(built.model(*built.args))
    with torch.no_grad():
        for name, parameter in built.model.named_parameters():
            if name in victims:
                parameter.mul_(1.01)
    torch.testing.assert_close(built.loss(built.model(*built.args)), loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "double_activation"))
def test_a_loss_that_applies_an_activation_is_given_values_between_0_and_1(
    program: Program, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, seen = program.build(seed), []
    for name in ("cross_entropy", "binary_cross_entropy_with_logits"):
        real = getattr(torch.nn.functional, name)
        monkeypatch.setattr(
            torch.nn.functional,
            name,
            lambda given, *rest, real=real, **more: (seen.append(given), real(given, *rest, **more))[1],
        )
    built.loss(built.model(*built.args))
    assert len(seen) == 1
    assert seen[0].min() >= 0 and seen[0].max() <= 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "target_range"))
def test_a_squared_error_is_far_above_the_size_of_the_outputs(program: Program, seed: int) -> None:
    built = program.build(seed)
    out = built.model(*built.args)
    out.retain_grad()
    built.loss(out).backward()
    shares = [out.numel() / 2, 1 / 2]  # of a mean, of a sum
    distance = out.grad.double().square().mean().sqrt() * (shares[1] if "summed" in program.name else shares[0])
    assert distance > 1.5 * max(1.0, out.double().abs().max().item())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "advice"))
def test_the_remedy_is_one(program: Program, seed: int) -> None:
    (mended,) = [one for one in HEALTHY if one.name == f"{program.name}_mended"]
    assert sick(program.build(seed)) or spread(program.build(seed)) > spread(mended.build(seed)) + 1
    assert not sick(mended.build(seed))


def spread(built: Built) -> float:
    """Decades between the largest and the smallest gradient that arrives at a call."""
    norms = [norm for norm in arrivals(calls_of(built)) if norm > 0]
    return math.log10(max(norms) / min(norms)) if norms and all(map(math.isfinite, norms)) else math.inf


def sick(built: Built) -> str:
    """What is wrong with two steps of a program, in a word: non-finite, missing, far apart or far too large."""
    optimizer = built.optimized()
    for number in range(2):
        args, loss_of = built.at(number)
        optimizer.zero_grad()
        loss_of(built.model(*args)).backward()
        gradients = [p.grad for p in built.model.parameters()]
        if any(g is None for g in gradients):
            return "missing"
        if any(not g.isfinite().all() for g in gradients):
            return "non-finite"
        matrices = [p for p in built.model.parameters() if p.ndim > 1]
        sizes = [p.grad.double().norm().item() for p in matrices]
        if not min(sizes) > 2e-4 * max(sizes) or max(sizes) > 100:
            return "far apart or large"
        before = [p.detach().clone() for p in matrices]
        optimizer.step()
        if any(not (p - b).norm() < b.norm() for p, b in zip(matrices, before, strict=True)):
            return "steps too large"
    return ""


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The tensors whose ``.grad`` a backward pass fills."""
    queue, seen, found = [loss.grad_fn], set(), []
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        queue += [one for one, _ in node.next_functions]
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "underflow"))
def test_underflow_is_gone_in_single_precision(program: Program, seed: int) -> None:
    built = program.build(seed)
    half = of_victims(program, step(built)[1])
    exact = copy.deepcopy(built.model).float()
    exact.zero_grad()
    args = tuple(a.float() if a.is_floating_point() else a for a in built.args)
    with torch.autocast("cpu", enabled=False), warnings.catch_warnings():
        full = step(Built(_without_autocast(exact), args, built.loss))[1]
    assert all((g == 0).double().mean() > 0.4 for g in half.values() if g is not None and g.ndim > 1)
    assert all((full[name] == 0).double().mean() < 0.6 for name in half)
    assert sum((full[n] == 0).sum() for n in half) < 0.5 * sum((g == 0).sum() for g in half.values() if g is not None)


def _without_autocast(model: torch.nn.Module) -> torch.nn.Module:
    """The autocast region of one program runs in single precision where its inputs are double."""
    if any(type(m).__name__ == "Region" for m in model.modules()):
        model.forward = lambda x: model.head(model.mid(torch.tanh(model.stem(x))))  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", named(FAULTS, "training"))
def test_training_shows_it_in_time(program: Program, seed: int) -> None:
    built = program.build(seed)
    optimizer = built.optimized()
    norms, moves = [], []
    for number in range(built.steps):
        args, loss = built.at(number)
        optimizer.zero_grad()
        loss(built.model(*args)).backward()
        before = [p.detach().clone() for p in built.model.parameters()]
        norms.append(max(p.grad.double().norm().item() for p in built.model.parameters() if p.grad is not None))
        optimizer.step()
        moves += [
            ((p - b).norm() / b.norm()).item()
            for p, b in zip(built.model.parameters(), before, strict=True)
            if b.ndim > 1
        ]
    best = program.expect[0]
    if best == "spike":
        usual = sorted(norms)[len(norms) // 2]
        assert max(norms) > 20 * usual and sum(n > 20 * usual for n in norms) == 1
    elif best in {"update_size", "weight_decay"}:
        assert max(m if math.isfinite(m) else math.inf for m in moves) > 1
    else:
        assert best == "optimizer_epsilon" and built.optimizer is not None
        largest = max(p.grad.double().square().mean().sqrt().item() for p in built.model.parameters())
        assert largest < 10 * optimizer.param_groups[0]["eps"]


def test_the_unit_that_dies_in_training_is_alive_before() -> None:
    (program,) = [p for p in FAULTS if p.name == "killed_by_one_step"]
    for seed in SEEDS:
        built = program.build(seed)
        optimizer, dead = built.optimized(), []
        for number in range(built.steps):
            args, loss = built.at(number)
            hidden = built.model.net[:4](built.args[0])
            dead.append((hidden <= 0).all(0).double().mean().item())
            optimizer.zero_grad()
            loss(built.model(*args)).backward()
            optimizer.step()
        assert max(dead[:2]) < 0.3 and min(dead[5:]) > 0.7


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in SEEDS[1:])])
@pytest.mark.parametrize("program", named(HEALTHY))
def test_a_control_has_a_gradient_everywhere_and_trains_on(program: Program, seed: int) -> None:
    built = program.build(seed)
    loss, gradients = step(program.build(seed))
    assert math.isfinite(loss)
    for name, gradient in gradients.items():
        assert name.startswith(IDLE) or gradient is not None or program.proof is not None, name
        assert gradient is None or gradient.isfinite().all(), name
    built.train(built.optimized())
    assert all(p.isfinite().all() for p in built.model.parameters())
