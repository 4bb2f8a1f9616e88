"""Waits for other ranks: who is silent is suspected first, and given up at the time-out; a rank that waits is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from loguru import logger

from gossip.communication.survivors.agreement import Agreement
from gossip.communication.survivors.mesh import Mesh
from gossip.communication.survivors.peer_connection import Key, Kind

_NUM_BEATS_MISSED = 4
_SUSPECTED = 0.25  # of the time-out
_SILENT = 0.9


class PatientWaits:
    """How a rank of :class:`gossip.communication.survivors.living_world.LivingWorld` waits for others.

    Attributes
    ----------
    mesh : Mesh
    agreement : Agreement
    timeout : timedelta
        Who is waited for so long, and waits for nobody himself, is given up.
    """

    mesh: Mesh
    agreement: Agreement
    timeout: timedelta

    @property
    def member(self) -> int:
        """This rank, by its number."""
        raise NotImplementedError

    @property
    def members(self) -> tuple[int, ...]:
        """Who trains, by their numbers."""
        raise NotImplementedError

    @property
    def _others(self) -> list[int]:
        return [member for member in self.members if member != self.member]

    def wait_until(
        self,
        look: Callable[[], bool],
        awaited: Callable[[], Sequence[int]],
        where: str,
        *,
        looks_again_at: float | None = None,
        looks_every_s: float | None = None,
    ) -> None:
        """Wait until ``look()``, which is called with what the mesh has locked. Ctrl-C gets through.

        It is called whenever the mesh has something new, at ``looks_again_at`` (``time.monotonic()``), and every
        ``looks_every_s``. A member that is waited for longer than the time-out, and does not wait for anybody himself,
        is given up.

        Raises
        ------
        EpochEndedError
            ``look`` has found that it never will be.
        """
        began = told_at = time.monotonic()
        timeout_s, beat_s = self.timeout.total_seconds(), self.mesh.beat_s
        is_warned = False
        with self.mesh.changed:
            while not look():
                missing = awaited()
                left = [member for member in missing if member in self.mesh.left and member in self.mesh.lost]
                if left:
                    self.agreement.miss(left)
                ahead_s = 0.0 if looks_again_at is None else looks_again_at - time.monotonic()
                self.mesh.changed.wait(min(looks_every_s or beat_s, ahead_s if ahead_s > 0 else beat_s))
                now = time.monotonic()
                if now - told_at >= beat_s:
                    self._tell(missing)
                    told_at = now
                waited_s = now - began
                idle = self._idle_among(missing, waited_s) if waited_s > timeout_s * _SUSPECTED else []
                if idle and not is_warned:
                    is_warned = True
                    self._suspect(idle, where, waited_s)
                if idle and waited_s > timeout_s:
                    self._give_up(idle, where, waited_s)

    def _suspect(self, members: Sequence[int], where: str, waited_s: float) -> None:
        heard = (f"rank {member} (last heard of {self.mesh.silent_s(member):.3g} s ago)" for member in members)
        logger.warning(
            "rank {}: {}: has waited {:.3g} s for {}; gives up after {:g} s",
            self.member,
            where,
            waited_s,
            ", ".join(heard),
            self.timeout.total_seconds(),
        )

    def _give_up(self, members: Sequence[int], where: str, waited_s: float) -> None:
        """Together with whoever else has been silent for long: if these are most, it is this rank that is cut off."""
        silence_s = self.timeout.total_seconds() * _SILENT
        silent = [member for member in self._others if self.mesh.silent_s(member) > silence_s]
        self.agreement.give_up(
            dict.fromkeys(silent, f"{where}: rank {self.member} has heard nothing of it for {silence_s:.3g} s")
            | dict.fromkeys(members, f"{where}: rank {self.member} waited {waited_s:.3g} s for it in vain")
        )

    def _tell(self, missing: Sequence[int]) -> None:
        """Tell the others for whom this rank waits, so that nobody gives this one up for their sake."""
        ranks = torch.tensor(sorted(missing), dtype=torch.int64)
        for member in self._others:
            self.mesh.send(member, Key(Kind.WAITING), ranks.clone())

    def _idle_among(self, members: Sequence[int], waited_s: float) -> list[int]:
        """Those that have not said for some time that they wait for somebody; after twice the time-out all."""
        recent = time.monotonic() - _NUM_BEATS_MISSED * self.mesh.beat_s
        return [
            member
            for member in members
            if waited_s > 2 * self.timeout.total_seconds()
            or self.mesh.waiting.get(member, (0.0, frozenset()))[0] < recent
        ]
