"""What happened in a run besides what its arguments and batches determine, for virtual workers to repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from gossip.errors import warn_user

_FILES = "rank*.jsonl"


class Average(NamedTuple):
    """An average that a rank made of a bucket with a partner, from the values that both showed at the time.

    These were the values after the newest steps of the two, ``step`` and ``partner_step``. It entered the parameters
    before the update of step ``entered``, and ``is_read`` if the gradient of that step was computed with it: between
    two steps, because all ranks performed a collective operation there.
    """

    rank: int
    step: int
    bucket: int
    partner: int
    partner_step: int
    entered: int = -1
    is_read: bool = False


class Missed(NamedTuple):
    """A message of round ``step`` that a rank did not mix in together with the others of that round.

    ``bucket`` counts the channels of an exchange as well, as transports do. Until a late message arrives, and for one
    that never does, ``entered`` is -1; then there is a second event: it entered the values before the update of step
    ``entered``, and ``is_read`` if the gradient of that step was computed with it.
    """

    rank: int
    step: int
    bucket: int
    source: int
    entered: int = -1
    is_read: bool = False


class Members(NamedTuple):
    """The ranks that train from step ``step`` on, a generation, and what replaces a topology that cannot serve them.

    A rank has so many buckets.
    """

    rank: int
    step: int
    generation: int
    members: Sequence[int]
    fallback_topology: str
    num_buckets: int


class Agreed(NamedTuple):
    """A rank has the mean, over the members of a generation, of what the algorithm keeps alike on all ranks."""

    rank: int
    step: int
    generation: int


class Joined(NamedTuple):
    """A rank took over the state that ``source`` had before step ``step``."""

    rank: int
    step: int
    source: int


class Idle(NamedTuple):
    """A rank made step ``step`` without an update, because it had no batch, or was about to leave."""

    rank: int
    step: int


class Ended(NamedTuple):
    """A rank closed its model after so many steps."""

    rank: int
    step: int


Event = Average | Missed | Members | Agreed | Joined | Idle | Ended
_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


class Recording(NamedTuple):
    """What happened to all ranks of a run, for :class:`gossip.VirtualWorkers` to repeat.

    Attributes
    ----------
    events : sequence of Average and other events
        The averages of ranks that make their steps independently, those of one rank and bucket in the order in which
        they were made; of other ranks, who trained when, and which messages were lost or late.
    num_steps : sequence of int
        The number of steps that each rank has made, by its number; ranks that join are counted on. Of one that has not
        closed its model, what its last event tells.
    """

    events: Sequence[Event]
    num_steps: Sequence[int]

    @classmethod
    def load(cls, folder: str | Path) -> Recording:
        """Read what the ranks of a run wrote into ``record=folder``; of several hosts, copy all files into one folder.

        Raises
        ------
        FileNotFoundError
            There is no recording in the folder.
        ValueError
            A file is something else.
        """
        files = sorted(Path(folder).glob(_FILES))
        if not files:
            raise FileNotFoundError(
                f"folder {str(folder)!r} has no file {_FILES}; pass the one that was record= of the run"
            )
        events = [event for file in files for event in _read(file)]
        if not events:
            raise ValueError(f"folder {str(folder)!r} has the files of a recording, but no rank has noted anything yet")
        found = {event.rank for event in events} | {int(file.stem.removeprefix("rank")) for file in files}
        named = {rank for event in events if isinstance(event, Members) for rank in event.members}
        if missing := sorted(named - found):  # a rank may have been lost before it had one
            warn_user(
                f"folder {str(folder)!r} has no files of ranks {missing}; if they are on other hosts, copy them there"
            )
        if not any(isinstance(event, Ended) for event in events):
            warn_user(
                f"the recording in {str(folder)!r} does not say how many steps were made, as no rank has closed its "
                "model; make as many as you know"
            )
        last: dict[int, int] = dict.fromkeys(found | named, 0)
        for event in events:
            ends = event.step if isinstance(event, Ended) else max(event.step, getattr(event, "entered", 0)) + 1
            last[event.rank] = ends if isinstance(event, Ended) else max(last.get(event.rank, 0), ends)
        return cls(events, [last.get(rank, 0) for rank in range(max(last) + 1)])


class Recorder:
    """Appends the events of a process to a file of its own, line by line, so that a kill loses none."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        self._path = Path(folder).resolve() / _FILES.replace("*", str(rank))  # the program may change its folder
        self._is_broken = False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._path.touch(exist_ok=False)
        except FileExistsError:
            raise ValueError(
                f"record={str(folder)!r} has a recording already ({self._path.name}), and each has a folder of its "
                "own; pass another one"
            ) from None

    def __call__(self, event: tuple[Any, ...]) -> None:
        """Write an event before it has an effect on other ranks; a disk that fails does not end the training."""
        if self._is_broken:
            return
        try:
            with self._path.open("a") as file:
                file.write(json.dumps([type(event).__name__, *event]) + "\n")
        except OSError as error:
            self._is_broken = True
            warn_user(f"recording: {self._path} cannot be written ({error}); the run goes on, and cannot be repeated")


def _read(file: Path) -> Iterator[Event]:
    for line in file.read_text().split("\n")[:-1]:  # what is not a whole line was being written at the end
        try:
            kind, *values = json.loads(line)
            yield _KINDS[kind](*values)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a recording of a rank: {line[:80]!r}; pass the run's record=") from error
