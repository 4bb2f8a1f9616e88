"""Virtual workers that repeat the steps and averages of a recording, each at its own pace."""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

import torch
from torch import nn

from gossip.compression.conversation import accumulation_dtype
from gossip.errors import GossipError
from gossip.exchange.recording import Average, Members, Recording
from gossip.optimizers.scopes import COUNTER
from gossip.parameters.buckets import Bucket
from gossip.virtual.shards import rows_of, written
from gossip.virtual.stacked_exchanges import StackedExchanges
from gossip.virtual.stacked_optimizers import left_alone, step_all, step_counters
from gossip.virtual.stacked_updating import StackedModel, StackedUpdater


@dataclass
class _Made:
    """An average that has been made, and its change; it enters the values later than it is shown to others."""

    average: Average
    change: torch.Tensor
    has_entered: bool = False


@dataclass
class _Place:
    """The state of one bucket of one rank."""

    to_make: deque[Average]
    """The averages to make, in order; none enters before one that is made before it."""
    step: int = -1
    """The newest step whose update it contains."""
    made: list[_Made] = field(default_factory=list)
    """Averages that have not entered, or do not count in what was shown after the step of the next one to be made."""
    shown: dict[int, torch.Tensor] = field(default_factory=dict)
    """The values after a step, [numel], by step, if an average with them is still to be made."""

    def forget(self) -> None:
        """Discard data that is no longer needed."""
        first = self.to_make[0].step if self.to_make else None
        self.shown = {step: values for step, values in self.shown.items() if first is not None and step >= first}
        self.made = [
            made for made in self.made if not made.has_entered or (first is not None and made.average.entered > first)
        ]


class Replay:
    """A recording in the course of its repetition.

    Each call of the workers gives all replicas gradients; a replica uses them if it has none yet for the step that it
    is about to make. Then updates and averages are made in the recording's order, as far as these gradients allow.

    Raises ValueError: the recording is for other buckets, or of ranks that changed; or buffers are to be averaged.
    """

    def __init__(self, recording: Recording, model: StackedModel, exchanges: StackedExchanges) -> None:
        shards, buckets, buffer_buckets, optimizers = model
        if buffer_buckets:
            raise ValueError('replay: a recording only covers parameters; choose buffers="local"')
        world_size = shards[-1].ranks.stop
        if any(isinstance(event, Members) for event in recording.events):
            raise ValueError(
                "replay: the recording is of ranks that made their steps together, or that have changed, which "
                'algorithm="asynchronous" does not repeat; pass the algorithm of the run'
            )
        averages = [event for event in recording.events if isinstance(event, Average)]
        found = {average.bucket for average in averages}
        if found and max(found) >= len(buckets):
            raise ValueError(
                f"replay names bucket {max(found)}, but the model has {len(buckets)}; choose bucket_cap_mb as in the "
                "run that was recorded"
            )
        self.next_steps: list[int | None] = [0 if num_steps else None for num_steps in recording.num_steps]
        self._num_steps = recording.num_steps
        self._shards, self._buckets, self._optimizers, self._exchanges = shards, buckets, optimizers, exchanges
        made: dict[tuple[int, int], deque[Average]] = defaultdict(deque)
        for average in averages:
            made[average.rank, average.bucket].append(average)
        self._places = {
            (rank, bucket.index): _Place(made[rank, bucket.index]) for rank in range(world_size) for bucket in buckets
        }
        self._gradients: dict[int, dict[str, torch.Tensor | None]] = {}  # by rank
        self._num_updates = Counter[tuple[int, nn.Parameter]]()

    def make_steps(self, updater: StackedUpdater, step: int) -> torch.Tensor:
        """Take the gradients of the stacks, and make what the recording says, as far as these allow.

        The updates of ranks without gradients, or with ones that are not finite, change nothing; return the latter,
        [n]. ``step`` is for the log.

        Raises GossipError: the recording contradicts itself.
        """
        skipped, _ = updater.prepare(step)
        left_out, reached = skipped | (updater.scales == 0), updater.reached
        for shard in self._shards:
            for row, rank in enumerate(shard.ranks):
                if self.next_steps[rank] is not None and rank not in self._gradients:
                    self._gradients[rank] = {
                        name: None
                        if parameter.grad is None or bool(left_out[rank] | ~reached.get(name, ~left_out)[rank])
                        else parameter.grad[row].clone()
                        for name, parameter in shard.parameters.items()
                    }
        before = [place.step for place in self._places.values()]
        while any(self._advance(rank, bucket) for rank in range(len(self.next_steps)) for bucket in self._buckets):
            pass
        if before == [place.step for place in self._places.values()] and any(s is not None for s in self.next_steps):
            waiting = {rank: place.to_make[0] for (rank, _), place in self._places.items() if place.to_make}
            raise GossipError(
                f"replay: the recording contradicts itself: no rank can continue; they wait for {waiting}"
            )
        updater.drop_gradients()
        written(self._shards)
        return skipped

    def _advance(self, rank: int, bucket: Bucket) -> bool:
        """Make the next average of a bucket, or its next update; return whether either was possible."""
        place, step = self._places[rank, bucket.index], self.next_steps[rank]
        if self._average(rank, bucket, place):
            return True
        is_free = not place.to_make or (step is not None and place.to_make[0].entered > step)
        if step is None or place.step >= step or rank not in self._gradients or not is_free:
            return self._read(rank)
        self._enter(rank, bucket, step, is_read=False)
        self._update(rank, bucket)
        place.step = step
        if any(average.step == step for average in place.to_make):
            row = self._row(rank, bucket)
            place.shown[step] = row.to(accumulation_dtype(row.dtype), copy=True)
        self._read(rank)
        return True

    def _average(self, rank: int, bucket: Bucket, place: _Place) -> bool:
        mine = place.to_make[0] if place.to_make else None
        if mine is None or mine.step > place.step:
            return False
        other = self._places[mine.partner, bucket.index]
        theirs = other.to_make[0] if other.to_make else None
        expected = (mine.partner, mine.partner_step, rank, mine.step)
        if theirs is None or theirs[:2] + theirs[3:5] != expected or theirs.step > other.step:
            return False
        difference = (self._shown(other, theirs) - self._shown(place, mine)) / 2
        for own, average, change in ((place, mine, difference), (other, theirs, -difference)):
            own.to_make.popleft()
            own.made.append(_Made(average, change))
            own.forget()
        self._read(rank)
        self._read(mine.partner)
        return True

    def _shown(self, place: _Place, average: Average) -> torch.Tensor:
        """Return the values that an average made now uses."""
        shown = place.shown[average.step].clone()
        for made in place.made:
            if made.average.entered > average.step:
                shown += made.change.to(shown.device)
        return shown

    def _row(self, rank: int, bucket: Bucket) -> torch.Tensor:
        view = next(view for view in self._exchanges.views(bucket.index) if rank in view.ranks)
        return view.values[rank - view.ranks.start]

    def _enter(self, rank: int, bucket: Bucket, step: int, *, is_read: bool) -> None:
        place, row = self._places[rank, bucket.index], self._row(rank, bucket)
        for made in place.made:
            if (made.average.entered, made.average.is_read) == (step, is_read):
                row.copy_(row.to(made.change.dtype) + made.change.to(row.device))
                made.has_entered = True
        place.forget()

    def _read(self, rank: int) -> bool:
        """Let a rank whose buckets are all updated begin its next step; return whether it does."""
        step = self.next_steps[rank]
        places = [self._places[rank, bucket.index] for bucket in self._buckets]
        if step is None or any(place.step < step for place in places):
            return False
        if any(average.entered == step + 1 and average.is_read for place in places for average in place.to_make):
            return False  # these are made before the values are read
        for bucket in self._buckets:
            self._enter(rank, bucket, step + 1, is_read=True)
        del self._gradients[rank]
        self.next_steps[rank] = step + 1 if step + 1 < self._num_steps[rank] else None
        return True

    def _update(self, rank: int, bucket: Bucket) -> None:
        """Step the optimizers for a single row of a bucket's parameters."""
        ((shard, row),) = rows_of(self._shards, rank, rank + 1)
        others = torch.ones(len(shard.ranks), dtype=torch.bool, device=shard.device)
        others[row] = False
        for each in self._shards:
            for parameter in each.parameters.values():
                parameter.grad = None
        alone: dict[nn.Parameter, torch.Tensor] = {}
        for name in bucket.names:
            if (gradient := self._gradients[rank][name]) is not None:
                parameter = shard.parameters[name]
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad[row] = gradient
                alone[parameter] = others
        if not alone:
            return
        for parameter in alone:  # the counters in the optimizers' states are this rank's in the update that it makes
            made = self._num_updates[rank, parameter]
            self._num_updates[rank, parameter] += 1
            for entry in step_counters(self._optimizers, [parameter]):
                value = entry[COUNTER]
                entry[COUNTER] = torch.full_like(value, made) if isinstance(value, torch.Tensor) else made
        with left_alone(self._optimizers, alone):
            step_all(self._optimizers)
        for parameter in alone:
            parameter.grad = None
