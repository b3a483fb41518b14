"""The native observer beside rewrite rules: it measures every value; whoever follows the call says which is which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fxgrad.probes.forward_record import ForwardRecord
from fxgrad.torch_support.structure import tensors_in


class Beside:
    """One call.

    Args:
        extension: the compiled module.
        model: its ``Model``, which knows the parameters and no course.
        level: statistics level, as the extension has it.
        forward_record: of the call.
    """

    def __init__(self, extension: Any, model: Any, level: Any, forward_record: ForwardRecord) -> None:
        self._forward_record = forward_record
        self._record = extension.Record(forward_record, level)
        self.native = extension.Forward(model, self._record, False, False)  # noqa: FBT003  # no names in C++
        forward_record.slots = ()  # C++ writes; a rule's hook observes what C++ does not see before it
        forward_record.rewriting.seen = self._sees

    def _sees(self, value: Tensor) -> bool:
        """Whether a value that is no leaf has a hook in C++ by now, which then runs before a rule's."""
        known: int = self.native.value_of(value)
        return known >= 0

    def begin(self, inputs: Sequence[tuple[str, Tensor]]) -> None:
        """Before the forward runs."""
        self.native.begin("inputs", [tensor for _, tensor in inputs], None, None, None)

    @property
    def failed(self) -> str:
        """Why C++ could not look on; empty where it could."""
        return str(self.native.failed)

    def close(self) -> None:
        """Whatever happened: C++ looks on no longer."""
        self.native.leave()
        self._forward_record.rewriting.seen = None  # kept with the flow; what comes later has Python's hooks

    def finish(self, result: Any) -> None:
        """The forward has returned: its sites are known.  Where C++ could not look on, the call has no flow."""
        self.native.finish([tensor for _, tensor in tensors_in(result)])
        forward_record, native = self._forward_record, self.native
        if native.failed:
            return
        slots: list[list[int]] = [[] for _ in range(native.values)]
        own = forward_record.rewriting.own
        for value, site in native.noted:
            if value >= 0 and site not in own:  # a parameter has hooks of its own
                slots[value].append(site)
        forward_record.slots, forward_record.sizes = tuple(map(tuple, slots)), self._record.shapes
        forward_record.computed = True
