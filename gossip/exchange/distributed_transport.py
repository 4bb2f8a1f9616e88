"""Exchange over ``torch.distributed``: in groups, point-to-point, and in the memory of one machine."""

from __future__ import annotations

import queue
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest

import torch

from gossip.communication.device_paths import Message, Pending, Tensors, message_of, post_point_to_point, taking_by
from gossip.communication.host.worker_threads import Job, Operation, Works, posted
from gossip.communication.shared_buffers import BUFFERS_PER_ROW
from gossip.communication.shared_memory import LocalMessages, Reading, Readings, SharedMessage
from gossip.communication.waiting import Failure
from gossip.communication.world import World
from gossip.compression.conversation import Arrival, Conversation, Delivery, Messages, Parts, Turn
from gossip.errors import ExchangeError, GossipError
from gossip.exchange.transport import Transport
from topologies import Round, Topology

_MAX_GROUPS_PER_RANK = 16
_MAX_DEVICE_GROUPS_PER_RANK = 4  # NCCL spends hundreds of MB of the device's memory for each
_TAG_STEPS = 2**10  # far more steps than two ranks can be apart
#: An all-reduce among g ranks sends less than g - 1 messages do, but takes more turns; it pays from this size on.
MIN_LARGE_BYTES = 2**16
#: Messages are cut into pieces of this size, of which a few are in flight at a time.
PIECE_BYTES = 2**19


class DistributedTransport(Transport):
    """Exchange over ``torch.distributed``.

    Messages are sent point-to-point, each as a whole, to every rank that reads this one. Where three or more ranks
    average uniformly in disjoint groups, messages of at least 64 KiB run as one all-reduce per group, over
    communicators that are created here, once, for all rounds of the period and of a warm-up; unless that would give
    some rank more than 16 communicators (4 with backends other than gloo, and only the group itself if such a group was
    passed).

    Parameters
    ----------
    world : World
        The ranks.
    topology : Topology
        The topology whose rounds are exchanged.
    sums_on_wire : bool
        Whether all-reduce may be used; compressed messages cannot be added before they are decoded.
    shares_memory : bool
        Whether messages of at least 64 KiB between ranks on one machine go through shared memory, on a CPU: whole
        values are read in place, others are copied from there.

    Notes
    -----
    Construction is collective: every rank must construct it, with the same topology.

    Measurements on gloo (docs/performance.md): if the link is the bottleneck, a pair takes equally long either way, but
    small messages take a third of the time point-to-point, and less processor time. Receives are posted before sends,
    without which large messages would move in one direction at a time. Large messages are sent in pieces, and only as
    many at a time as keep the link busy (``gossip.communication.host.worker_threads``): otherwise messages of several
    buckets would compete, to the old peer and to the new one, and the resulting losses cost more than the pauses.
    """

    num_buffers = BUFFERS_PER_ROW

    def __init__(
        self, world: World, topology: Topology, *, sums_on_wire: bool = True, shares_memory: bool = True
    ) -> None:
        assert world.membership is not None
        self.world = world
        most = _MAX_GROUPS_PER_RANK if world.membership.is_gloo else _MAX_DEVICE_GROUPS_PER_RANK
        self._shared = dict.fromkeys(shared_groups(topology, most) if sums_on_wire else ())
        if not world.can_split:  # the group that was passed is the only one available
            self._shared = {ranks: None for ranks in self._shared if len(ranks) == world.world_size}
        for ranks in self._shared:
            if world.rank in ranks or not world.membership.is_gloo:
                world.communicator(ranks, "mixing")
        self.local_messages = LocalMessages(world, shares_memory=shares_memory)
        self.shared_messages: dict[int, SharedMessage] = {}
        self._copies: dict[tuple[int, int, int], SharedMessage] = {}  # by bucket, number within it, and size

    def memory(self, message: torch.Tensor, *, step: int, bucket: int) -> torch.Tensor:
        """Return memory that peers on this machine read, if any; waits until they have read its old content."""
        if not self._shares(message):
            return message
        if bucket not in self.shared_messages:
            self.shared_messages[bucket] = SharedMessage(self.local_messages, message, bucket)
        return self.shared_messages[bucket].take(f"step {step}, bucket {bucket}")

    def _shares(self, message: torch.Tensor) -> bool:
        return bool(self.local_messages.local) and _is_large(message)

    def rehearse(self, turn: Turn, round_: Round, device: torch.device, *, alike: bool) -> Sequence[torch.Tensor]:
        in_place = alike and device.type == "cpu" and all(map(self._shares, turn.sent.values()))
        self.room(turn, round_, in_place)
        readers = self._handed_out(turn.sent, in_place) if device.type == "cpu" else {}
        distinct = {id(message): message for message in readers.values()}.values()
        return tuple(distinct) if in_place else tuple(map(torch.empty_like, distinct))

    def held(self) -> list[torch.Tensor]:
        kept = (*self.shared_messages.values(), *self._copies.values())
        return [buffer for message in kept for buffer in message.written]

    def describe(self) -> str:
        """Describe the backend, the communicators, and how rounds are exchanged. Local."""
        assert self.world.membership is not None
        shared = [self.world.communicator(ranks, "mixing") for ranks in self._shared if self.world.rank in ranks]
        number, others = len({id(group) for group in (self.world.group, *shared)}), len(self.local_messages.local)
        size = f"{MIN_LARGE_BYTES // 2**10} KiB"
        return (
            f"backend {self.world.membership.backend_name}, {number} communicator{'s' * (number > 1)} on rank "
            f"{self.world.rank}; messages point-to-point"
            + f", from {size} on by all-reduce in {len(self._shared)} group{'s' * (len(self._shared) > 1)}"
            * bool(self._shared)
            + f"; with {others} rank{'s' * (others > 1)} on this machine messages from {size} on go through memory"
            * bool(others)
        )

    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> DistributedExchange:
        check_device(self.world, conversation.unmade_opening, step, bucket)
        return DistributedExchange(self, conversation, round_, step, bucket)

    def room(
        self, turn: Turn, round_: Round, in_place: bool
    ) -> tuple[Sequence[int], torch.Tensor | None, dict[int, torch.Tensor]]:
        """Return this rank's uniform group, and the accumulator if messages are added on the wire, else buffers.

        Large whole values are added that are not read in shared memory. The members of a group decide equally, and the
        groups of a round are disjoint.
        """
        rank, local = self.world.rank, self.local_messages.local
        ranks = next((ranks for ranks in round_.uniform_groups or () if rank in ranks), ())
        if ranks in self._shared and turn.make_accumulator is not None:
            is_large = next(iter(turn.sent.values())).nbytes >= MIN_LARGE_BYTES
            if is_large and not (in_place and self.local_messages.are_local(ranks)):
                return ranks, turn.make_accumulator(), {}
        is_read_in_place = in_place and local.issuperset((*round_.neighbours(rank), *turn.sent))
        return ranks, None, {} if is_read_in_place else dict(turn.receive_buffers)

    def _handed_out(self, messages: Messages, in_place: bool) -> Messages:
        """Return the messages that ranks on this machine read in memory, by rank."""
        local = self.local_messages.local
        return {rank: each for rank, each in messages.items() if rank in local and (in_place or _is_large(each))}

    def hand_out(self, messages: Messages, bucket: int, where: str) -> frozenset[int]:
        """Let ranks on this machine read their message, in place or as a copy, and return these ranks."""
        in_place = self.shared_messages.get(bucket)
        readers = self._handed_out(messages, in_place is not None)
        if in_place is not None:
            in_place.publish(tuple(readers))
            return frozenset(readers)
        distinct = {id(message): message for message in readers.values()}
        for number, message in enumerate(distinct.values()):
            place = bucket, number, message.nbytes
            if place not in self._copies:
                self._copies[place] = SharedMessage(self.local_messages, _bytes_of(message), bucket)
            self._copies[place].take(where).copy_(_bytes_of(message))
            self._copies[place].publish([target for target, same in readers.items() if same is message])
        return frozenset(readers)


class DistributedExchange:
    """Messages in flight over ``torch.distributed``, see :class:`gossip.Exchange`."""

    pending: Pending

    def __init__(
        self, transport: DistributedTransport, conversation: Conversation, round_: Round, step: int, bucket: int
    ) -> None:
        self._world, self._conversation, turn = transport.world, conversation, conversation.unmade_opening
        self._step, self._bucket, self._where = step, bucket, f"step {step}, bucket {bucket}"
        self._sent, self._sources = turn.sent, tuple(round_.neighbours(self._world.rank))
        self._progress = Progress()
        self._local_messages = transport.local_messages
        self._in_place = transport.shared_messages.get(bucket)
        self._readings: Mapping[int, Reading] = {}
        self._handed_out: frozenset[int] = frozenset()
        self._following: Works = ()
        self.bytes_by_peer = {target: message.nbytes for target, message in turn.sent.items()}
        ranks, self._total, self._received = transport.room(turn, round_, self._in_place is not None)
        if self._total is not None:
            self._begin_all_reduce(conversation.opening, ranks, self._total)
            return
        local = self._local_messages.local
        self._readings = {
            source: self._local_messages.expect(source, bucket)
            for source in self._sources
            if source in local and (self._in_place is not None or _is_large(self._received[source]))
        }
        on_host = all(message.is_cpu for message in (*turn.sent.values(), *self._received.values()))
        if not local.isdisjoint(turn.sent) or not on_host:
            self._progress.follow(conversation.make_opening())  # all of it: the next calls need it, or wait for it
            self._handed_out = transport.hand_out(turn.sent, bucket, self._where)
        self.pending = self._begin_messages()
        self._progress.follow(conversation.make_opening())

    def _begin_all_reduce(self, turn: Turn, ranks: Sequence[int], total: torch.Tensor) -> None:
        assert self._world.device_paths is not None
        # In the wide dtype, because mul(out=) would round in the narrow one.
        total.copy_(next(iter(turn.sent.values()))).mul_(1 / len(ranks))
        self._sources = tuple(rank for rank in ranks if rank != self._world.rank)
        self.bytes_by_peer = {rank: 2 * total.nbytes // len(ranks) for rank in self._sources}
        group = self._world.communicator(ranks, "mixing")
        name = f"the all-reduce with ranks {', '.join(map(str, self._sources))}"

        def post(_: Tensors, received: Tensors) -> Job:
            yield (posted(name, lambda: group.allreduce([received[0]]), 2 * total.nbytes),)
            yield None
            yield from self._proceed(Delivery({}, {}, total=total))

        self.pending = self._world.device_paths.submit(post, [total], [total])

    @property
    def arrived_at(self) -> Mapping[int, float]:
        times = self.pending.finished_at
        if self._total is not None:
            return dict.fromkeys(self._sources, max(times.values())) if times else {}
        return {source: times[message_of(source)] for source in self._sources if message_of(source) in times}

    def _begin_messages(self) -> Pending:
        """Post the messages that go over a network; without any, whoever needs the local ones polls for them."""
        if not self._received and self._readings:
            return Readings({message_of(source): reading for source, reading in self._readings.items()}, self._take_in)
        assert self._world.device_paths is not None
        return self._world.device_paths.submit(self._post_all, list(self._sent.values()), list(self._received.values()))

    def _post_all(self, sent: Tensors, received: Tensors) -> Job:
        """Send and receive the messages, and those with which the codec follows up."""
        wire_sent = dict(zip(self._sent, sent, strict=True))
        wire_received = dict(zip(self._received, received, strict=True))
        outgoing = {rank: message for rank, message in wire_sent.items() if rank not in self._handed_out}
        incoming = {rank: buffer for rank, buffer in wire_received.items() if rank not in self._readings}
        if all(message.is_cpu for message in (*sent, *received)):
            # All receives at once, so that a peer on a slow link learns early that there is room.
            receives = [self._post({}, buffers) for buffers in _pieces(incoming)]
            self._following = self._post({}, self._conversation.unmade_opening.following)
            num_bytes = 0
            for works, piece in zip_longest(receives, _pieces(outgoing)):
                self._progress.wait_for(num_bytes := num_bytes + PIECE_BYTES)
                yield [*(works or ()), *self._post(piece or {}, {})]
        else:  # the host does not inspect them
            self._progress.wait_for(sys.maxsize)
            yield self._post(outgoing, incoming)
        yield [
            Operation(message_of(source), self._local_messages.arrival(reading))
            for source, reading in self._readings.items()
        ]
        yield None
        self._progress.wait_for(sys.maxsize)  # a rank that sends nothing decodes the others' messages by its own
        for source, reading in self._readings.items():
            if self._in_place is not None:
                wire_received[source] = self._received[source] = self._read_message(reading)
            else:
                _bytes_of(wire_received[source]).copy_(reading.buffer.message)
                reading.done()
        yield from self._proceed(Delivery(self._sent, self._received, on_host=(wire_sent, wire_received)))

    def _take_in(self) -> None:
        """Read the messages, all in the memory of this machine; they are whole values, which need no follow-up."""
        self._received = {source: self._read_message(reading) for source, reading in self._readings.items()}
        for _ in self._proceed(Delivery(self._sent, self._received)):
            pass

    def _read_message(self, reading: Reading) -> torch.Tensor:
        assert self._in_place is not None
        return reading.buffer.message.view(self._in_place.message.dtype)

    def _proceed(self, delivery: Delivery) -> Job:
        """Carry the turns after the opening, once that has been delivered."""
        for turn in self._conversation.proceed(delivery):
            for target, message in turn.sent.items():
                self.bytes_by_peer[target] = self.bytes_by_peer.get(target, 0) + message.nbytes
            following, self._following = self._following, ()
            yield [*following, *self._post(turn.sent, {} if following else turn.receive_buffers)]

    def _post(self, sent: Messages, received: Messages) -> Works:
        # Two buckets between two ranks must never be swapped.
        tag = self._bucket * _TAG_STEPS + self._step % _TAG_STEPS
        return post_point_to_point(
            self._world.group,
            [Message(source, buffer, tag) for source, buffer in received.items()],
            [Message(target, message, tag) for target, message in sent.items()],
        )

    def wait(self) -> Arrival:
        if (failure := self._world.wait_for(self.pending, self._where, self._awaited)) is not None:
            raise lost_exchange(self._world, failure, self._where, self.pending) from self.pending.error
        arrival = self._conversation.arrival
        return arrival._replace(parts=self._read(arrival.parts))

    def _awaited(self) -> Sequence[int]:
        """Return the ranks that the exchange currently waits for."""
        return peers_in(self.pending.awaited, self._sources, self._sent) or self._sources

    def _read(self, parts: Parts) -> Parts:
        """Yield all parts, then tell the peers that this rank has read their messages."""
        yield from parts
        for reading in self._readings.values() if self._in_place is not None else ():
            reading.done()


class Progress:
    """The number of bytes of a message that are complete, for the thread that sends them."""

    def __init__(self) -> None:
        self._made: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._num_bytes = 0
        self._error: BaseException | None = None

    def follow(self, making: Iterator[int]) -> None:
        """Run the iterator that makes the message."""
        try:
            for num_bytes in making:
                self._made.put(num_bytes)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._made.put(sys.maxsize)

    def wait_for(self, num_bytes: int) -> None:
        """Return when this number of bytes is complete, or the whole message. Not called in two threads at a time."""
        while self._num_bytes < num_bytes:
            self._num_bytes = self._made.get()
        if self._error is not None:
            raise GossipError(f"the message was not made: {self._error}")


def peers_in(awaited: str, sources: Iterable[int], targets: Iterable[int]) -> Sequence[int]:
    """Return the rank that ``awaited`` refers to, as sender or as receiver; empty if it refers to something else."""
    ranks = {message_of(source): source for source in sources} | {taking_by(target): target for target in targets}
    return (ranks[awaited],) if awaited in ranks else ()


def lost_exchange(world: World, failure: Failure, where: str, pending: Pending) -> ExchangeError:
    """Return the error for an exchange whose messages did not arrive, naming rank, step, bucket and peers."""
    if pending.error is not None:
        return world.lost(failure, f"{where}: failed while waiting for {pending.awaited}", pending.error)
    return world.lost(
        failure,
        f"{where}: {failure.of_waiting} for {pending.awaited}",
        advice=" (GossipDataParallel's timeout sets how long to wait)",
    )


def _is_large(message: torch.Tensor) -> bool:
    """Return whether the message is worth sharing in memory; equal at both ends of an edge."""
    return message.device.type in ("cpu", "meta") and message.nbytes >= MIN_LARGE_BYTES


def _bytes_of(message: torch.Tensor) -> torch.Tensor:
    return message.view(-1).view(torch.uint8)


def _pieces(messages: Messages) -> Iterator[Messages]:
    """Yield messages in host memory piece by piece, cut equally by all ranks."""
    cut = {peer: message.split(PIECE_BYTES // message.element_size()) for peer, message in messages.items()}
    for number in range(max(map(len, cut.values()), default=0)):
        yield {peer: pieces[number] for peer, pieces in cut.items() if number < len(pieces)}


def shared_groups(topology: Topology, most_per_rank: int = _MAX_GROUPS_PER_RANK) -> list[tuple[int, ...]]:
    """Return the groups of three or more ranks that get a communicator, in order of their first round."""
    groups: dict[tuple[int, ...], None] = {}
    for phase in topology.phases:
        found = dict(groups)
        for exchange in range(phase.num_distinct(sampled=0)):
            of_round = phase.topology.round(exchange).uniform_groups or ()
            found |= dict.fromkeys(ranks for ranks in of_round if len(ranks) > 2)
            if max(Counter(chain.from_iterable(found)).values(), default=0) > most_per_rank:
                break  # some rank would be in too many
        else:
            groups = found
    return list(groups)


def check_device(world: World, turn: Turn, step: int, bucket: int) -> None:
    """Refuse a message that the backend cannot carry."""
    assert world.device_paths is not None
    assert world.membership is not None
    device = next(iter((turn.sent or turn.receive_buffers).values())).device
    if not world.device_paths.serves(device):
        raise ExchangeError(
            f"rank {world.rank}: step {step}, bucket {bucket}: its parameters are on {device}, but the process "
            f"group only has a backend for {', '.join(world.membership.backends)}; move the module there before "
            'wrapping it, or initialise with backend="cpu:gloo,cuda:nccl"'
        )
