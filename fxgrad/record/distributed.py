"""The flows of all ranks, on every rank: who is there is asked by torch's store, then one collective brings the rows.

A rank that is not there is known before the collective begins, which nobody enters then: the process group stays as it
is, and the others can go on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # missing in its __all__ only

from fxgrad.errors import NoFlowError, OptionError, RanksError
from fxgrad.plain import from_plain, plain
from fxgrad.record.rank_facts import Facts, facts_of
from fxgrad.record.rows import rows_of
from fxgrad.record.union import Part, course_of, together
from fxgrad.schema import GradientFlow
from fxgrad.store import from_json, to_json

__all__ = ["TIMEOUT", "Packed", "flow_of_ranks", "flows_of_ranks", "is_distributed", "packed", "unpacked"]

TIMEOUT = 120.0  # seconds


def flow_of_ranks(flow: GradientFlow | None, *, timeout: float = TIMEOUT, group: Any = None) -> GradientFlow:
    """The latest flows of all ranks of a process group as one, the same on each of them.

    To be called by all ranks, in the same order as their other collectives.

    Args:
        flow: of this rank; None where it has none.
        timeout: seconds that ranks wait for each other.
        group: the process group; None for all ranks.

    Raises:
        RanksError: ranks did not come to this call in time, or came to another one.
        NoFlowError: no rank has a flow.
        OptionError: ``timeout`` is no positive number.
    """
    found = _exchange("flow", [] if flow is None else [flow], timeout, group)
    parts = [part for parts in found.parts for part in parts]
    if not parts:
        message = "no rank has recorded a gradient flow yet: run backward() of a watched model first"
        raise NoFlowError(message)
    return together(parts, found.courses, len(found.parts))


def flows_of_ranks(
    flows: Sequence[GradientFlow], *, timeout: float = TIMEOUT, group: Any = None
) -> list[GradientFlow]:  # fmt: skip
    """Several flows of all ranks, put together by the number of the backward event; arguments as for one.

    Raises:
        RanksError, OptionError: as for one.
    """
    found = _exchange("history", flows, timeout, group)
    events: dict[tuple[int, int], list[Part]] = {}
    for parts in found.parts:
        nth: dict[int, int] = {}  # a pass may run through several forward calls
        for part in parts:
            number = part.facts.event.backward
            nth[number] = nth.get(number, -1) + 1
            events.setdefault((number, nth[number]), []).append(part)
    return [together(events[event], found.courses, len(found.parts)) for event in sorted(events)]


@dataclass(frozen=True, slots=True)
class _Found:
    """What all ranks told: parts by rank, and a flow of each course."""

    parts: list[list[Part]]
    courses: dict[str, GradientFlow]


def _exchange(what: str, flows: Sequence[GradientFlow], timeout: float, group: Any) -> _Found:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        message = f"timeout= takes the seconds that ranks wait for each other, above 0, but got {timeout!r:.40}"
        raise OptionError(message)
    spread = is_distributed(group)
    rank = dist.get_rank(group) if spread else 0
    own = packed(flows, rank)
    if not spread:
        return _Found([unpacked(own.payload, rank)], own.courses)
    told = {"what": what, "bytes": own.payload.numel(), "courses": sorted(own.courses)}
    try:
        meeting = _Meeting(group, timeout)
        agreed = meeting.agree(told, own.courses)
        payloads = meeting.gather(own.payload, agreed["bytes"])
        meeting.done()
    except dist.DistNetworkError as error:
        message = f"the process that keeps torch's store, rank 0 or torchrun itself, is gone: {error}".splitlines()[0]
        raise RanksError(message) from error
    courses = {name: from_json(text) for name, text in agreed["unknown"].items()} | own.courses
    return _Found([unpacked(payload, number) for number, payload in enumerate(payloads)], courses)


def is_distributed(group: Any = None) -> bool:
    """Whether there are several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


# ---- what travels --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packed:
    """What one rank sends, uint8, and its flows by course."""

    payload: Tensor
    courses: dict[str, GradientFlow]


def packed(flows: Sequence[GradientFlow], rank: int) -> Packed:
    """The length of the head in 8 bytes, the head as JSON (a multiple of 8), and the rows of each flow as float64."""
    courses: dict[str, GradientFlow] = {}
    heads: list[dict[str, Any]] = []
    rows: list[Tensor] = []
    for flow in flows:
        course = course_of(flow)
        courses.setdefault(course, flow)
        rows.append(rows_of(flow, rank))
        heads.append({"course": course, "facts": plain(facts_of(flow)), "rows": list(rows[-1].shape)})
    head = json.dumps(heads, allow_nan=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    start = torch.frombuffer(bytearray(len(head).to_bytes(8, "little") + head), dtype=torch.uint8)
    return Packed(torch.cat([start, *(one.flatten().view(torch.uint8) for one in rows)]), courses)


def unpacked(payload: Tensor, rank: int) -> list[Part]:
    """The parts of one rank; bytes behind them do not matter."""
    start = 8 + int.from_bytes(bytes(payload[:8].tolist()), "little")
    heads = json.loads(bytes(payload[8:start].tolist()))
    parts = []
    for head in heads:
        count, width = head["rows"]
        end = start + 8 * count * width
        rows = payload[start:end].view(torch.float64).reshape(count, width)
        parts.append(Part(rank, head["course"], from_plain(Facts, head["facts"]), rows))
        start = end
    return parts


# ---- the meeting ---------------------------------------------------------------------------------------------------


class _Meeting:
    """One read by all ranks of a group: in torch's store they say that they are there and what they have.

    Rank 0 looks who is there and says what is to be exchanged; all others wait for that.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        world: Any = dist.group.WORLD
        self.group = world if group is None else group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout
        self._store = PrefixStore("fxgrad", self.group.get_group_store())
        self._number = self._store.add(f"reads of {self.rank}", 1)

    def _key(self, word: str, number: int | None = None) -> str:
        return f"{self._number if number is None else number} {word}"

    def agree(self, told: dict[str, Any], courses: dict[str, GradientFlow]) -> dict[str, Any]:
        """What is to be exchanged: the bytes of the longest payload, and flows of the courses that are not known here.

        Raises:
            RanksError: a rank did not come, or asked for something else.
        """
        self._store.set(self._key(str(self.rank)), json.dumps(told))
        if self.rank == 0:
            self._store.set(self._key("plan"), json.dumps(self._planned()))
        agreed: dict[str, Any] = json.loads(self._get(self._key("plan"), "rank 0", (0,), self.timeout * 1.5 + 5.0))
        if agreed["error"]:
            raise RanksError(agreed["error"], tuple(agreed["ranks"]))
        for course, first in agreed["needed"].items():  # the keys stay: the next read may need them again
            if first == self.rank and not self._store.check([f"course {course}"]):
                self._store.set(f"course {course}", to_json(courses[course]))
        agreed["unknown"] = {
            course: self._get(f"course {course}", f"rank {first}", (first,), self.timeout)
            for course, first in agreed["needed"].items()
            if course not in courses
        }
        return agreed

    def _planned(self) -> dict[str, Any]:
        """Who is there, and what is to be exchanged."""
        missing = self._missing()
        if missing:
            who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            message = (
                f"{who} of {self.size} did not come to this read of the reduced flow within {self.timeout:g} s. Every "
                "rank has to call it, in the same order, those that do not print too; timeout= says how long to wait"
            )
            return {"error": message, "ranks": missing}
        told = [json.loads(text) for text in self._store.multi_get([self._key(str(n)) for n in range(self.size)])]
        odd = [number for number, one in enumerate(told) if one["what"] != told[0]["what"]]
        if odd:
            message = (
                f"rank 0 reads the reduced {told[0]['what']}, but rank {odd[0]} the reduced {told[odd[0]]['what']}: "
                "every rank has to make the same calls, in the same order"
            )
            return {"error": message, "ranks": odd}
        first: dict[str, int] = {}
        for number, one in enumerate(told):
            for course in one["courses"]:
                first.setdefault(course, number)
        needed = {course: n for course, n in first.items() if any(course not in one["courses"] for one in told)}
        return {"error": "", "ranks": [], "bytes": max(one["bytes"] for one in told), "needed": needed}

    def _missing(self) -> list[int]:
        keys = [self._key(str(number)) for number in range(self.size)]
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout))
        except RuntimeError:  # not every store has an error of its own for that
            return [number for number, key in enumerate(keys) if not self._store.check([key])]
        return []

    def _get(self, key: str, who: str, ranks: tuple[int, ...], seconds: float) -> str:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
            text: str = self._store.get(key).decode()
        except RuntimeError as error:
            message = (
                f"{who} of {self.size} did not answer a read of the reduced flow within {seconds:g} s: it died, or "
                f"never came to the call ({type(error).__name__})"
            )
            raise RanksError(message, ranks) from error
        return text

    def gather(self, payload: Tensor, longest: int) -> list[Tensor]:
        """The payloads of all ranks, uint8: the one collective.

        Raises:
            RanksError: a rank died meanwhile.
        """
        device = _device_of(self.group)
        sent = torch.zeros(longest, dtype=torch.uint8)
        sent[: payload.numel()] = payload
        received = [torch.empty_like(sent, device=device) for _ in range(self.size)]
        try:
            work: Any = dist.all_gather(received, sent.to(device), group=self.group, async_op=True)
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            message = f"a rank died while the ranks exchanged their flows: {error}".splitlines()[0]
            raise RanksError(message) from error
        return [one.cpu() for one in received]

    def done(self) -> None:
        """Leave little in the store: what nobody can ask for any more is deleted."""
        before = self._number - 1
        self._store.delete_key(self._key(str(self.rank), before))
        if self.rank == 0:  # all have come to this read, so that they have read the call graph of the one before
            self._store.delete_key(self._key("plan", before))


def _device_of(group: Any) -> torch.device:
    """Where the group's collectives take tensors from: the CPU where they can."""
    if any(f"cpu:{backend}" in dist.get_backend_config(group) for backend in ("gloo", "mpi", "ucc")):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    return torch.device(accelerator.type if accelerator else "cpu", torch.accelerator.current_device_index())
