"""The exchanges of one model, on one rank or on all at once: what is in flight, and how it enters the values."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from gossip.algorithms import VALUES, Algorithm, Arrived, BucketView
from gossip.compression.codec import Compression
from gossip.compression.value_codecs import Uncompressed
from gossip.errors import GossipError
from topologies import Round, Topology

CHANNEL_STRIDE = 2**16
"""The distance in numbering between a bucket's channels, in codecs and messages; far above the number of buckets."""
Outgoing = Mapping[str, list[torch.Tensor]]
"""By channel what is sent, for each view."""
Accepted = Iterator[tuple[BucketView, Mapping[str, Arrived]]]
"""What has arrived, view by view or part by part."""


@runtime_checkable
class UsesExchange(Protocol):
    """An optimizer that is shown what was communicated, before it is mixed in."""

    def pre_average_hook(
        self,
        parameters: Sequence[nn.Parameter],
        sent: Sequence[torch.Tensor],
        mixed: Sequence[torch.Tensor],
        round_: Round,
        round_index: int,
    ) -> None:
        """React to the messages of a bucket, when all have arrived and before they are combined. Local.

        Parameters
        ----------
        parameters : sequence of Parameter
            The parameters of this optimizer in the bucket, as they are now.
        sent, mixed : sequence of Tensor
            For each of them, in its shape: what this rank sent, and ``sum_j W[i, j]`` times what rank j sent, in the
            accumulation dtype. Read-only.
        round_ : Round
            The round in which they were sent.
        round_index : int
            The index of the round.
        """


@dataclass
class InFlight(ABC):
    """One bucket's messages of a round, with everything that belongs to them."""

    round: Round
    round_index: int
    sent: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """By channel what was sent, for each view; only for channels whose messages are single tensors."""

    @abstractmethod
    def differences(self) -> dict[str, list[torch.Tensor]]:
        """Wait, once, and return by channel what is to be added, for each view of the bucket."""


AnyInFlight = TypeVar("AnyInFlight", bound=InFlight)
AnyMeter = TypeVar("AnyMeter")
"""The type in which the cost of a step is counted."""


class Exchanges(ABC, Generic[AnyInFlight, AnyMeter]):
    """Sends buckets to the peers and combines what arrives.

    This class holds all policy: what is sent in which round, what optimizers are shown, what is refused, and how it is
    combined. Subclasses determine how messages travel and how they are summed.

    Attributes
    ----------
    samples : float, Tensor [n], float64, or None
        How many samples the updates of this rank count, or those of each; None if nobody has said so.
    has_update : float or Tensor [n], float64
        0 where a step makes no update, because there are no gradients; otherwise 1.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], topology: Topology, algorithm: Algorithm, compression: Compression
    ) -> None:
        self.in_flight: list[AnyInFlight | None] = []  # by bucket
        self.algorithm = algorithm
        self.samples: float | torch.Tensor | None = None
        self.has_update: float | torch.Tensor = 1.0
        self._topology = topology
        self._compression = compression
        self._readers = [optimizer for optimizer in optimizers if isinstance(optimizer, UsesExchange)]
        self._keeps_sent = bool(self._readers) or algorithm.reads_sent

    # ------------------------------------------------------------------ what a subclass adds

    @abstractmethod
    def views(self, index: int) -> Sequence[BucketView]:
        """Return a bucket's values and state: one view on a rank, one per device of virtual workers."""

    @abstractmethod
    def holds_parameters(self, index: int) -> bool:
        """Return whether it is a bucket of parameters; the alternative is a bucket of buffers, which are only mixed."""

    @abstractmethod
    def _takes_part(self, step: int, round_: Round) -> bool:
        """Return whether the round that ends a step changes values on any rank here."""

    @abstractmethod
    def _start(self, index: int, messages: Outgoing, round_: Round, step: int, meter: AnyMeter) -> AnyInFlight:
        """Start to exchange the messages of each view, by channel."""

    @abstractmethod
    def _accepted(self, index: int, in_flight: AnyInFlight, meter: AnyMeter) -> Accepted:
        """Wait, then yield what has arrived.

        Nothing if all messages were lost, or one is not finite: then nothing is mixed, as if the peers had been absent.
        """

    @abstractmethod
    def _written(self, index: int) -> None:
        """React to a change of a bucket's values."""

    @abstractmethod
    def joined(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a single tensor of what belongs to each view, for a checkpoint; copied if there are several views."""

    @abstractmethod
    def dealt(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Split what :meth:`joined` made by view; copies if there are several views."""

    @abstractmethod
    def names(self, index: int) -> Sequence[str]:
        """Return the names of the parameters in a bucket."""

    # ------------------------------------------------------------------ policy

    def _compression_of(self, index: int, channel: str) -> Compression:
        is_compressed = self.holds_parameters(index) and channel not in self.algorithm.numbers
        return self.algorithm.compression or self._compression if is_compressed else Uncompressed()

    def _channels(self, index: int) -> tuple[str, ...]:
        """Return the channels of a bucket's exchange."""
        algorithm = self.algorithm
        return (*algorithm.sends, *algorithm.numbers) if self.holds_parameters(index) else (VALUES,)

    def _edges(self, index: int, channel: str, round_: Round, step: int) -> Round:
        """Return the edges of one channel of a bucket, of which there are none if it is not sent after ``step``."""
        is_tensor = self.holds_parameters(index) and channel not in self.algorithm.numbers
        if is_tensor and not self.algorithm.is_sent(channel, step):
            return Round.identity(round_.world_size)
        return self._most_edges(index, channel, round_)

    def _most_edges(self, index: int, channel: str, round_: Round) -> Round:
        """Return the edges of one channel of a bucket whenever it is sent."""
        return self.algorithm.channel_round(channel, round_) if self.holds_parameters(index) else round_

    def _is_in(self, step: int, round_: Round, rank: int) -> bool:
        """Return whether the round that ends a step changes values on a rank."""
        return bool(round_.peers(rank)) or self.algorithm.steps_alone(step, round_)

    def _begin(self, view: BucketView) -> None:
        """Let the algorithm initialise a bucket's state for the first time."""
        self.begin(view)
        dtypes = view.values.dtype, getattr(self._compression, "dtype", None)
        if self.algorithm.weighted and torch.float16 in dtypes:
            raise ValueError(
                f"algorithm {self.algorithm.describe()} sends products of values and numbers of samples, which are too "
                "large for float16; choose bfloat16"
            )
        name, sends, made = self.algorithm.describe(), set(self.algorithm.sends), set(self.algorithm.message(view))
        if VALUES not in sends or sends != made:
            raise ValueError(
                f"algorithm {name} has sends={sorted(sends)}, but its message() returns {sorted(made)}; both must name "
                f"the same channels, {VALUES!r} among them"
            )

    def begin(self, view: BucketView) -> None:
        """Let the algorithm initialise a bucket's state; ranks count by their samples, updated now or not."""
        view.samples = self._samples_of(view, 1.0)
        self.algorithm.begin(view)
        view.samples = self._samples_of(view, self.has_update)

    def _samples_of(self, view: BucketView, has_update: float | torch.Tensor) -> float | torch.Tensor:
        samples = has_update * (1.0 if self.samples is None else self.samples)
        if not isinstance(samples, torch.Tensor):
            return samples
        return samples[view.ranks.start : view.ranks.stop, None].to(view.values.device)

    def weigh(self, samples: float | torch.Tensor | None) -> None:
        """Let the next updates count so many samples. The first time, the numbers by which ranks count begin so."""
        is_first, self.samples = self.samples is None, samples
        for view in self.parameter_views():
            view.samples = self._samples_of(view, self.has_update)
            if is_first and samples is not None:
                kept, view.kept = view.kept, {}
                counts = {name: view.numbers[name].clone() for name in self.algorithm.counts}
                self.begin(view)
                view.kept = kept
                for name, count in counts.items():
                    view.numbers[name].copy_(count)

    @contextlib.contextmanager
    def updating(self, has_update: float | torch.Tensor) -> Iterator[None]:
        """Within the block, count samples only where there is an update: 1 or 0, by rank if there are several."""
        self._set_updating(has_update)
        try:
            yield
        finally:
            self._set_updating(1.0)

    def _set_updating(self, has_update: float | torch.Tensor) -> None:
        self.has_update = has_update
        for view in self.parameter_views() if self.algorithm.weighted else ():
            view.samples = self._samples_of(view, has_update)

    def check_weighed(self) -> None:
        """Raise GossipError if ranks count by their samples, and nobody has said how many these are."""
        if self.algorithm.weighted and self.samples is None and bool(torch.as_tensor(self.has_update).any()):
            raise GossipError(
                f"algorithm {self.algorithm.describe()} counts ranks by their samples: call weigh(samples) before the "
                "backward pass of each step whose number differs from the last one's, on every rank"
            )

    def parameter_views(self) -> Iterator[BucketView]:
        """Yield the views of all buckets of parameters, bucket by bucket."""
        for index in range(len(self.in_flight)):
            if self.holds_parameters(index):
                yield from self.views(index)

    def _like(self, view: BucketView, channel: str) -> torch.Tensor:
        """Return a tensor like the messages of a channel."""
        if channel in view.numbers:
            return view.numbers[channel]
        return view.values if channel == VALUES else view.zeros()

    def is_due(self, index: int, step: int) -> bool:
        """Return whether step ``step`` ends with an exchange of the bucket that changes its values on a rank here."""
        return self.algorithm.is_exchanged(index, step) and self._takes_part(step, self._topology.round(step))

    def send(self, index: int, step: int, meter: AnyMeter) -> None:
        """Start round ``step`` of a bucket; does nothing in a round that changes nothing here."""
        if not self.is_due(index, step):
            return
        if (earlier := self.in_flight[index]) is not None:
            raise GossipError(
                f"step {step}, bucket {index}: algorithm {self.algorithm.describe()} exchanges again before the "
                f"messages of round {earlier.round_index}, which have {self.algorithm.overlap} steps, are combined; "
                "reduce its overlap, or exchange less often"
            )
        round_ = self._topology.round(step)
        messages: dict[str, list[torch.Tensor]] = {channel: [] for channel in self._channels(index)}
        for view in self.views(index):
            made = self.algorithm.message(view) if self.holds_parameters(index) else {VALUES: view.values}
            numbers = {name: view.numbers[name] for name in self._channels(index) if name in view.numbers}
            for channel, message in {**made, **numbers}.items():
                messages[channel].append(message)
        self.in_flight[index] = self._start(index, messages, round_, step, meter)

    def combine_(self, index: int, meter: AnyMeter) -> None:
        """Await what is in flight for a bucket, if anything is, and combine it."""
        in_flight, self.in_flight[index] = self.in_flight[index], None
        if in_flight is None:
            return
        view = None
        for view, got in self._accepted(index, in_flight, meter):
            self._arrive(index, view, got, in_flight)
        if view is None and type(self.algorithm).arrive is not Algorithm.arrive:
            for number, view in enumerate(self.views(index)):  # as a rank without a peer
                self._arrive(index, view, self._nothing(index, number, in_flight), in_flight)
        self._written(index)

    def _arrive(self, index: int, view: BucketView, got: Mapping[str, Arrived], in_flight: AnyInFlight) -> None:
        if self.holds_parameters(index):
            view.round_index = in_flight.round_index
            self.algorithm.arrive(view, got)
        else:
            self.algorithm.combine_(view.values, got[VALUES].difference, in_flight.round_index)

    def _nothing(self, index: int, number: int, in_flight: AnyInFlight) -> dict[str, Arrived]:
        """Return what arrives in a view of a bucket where all messages were lost or refused: differences of zero."""
        like, sent = self.views(index)[number], in_flight.sent
        return {
            channel: Arrived(
                like.zeros() if channel not in like.numbers else torch.zeros_like(like.numbers[channel]),
                sent[channel][number] if channel in sent else None,
            )
            for channel in self._channels(index)
        }

    def _show(self, index: int, in_flight: AnyInFlight) -> None:
        """Call the optimizers' pre_average_hook for their parameters in a bucket."""
        if not self._readers or not self.holds_parameters(index):
            return
        for optimizer in self._readers:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for view, sent, difference in zip(
                self.views(index), in_flight.sent[VALUES], in_flight.differences()[VALUES], strict=True
            ):
                if slots := [slot for slot, parameter in enumerate(view.parameters) if id(parameter) in held]:
                    own, mixed = view.slots(sent), view.slots(sent + difference)
                    optimizer.pre_average_hook(
                        [view.parameters[slot] for slot in slots],
                        [own[slot] for slot in slots],
                        [mixed[slot] for slot in slots],
                        in_flight.round,
                        in_flight.round_index,
                    )

    def kept(self) -> list[object]:
        """Return what the algorithm keeps for each bucket."""
        views = [view for index in range(len(self.in_flight)) for view in self.views(index)]
        return [kept for view in views for kept in (view.kept, view.numbers)]

    def averaged(self) -> None:
        """Notify the algorithm that the values have become the mean over ranks."""
        for view in self.parameter_views():
            self.algorithm.averaged(view)

    def drop(self) -> None:
        """Await what is in flight and drop it."""
        for index, in_flight in enumerate(self.in_flight):
            if in_flight is not None:
                in_flight.differences()
            self.in_flight[index] = None

    def weights(self) -> dict[str, list[torch.Tensor]]:
        """Return the weights of parameters in a mean over ranks, for each view, [..., 1]; empty if all are equal."""
        number = self.algorithm.weighs_by
        if number is None:
            return {}
        return {
            name: [view.numbers[number] for view in self.views(index)]
            for index in range(len(self.in_flight))
            if self.holds_parameters(index)
            for name in self.names(index)
        }


def corrupted(rank: int, bucket: int, round_index: int) -> GossipError:
    """Return the error for a rank whose own message is not finite."""
    return GossipError(
        f"rank {rank}: step {round_index + 1}, bucket {bucket}: what this rank sent in round {round_index} is not "
        "finite: its own parameters are corrupted, and its peers have refused them; start again from a checkpoint, "
        "with a smaller learning rate"
    )


def row_sum(round_: Round, rank: int) -> float:
    """Return the sum of a row of W, the total weight of what a rank mixes."""
    row = round_.row(rank)
    return row.pop(rank) + sum(row.values())
