"""Where NaN and Inf come from: a parameter, an operation in the forward or the backward pass, or the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan
from typing import Literal

from fxgrad.diagnosis.advice import is_multiplied, of_nonfinite, of_nonfinite_loss
from fxgrad.diagnosis.causes import Cause
from fxgrad.diagnosis.check import Draft, Evidence, LackingError, listed
from fxgrad.diagnosis.spoilt import spoilt_by_step
from fxgrad.diagnosis.view import FlowView
from fxgrad.schema import Edge, Finding, Severity, Site, Statistics

_State = Literal["clean", "masked", "bad"]
#: What writes a constant into a tensor, and so may write an infinite one on purpose.
_WRITES = frozenset({
    "masked_fill", "where", "full", "full_like", "new_full", "tensor", "scalar_tensor", "fill", "setitem", "index_fill",
    "nan_to_num", "pad", "masked_scatter", "zeros", "new_tensor", "index_put", "copy", "clone", "detach", "to", "float",
})  # fmt: skip
#: What a mask of -inf is made for.
_TAKES_MASKS = frozenset({
    "softmax", "log_softmax", "logsumexp", "attention", "masked_fill", "add", "sub", "where", "mul", "max", "amax",
    "cross_entropy", "nll_loss", "logaddexp", "logcumsumexp",
})  # fmt: skip
#: Risky where several consumers of a value could have sent the bad part, in this order.
_SUSPECTS = ("sqrt", "norm", "log", "div", "pow", "acos", "asin", "std", "exp", "softmax", "logsumexp", "atan2")


def bad(statistics: Statistics | None) -> bool:
    """Whether an entry is NaN or Inf, as far as the level can tell."""
    return statistics is not None and bool(statistics.nonfinite)


def may_be_bad(statistics: Statistics | None) -> bool:
    """Whether an entry is NaN or Inf, or the level cannot tell."""
    return statistics is not None and statistics.nonfinite is not False


def nonfinite(evidence: Evidence) -> Iterable[Finding]:
    """Findings of the first flow that has a non-finite gradient, parameter or harmful value, or a step that made one.

    Blamed in the forward pass is a node with finite inputs and a non-finite output; in the backward pass one whose
    outputs got a finite gradient and that sends back a non-finite part.  Infinite values that were written on purpose
    (masks, buffers with -inf) count as finite.
    """
    for view in evidence.views:
        found = list(_Origin(evidence, view).findings())
        if all(finding.severity == "info" for finding in found):
            found += spoilt_by_step(evidence, view)
        if any(finding.severity != "info" for finding in found) or (found and view is evidence.view):
            return found
    if all(view.flow.event.level == "norm" for view in evidence.views) and any(
        site.statistics is not None and site.statistics.nonfinite is None for site in evidence.view.flow.sites
    ):
        message = "at statistics='norm' an Inf may be the accumulator's; the site is measured in full in the next step"
        raise LackingError(message)
    return ()


@dataclass(slots=True)
class _Place:
    """A node to blame."""

    key: str
    statistics: Statistics | None
    kind: Literal["forward", "backward"]
    edge: Edge | None = None
    sure: bool = True


class _Origin:
    """The search in one flow."""

    def __init__(self, evidence: Evidence, view: FlowView) -> None:
        self.evidence = evidence
        self.view = view
        self.flow = view.flow

    def findings(self) -> Iterator[Finding]:
        """All independent origins, nearest to the loss first."""
        stored = self._stored()
        if stored is not None:
            yield stored
            if stored.severity == "error":
                return
        forward, backward = self._forward(), self._backward()
        for place in forward:
            yield self._at_forward(place)
        explained = set().union(*({p.key, *self.view.behind(p.key)} for p in forward)) if forward else set()
        touched = {key for key in explained if self._touched(key)}
        rest = [place for place in backward if place.key not in touched]
        harm = self._affected() or any(bad(s.statistics) for s in self.flow.sites if s.op == "placeholder")
        for place in rest:
            found = self._at_backward(place)
            yield found if harm else replace(found, severity="info")
        if not forward and not backward:
            yield from self._seed()
        if not forward and not rest:
            yield from self._contained()

    def _touched(self, key: str) -> bool:
        """Whether bad values go into a node or come out of it."""
        inputs = (self.states.get(e.producer + e.output_position) for e in self.view.takes[key])
        return "bad" in {*inputs, *(self.states.get(site.id) for site in self.view.sites[key])}

    # ---- what was bad before the step ----------------------------------------------------------------------------

    def _stored(self) -> Finding | None:
        """What held NaN or Inf when the forward began; information where nothing came of it."""
        names = [r.name for r in self.flow.parameters if r.value is not None and self._spoilt(r.value, r.requires_grad)]
        names += [b.name for b in self.flow.buffers if self._spoilt(b.value, trained=False)]
        takers = [node.key for node in self.flow.nodes if set(names).intersection(node.parameters)]
        if not names:
            return None
        if not any(self._touched(key) or self._bad_gradient(key) for key in takers):
            draft = Draft(self.evidence, "nonfinite", "info", f"{listed(names)} holds NaN or Inf; nothing came of it",
                          "nothing, where these entries are never used", {"parameters": len(names)})  # fmt: skip
            return draft.at(None, view=self.view, parameter=names[0], confidence="exact")
        draft = Draft(
            self.evidence, "nonfinite", "error",
            f"{listed(names)} held NaN or Inf before this forward began; nothing in this step made it",
            "look at the step before: a too large update (lower the learning rate, clip gradients) or a gradient that "
            "was non-finite already. Restart from a checkpoint: it doesn't heal by itself.",
            {"parameters": len(names)},
        )  # fmt: skip
        return draft.at(None, view=self.view, parameter=names[0], affected=tuple(names), confidence="exact")

    @staticmethod
    def _spoilt(value: Statistics, trained: bool) -> bool:  # noqa: FBT001  # of the record
        """NaN, or Inf in what is trained: a table or mask that is never trained may hold Inf on purpose."""
        return bool(value.nan_count or (trained and value.inf_count))

    # ---- the forward pass ------------------------------------------------------------------------------------------

    @cached_property
    def states(self) -> dict[str, _State]:
        """By site id; empty without forward statistics."""
        return self._walk[0]

    @cached_property
    def _walk(self) -> tuple[dict[str, _State], list[_Place]]:
        states: dict[str, _State] = {}
        origins: list[_Place] = []
        infinite = {b.name for b in self.flow.buffers if b.value.inf_count}
        for node in self.flow.nodes if self.flow.event.values else ():
            inputs = {states.get(e.producer + e.output_position, "clean") for e in self.view.takes[node.key]}
            if infinite.intersection(node.parameters):
                inputs.add("masked")
            worst: _Place | None = None
            for site in self.view.sites[node.key]:
                states[site.id] = state = self._state(site, inputs)
                if state == "bad" and "bad" not in inputs:
                    worst = worst or self._blamed(node.key, site, states)
            if worst is not None:
                origins.append(worst)
        return states, origins

    def _blamed(self, key: str, site: Site, states: dict[str, _State]) -> _Place:
        """Who made the first bad value: the node; or the origin of infinite entries that were no mask to it."""
        masked = [k for k in self.view.before(key) if any(states.get(s.id) == "masked" for s in self.view.sites[k])]
        if not masked or self.view.kinds[key] in _TAKES_MASKS:
            return _Place(key, site.value, "forward")
        emptied = next((k for k in masked if self.view.kinds[k] == "logsumexp"), None)
        given = next((k for k in masked if self.view.nodes[k].op == "placeholder"), None)
        source = emptied or given
        return _Place(source or key, self.view.sites[source][0].value if source else site.value, "forward")

    def _state(self, site: Site, inputs: set[_State]) -> _State:
        value = site.value
        if value is None:
            return "bad" if "bad" in inputs else "clean"
        if value.nan_count:
            return "bad"
        if not value.inf_count:
            return "clean"
        if "bad" in inputs:
            return "bad"
        if "masked" in inputs or site.op == "placeholder":
            return "masked"
        kind = self.view.kinds[site.key]
        constants = [c.number for c in site.node.constants if c.number is not None]
        written = kind in _WRITES and (any(abs(c) == float("inf") for c in constants) or not self.view.takes[site.key])
        written |= kind == "log" and self.view.blind.get(site.id) == "no_grad_required"  # of a table of 0 and 1
        return "masked" if written else "bad"

    def _forward(self) -> list[_Place]:
        """The forward origins that do harm: their bad values reach the outputs or a gradient."""
        harmful = []
        hurt = {key for key in self.view.nodes if self._touched(key) and self._bad_gradient(key)}
        out = {
            e.producer + e.output_position for e in self.flow.edges if self.view.nodes[e.consumer.key].op == "output"
        }
        ends = {value.partition("[")[0] if value not in self.view.by_id else self.view.by_id[value].key
                for value in out if self.states.get(value) == "bad"}  # fmt: skip
        for place in self._walk[1]:
            behind = {place.key, *self.view.behind(place.key)}
            if behind & ends or behind & hurt:
                harmful.append(place)
        return harmful

    def _bad_gradient(self, key: str) -> bool:
        """Whether a node got or sends a non-finite gradient, or its parameters did."""
        node = self.view.nodes[key]
        return (
            any(bad(s) for _, s in self.view.parts(key))
            or any(bad(site.passed_on) for site in self.view.sites[key])
            or any(bad(record.statistics) for record in self.view.records(node))
        )

    # ---- the backward pass ---------------------------------------------------------------------------------------

    def _backward(self) -> list[_Place]:
        """Nodes that got a finite gradient and send a non-finite one, nearest to the loss first."""
        return self._senders(bad) or self._likely() or list(self._among_consumers())

    def _likely(self) -> list[_Place]:
        """At level ``norm`` an Inf may be the accumulator's; one that a NaN comes of is taken for real."""
        hurt = {site.key for site in self.flow.sites if bad(site.statistics)}
        hurt |= {n.key for n in self.flow.nodes if any(bad(r.statistics) for r in self.view.records(n))}
        found = self._senders(may_be_bad) if hurt else []
        return [replace(place, sure=False) for place in found if hurt.intersection(self.view.before(place.key))]

    def _senders(self, wrong: Callable[[Statistics | None], bool]) -> list[_Place]:
        found = []
        for node in reversed(self.flow.nodes):
            key = self.view.function_around(node.key) or node.key
            if node.op in ("output", "placeholder") or not self._finite(key):
                continue
            parts = self.view.parts(node.key)
            sent = next((_Place(key, s, "backward", e) for e, s in parts if wrong(s)), None)
            own = next(
                (r.statistics for r in self.view.records(node) if wrong(r.statistics) and self._only(r.name)), None
            )
            if sent is None and own is not None:
                sent = _Place(node.key, own, "backward")
            if sent is not None:
                found.append(sent)
        return found

    def _finite(self, key: str) -> bool:
        """Whether all that a node's outputs got was finite for sure, and something was measured."""
        measured = [site.passed_on for site in self.view.sites[key] if site.passed_on is not None]
        return bool(measured) and not any(map(may_be_bad, measured))

    def _only(self, parameter: str) -> bool:
        owners = self.view.owners.get(parameter, [])
        return all(map(self._finite, owners))

    def _among_consumers(self) -> Iterator[_Place]:
        """Without parts: a value with a bad gradient of whose consumers none got one; the likeliest is named."""
        for site in reversed(self.flow.sites):
            if not bad(site.statistics):
                continue
            users = list(dict.fromkeys(e.consumer.key for e in self.view.uses.get(site.id, [])))
            known = [key for key in users if self.view.nodes[key].op != "output" and self._finite(key)]
            if known and len(known) == len(users):
                ranks = {kind: rank for rank, kind in enumerate(_SUSPECTS)}
                key = min(known, key=lambda k: ranks.get(self.view.kinds[k], len(ranks)))
                yield _Place(key, site.statistics, "backward")
                return

    # ---- words -----------------------------------------------------------------------------------------------------

    def _at_forward(self, place: _Place) -> Finding:
        cause, value = self._cause(place), place.statistics
        node, given = self.view.nodes[place.key], self._given(place.key)
        if node.op == "placeholder":
            message = f"the model's input {node.target} holds NaN or Inf: {self._counts(value)}"
            why, mend = "", "look at the data: find the sample, and clean or skip it"
        else:
            message = f"first non-finite values at {self.view.source_words(place.key)}: {self._counts(value)}; {given}"
            why, mend = f". Likely: {cause.why}", cause.mend
            if self._hidden(place.key):
                message += "; what comes behind hides it, so that the outputs look finite"
        draft = Draft(self.evidence, "nonfinite", self._severity(), message + why, mend, self._numbers(place))
        return draft.at(node, view=self.view, path=self._path(place.key, forward=True), affected=self._affected(),
                        confidence="exact")  # fmt: skip

    def _at_backward(self, place: _Place) -> Finding:
        cause, statistics = self._cause(place), place.statistics
        words = "Inf" if statistics is not None and not (statistics.nan_count or isnan(statistics.l2_norm)) else "NaN"
        counts = self._counts(statistics)
        message = f"{self.view.source_words(place.key)} turned a finite gradient into {words}: {counts}"
        if self.flow.event.values:
            message += "; its values in the forward pass were " + (
                "not all finite" if self._touched(place.key) else "finite"
            )
        draft = Draft(self.evidence, "nonfinite", self._severity(), f"{message}. Likely: {cause.why}", cause.mend,
                      self._numbers(place))  # fmt: skip
        return draft.at(self.view.nodes[place.key], view=self.view, path=self._path(place.key, forward=False),
                        affected=self._affected(), confidence="exact" if place.sure else "one step")  # fmt: skip

    def _given(self, key: str) -> str:
        """What a node took, in words."""
        if not self.view.takes[key]:
            names = self.view.nodes[key].parameters
            return f"it takes {listed(names)}, which held finite numbers" if names else "it takes no values"
        taken = {self.states.get(e.producer + e.output_position) for e in self.view.takes[key]}
        return "infinite entries of its inputs were a mask" if "masked" in taken else "its inputs were finite"

    def _cause(self, place: _Place) -> Cause:
        return of_nonfinite(self.view, place.key, place.statistics, forward=place.kind == "forward")

    def _severity(self) -> Severity:
        if not self._scaled():
            return "error"
        return "info" if self._skipped() <= self.evidence.thresholds.skips else "warning"

    def _scaled(self) -> bool:
        """Whether a GradScaler looks after overflows, and the values themselves are finite."""
        scaled = self.flow.event.loss_scale or self._looks_scaled()
        return bool(scaled) and "bad" not in self.states.values() and self._overflows()

    def _looks_scaled(self) -> bool:
        """Whether a scaler that was not handed over may be at work: such a loss, and a later gradient is finite."""
        at = self.evidence.views.index(self.view)
        later = (view.flow.parameters for view in self.evidence.views[at + 1 :])
        return is_multiplied(self.view) and any(not any(bad(r.statistics) for r in records) for records in later)

    def _overflows(self) -> bool:
        """Whether half precision takes part."""
        return any(site.dtype == "float16" for site in self.flow.sites)

    def _skipped(self) -> int:
        """Steps that the scaler skipped; without an optimizer to ask, the flows whose step it must have."""
        hurt = (any(bad(record.statistics) for record in view.flow.parameters) for view in self.evidence.views)
        return sum(hurt) if self.flow.optimizer is None else self.flow.optimizer.skipped

    def _hidden(self, key: str) -> bool:
        return all(self.states.get(e.producer + e.output_position) != "bad" for e in self.flow.edges
                   if self.view.nodes[e.consumer.key].op == "output") and key in self.view.nodes  # fmt: skip

    @staticmethod
    def _counts(statistics: Statistics | None) -> str:
        if statistics is None or statistics.nan_count is None:
            return "entries are counted at statistics='full'"
        words = [f"{count} {word}" for count, word in
                 ((statistics.nan_count, "NaN"), (statistics.inf_count, "Inf")) if count]  # fmt: skip
        return f"{' and '.join(words)} of {statistics.numel} entries"

    def _numbers(self, place: _Place) -> dict[str, float]:
        found: dict[str, float] = {}
        if place.statistics is not None:
            found = {name: value for name in ("nan_count", "inf_count", "numel")
                     if (value := getattr(place.statistics, name)) is not None}  # fmt: skip
        for index, edge in enumerate(self.view.takes[place.key]):
            site = self.view.by_id.get(edge.producer + edge.output_position)
            value = site.value if site is not None else None
            if value is not None:
                found[f"input{index}_zeros"] = value.zero_count or 0
                found[f"input{index}_max_abs"] = value.max_abs or 0.0
                found[f"input{index}_min_abs_nonzero"] = value.min_abs_nonzero or 0.0
                found[f"input{index}_rms"] = value.rms
        return found

    def _affected(self) -> tuple[str, ...]:
        return tuple(record.name for record in self.flow.parameters if bad(record.statistics))

    def _path(self, key: str, *, forward: bool) -> tuple[str, ...]:
        """From the culprit on along what is bad: behind it in the forward pass, before it in the backward pass."""
        if forward:
            reach = {
                k for k in self.view.behind(key) if any(self.states.get(s.id) == "bad" for s in self.view.sites[k])
            }
        else:
            reach = {k for k in self.view.before(key) if any(may_be_bad(s.statistics) for s in self.view.sites[k])}
        ordered = sorted(reach, key=self.view.order.__getitem__, reverse=not forward)
        return (key, *ordered)

    # ---- outside of the model ------------------------------------------------------------------------------------

    def _seed(self) -> Iterator[Finding]:
        """The gradient was bad when it entered: non-finite at the first measured sites behind the loss."""
        wrong = [site for site in self.flow.sites if bad(site.statistics)]
        if not wrong and not self._affected():
            return
        last = wrong[-1] if wrong else None
        unknown = "" if self.flow.event.values else " (whether the outputs themselves were finite was not measured)"
        where = f" at {last.id}" if last is not None else ""
        scaled = self._scaled()
        cause = of_nonfinite_loss(self.view)
        draft = Draft(
            self.evidence, "nonfinite",
            ("info" if self._skipped() <= self.evidence.thresholds.skips else "warning") if scaled else "error",
            f"the gradient was non-finite already when it entered the model{where}: {cause.why}{unknown}",
            cause.mend,
            {"nan_count": (last.nan_count or 0) if last else 0, "inf_count": (last.inf_count or 0) if last else 0},
        )  # fmt: skip
        path = tuple(site.key for site in reversed(wrong))
        yield draft.at(None, view=self.view, path=path, affected=self._affected(), confidence="exact")

    def _contained(self) -> Iterator[Finding]:
        """Bad values that nothing came of: good to know."""
        for place in self._walk[1]:
            cause = self._cause(place)
            draft = Draft(
                self.evidence, "nonfinite", "info",
                f"{self.view.source_words(place.key)} made {self._counts(place.statistics)}, removed by what follows; "
                "outputs and gradients are finite",
                cause.mend, self._numbers(place),
            )  # fmt: skip
            yield draft.at(self.view.nodes[place.key], view=self.view, confidence="exact")
