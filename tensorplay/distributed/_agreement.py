"""Ranks agree on how the next call runs, so that none waits in a collective that others skip.

All ranks make the same calls over a mesh in the same order. Rank threads meet before each.
Processes number them: a rank that knows the call says so in passing; one that meets it for the
first time asks what the others do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from jax.sharding import Mesh

from ._errors import DistBackendError
from ._failures import peer_lost
from ._spmd import own_ranks_of, ranks_of
from ._world import World, current_world

EAGERLY = "eagerly"
COMPILED = "compiled"


class Agreement:
    """One rank's side of the calls of ``what`` over one mesh."""

    def __init__(self, mesh: Mesh, what: str) -> None:
        self.mesh, self.what = mesh, what

    def choose(self, choice: str, program: Hashable, new: bool) -> str:
        """How this call runs on all ranks.

        Args:
            choice: `EAGERLY` or `COMPILED`, as this rank would choose.
            program: equal on all ranks that would run the same program.
            new: this rank has not made such a call before.

        Raises:
            RuntimeError: this rank must run eagerly, while others run a program that they know.
        """
        world = current_world()
        if self.mesh.size == 1:
            return choice
        if world.rendezvous is not None:
            return self._among_threads(world, choice, program, new)
        if world.link is None:
            return choice
        return self._among_processes(world, ranks_of(self.mesh), choice, new)

    def _among_threads(self, world: World, choice: str, program: Hashable, new: bool) -> str:
        assert world.rendezvous is not None
        what = f"the choice how to run {self.what}"
        ranks = ranks_of(self.mesh)

        def together(brought: Sequence[tuple[Hashable, bool]]) -> str:
            programs = [program for program, _ in brought]
            same = programs[0] is not None and all(p == programs[0] for p in programs)
            own = COMPILED if same else EAGERLY
            processes = world.processes_of(ranks)
            if world.process is None or len(processes) == 1:
                return own
            anything_new = any(is_new for _, is_new in brought)
            return self._among_processes(world.process, processes, own, anything_new)

        brought = (program if choice == COMPILED else None, new)
        members = own_ranks_of(self.mesh)
        found: str = world.rendezvous.meet(world.rank, members, what, what, brought, together)
        return found

    def _among_processes(self, world: World, ranks: tuple[int, ...], choice: str, new: bool) -> str:
        """The choice of all processes ``ranks``, seen from one of them."""
        assert world.link is not None
        if not new:
            world.link.vote(self._next_name(world), ranks, f"known {choice}")
            return choice
        try:
            ballots = world.link.ballot(
                self._next_name(world), ranks, f"new {choice}", world.timeout
            )
        except DistBackendError as error:
            raise peer_lost(str(error)) from None
        if not any(ballot.endswith(EAGERLY) for ballot in ballots):
            return COMPILED
        ahead = [
            r for r, ballot in zip(ranks, ballots, strict=True) if ballot == f"known {COMPILED}"
        ]
        if ahead:
            raise RuntimeError(
                f"{self.what}: rank {world.rank} cannot run this call as the program that ranks "
                f"{ahead} run: forward must do the same on all ranks, or differ from the first "
                "call on. Move what differs (printing on one rank, say) out of forward"
            )
        return EAGERLY

    def _next_name(self, world: World) -> str:
        number = world.ballots[self.mesh] = world.ballots.get(self.mesh, 0) + 1
        return f"call {number} over these ranks, {self.what}"
