"""The exchanges of virtual workers that repeat what happened to ranks that make their steps together."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gossip.algorithms import VALUES, Algorithm, BucketView
from gossip.compression.codec import Compression
from gossip.errors import GossipError
from gossip.exchange.exchanges import CHANNEL_STRIDE, Outgoing
from gossip.exchange.recording import Agreed, Idle, Joined, Members, Missed, Recording
from gossip.optimizers.scopes import has_shape
from gossip.step.building.wrapper_arguments import resized_or
from gossip.step.state.algorithm_state import regroup
from gossip.virtual.stacked_exchanges import StackedExchanges, StackedInFlight, StackedMeter
from gossip.virtual.stacked_updating import StackedModel, StackedUpdater
from topologies import Round, Topology


class _Generation(NamedTuple):
    """The ranks that train from a step on, and how."""

    step: int
    members: Sequence[int]
    agreed: set[int]  # on what the algorithm keeps alike on all ranks
    topology: Topology
    algorithm: Algorithm
    schedule: Topology


class _Late(NamedTuple):
    """What a late message adds to the values of a rank."""

    block: int
    rank: int
    round_index: int
    difference: torch.Tensor


class ReplayedExchanges(StackedExchanges):
    """The exchanges of all ranks that a recording names: those that do not train at a step have no edges.

    Raises ValueError: the recording does not say who trained, or the compression or the algorithm cannot be replayed.
    """

    def __init__(
        self,
        recording: Recording,
        topology: Topology,
        bound: Callable[[Topology], Algorithm],
        model: StackedModel,
        compression: Compression,
    ) -> None:
        self._world_size = len(recording.num_steps)
        self._generations: list[_Generation] = []
        agreed: dict[int, set[int]] = defaultdict(set)
        self._missed: dict[tuple[int, int], list[Missed]] = defaultdict(list)  # by round and bucket of a rank
        self._joined: dict[int, dict[int, int]] = defaultdict(dict)  # sources by the step before which they gave
        self._idle: dict[int, set[int]] = defaultdict(set)
        for event in recording.events:
            if isinstance(event, Agreed):
                agreed[event.generation].add(event.rank)
            elif isinstance(event, Missed):
                self._missed[event.step, event.bucket].append(event)
            elif isinstance(event, Joined):
                self._joined[event.step][event.rank] = event.source
            elif isinstance(event, Idle):
                self._idle[event.step].add(event.rank)
        for each in _generations(recording):
            resized, algorithm = resized_or(each.fallback_topology, topology, len(each.members), bound)
            schedule = algorithm.schedule(resized)
            own = agreed[each.generation]
            self._generations.append(_Generation(each.step, each.members, own, resized, algorithm, schedule))
        self._late: dict[tuple[int, bool], list[_Late]] = defaultdict(list)  # by when they enter
        self._given: dict[int, dict[tuple[object, ...], torch.Tensor]] = {}  # by rank that joins, what it takes over
        self._given_samples: dict[int, float] = {}
        self._is_joining: set[int] = set()  # ranks that have not agreed on common state since they joined
        self._still: dict[int, dict[str, torch.Tensor]] = {}  # buffers of ranks that make no update in the next step
        self._step, self._next = 0, self._generations[0].step
        *_, algorithm, schedule = self._generations[0]
        if algorithm.requires.tree:
            raise ValueError(
                f"replay: algorithm {algorithm.describe()} relays along a tree of the ranks, which are others after "
                "each change; no virtual workers can repeat that"
            )
        rounds = Topology.from_function(self._round, stochasticity=schedule.stochasticity)
        super().__init__(model, rounds, algorithm, compression)
        if self.codecs:
            raise ValueError(
                f"replay: what codecs of compression {(algorithm.compression or compression).describe()} remember of "
                "lost messages is not in a recording; only messages that are values can be repeated (none, bf16, fp16)"
            )
        (num_buckets,) = {each.num_buckets for each in _generations(recording)[:1]}
        if num_buckets != len(self._blocks):
            raise ValueError(
                f"replay is a recording of {num_buckets} buckets, but the model has {len(self._blocks)}; pass module, "
                "bucket_cap_mb and buffers as in the run that was recorded"
            )
        self._take_over(self._next)

    @property
    def next_ranks(self) -> Sequence[int]:
        return self._at(self._next).members

    @property
    def averaged_ranks(self) -> list[int]:
        first = self._generations[0].step
        return sorted({*self.next_ranks} & {*self._at(max(first, self._next - 1)).members})

    def _at(self, step: int) -> _Generation:
        """Return the ranks that make a step, and how."""
        return next((each for each in reversed(self._generations) if each.step <= step), self._generations[0])

    def _round(self, step: int) -> Round:
        """Return the round of the ranks that train, among all."""
        return among(self._at(step).schedule.round(step), self._at(step).members, self._world_size)

    # ------------------------------------------------------------------ a step

    def begin_step(self, step: int, updater: StackedUpdater) -> None:
        """Mix in late messages, and drop the gradients of ranks that make no update in this step.

        Raises GossipError: it is not the next step of the run.
        """
        if step != self._next:
            raise GossipError(
                f"replay: the next step of the run is {self._next}, but this is step {step}; gossip.load the "
                "checkpoint from which the run went on, before the first step, if there was one, and no other"
            )
        self._enter((step, False))
        for rank, buffers in self._still.items():  # the forward pass was of all replicas
            for name, row in self._buffers_of(rank).items():
                row.copy_(buffers[name])
        updating = self._updating(step)
        for rank in set(range(self._world_size)) - updating:
            updater.scales[rank] = 0
        updater.counts_each = True
        for index in self._buckets:
            lags = updater.lags[self.names(index)[0]]
            for view in self.views(index) if lags.any() else ():
                view.lags = lags[view.ranks.start : view.ranks.stop, None].to(view.values.device, torch.float64)

    def _updating(self, step: int) -> set[int]:
        return set(self._at(step).members) - self._idle[step]

    def _buffers_of(self, rank: int) -> dict[str, torch.Tensor]:
        place, row = self._place(rank)
        return {name: buffer[row] for name, buffer in self._shards[place].buffers.items()}

    def _keep_still(self) -> None:
        still = set(range(self._world_size)) - self._updating(self._next)
        self._still = {rank: {name: row.clone() for name, row in self._buffers_of(rank).items()} for rank in still}

    def end_step(self, step: int, updater: StackedUpdater, meter: StackedMeter) -> Topology | None:
        """Do what happens between the last step and this one: late messages, another generation, ranks that join."""
        self._next = step
        changes = self._at(step) is not self._at(step - 1)
        self._enter((step, True))
        if changes or self.algorithm.before_forward:  # what arrives is combined here, too
            self._enter((step, False))
        if changes:
            self._change(step, meter)
        self._take_over(step)
        for rank, source in self._joined[step].items():
            for lags in updater.lags.values():
                lags[rank] = lags[source]
        return self._at(step).topology if changes else None

    def _take_over(self, step: int) -> None:
        for rank, source in self._joined[step].items():
            self._given[rank] = {key: row.clone() for key, row in self._state_of(source).items()}
            if isinstance(self.samples, torch.Tensor):
                self._given_samples[rank] = float(self.samples[source])
        self._keep_still()

    def _enter(self, moment: tuple[int, bool]) -> None:
        for late in self._late.pop(moment, ()):
            row = self._row(self.views(late.block), late.rank)
            self.algorithm.combine_(row, late.difference.to(row.device), late.round_index)
            self._written(late.block)

    def _change(self, step: int, meter: StackedMeter) -> None:
        before, after, algorithm = self._at(step - 1).members, self._at(step).members, self._at(step).algorithm
        for index in range(len(self.in_flight)):
            self.combine_(index, meter)
        algorithm.follow(self.algorithm)
        self.algorithm = algorithm
        joining = set(after) - set(before)
        if isinstance(self.samples, torch.Tensor):
            given = {rank: self._given_samples[rank] for rank in joining & self._given_samples.keys()}
            samples = [given.get(rank, float(own)) for rank, own in enumerate(self.samples)]
            self.weigh(torch.tensor(samples, dtype=torch.float64))
        regroup(self)
        self._is_joining |= joining
        for rank in joining:
            for key, row in self._state_of(rank).items():
                row.copy_(self._given[rank].get(key, torch.zeros(())))  # an optimizer begins with zeros
        for generation in (each for each in self._generations if each.step == step and each.agreed):
            trained = sorted(set(generation.members) - self._is_joining) or generation.members
            for name in algorithm.common:
                for index in self._buckets:
                    rows = [self._row(self.views(index), rank, name) for rank in range(self._world_size)]
                    mean = torch.stack([rows[rank].cpu() for rank in trained]).double().mean(0)
                    for rank in generation.agreed:
                        rows[rank].copy_(mean)
            self._is_joining -= generation.agreed

    def _place(self, rank: int) -> tuple[int, int]:
        """Return the place of the shard that holds a rank, and of the rank's row in it."""
        place = next(place for place, shard in enumerate(self._shards) if rank in shard.ranks)
        return place, rank - self._shards[place].ranks.start

    def _row(self, views: Sequence[BucketView], rank: int, kept: str | None = None) -> torch.Tensor:
        place, row = self._place(rank)
        view = views[place]
        return (view.values if kept is None else {**view.kept, **view.numbers}[kept])[row]

    def _state_of(self, rank: int) -> dict[tuple[object, ...], torch.Tensor]:
        """Return the rows of a rank that another one takes over when it joins."""
        place, row = self._place(rank)
        shard, found = self._shards[place], dict[tuple[object, ...], torch.Tensor]()
        for name, parameter in shard.parameters.items():
            found[name,] = parameter.data[row]
            for number, optimizer in enumerate(self._optimizers):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if has_shape(value, parameter):
                        found[name, number, key] = value[row]
        found |= {(name,): buffer[row] for name, buffer in shard.buffers.items()}
        for name, how in self.algorithm.keeps.items():
            if how.scope != "joint":
                found |= {(index, name): self._row(self.views(index), rank, name) for index in self._buckets}
        for name in self.algorithm.kept_numbers:
            found |= {(index, name): self._row(self.views(index), rank, name) for index in self._buckets}
        return found

    def load_rank_states(self, states: Sequence[Mapping[str, Any]] | None) -> None:
        if states is None:
            raise GossipError(
                f"replay: the checkpoint is not one of {self._world_size} ranks with what they had in flight; a run "
                "that went on from a checkpoint is repeated only if all its ranks were in that"
            )
        super().load_rank_states(states)
        self._keep_still()

    # ------------------------------------------------------------------ what was lost, and what was late

    def _start(self, index: int, messages: Outgoing, round_: Round, step: int, meter: StackedMeter) -> StackedInFlight:
        self._step = step
        compression = self._compression_of(index, VALUES)

        def sent_by(rank: int) -> torch.Tensor:
            place, row = self._place(rank)
            sent = compression.messages(messages[VALUES][place][row : row + 1])
            assert sent is not None
            return sent[0].to("cpu", torch.float64)

        for late in self._missed[step, self._number_of(index)]:
            if late.entered >= 0:
                weight = round_.neighbours(late.rank).get(late.source, 0.0)  # without() refuses others
                difference = weight * (sent_by(late.source) - sent_by(late.rank))
                self._late[late.entered, late.is_read].append(_Late(index, late.rank, step, difference))
        return super()._start(index, messages, round_, step, meter)

    def _number_of(self, index: int) -> int:
        """Return the number of a block's bucket on a rank."""
        return next(number for number, (_, indices) in enumerate(self._blocks) if index in indices)

    def _edges(self, index: int, channel: str, round_: Round, step: int) -> Round:
        edges = super()._edges(index, channel, round_, step)
        number = self._number_of(index) + CHANNEL_STRIDE * self._channels(index).index(channel)
        missed = {(each.rank, each.source) for each in self._missed[self._step, number]}
        return without(edges, missed) if missed else edges

    def weights(self) -> dict[str, list[torch.Tensor]]:
        trains = torch.zeros(self._world_size, 1, dtype=torch.float64)
        trains[self.averaged_ranks] = 1
        by_shard = [trains[shard.ranks.start : shard.ranks.stop].to(shard.device) for shard in self._shards]
        weights = dict.fromkeys((*self._shards[0].parameters, *self._shards[0].buffers), by_shard)
        numbers = super().weights().items()
        return weights | {name: [a * b for a, b in zip(own, by_shard, strict=True)] for name, own in numbers}


def among(round_: Round, members: Sequence[int], world_size: int) -> Round:
    """Return a round of some ranks as one of all ranks, of which the others have no edges."""
    targets, sources, weights = round_.edges()
    place = np.asarray(members)
    own = np.ones(world_size)
    own[place] = round_.sparse().diagonal()
    return Round.from_edges(world_size, place[targets], place[sources], weights, own)


def without(round_: Round, missed: set[tuple[int, int]]) -> Round:
    """Return a round without the edges (target, source) in ``missed``, whose targets keep these weights."""
    targets, sources, weights = round_.edges()
    is_missed = np.array([edge in missed for edge in zip(targets.tolist(), sources.tolist(), strict=True)])
    if is_missed.sum() != len(missed):
        raise ValueError("replay: the recording names edges that the topology does not have; pass the run's topology")
    kept = np.bincount(targets[is_missed], weights[is_missed], round_.world_size)
    own, is_left = round_.sparse().diagonal() + kept, ~is_missed
    return Round.from_edges(round_.world_size, targets[is_left], sources[is_left], weights[is_left], own)


def check_recording(recording: Recording, world_size: int, *, has_changes: bool) -> int:
    """Return the number of ranks with which a run began, which is smaller than ``world_size`` if others joined.

    Raises ValueError: the recording is of another number of ranks, or, if the ranks may change, does not say which.
    """
    if len(recording.num_steps) != world_size:
        raise ValueError(
            f"replay is a recording of {len(recording.num_steps)} ranks, but world_size is {world_size}; pass the same "
            "number"
        )
    return len(_generations(recording)[0].members) if has_changes else world_size


def _generations(recording: Recording) -> list[Members]:
    """Return who trains from which step on, in order."""
    found: dict[int, Members] = {}
    for event in recording.events:
        if isinstance(event, Members):
            known = found.setdefault(event.generation, event)
            if (known.step, known.members) != (event.step, event.members):
                raise ValueError(
                    f"replay: the recording contradicts itself, {known} and {event}: its files are of several runs, or "
                    "the run loaded a checkpoint after its first step, which no virtual workers repeat"
                )
    if not found:
        raise ValueError(
            'replay: the recording does not say which ranks began, as with algorithm="asynchronous"; pass the '
            "algorithm of the run, and all files of its record="
        )
    return [found[number] for number in sorted(found)]
