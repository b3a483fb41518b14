"""What a watch knows of the training around the backward passes: the optimizers' steps and the loss scale."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from fxgrad.errors import OptionError
from fxgrad.record.recorder import EventRecord, Recorder
from fxgrad.record.scaling import Reading, Scales
from fxgrad.record.updates import Step, Updates
from fxgrad.schema import EventInfo, GradientFlow, OptimizerFacts, Update
from fxgrad.torch_support.private import version_of, without_dispatch_modes, without_torch_function

if TYPE_CHECKING:
    from fxgrad.probes.forward_record import ForwardRecord


def checked_optimizers(given: Any) -> tuple[Optimizer, ...]:
    """The optimizers of ``watch(optimizer=...)``.

    Raises:
        OptionError: something else than a ``torch.optim.Optimizer`` or a sequence of them.
    """
    if given is None:
        return ()
    listed = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for one in listed:
        if not isinstance(one, Optimizer) or not _takes_hooks(one):
            message = (
                f"optimizer= takes a torch.optim.Optimizer or a list of them, but got {type(one).__name__}; "
                "of a wrapper, give the optimizer inside of it"
            )
            raise OptionError(message)
    return tuple({id(one): one for one in listed}.values())


def _takes_hooks(optimizer: Optimizer) -> bool:
    """Whether it is one that torch made, and no wrapper that only looks like one."""
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True


def checked_scaler(given: Any) -> GradScaler | None:
    """The scaler of ``watch(scaler=...)``.

    Raises:
        OptionError: no ``torch.amp.GradScaler``.
    """
    if given is not None and not isinstance(given, GradScaler):
        message = f"scaler= takes a torch.amp.GradScaler, but got {type(given).__name__}"
        raise OptionError(message)
    return given


class Training:
    """Steps and loss scales, by backward event of one recorder.

    Args:
        recorder: whose events they belong to.
        optimizers: each with hooks of ours from now on, until ``remove``.
        scaler: read, never changed.
    """

    def __init__(self, recorder: Recorder, optimizers: Sequence[Optimizer], scaler: GradScaler | None) -> None:
        self._recorder = recorder
        self.paused = False
        self._scales = None if scaler is None else Scales(scaler)
        self._optimizers = [
            Updates(one, lambda: recorder.begun, self._wanted, place) for place, one in enumerate(optimizers)
        ]
        self._others = _Others()
        self._calls_before: int | None = None
        recorder.began = self._began

    def _wanted(self) -> bool:
        return self._recorder.on and not self.paused

    def remove(self) -> None:
        """Take the hooks off the optimizers; what was measured stays readable."""
        for one in self._optimizers:
            one.remove()

    # ---- while the model trains --------------------------------------------------------------------------------

    def forward(self, forward_record: ForwardRecord) -> None:
        """A forward call is about to be observed."""
        if self._calls_before is None:
            self._calls_before = self._calls
        parameters: Sequence[tuple[int, tuple[str, ...], Tensor]] = forward_record.parameters
        if forward_record.accumulating is None:
            forward_record.accumulating = any(parameter.grad is not None for _, _, parameter in parameters)
        if not forward_record.accumulating:
            for one in self._optimizers:
                one.discard()
        if self._optimizers:
            self._others.look(parameters, self._grouped())

    def _grouped(self) -> set[int]:
        """Ids of the parameters that the optimizers have."""
        return {id(parameter) for one in self._optimizers for parameter in one.parameters}

    def _began(self, event: int) -> None:
        try:
            with without_torch_function(), without_dispatch_modes():
                for one in self._optimizers:
                    one.begins(event)
                if self._scales is not None:
                    self._scales.note(event, self._calls)
        except Exception:  # noqa: BLE001  # the user's backward must go on; the event has no loss scale then
            self._recorder.began = None

    @property
    def steps(self) -> int:
        """How many steps the optimizer has taken (of several, the most) since the first observed forward call."""
        return 0 if self._calls_before is None else self._calls - self._calls_before

    @property
    def _calls(self) -> int:
        return max((one.calls for one in self._optimizers), default=0)

    # ---- reading -----------------------------------------------------------------------------------------------

    def complete(self, events: Sequence[EventRecord], flows: Sequence[GradientFlow]) -> list[GradientFlow]:
        """The flows of events with what is known by now of their scale and of the step behind them.

        The same objects as before while nothing more is known.
        """
        readings = self._readings()
        return [self._complete(event_record, flow, readings) for event_record, flow in zip(events, flows, strict=True)]

    def _complete(self, event_record: EventRecord, flow: GradientFlow, readings: tuple[Reading, ...]) -> GradientFlow:
        known = self._known(event_record, lambda: readings)
        token = known.token(event_record)
        if event_record.completed is None or event_record.completed[0] != token:
            event_record.completed = (token, known.complete(event_record, flow))
        return event_record.completed[1]

    def stepped(self, event_record: EventRecord) -> bool | None:
        """Whether a step that used the event has been taken; None where there is no optimizer."""
        optimizers = self._optimizers
        return any(one.of(event_record.event) is not None for one in optimizers) if optimizers else None

    def known(self, event_record: EventRecord) -> Known:
        """What is known now of an event, for another thread to complete its flow with; waits for no device."""
        return self._known(event_record, (lambda: ()) if self._scales is None else self._scales.kept(self._calls))

    def _known(self, event_record: EventRecord, readings: Callable[[], tuple[Reading, ...]]) -> Known:
        optimizers = self._optimizers
        steps = tuple(step for one in optimizers if (step := one.of(event_record.event)) is not None)
        if not optimizers:
            return Known(readings, steps)
        word = " + ".join(dict.fromkeys(one.type for one in optimizers))
        missing = self._others.among(_registered(event_record), self._grouped())
        facts = OptimizerFacts(word, None, 0, 0, *missing, others=self._elsewhere(event_record))
        in_kernel = any(one.in_kernel for one in optimizers)
        return Known(readings, steps, facts, functools.partial(self._skipped, in_kernel=in_kernel))

    def _elsewhere(self, event_record: EventRecord) -> int:
        """How many parameters of the optimizers are none of the model's."""
        outside = event_record.forward_record.outside
        own = {
            id(parameter) for _, names, parameter in event_record.forward_record.parameters if names[0] not in outside
        }
        return len({id(one) for updates in self._optimizers for one in updates.parameters} - own)

    def scale_of(self, event: int) -> float | None:
        """The loss scale of an event.  Copies it to the host."""
        readings = () if self._scales is None else self._scales.read()
        return next((reading.scale for reading in reversed(readings) if reading.event == event), None)

    def _readings(self) -> tuple[Reading, ...]:
        if self._scales is None:
            return ()
        return (*self._scales.read(), self._scales.present(self._calls))

    def _skipped(self, readings: tuple[Reading, ...], *, in_kernel: bool) -> tuple[int, int]:
        return (0, 0) if self._scales is None else self._scales.skipped(readings, in_kernel=in_kernel)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known at some time of the training around one event.

    Attributes:
        readings: gives the loss scales so far, and the one now; copies them to the host.
        steps: of the optimizers, behind the event.
        facts: of the optimizers, without those of the steps; None where there is no optimizer.
        skipped: how many steps were skipped between readings, and among how many.
    """

    readings: Callable[[], tuple[Reading, ...]]
    steps: tuple[Step, ...]
    facts: OptimizerFacts | None = None
    skipped: Callable[[tuple[Reading, ...]], tuple[int, int]] = lambda _: (0, 0)

    def token(self, event_record: EventRecord) -> object:
        """Equal where nothing more is known."""
        _, steps, skipped, asked = self._behind(event_record)
        facts = self.facts
        return (*steps, skipped, asked, None if facts is None else (facts.missing, facts.moved))

    def complete(self, event_record: EventRecord, flow: GradientFlow) -> GradientFlow:
        """The flow with it.  Copies to the host."""
        event, updates, facts = self.around(event_record, flow.event)
        made = dataclasses.replace(flow, event=event, optimizer=facts)
        if not updates:
            return made
        parameters = tuple(
            dataclasses.replace(record, update=updates.get(id(parameter)))
            for record, (_, _, parameter) in zip(flow.parameters, event_record.forward_record.parameters, strict=True)
        )
        return dataclasses.replace(made, parameters=parameters)

    def around(
        self, event_record: EventRecord, event: EventInfo
    ) -> tuple[EventInfo, dict[int, Update], OptimizerFacts | None]:  # fmt: skip
        """The event with its loss scale, updates by id of the parameter, and the optimizers.  Copies to the host."""
        scale, steps, skipped, asked = self._behind(event_record)
        event = dataclasses.replace(event, loss_scale=scale, accumulating=event_record.forward_record.accumulating)
        updates = {key: update for step in steps for key, update in step.read()[1].items()}
        if self.facts is None:
            return event, updates, None
        found = tuple(step.read()[0] for step in steps)
        number = next((one.number for one in found if one.number is not None), None)
        facts = dataclasses.replace(self.facts, step=number, skipped=skipped, asked=asked, steps=found)
        return event, updates, facts

    def _behind(self, event_record: EventRecord) -> tuple[float | None, tuple[Step, ...], int, int]:
        """The loss scale, the steps that used the event, and how many were skipped among how many."""
        readings = self.readings()
        position = next((n for n, reading in enumerate(readings) if reading.event == event_record.event), None)
        if position is None:
            return None, self.steps, 0, 0
        steps = () if _thrown_away(readings[position:], self.steps) else self.steps
        skipped = self.skipped(readings[: position + 2]) if self.facts is not None else (0, 0)
        return readings[position].scale, steps, *skipped


class _Others:
    """The trained parameters that no optimizer of the watch has, and which of them something changes all the same."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}  # by name: id of the tensor, how often it had been written to
        self._moved: set[str] = set()

    def look(self, parameters: Sequence[tuple[int, tuple[str, ...], Tensor]], grouped: set[int]) -> None:
        """A forward begins: who has been written to since the one before."""
        for _, names, parameter in parameters:
            if id(parameter) in grouped or not parameter.requires_grad:
                continue
            now = id(parameter), version_of(parameter)
            before = self._seen.get(names[0], now)
            if before[0] == now[0] and before != now:  # another tensor under the name was not written to
                self._moved.add(names[0])
            self._seen[names[0]] = now

    def among(
        self, parameters: Sequence[tuple[int, tuple[str, ...], Tensor]], grouped: set[int]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of those of these parameters, and of those that were changed."""
        names = tuple(names[0] for _, names, p in parameters if id(p) not in grouped and p.requires_grad)
        return names, tuple(name for name in names if name in self._moved)


def _thrown_away(readings: Sequence[Reading], steps: Sequence[Step]) -> bool:
    """Whether the scaler skipped the step behind an event, so that the next one used later gradients.

    ``zero_grad(set_to_none=False)`` leaves no other trace of it.
    """
    scale = readings[0].scale
    later = [one.scale for one in readings[1:] if any(step.first <= one.event < step.end for step in steps)]
    return scale is not None and any(other is not None and other < scale for other in later)


def _registered(event_record: EventRecord) -> list[tuple[int, tuple[str, ...], Tensor]]:
    """The parameters of an event that a registered module has; ``unregistered`` tells of the others."""
    forward_record = event_record.forward_record
    return [one for one in forward_record.parameters if one[1][0] not in forward_record.outside]
