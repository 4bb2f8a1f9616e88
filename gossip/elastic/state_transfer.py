"""The state of a rank for one that joins: taken between two steps, and sent in pieces while training continues.

It has two parts. The joining rank asks for the first one, and trains from a later step than this state's: that to which
it has been admitted. The second part is what must be of exactly that step; the rank that has given the first one sends
it when it gets there.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from loguru import logger

from gossip.communication.host.available_memory import ShrinkingMemory, size_text
from gossip.elastic.connections.mesh import Mesh, in_words
from gossip.elastic.connections.peer_connection import Key, Kind
from gossip.elastic.shard_group_world import MOST_TIMEOUTS
from gossip.errors import CannotJoinError, ExchangeError, reason

_PIECE_BYTES = 2**20  # a message of training waits behind at most one of them
_NUM_ASKED = 4  # number of pieces requested at a time
_TICK_S = 1.0
_DIGEST_BYTES = hashlib.sha256().digest_size
_LAST = 2**62  # requested last, in place of a piece: nothing more of this part and those before it is needed
_WHERE = _LAST - 1  # in place of a piece: the step at which the rank is
_AT_STEP = 2  # plus a step: when a state is taken, in place of whether at the end of any step
_FIRST, _SECOND = 0, 1  # parts of the state
_REFUSES = 1  # in place of any piece of a part: the reason why there is none


class StateSource:
    """Gives this rank's state to joining ranks, or the reason why they cannot have it. Errors here concern only them.

    Those that ask in the same step share a copy, each piece of which is let go once all of them have it. Others wait
    until it is gone. Several ranks of one machine that give their states at once do not add up what they need.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._lock = threading.Lock()
        # Joining ranks: at the end of a step or before one, or of which one; is each within its loop.
        self._waiting: dict[int, tuple[int, bool]] = {}
        self._begun: dict[int, bool] = {}  # joining ranks that have the first part; is each within its loop
        # By joining rank and part, the copy of a state, and how many of its bytes have arrived there.
        self._taken: dict[tuple[int, int], tuple[ShrinkingMemory, int]] = {}
        self._said: set[str] = set()
        mesh.handlers[Kind.ASK] = lambda member, frame: self._on_ask(member, frame.key)

    def asked_by(self, step: int, *, at_step_end: bool) -> list[int]:
        """Return the joining ranks that wait for a state as at the end of a step, or as at the beginning of one.

        Those of a shard group wait for that after a certain number of steps, so that their shards fit together.
        """
        with self._lock:
            known = {*self._waiting, *self._begun, *(member for member, _ in self._taken)}
        patience_s = self._mesh.timeout.total_seconds()
        gone = [each for each in known if each in self._mesh.lost or self._mesh.silent_s(each) > patience_s]
        with self._lock:
            for member in gone:  # who was silent may have the first part, and come back for the second one
                self._forget(member, _SECOND if member in self._mesh.lost else _FIRST)
            late = [member for member, (when, _) in self._waiting.items() if _AT_STEP <= when < _AT_STEP + step]
        for member in late:
            self._refuse([member], _FIRST, f"it has already made step {step - 1}")
        with self._lock:
            waiting = {} if self._taken else self._waiting  # there is at most one copy
            now = {_AT_STEP + step, True} if at_step_end else {False}
            return [member for member, (when, _) in waiting.items() if when in now]

    def begun(self, members: Iterable[int], *, returning: bool) -> list[int]:
        """Return those of ``members`` that wait for the second part, because they train from this step on.

        Either those that are within their loop, at the end of the step before, or those that are before their loop.
        """
        return [member for member in members if self._begun.get(member) is returning]

    def give(
        self, joining: Sequence[int], state: Callable[..., tuple[str, torch.Tensor]], *, is_second: bool = False
    ) -> None:
        """Give them a state, or its second part.

        ``state`` returns its structure as text, and the values of its tensors, [nbytes], uint8, in memory from the
        function that it is given, which takes their number and raises if there is too little.
        """
        part = _SECOND if is_second else _FIRST
        with self._lock:
            for member in joining:
                self._begun.pop(member, None)
                if (asked := self._waiting.pop(member, None)) is not None:
                    self._begun[member] = asked[1]
        try:
            text, values = state(partial(self._allocate, joining, part))
            head = json.dumps({"text": text, "num_bytes": values.nbytes}).encode()
            for member in joining:
                self._send(member, 0, torch.frombuffer(bytearray(head), dtype=torch.uint8), part)
        except Exception as error:
            self._fail(joining, part, error)

    def _allocate(self, joining: Sequence[int], part: int, num_bytes: int) -> torch.Tensor:
        copied, own, whom = ShrinkingMemory(num_bytes), self._mesh.member, in_words(joining)
        what = ("its state", "the rest of its state")[part]
        logger.info(
            "rank {}: gives {} to {}: {} in a copy, let go as it is sent", own, what, whom, size_text(num_bytes)
        )
        with self._lock:
            self._taken |= {(member, part): (copied, 0) for member in joining}
        return copied.values

    def _on_ask(self, member: int, key: Key) -> None:
        """Handle a request, in the mesh's thread. Piece 0 describes the others, and makes this rank take its state."""
        _, piece, second, third = key
        with self._lock:
            if piece == _WHERE:
                self._send(member, _WHERE, torch.tensor([self._mesh.position()[1]]).view(torch.uint8), _FIRST)
                return
            if piece == 0:
                self._waiting[member] = second, bool(third)
            elif piece == _LAST:
                self._forget(member, second)
            copied, _ = self._taken.get((member, second), (None, 0))
            if copied is None or piece == 0:
                return
            self._taken[member, second] = copied, (piece - _NUM_ASKED) * _PIECE_BYTES
            copied.release(min(num_arrived for each, num_arrived in self._taken.values() if each is copied))
        try:
            begin = (piece - 1) * _PIECE_BYTES
            if begin < copied.num_released:
                raise ExchangeError(f"piece {piece} of its state was let go when those behind it were asked for")
            self._send(member, piece, copied.values[begin : begin + _PIECE_BYTES], second)
        except Exception as error:
            self._fail([member], second, error)

    def _forget(self, member: int, part: int) -> None:
        self._waiting.pop(member, None)
        for number in (_FIRST, _SECOND)[: part + 1]:
            self._taken.pop((member, number), None)
        if part == _SECOND:
            self._begun.pop(member, None)

    def _fail(self, joining: Sequence[int], part: int, error: Exception) -> None:
        """Refuse this rank's state because of an error, which is logged once."""
        why = reason(error)
        with self._lock:
            is_new = why not in self._said
            self._said.add(why)
        if is_new:
            logger.warning(
                "rank {}: its state cannot be given to {}, which would join: {}; training continues without it",
                self._mesh.member,
                in_words(joining),
                why,
            )
        self._refuse(joining, part, why)

    def _refuse(self, joining: Sequence[int], part: int, why: str) -> None:
        """Tell them why they do not get this rank's state."""
        with self._lock:
            for member in joining:
                self._forget(member, _SECOND)
        for member in joining:
            self._mesh.send(
                member, Key(Kind.STATE, 0, part, _REFUSES), torch.frombuffer(bytearray(why.encode()), dtype=torch.uint8)
            )

    def _send(self, member: int, piece: int, content: torch.Tensor, part: int) -> None:
        digest = hashlib.sha256(content.numpy().data).digest()
        payload = torch.cat([torch.frombuffer(bytearray(digest), dtype=torch.uint8), content])
        self._mesh.send(member, Key(Kind.STATE, piece, part), payload)


def take_state(
    mesh: Mesh, sources: Sequence[int], *, at_step_end: bool, returns: bool, at_step: int | None = None
) -> tuple[int, str, ShrinkingMemory]:
    """Return the state of the first of ``sources`` that gives it: its rank, text and values.

    It is taken ``at_step_end``, or else at the beginning of a step, after everything that happens between two steps; or
    when a source has made ``at_step`` steps. A rank that ``returns`` is within its loop, and not before it.

    Raises
    ------
    CannotJoinError
        Each of them said that it cannot give its state, and why; or this rank cannot hold it.
    ExchangeError
        No rank gave its state; the text says why.
    """
    lost: list[str] = []
    refused: dict[str, list[int]] = {}  # sources, by reason
    for source in sources:
        needless = _SECOND
        try:
            mesh.send(source, Key(Kind.ASK, 0, at_step_end if at_step is None else _AT_STEP + at_step, returns))
            taken = _take_from(mesh, source, _FIRST)
            needless = _FIRST
            return source, *taken
        except _RefusedError as error:
            refused.setdefault(str(error), []).append(source)
        except CannotJoinError:
            raise
        except ExchangeError as error:
            lost.append(str(error))
        finally:
            let_go(mesh, source, needless)
    reasons = lost + [f"{in_words(ranks)} cannot: {why}" for why, ranks in refused.items()]
    text = f"rank {mesh.member}: joining: no rank gave this rank its state: {'; '.join(reasons)}"
    raise ExchangeError(text) if lost else CannotJoinError(f"{text}. Start this rank again once that is mended")


def step_of(mesh: Mesh, source: int) -> int:
    """Return how many steps a member has made; ExchangeError if it does not reply."""
    mesh.send(source, Key(Kind.ASK, _WHERE))
    return int(_piece(mesh, source, _FIRST, _WHERE).view(torch.int64))


def take_second_part(mesh: Mesh, source: int) -> tuple[str, ShrinkingMemory]:
    """Return the second part of the state of ``source``, which sends it unasked: its text and values."""
    try:
        return _take_from(mesh, source, _SECOND)
    finally:
        let_go(mesh, source)


def let_go(mesh: Mesh, source: int, part: int = _SECOND) -> None:
    """Tell a rank that it need not keep this part of its state any longer, and those before it, nor take them."""
    mesh.send(source, Key(Kind.ASK, _LAST, part))


class _RefusedError(ExchangeError):
    """A rank cannot give its state; the text is its reason."""


def _take_from(mesh: Mesh, source: int, part: int) -> tuple[str, ShrinkingMemory]:
    head = _piece(mesh, source, part, 0)
    try:
        described: dict[str, Any] = json.loads(head.numpy().tobytes())
        text, num_bytes = str(described["text"]), int(described["num_bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise ExchangeError(f"what rank {source} says of its state cannot be read: {reason(error)}") from error
    try:
        copied = ShrinkingMemory(num_bytes)
    except MemoryError as error:
        raise CannotJoinError(
            f"rank {mesh.member}: joining: there is no memory here for the state of rank {source}: {error}; free some, "
            "and start this rank again"
        ) from error
    places = copied.values.split(_PIECE_BYTES) if num_bytes else ()
    asked = 0
    for number, place in enumerate(places, 1):
        while asked < min(number + _NUM_ASKED - 1, len(places)):
            asked += 1
            mesh.send(source, Key(Kind.ASK, asked, part))
        content = _piece(mesh, source, part, number)
        if content.numel() != place.numel():
            raise ExchangeError(f"piece {number} of rank {source}'s state has {content.numel()} bytes")
        place.copy_(content)
    return text, copied


def _piece(mesh: Mesh, source: int, part: int, number: int) -> torch.Tensor:
    """Wait for a piece that was requested; raise if what arrives is not what was sent."""
    timeout_s, began = mesh.timeout.total_seconds(), time.monotonic()
    deadline = began + timeout_s
    with mesh.changed, mesh.waits():
        while (payload := mesh.take(source, Key(Kind.STATE, number, part))) is None:
            mesh.check()
            if (refusal := mesh.take(source, Key(Kind.STATE, 0, part, _REFUSES))) is not None:
                raise _RefusedError(refusal.numpy().tobytes().decode())
            if source in mesh.lost:
                raise ExchangeError(f"rank {source} was lost: {mesh.lost[source]}")
            now = time.monotonic()
            if mesh.waits_at(source) is not None:
                deadline = min(now, began + MOST_TIMEOUTS * timeout_s) + timeout_s
            if now > deadline:
                raise ExchangeError(
                    f"rank {source}, which gives its state between two steps, sent none for {timeout_s:g} s"
                )
            mesh.changed.wait(min(_TICK_S, timeout_s / 10))
    digest, content = payload[:_DIGEST_BYTES], payload[_DIGEST_BYTES:]
    if hashlib.sha256(content.numpy().data).digest() != digest.numpy().tobytes():
        raise ExchangeError(f"piece {number} of rank {source}'s state is not what it sent")
    return content
