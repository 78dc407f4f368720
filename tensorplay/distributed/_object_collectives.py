"""Collectives on Python objects, which travel pickled. Source: torch.distributed.

Every receiver gets a copy, also on the rank that an object comes from. Unpickling runs what the
pickle says: use these only among ranks that trust one another.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from ._group_call import group_of, root_of
from ._letters import Letter, Mail, Ticket, mail_of
from ._process_group import Group, ProcessGroup
from ._world import current_world


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Put rank r's ``obj`` into every rank's ``object_list[r]``.

    Args:
        object_list: output, of one element per rank.
        obj: anything that can be pickled.
    """
    chosen = group_of("all_gather_object", group)
    if chosen is None:
        return
    call = _Call(chosen, "all_gather_object")
    call.send(chosen.ranks, pickle.dumps(obj))
    object_list[: chosen.size()] = call.receive(chosen.ranks)
    call.finish()


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """Put rank r's ``obj`` into rank ``dst``'s ``object_gather_list[r]``.

    Args:
        obj: anything that can be pickled.
        object_gather_list: on rank ``dst`` the output, of one element per rank; None on the others.
        dst: global rank (default 0); or ``group_dst``, its place in ``group``.

    Raises:
        ValueError: the list is missing or too much, or ``dst`` is not a member.
    """
    chosen = group_of("gather_object", group)
    if chosen is None:
        return
    root = root_of(chosen, dst, group_dst, default=0)
    if (chosen.rank() == root) != bool(object_gather_list):
        word = "must" if chosen.rank() == root else "must NOT"
        raise ValueError(
            f"Argument ``object_gather_list`` {word} be specified on this rank: destination is "
            f"rank {chosen.ranks[root]}"
        )
    call = _Call(chosen, "gather_object")
    call.send([chosen.ranks[root]], pickle.dumps(obj))
    if object_gather_list:
        object_gather_list[: chosen.size()] = call.receive(chosen.ranks)
    call.finish()


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """Replace every rank's ``object_list`` elements by rank ``src``'s.

    Args:
        object_list: of the same length on all ranks.
        src: global rank (default 0); or ``group_src``, its place in ``group``.
        device: accepted for compatibility, without effect.

    Raises:
        ValueError: ``src`` is not a member, or its list has another length.
    """
    chosen = group_of("broadcast_object_list", group)
    if chosen is None:
        return
    root = root_of(chosen, src, group_src, default=0)
    call = _Call(chosen, "broadcast_object_list")
    if chosen.rank() == root:
        call.send([r for r in chosen.ranks if r != chosen.ranks[root]], pickle.dumps(object_list))
    else:
        (received,) = call.receive([chosen.ranks[root]])
        if len(received) != len(object_list):
            raise ValueError(
                f"broadcast_object_list: rank {chosen.ranks[root]} sent {len(received)} objects, "
                f"the list of rank {current_world().rank} has {len(object_list)}"
            )
        object_list[:] = received
    call.finish()


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """Put rank ``src``'s ``scatter_object_input_list[r]`` into rank r's output list, at 0.

    Args:
        scatter_object_output_list: at least one element, of which the first is replaced.
        scatter_object_input_list: on rank ``src`` one object per rank; not looked at on the others.
        src: global rank (default 0); or ``group_src``, its place in ``group``.

    Raises:
        ValueError: the output list is empty, the input list missing or not one object per rank, or
            ``src`` is not a member.
    """
    chosen = group_of("scatter_object_list", group)
    if chosen is None:
        return
    root = root_of(chosen, src, group_src, default=0)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError(
            "Expected argument scatter_object_output_list to be a list of size at least 1."
        )
    call = _Call(chosen, "scatter_object_list")
    if chosen.rank() == root:
        for rank, obj in zip(chosen.ranks, _inputs(scatter_object_input_list, chosen), strict=True):
            call.send([rank], pickle.dumps(obj))
    (scatter_object_output_list[0],) = call.receive([chosen.ranks[root]])
    call.finish()


def _inputs(objects: list[Any] | None, group: ProcessGroup) -> list[Any]:
    if objects is None:
        raise ValueError("source rank must provide non-None scatter_object_input_list")
    if len(objects) != group.size():
        raise ValueError(
            f"scatter_object_input_list must have one object per rank: expected {group.size()}, "
            f"got {len(objects)}"
        )
    return objects


class _Call:
    """One rank's part in an object collective."""

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self._what = f"{name}()"
        self._key = (name, group.group_name)
        self._mail: Mail = mail_of(current_world())
        self._sent: dict[int, Letter] = {}

    def send(self, targets: Sequence[int], data: bytes) -> None:
        """Send without waiting."""
        for target in targets:
            self._sent[target] = self._mail.send(target, self._key, data)

    def receive(self, sources: Sequence[int]) -> list[Any]:
        """One object from each of ``sources``, in their order."""
        tickets = [self._mail.expect(source, self._key) for source in sources]
        return [pickle.loads(self._received(t, source)) for t, source in zip(tickets, sources)]

    def _received(self, ticket: Ticket, source: int) -> bytes:
        self._mail.wait((source,), self._what, ticket.is_done)
        assert ticket.letter is not None
        data: bytes = ticket.letter.value
        return data

    def finish(self) -> None:
        """Wait until all that was sent is there, so that this rank may leave the job."""
        for target, letter in self._sent.items():
            self._mail.wait((target,), self._what, letter.is_taken)
