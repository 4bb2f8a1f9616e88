"""Collective operations of the remaining ranks: they complete on all, or are repeated without lost ranks."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch

from gossip.elastic.connections.peer_connection import Kind
from gossip.elastic.failure_detector import FailureDetector
from gossip.elastic.generations import Generation
from gossip.errors import GenerationEndedError, GossipError

_Result = TypeVar("_Result")


class RepeatedOperations(FailureDetector):
    """The part of :class:`gossip.elastic.elastic_world.ElasticWorld` that has the collective operations."""

    on_end: Callable[[], None]
    on_enter: Callable[[], None]
    _place: int
    _members: tuple[int, ...]
    _taking_part: tuple[int, ...]
    _is_joint: bool

    def holding_shard(self, members: Iterable[int]) -> tuple[int, ...]:
        """Return those of ``members`` that hold the same shard of their replicas as this rank. Local."""
        size, place = self.group_size, self._place
        return tuple(members) if size == 1 else tuple(member for member in members if member % size == place)

    def enter(self, generation: Generation, members: tuple[int, ...] | None = None) -> None:
        """Become a member of ``generation``, with those of its members that take part; by default all. Local."""
        if generation.number != self._generation.number:
            self.mesh.forget(
                lambda member, key: (  # the steps before it may still ask for messages
                    (member in self.mesh.lost and key.kind != Kind.MESSAGE)
                    or (key.kind == Kind.COLLECTIVE and key.first < generation.number)
                )
            )
        self._generation = generation
        self._taking_part = generation.members if members is None else members
        self._members = self.holding_shard(self._taking_part)
        self.rank, self.world_size = self._members.index(self.member), len(self._members)
        self.on_enter()

    def collectively(self, operation: Callable[[], _Result], undo: Callable[[], object] = lambda: None) -> _Result:
        if self.is_alone or self.is_joint:
            return operation()
        self._is_joint = self.consensus.is_joint = True
        try:
            while True:
                generation, members = self.consensus.begin_together()
                leaves = self.member not in generation.members
                if self.consensus.can_end or leaves:
                    self._is_joint = self.consensus.is_joint = False
                    self.on_end()
                    self._is_joint = self.consensus.is_joint = True
                if leaves:
                    raise GossipError(
                        f"rank {self.member}: its shard group leaves at step {generation.first_step}, and takes part "
                        "in no collective operation any more; call leave() on all of its ranks"
                    )
                self.enter(generation, members)
                self._num_primitives = self._num_in_group = 0
                results: list[_Result] = []
                try:
                    results.append(operation())
                    others = [member for member in self._taking_part if member != self.member]
                    self.exchange(dict.fromkeys(others), "ending it together", others)
                except GenerationEndedError:
                    may_have_ended = bool(results) and self._is_one_ahead()
                    if not may_have_ended:
                        self.consensus.wait_for_generation_after(self._generation.number)
                else:
                    may_have_ended = True
                if may_have_ended and self.consensus.commit(self._generation, self._taking_part):
                    return results[0]
                undo()
        finally:
            self._is_joint = self.consensus.is_joint = False

    def _is_one_ahead(self) -> bool:
        """Return whether one that takes part was past the operation: if it has completed it, all have its result."""
        have_passed = partial(self.consensus.have_passed, self._taking_part)
        if have_passed():
            return True
        self.consensus.wait_for_generation_after(self._generation.number, unless=have_passed)
        return have_passed() or self.consensus.were_ahead(self._taking_part, self._generation.number)

    def check_joint(self) -> None:
        if not self.is_alone:
            self.consensus.begin_together()

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        if self.is_alone:
            return [payload]

        def gather() -> list[bytes]:
            own = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else None
            found = self.exchange(dict.fromkeys(self._others, own), what)
            return [payload if member == self.member else found[member].numpy().tobytes() for member in self._members]

        return self.collectively(gather)

    @torch.no_grad()
    def broadcast_(self, tensors: Iterable[torch.Tensor], what: str) -> None:
        if self.is_alone:
            return
        held = list(tensors)

        def broadcast() -> None:
            is_first = self.rank == 0
            for tensor in held:
                row = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu() if tensor.numel() else None
                sent = dict.fromkeys(self._others if is_first else (), row)
                sources = () if is_first else self._members[:1]
                num_bytes = dict.fromkeys(sources, tensor.numel() * tensor.element_size())
                found = self.exchange(sent, what, sources, num_bytes=num_bytes)
                for payload in found.values() if row is not None else ():
                    tensor.copy_(payload.view(tensor.dtype).view(tensor.shape))

        self.collectively(broadcast)

    @torch.no_grad()
    def sum_(self, tensor: torch.Tensor, what: str, *, holds_host: bool = True) -> None:
        del holds_host  # the host adds up
        if self.is_alone or tensor.numel() == 0:
            return
        before = None if self.is_joint else tensor.clone()  # else the whole operation is undone

        def add_up() -> None:
            flat = tensor.detach().cpu().contiguous().view(-1)
            slices = dict(zip(self._members, flat.tensor_split(self.world_size), strict=True))
            own = slices[self.member]
            sent = {member: slices[member] for member in self._others}
            shares = self.exchange(sent, what, num_bytes=dict.fromkeys(sent, own.nbytes))
            rows = [own if member == self.member else shares[member].view(own.dtype) for member in self._members]
            total = rows[0].clone()
            for row in rows[1:]:
                total += row
            num_bytes = {member: slices[member].nbytes for member in self._others}
            sums = self.exchange(dict.fromkeys(self._others, total), what, num_bytes=num_bytes)
            for member, part in slices.items():
                part.copy_(total if member == self.member else sums[member].view(total.dtype))
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))

        self.collectively(add_up, lambda: None if before is None else tensor.copy_(before))
