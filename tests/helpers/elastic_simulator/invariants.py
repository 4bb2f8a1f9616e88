"""What must hold whatever happens to ranks: checked as it happens, and when all has ended."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

from elastic_simulator.simulated_ranks import Message, schedule
from gossip.elastic.flag_votes import Position
from gossip.elastic.generations import Generation

_MOST_EXACT_STEPS = 20
RECOVERS_WITHIN_S, _AGREES_WITHIN_S = 3.0, 1.0
"""After the last fault, in time-outs: members make a step, and who was lost comes back; and without any fault."""
_LONGEST_STEPS = 3.0
_ON_PURPOSE, _CUTS = ("join", "leave", "preempt"), ("cut", "one-way cut", "power", "reset")


class Violation(AssertionError):
    """Something that must hold does not."""


class Record:
    """What ranks have done, by their numbers as members; in more than some 20 steps halved differences are rounded."""

    def __init__(self, num_steps: int, step_s: float, group_size: int, min_ranks: int) -> None:
        self._step_s, self._group_size, self._min_ranks = step_s, group_size, min_ranks
        self._tolerance = 0.0 if num_steps <= _MOST_EXACT_STEPS else 1e-6
        self.generations: dict[int, Generation] = {}
        self.sent: dict[tuple[int, int, int], Message] = {}  # by member, step and generation
        self.mixed: set[tuple[int, int, int, int]] = set()  # receiver, sender, step, generation
        self.put_off: dict[tuple[int, int, int, int], tuple[Message, float]] = {}
        self.given: set[tuple[int, int, float]] = set()  # values by member and step
        self.taken: dict[int, tuple[int, int]] = {}  # the group and step of what a group has taken over
        self._last_step_at: dict[int, float] = {}
        self._longest_wait_s: defaultdict[int, float] = defaultdict(float)
        self.healed_at = 0.0  # the last fault so far has ended
        self.last_step: dict[int, int] = {}
        self.votes: defaultdict[Position, dict[int, bool]] = defaultdict(dict)
        self.answers: defaultdict[Position, dict[int, bool]] = defaultdict(dict)
        self.contributions: defaultdict[tuple[Position, tuple[int, ...]], dict[int, float]] = defaultdict(dict)
        self.sums: defaultdict[Position, dict[int, tuple[tuple[int, ...], float]]] = defaultdict(dict)
        self.saved: dict[int, int] = {}  # steps that ranks had made when they ended together
        self.on_step: Callable[[int, int], None] = lambda *_: None
        self.on_yes: Callable[[int, int], None] = lambda *_: None
        self._num_yes = 0
        self._written: dict[str, bytes] = {}

    # ------------------------------------------------------------------ who trains

    def written(self, key: str, value: bytes) -> None:
        """Check what is written to the store."""
        if not key.startswith(("proposal/", "decision/")):
            return
        if key in self._written:
            raise Violation(f"{key} was {self._written[key]!r}, and is {value!r}")
        self._written[key] = value
        if key.startswith("decision/") and (found := json.loads(value))[0]:
            members, leaving, *_ = json.loads(self._written[f"proposal/{key.partition('/')[2]}"])
            voted = {member for member, _ in found[0]}
            self._check_whole(members, key)
            if voted != {*members, *leaving}:
                raise Violation(f"{key}: {sorted(voted)} have voted, asked were {members} and {leaving}")

    def _check_whole(self, members: Collection[int], where: str) -> None:
        size = self._group_size
        if set(members) != {each // size * size + place for each in members for place in range(size)}:
            raise Violation(f"{where}: not all of {members} are of whole groups of {size}")

    def have_met(self, member: int, said: set[str]) -> None:
        """Check that the ranks of a shard group do the same."""
        if len(said) > 1:
            raise Violation(f"rank {member}: the ranks of its shard group meet where they are: {sorted(said)}")

    def begins_step(self, world: Any, step: int, generation: Generation) -> None:
        """Check that ranks agree on their generations, and that none makes a step before it may."""
        self.on_step(world.member, step)
        self.last_step[world.member] = step
        known = self.generations.setdefault(generation.number, generation)
        if known != generation:
            raise Violation(f"rank {world.member}: {generation} is {known} for others")
        self._check_whole(generation.members, str(generation))
        if world.member not in generation.members:
            raise Violation(f"rank {world.member} makes step {step} of {generation}, which it is not in")
        if len(generation.members) < self._min_ranks:
            raise Violation(f"rank {world.member} makes step {step} of {generation}, fewer than {self._min_ranks}")
        if generation.has_first_steps and step < generation.first_step:
            raise Violation(f"rank {world.member} makes step {step} of {generation}")
        for other in self.generations.values():
            is_later = other.number > generation.number
            if is_later and world.member in other.members and step >= other.first_step:
                raise Violation(f"rank {world.member} makes step {step} in {generation}, others in {other}")

    def ends_step(self, member: int, now: float) -> None:
        """Note that a member has made a step, or has ended, so long after its last one and the last fault."""
        waited_s = now - max(self._last_step_at.get(member, now), self.healed_at)
        self._longest_wait_s[member] = max(self._longest_wait_s[member], waited_s)
        self._last_step_at[member] = now

    def gives(self, member: int, step: int, value: float) -> None:
        self.given.add((member, step, value))

    def restored(self, member: int, step: int, value: float, giver: int) -> None:
        """Check that a state is that of a rank at this step, and what a group takes over of one group at one step."""
        if (giver, step, value) not in self.given or (giver - member) % self._group_size:
            raise Violation(f"rank {member} has taken {value} as of step {step}, which rank {giver} has not given")
        taken = giver // self._group_size, step
        if self._group_size > 1 and self.taken.setdefault(member // self._group_size, taken) != taken:
            raise Violation(f"rank {member} has taken what is of {taken}, others of its group {self.taken}")

    # ------------------------------------------------------------------ messages

    def sends(self, message: Message) -> None:
        _, member, step, number = message
        key = int(member), int(step), int(number)
        if key in self.sent:
            raise Violation(f"rank {key[0]} sends twice in step {key[1]} of generation {key[2]}")
        self.sent[key] = message

    def mixes(self, own: Message, sources: dict[int, float], difference: list[float]) -> None:
        """Check that a rank mixes whole messages of its step and generation, each at most once."""
        _, member, step, number = own
        found = [0.0] * 4
        for source, weight in sources.items():
            message = self.sent.get((source, int(step), int(number)))
            if message is None:
                raise Violation(f"rank {member:g} mixes at step {step:g} what rank {source} has not sent")
            self._once(int(member), source, int(step), int(number))
            found = [
                so_far + weight * (theirs - mine) for so_far, theirs, mine in zip(found, message, own, strict=True)
            ]
        if not self._are_equal(found, difference):
            raise Violation(f"rank {member:g}, step {step:g}: {difference} from {sources}, expected {found}")

    def puts_off(self, own: Message, sources: dict[int, float]) -> None:
        _, member, step, number = own
        for source, weight in sources.items():
            self.put_off[int(member), source, int(step), int(number)] = own, weight

    def mixes_late(self, member: int, step: int, difference: list[float]) -> None:
        """Check that a late message is one that was put off."""
        for (receiver, source, at, number), (own, weight) in self.put_off.items():
            message = self.sent.get((source, at, number))
            if (receiver, at) != (member, step) or message is None:
                continue
            late = [weight * (theirs - mine) for theirs, mine in zip(message, own, strict=True)]
            if self._are_equal(late, difference):
                self._once(receiver, source, at, number)
                del self.put_off[receiver, source, at, number]
                return
        raise Violation(f"rank {member} mixes {difference} late as of step {step}, which it has not put off")

    def _are_equal(self, some: list[float], others: list[float]) -> bool:
        return all(
            math.isclose(one, other, rel_tol=self._tolerance, abs_tol=self._tolerance)
            for one, other in zip(some, others, strict=True)
        )

    def _once(self, *key: int) -> None:
        if key in self.mixed:
            raise Violation("rank {} mixes the message of rank {} of step {}, generation {} twice".format(*key))
        self.mixed.add(key)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ together

    def voted(self, member: int, position: Position, yes: bool) -> None:
        self.votes[position][member] = yes
        if yes:
            self._num_yes += 1
            self.on_yes(member, self._num_yes)

    def answered(self, member: int, position: Position, answer: bool | None) -> None:
        self.answers[position][member] = bool(answer)

    def saves(self, member: int, step: int) -> None:
        """Check that ranks that end together have made the same number of steps."""
        self.saved[member] = step
        if len(set(self.saved.values())) > 1:
            raise Violation(f"ranks have saved after different steps: {self.saved}")

    def contributes(self, member: int, position: Position, members: tuple[int, ...], value: float) -> None:
        """Note what a member adds to a sum, which may be found again, with those that are left."""
        self.contributions[position, members][member] = value

    def added_up(self, member: int, position: Position, members: tuple[int, ...], total: list[float]) -> None:
        """Check that a sum is that of the ranks that are said to have taken part."""
        found = sum(self.contributions[position, members].get(each, float("nan")) for each in members)
        if not self._are_equal([found, float(len(members))], total):
            raise Violation(f"rank {member}: the sum over {members} at {position} is {total}, expected {found}")
        self.sums[position][member] = members, total[0]

    # ------------------------------------------------------------------ in the end

    def check_left(self, left: set[int], generations: dict[int, Generation]) -> None:
        """Check that ranks that have ``left`` made their last steps, by all generations, also those without a step."""
        for member in left:
            was_in = max(number for number, each in generations.items() if member in each.members)
            without = [each for number, each in sorted(generations.items()) if number > was_in][:1]
            if without and self.last_step[member] != without[0].first_step - 1:
                raise Violation(f"rank {member} left after step {self.last_step[member]}, others go on in {without[0]}")

    def check_end(
        self, remaining: set[int], topology: str, faults: set[str], *, saved: set[int], left: set[int]
    ) -> None:
        """Check what is alike on the ``remaining`` ranks, which have trained to the end, and how long they waited.

        Nothing is lost of what they, those that have ``saved`` and those that ``left`` sent to the first two kinds.
        """
        is_calm, may_be_cut = faults.issubset(_ON_PURPOSE), not faults.isdisjoint(_CUTS)
        most_s = (_AGREES_WITHIN_S if is_calm else RECOVERS_WITHIN_S) + _LONGEST_STEPS * self._step_s
        for member in remaining | saved | left:
            if self._longest_wait_s[member] > most_s:
                raise Violation(f"rank {member} waited {self._longest_wait_s[member]:.3g} s, without any fault")
        for position, answers in self.answers.items():
            told = {answers[member] for member in remaining & answers.keys()}
            wanted = any(yes for member, yes in self.votes[position].items() if member in remaining)
            if len(told) > 1 or (told == {False} and wanted):
                raise Violation(f"{position}: the flag was {answers}, after votes {self.votes[position]}")
        for position, sums in self.sums.items():
            # Who has ended, and is cut off before another one knows that it has, is not asked any more.
            if position == max(self.sums) and may_be_cut:
                continue
            size = self._group_size
            of_rest = {member: sums[member] for member in remaining & sums.keys()}
            places = {(member % size, total) for member, (_, total) in of_rest.items()}
            groups = {tuple(each // size for each in members) for members, _ in of_rest.values()}
            if len(groups) > 1 or len(dict(places)) < len(places):
                raise Violation(f"{position}: different sums: {sums}")
        last = {member: max(step for other, step, _ in self.sent if other == member) for member, _, _ in self.sent}
        for sender, step, number in self.sent:
            everyone = self.generations[number].members
            members = [each for each in everyone if (each - sender) % self._group_size == 0]
            rounds = schedule(topology, len(members))[1]
            for place in rounds[step % len(rounds)].targets(members.index(sender)):
                receiver = members[place]
                is_due = receiver in remaining | saved and sender in remaining | saved | left
                is_due = is_due and step < last.get(receiver, 0)  # then it is in flight
                if is_due and (receiver, sender, step, number) not in self.mixed:
                    raise Violation(
                        f"rank {receiver} has not mixed what rank {sender} sent in step {step} of {number}; both have "
                        "trained to their ends"
                    )
