"""Point-to-point: tensors from one rank to another. Source: torch.distributed.

Sends and receives between two ranks are matched by tag, in the order of the calls. A send is done
when its receive has been called. Between processes tensors travel over TCP, through host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import jax
import jax.numpy as jnp

from .._dtypes import from_numpy_dtype
from .._tensor import Tensor, to_host
from ._errors import DistBackendError
from ._group_call import check_tensor, describe, group_of, read, root_of, write
from ._letters import Key, Letter, Mail, Ticket, mail_of
from ._process_group import (
    Backend,
    Group,
    GroupMember,
    ProcessGroup,
    get_backend,
    get_rank,
    group_or_default,
)
from ._work import Work
from ._world import World, current_world


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Start to send ``tensor``.

    Args:
        tensor: any shape and dtype.
        dst: global rank, which may be this one; or ``group_dst``, its place in ``group``.
        tag: matches the receive's.

    Returns:
        A `Work`; None for a rank outside ``group``.

    Raises:
        ValueError: ``dst`` is not a member.
    """
    check_tensor(tensor, "tensor")
    chosen = group_of("isend", group)
    if chosen is None:
        return None
    target = chosen.ranks[root_of(chosen, dst, group_dst)]
    world = current_world()
    mail = mail_of(world)
    letter = mail.send(target, _key(chosen, tag), _outgoing(tensor, world))
    what = f"send(dst={target}, tag={tag})"
    finish = functools.partial(_finish, mail, (target,), what, letter.is_taken)
    return Work(finish, letter.is_taken)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Start to receive into ``tensor``, which holds the result once the `Work` is done.

    Args:
        tensor: dtype and number of elements as sent.
        src: global rank, which may be this one; or ``group_src``, its place in ``group``. Neither:
            whoever of the group sends first.
        tag: matches the send's.

    Returns:
        A `Work`; None for a rank outside ``group``.

    Raises:
        ValueError: ``src`` is not a member.
    """
    check_tensor(tensor, "tensor")
    chosen = group_of("irecv", group)
    if chosen is None:
        return None
    source = None
    if src is not None or group_src is not None:
        source = chosen.ranks[root_of(chosen, src, group_src)]
    return _Receiving(tensor, source, chosen, tag)


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """As `isend`, and wait until the receiver has called receive.

    Raises:
        ValueError: ``dst`` is this rank, or not a member.
        DistBackendError: the receiver is gone, or does not receive within the timeout.
    """
    _check_other(group, dst, group_dst, "destination")
    work = isend(tensor, dst, group, tag, group_dst)
    if work is not None:
        work.wait()


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """As `irecv`, and wait until ``tensor`` holds the result.

    Returns:
        The sender's global rank; -1 for a rank outside ``group``.

    Raises:
        ValueError: ``src`` is this rank, or not a member.
        DistBackendError: the sender is gone, does not send within the timeout, or sent another
            dtype or size; then the message says what was sent.
    """
    _check_other(group, src, group_src, "source")
    work = irecv(tensor, src, group, tag, group_src)
    if not isinstance(work, _Receiving):
        return -1
    work.wait()
    return work.source


class P2POp:
    """One operation of `batch_isend_irecv`. Source: torch.distributed.P2POp.

    Args:
        op: `isend` or `irecv`.
        tensor: to send, or to receive into.
        peer: global rank; or ``group_peer``, its place in ``group``.
        tag: matches a send with a receive.

    Raises:
        ValueError: ``op`` is neither, or the peer is not a member.
    """

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: Tensor,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise ValueError(
                "Invalid ``op``. Expected ``op`` to be of type ``tensorplay.distributed.isend`` or "
                "``tensorplay.distributed.irecv``."
            )
        check_tensor(tensor, "tensor")
        self.op, self.tensor, self.tag = op, tensor, tag
        self.group = group_or_default(group)
        self.group_peer = root_of(self.group, peer, group_peer)
        self.peer = self.group.ranks[self.group_peer]

    def __repr__(self) -> str:
        own = get_rank(self.group)
        source, target = (own, self.group_peer) if self.op is isend else (self.group_peer, own)
        return (
            f"P2POp({self.op.__name__} pg={self.group.group_name}, group_src={source}, "
            f"group_dst={target},  {self.tensor.shape}, {self.tensor.dtype})"
        )


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Start several sends and receives of one group; their order among each other is free.

    Several to, or from, the same rank are matched in the order of the list.

    Raises:
        ValueError: no list of `P2POp`, or of different groups.
    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(p, P2POp) for p in p2p_op_list):
        raise ValueError(
            "Invalid ``p2p_op_list``. Each op is expected to be of type "
            "``tensorplay.distributed.P2POp``."
        )
    if any(p.group is not p2p_op_list[0].group for p in p2p_op_list):
        raise ValueError("All ops need to use the same group.")
    works = [p.op(p.tensor, p.peer, p.group, p.tag) for p in p2p_op_list]
    return [work for work in works if work is not None]


def monitored_barrier(
    group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """As ``barrier``, but the first rank of the group says who did not come in time.

    Args:
        timeout: default the group's.
        wait_all_ranks: name all the ranks that did not come, not only the first.

    Raises:
        RuntimeError: a rank did not come in time; every rank that came raises.
        ValueError: the group's backend is not gloo.
    """
    chosen = group_of("monitored_barrier", group)
    if chosen is None:
        return
    if get_backend(chosen) != Backend.GLOO:
        raise ValueError("monitored_barrier is only implemented for GLOO backend.")
    seconds = chosen.timeout if timeout is None else timeout.total_seconds()
    key: Key = ("monitored_barrier", chosen.next_barrier())
    if chosen.rank() == 0:
        _monitor(chosen, key, seconds, wait_all_ranks)
    else:
        _report(chosen, key, seconds)


class _Receiving(Work):
    """A receive in progress."""

    def __init__(self, tensor: Tensor, source: int | None, group: ProcessGroup, tag: int) -> None:
        self._tensor, self._written = tensor, False
        self._mail: Mail = mail_of(current_world())
        self._needs = () if source is None else (source,)
        self._what = f"recv(src={'any' if source is None else source}, tag={tag})"
        self._ticket: Ticket = self._mail.expect(source, _key(group, tag))
        super().__init__(self._receive, self._has_come)

    @property
    def source(self) -> int:
        """The sender, once it is done."""
        assert self._ticket.letter is not None
        return self._ticket.letter.source

    def _receive(self, timeout: float | None) -> None:
        _finish(self._mail, self._needs, self._what, self._ticket.is_done, timeout)
        self._write()

    def _has_come(self) -> bool:
        if self._ticket.is_done():
            self._write()
        return self._ticket.is_done()

    def _write(self) -> None:
        if self._written:
            return
        self._written = True
        letter: Letter | None = self._ticket.letter
        assert letter is not None
        value, tensor = letter.value, self._tensor
        letter.value = None
        if from_numpy_dtype(value.dtype) is not tensor.dtype or value.size != tensor.numel():
            raise DistBackendError(
                f"{self._what}: rank {letter.source} sent {describe([value])}, but rank "
                f"{current_world().rank} receives into {describe([read(tensor)])}"
            )
        with jax.enable_x64(True):
            write(tensor, jnp.asarray(value))


def _monitor(group: ProcessGroup, key: Key, seconds: float, wait_all_ranks: bool) -> None:
    """The first rank's part: learn who has come, and tell them whether all have."""
    mail = mail_of(current_world())
    tickets = {rank: mail.expect(rank, key) for rank in group.ranks[1:]}
    missing: list[int] = []
    for rank, ticket in tickets.items():
        if not mail.wait((rank,), "monitored_barrier()", ticket.is_done, seconds):
            missing.append(rank)
            if not wait_all_ranks:
                break
    word = "Rank" if len(missing) == 1 else "Ranks"
    error = (
        f"{word} {', '.join(map(str, missing))} failed to pass monitoredBarrier in "
        f"{seconds * 1000:g} ms"
    )
    for rank, ticket in tickets.items():
        if ticket.is_done():
            mail.send(rank, key, error.encode() if missing else b"")
    if missing:
        raise RuntimeError(error)


def _report(group: ProcessGroup, key: Key, seconds: float) -> None:
    """Another rank's part."""
    mail, first = mail_of(current_world()), group.ranks[0]
    mail.send(first, key, b"")
    answer = mail.expect(first, key)
    came = mail.wait((first,), "monitored_barrier()", answer.is_done, seconds)
    if came and answer.letter is not None and not answer.letter.value:
        return
    why = answer.letter.value.decode() if answer.letter else f"rank {first} did not answer"
    raise RuntimeError(
        f"Rank {current_world().rank} successfully reached monitoredBarrier, but others did not: "
        f"{why}"
    )


def _finish(
    mail: Mail,
    needs: tuple[int, ...],
    what: str,
    done: Callable[[], bool],
    timeout: float | None,
) -> None:
    if not mail.wait(needs, what, done, timeout):
        raise TimeoutError(f"{what} did not end within {timeout:g} s")


def _key(group: ProcessGroup, tag: int) -> Key:
    return ("p2p", group.group_name, tag)


def _outgoing(tensor: Tensor, world: World) -> Any:
    """A copy of the value, as an update of the tensor may reuse its array's memory."""
    if world.spans_processes:
        return to_host(read(tensor))
    with jax.enable_x64(True):
        return jnp.copy(read(tensor))


def _check_other(group: Group, rank: int | None, group_rank: int | None, role: str) -> None:
    if group == GroupMember.NON_GROUP_MEMBER or (rank is None and group_rank is None):
        return
    chosen = group_or_default(group)
    if chosen.rank() >= 0 and root_of(chosen, rank, group_rank) == chosen.rank():
        raise ValueError(
            f"Invalid {role} rank: {role} rank should not be the same as the rank of the current "
            "process."
        )
