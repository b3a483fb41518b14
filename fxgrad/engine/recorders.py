"""Which recorder observes a call: the native one, or Python's and why."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from fxgrad.capture.modules import ModuleMap
from fxgrad.courses.known import Observer
from fxgrad.courses.ways import FOLLOWED, Ways
from fxgrad.probes.forward_record import ForwardRecord
from fxgrad.record.library import Patience, reason
from fxgrad.record.parameters import ParameterHooks
from fxgrad.record.recorder import Recorder
from fxgrad.torch_support.private import compiled_autograd_on

if TYPE_CHECKING:
    from fxgrad.engine.step import Options

_AGAIN = 1.0  # seconds after which a reason that is read from files is read again


class Recorders:
    """Chooses the recorder of each call of one model; has the native one built once the watch has run for some time."""

    def __init__(self, recorder: Recorder, modules: ModuleMap, parameters: ParameterHooks, options: Options) -> None:
        self._recorder = recorder
        self._modules = modules
        self._parameters = parameters
        self._options = options
        self._patience = Patience()
        self._native: Observer | None = None
        self._ways: Ways | None = None
        self._reason = ""
        self._read_at = -_AGAIN

    def prepare(self) -> None:
        """Take the native recorder up where it is there now.  Call between two steps, before parameters get hooks."""
        options = self._options
        if self._native is not None or options.one_shot or options.capture == "eager" or not options.native:
            return
        self._patience.tick()
        found = self._recorder.library
        if found is not None:
            edges = options.sites == "edge"
            self._native = Observer(found, self._modules, options.level, edges=edges)
            self._ways = Ways(found, self._modules, options.level)
            self._parameters.use(found, options.level)
            self._modules.use(found)

    def record_for(self, forward_record: ForwardRecord) -> bool:
        """Give the probes of a graph C++ hooks where these can be had; whether they can."""
        native = self._native
        if native is None or forward_record.rewriting is not None or compiled_autograd_on():
            return False
        forward_record.record = native.record_of(forward_record)
        forward_record.sizes = forward_record.record.shapes
        return True

    def choose(self, forward_record: ForwardRecord) -> tuple[Observer | None, str]:
        """The native observer for this call, or why the Python recorder does it."""
        if self._native is not None:
            self._native.trained = self._parameters.trained
        why = self._unwanted() or self._unfit(forward_record)
        return (self._native, "every operator was that of a known course") if why is None else (None, why)

    def ways(self, forward_record: ForwardRecord, *, observe: bool) -> tuple[Ways | None, str]:
        """The known ways for a call under rewrite rules, or why the Python recorder does it."""
        why = self._unwanted()
        if why is None and self._ways is None:
            why = self._why()
        if why is None and compiled_autograd_on():
            why = "compiled autograd knows Python hooks only"
        if why is None and self._ways is not None:
            why = self._ways.refuses(forward_record.rewriting.rules)
            why = why or (self._ways.refuses_to_observe(forward_record) if observe else None)
        return (self._ways, FOLLOWED) if why is None else (None, why)

    def rename(self, forward_record: ForwardRecord) -> None:
        """Before a flow is read: name a call that left the known courses as well as can be by now, and for good.

        What was measured is sorted by these names once, perhaps by another thread: other names later would take it for
        that of other values.
        """
        if forward_record.settled:
            return
        forward_record.settled = True
        left = forward_record.deviation
        if self._native is not None:
            self._native.rename(forward_record)
        if left is not None and forward_record.deviation is None:
            forward_record.report = dataclasses.replace(
                forward_record.report, reason="it took a course that was learnt by a later call"
            )

    def _unwanted(self) -> str | None:
        options = self._options
        if options.capture == "eager":
            return "asked for"
        if options.one_shot:
            return "one-shot: the native recorder pays from the second call on"
        return None if options.native else "native=False"

    def _unfit(self, forward_record: ForwardRecord) -> str | None:
        if self._native is None:
            return self._why()
        if forward_record.reduced:
            return "fully_shard gathers parameters inside of the forward"
        if forward_record.values is not None and self._options.channels:
            return "channels are measured where Python hooks are"
        if compiled_autograd_on():
            return "compiled autograd knows Python hooks only"
        return self._native.refused

    def _why(self) -> str:
        now = time.monotonic()
        if now - self._read_at >= _AGAIN:
            self._read_at, self._reason = now, reason() or "it is being loaded"
        return f"no native recorder: {self._reason}"
