"""What a rule may return, and what is said when it breaks that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxgrad
from fxgrad import rules
from fxgrad.errors import OptionError, RuleError
from fxgrad.rules import given, layers, nodes, parameters, steps
from tests.rewriting.nets import Three, batch, grads, make, same, train
from tests.test_cases import load

BAD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "shape": (lambda g: g.sum(0), r"shape \(4, 2\), float32 on cpu, or None, but returned shape \(2,\)"),
    "dtype": (lambda g: g.double(), r"float64"),
    "device": (lambda g: g.to("meta"), r"on meta"),
    "layout": (lambda g: g.to_sparse(), r"torch\.sparse_coo"),
    "tuple": (lambda g: (g,), "but returned tuple"),
    "number": (lambda _: 0.0, "but returned float"),
    "in place": (lambda g: g.mul_(2), "in place, which others may read"),
    "raises": (lambda g: g.no_such_thing, "raised AttributeError"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_at_a_node(kind: str, capture: Any) -> None:
    function, words = BAD[kind]
    model = make(Three)
    with (
        fxgrad.rewrite(model, rules.custom(function, nodes("fc1"), name="mine"), capture=capture),
        pytest.raises(RuleError, match=f"rule 'mine' .*{words}") as caught,
    ):
        model(batch(model)[0]).sum().backward()
    assert "'fc1'" in str(caught.value)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("per", ["step", "backward", "arrival"])
def test_at_a_parameter(kind: str, per: Any) -> None:
    function, _ = BAD[kind]
    model = make(Three)
    rule = rules.custom(function, parameters("fc1.weight", per=per), name="mine")
    with fxgrad.rewrite(model, rule), pytest.raises(RuleError, match=r"rule 'mine' .*fc1\.weight"):
        train(model, 1)


def test_the_cause_is_kept() -> None:
    model = make(Three)
    with fxgrad.rewrite(model, rules.custom(BAD["raises"][0], nodes("fc1"))), pytest.raises(RuleError) as caught:
        model(batch(model)[0]).sum().backward()
    assert isinstance(caught.value.__cause__, AttributeError)


def test_a_rule_that_raises_in_the_backward_pass_says_what_is_rewritten_already() -> None:
    model, x = make(Three), torch.randn(4, 1)

    def fails(g: Tensor) -> Tensor:
        raise ValueError("no")  # noqa: EM101

    made = [rules.scale(2.0, nodes("fc*")), rules.custom(fails, nodes("fc1"))]
    with fxgrad.rewrite(model, made), pytest.raises(RuleError, match=r"half of it rewritten: at fc3, fc2\. Clear the"):
        model(x).sum().backward()
    with fxgrad.rewrite(model, made[1]), pytest.raises(RuleError, match="No other site was rewritten"):
        model(x).sum().backward()


def test_a_rule_that_raises_at_a_layer_changes_no_layer() -> None:
    model = make(Three)

    def fails(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        raise ValueError("no")  # noqa: EM101

    made = [rules.scale(2.0, parameters()), rules.custom_layer(fails, layers(path="fc3"))]
    found = grads(model, torch.randn(4, 1))
    with fxgrad.rewrite(model, made) as rewrite:
        with pytest.raises(RuleError, match=r"'fails' raised ValueError at 'fc3': no.* No gradient of a parameter"):
            rewrite.apply()
        assert all(torch.equal(p.grad, found[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda d: list(d.values()), "must return a dict"),
        (lambda d: {"gain": d["bias"]}, r"some of the names \['bias', 'weight'\]"),
        (lambda d: {"bias": d["weight"]}, r"fc1\.bias"),
        (lambda d: {"bias": d["bias"].add_(1)}, r"fc1\.bias in place"),
    ],
)
def test_a_layer_rule_with_a_wrong_result(returned: Any, words: str) -> None:
    model = make(Three)
    grads(model, torch.randn(4, 1))
    with (
        fxgrad.rewrite(model, rules.custom_layer(returned, layers(path="fc1"), name="mine")) as rewrite,
        pytest.raises(RuleError, match=f"rule 'mine'.*{words}"),
    ):
        rewrite.apply()


def test_a_layer_rule_may_return_a_part_or_nothing() -> None:
    model = make(Three)
    found = grads(model, torch.randn(4, 1))
    part = rules.custom_layer(lambda d: {"bias": d["bias"] * 2, "weight": None})
    with fxgrad.rewrite(model, [part, rules.custom_layer(lambda _: None)]) as rewrite:
        rewrite.apply()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, found[name] * (2 if "bias" in name else 1))


# ---- order, composition, when ----------------------------------------------------------------------------------------


def test_rules_run_in_the_order_given_and_rewrites_compose() -> None:
    model, x = make(Three), torch.randn(4, 1)
    add, times = rules.custom(lambda g: g + 1, nodes("fc3")), rules.scale(10.0, nodes("fc3"))

    def bias(*several: list[rules.Rule]) -> float:
        rewrites = [fxgrad.rewrite(model, made) for made in several]
        found = grads(model, x)["fc3.bias"]
        for rewrite in rewrites:  # the first one goes first: the order of leaving is free
            rewrite.remove()
        assert "forward" not in model.__dict__
        return float(found)

    assert bias([add, times]) == 4 * 20
    assert bias([times, add]) == 4 * 11
    assert bias([add], [times]) == 4 * 20
    assert bias([times], [add]) == 4 * 11


def test_rules_of_one_name_are_numbered() -> None:
    model = make(Three)
    with fxgrad.rewrite(model, [rules.scale(2.0, nodes("fc1")), rules.scale(2.0, nodes("fc2"))]) as rewrite:
        grads(model, torch.randn(4, 1))
    assert [record.rule for record in rewrite.report().records] == ["scale(2)", "scale(2)#1"]


@pytest.mark.parametrize("where", [nodes("fc1"), parameters("fc1.weight"), layers(path="fc1")])
def test_from_and_until_a_step(where: Any) -> None:
    model = make(Three)
    with fxgrad.rewrite(model, rules.scale(2.0, where, steps(2, 4))) as rewrite:
        for want in (0, 0, 1, 2, 2):
            assert rewrite.step in range(5)
            train(model, 1)
            assert rewrite.report().records[0].ran == want
        rewrite.step = 3
        train(model, 1)
        assert rewrite.report().records[0].ran == 3
        with pytest.raises(OptionError, match="step must be"):
            rewrite.step = -1


def test_conditions_on_the_gradient() -> None:
    model, x = make(Three), torch.randn(4, 1)
    plain = grads(model, x)
    for limit, factor in ((0.0, 3.0), (1e9, 1.0)):
        when = given(lambda g, limit=limit: g.norm() > limit)
        with fxgrad.rewrite(model, rules.scale(3.0, nodes("fc3"), when)):
            assert torch.equal(grads(model, x)["fc3.bias"], plain["fc3.bias"] * factor)
    with fxgrad.rewrite(model, rules.scale(3.0, nodes("fc3"), given(lambda g: torch.arange(4).reshape(4, 1) < 2))):
        assert float(grads(model, x)["fc3.bias"]) == 3 + 3 + 1 + 1


def test_conditions_on_a_layer_and_both_at_once() -> None:
    model, x = make(Three), torch.randn(4, 1)
    large = given(lambda d: torch.stack([g.norm() for g in d.values()]).sum() > 1e-9)
    seen = given(lambda d: d["bias"].norm() > 1e9)
    for when, factor in ((large, 2.0), (large & seen, 1.0), (large & steps(5), 1.0)):
        found = grads(model, x)
        with fxgrad.rewrite(model, rules.scale(2.0, layers(path="fc3"), when)) as rewrite:
            rewrite.apply()
            assert torch.equal(model.fc3.weight.grad, found["fc3.weight"] * factor)


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (lambda g: g, r"must return a boolean tensor.*returned torch\.float32"),
        (lambda g: g.sum(0, keepdim=True).T > 0, r"broadcasts to \(4, 2\), but returned torch\.bool \(2, 1\)"),
        (lambda _: 1, "but returned int"),
        (lambda g: g.nothing, "condition of rule 'scale.2.' raised AttributeError"),
    ],
)
def test_bad_conditions(condition: Any, words: str) -> None:
    model = make(Three)
    with fxgrad.rewrite(model, rules.scale(2.0, nodes("fc1"), given(condition))), pytest.raises(RuleError, match=words):
        grads(model, torch.randn(4, 1))


@pytest.mark.parametrize(
    ("make_rule", "words"),
    [
        (lambda: rules.scale(float("nan"), nodes()), "factor must be a number"),
        (lambda: rules.scale("2", nodes()), "factor must be a number"),
        (lambda: rules.clip_by_norm(0.0, nodes()), "max_norm must be a number above 0"),
        (lambda: rules.custom("f", nodes()), "function must be callable"),
        (lambda: rules.add_noise(1.0, nodes(), seed=1.5), "seed must be a whole number"),
        (lambda: steps(3, 3), "stop must be above start=3"),
        (lambda: steps(-1), "start must be a whole number"),
        (lambda: nodes(3), "a path is text"),
        (lambda: nodes(module_type=3), "a module type is a class"),
        (lambda: layers(per="arrival"), "gradients do not arrive together"),
        (lambda: parameters(per="epoch"), "per='epoch' is not possible"),
    ],
)
def test_bad_options(make_rule: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make_rule()


def test_bad_places_and_audits() -> None:
    with pytest.raises(RuleError, match="is no selection"):
        fxgrad.rewrite(make(Three), rules.scale(2.0, "fc1"))  # type: ignore[arg-type]
    with pytest.raises(RuleError, match=r"select nodes\(\.\.\.\), not layers"):
        fxgrad.rewrite(make(Three), rules.straight_through(layers()))
    with pytest.raises(OptionError, match="'count', 'full'"):
        fxgrad.rewrite(make(Three), rules.scale(2.0, nodes()), audit="all")  # type: ignore[arg-type]
    for where, near in (
        (parameters("fc1.wieght"), r"'fc1\.weight'"), (layers(path="fc9"), "'fc1'"), (layers("Conv1d"), "2 names"),
        (rules.groups("body"), "3 names"),
    ):  # fmt: skip
        with pytest.raises(RuleError, match=f"Three has no such .*{near}"):
            fxgrad.rewrite(make(Three), rules.scale(2.0, where))


# ---- a public report (tests/cases/54) --------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_the_rule_contract_of_a_public_report(capture: Any) -> None:
    case = load("54_rule_contract")
    model, (x,), loss = case.build()
    plain = grads(model, x, loss)
    where = nodes(case.EXPECT["rewrite"]["where"])
    for function in (lambda g: g, lambda _: None):
        with fxgrad.rewrite(model, rules.custom(function, where), capture=capture):
            found = grads(model, x, loss)
            assert all(torch.equal(found[name], plain[name]) for name in plain)
    with fxgrad.rewrite(model, rules.custom(lambda g: g * 10, where), capture=capture):
        found = grads(model, x, loss)
    for name, ratio in case.EXPECT["rewrite_param_ratio"].items():
        assert float(found[name].norm() / plain[name].norm()) == pytest.approx(ratio, rel=1e-5)
    with (
        fxgrad.rewrite(model, rules.custom(lambda g: g.sum(0), where), capture=capture),
        pytest.raises(RuleError, match=r"'fc1' must return .*shape \(2, 4, 5\).* but returned shape \(4, 5\)"),
    ):
        grads(model, x, loss)


def test_rewriting_is_seen_by_the_optimizer() -> None:
    """In the style of public reports: a hook that reads ``.grad`` comes too early, a rule does not."""
    model, other = make(Three), make(Three)

    def by_hand(m: torch.nn.Module) -> None:
        for p in m.fc2.parameters():
            p.grad = p.grad * 0.1

    with fxgrad.rewrite(model, rules.scale(0.1, parameters("fc2.*"))):
        assert same(train(model), train(other, hand=by_hand))
    frozen = make(Three)
    before = [p.clone() for p in frozen.fc1.parameters()]
    with fxgrad.rewrite(frozen, rules.zero_out(nodes("fc1"))):
        x, y = batch(frozen)
        optimizer = torch.optim.SGD(frozen.parameters(), lr=0.1)
        F.mse_loss(frozen(x), y).backward()
        optimizer.step()
    assert all(map(torch.equal, frozen.fc1.parameters(), before))
