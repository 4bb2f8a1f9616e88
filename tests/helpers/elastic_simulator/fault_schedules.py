"""Schedules of faults, drawn from seeds, and what becomes of ranks under them."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastic_simulator.invariants import RECOVERS_WITHIN_S, Record, Violation
from elastic_simulator.simulated_groups import GroupConnections, SimulatedGroup
from elastic_simulator.simulated_ranks import Engine, Settings, SimulatedWorld, replaced
from elastic_simulator.virtual_network import Network, Store
from elastic_simulator.virtual_time import Process, Scheduler
from gossip.errors import ExchangeError, GossipError

_CLOCK_RATES = 0.9, 1.1
_MOST_FAULTS = 4
_NUM_SEEDS_OF_GROUPS = 4
"""Of so many seeds, one in sequence is of shard groups."""
_OF_TWO_KINDS = 1_000_000
"""From this seed on a schedule has at least two faults, of at most two kinds, which find what needs several alike."""
_OF_CHANGES = 2_000_000  # from this seed on ranks only leave and join
_ENDS_WITHIN_S = 15.0
KINDS = (
    "kill",
    "power",
    "freeze",
    "cut",
    "one-way cut",
    "reset",
    "slow",
    "leave",
    "join",
    "restart",
    "silent store",
    "end of store",
    "preempt",
)
_SURVIVED = ("freeze", "cut", "one-way cut", "reset")
"""After which a rank may come back, in schedules that are so long that it finds the others."""
_OF_FEW = ("freeze", "cut", "reset", "kill", "power", "slow", "restart")
"""Of which one alone must end nobody else; who is cut off in one direction may lose the others first."""
_LONG_STEP_S = 0.1
_KEYS = "proposal/", "vote/", "decision/", "yes/"
_MOST_DELAY_S = 0.01
_ERRORS = (
    "fewer than min_ranks",
    "the training has ended",
    "the others continued without this rank",
    "no agreement on the remaining ranks",
    "connecting to all others",
    "the key-value store",
    "joining:",
    "Connection reset by peer",
    "keys: manifest",
)
_OF_GROUP = "of its shard group was lost", "within the shard group"
"""What a rank says after another one of its group has ended."""
_RECORDED = {"delay": "one-way cut"}
"""What a fault of ``scripts/chaos.py`` is here, where the name is another one."""
_LASTING = "freeze", "cut", "one-way cut", "restart", "silent store"
_STORE_FAULTS = ("silent store", "end of store")


@dataclass
class Fault:
    """Something that happens to a process, at a time or when something is written to the store."""

    kind: str
    at: float
    process: int
    other: int
    lasts_s: float
    key: str = ""  # when this is written to the store, or a rank votes for yes, and not at a time
    who: frozenset[int] = frozenset()


@dataclass
class FaultSchedule:
    """What a seed stands for."""

    seed: int
    settings: Settings
    faults: list[Fault] = field(default_factory=list)
    by_step: dict[tuple[int, int], Fault] = field(default_factory=dict)
    """Faults of members, by their number and step, in place of those at a time."""
    bound_s: float = 60.0
    """When everybody must have ended."""
    restart_after_s: float | None = None
    """After which time a process is started again that ended before the others."""

    @classmethod
    def recorded(cls, folder: Path) -> FaultSchedule:
        """Return what ``scripts/chaos.py`` did in a folder, in which it has left its notes."""
        ran = json.loads((folder / "results.json").read_text())
        options, timeout_s = ran["settings"], ran["settings"]["timeout_s"]
        lines = [line for path in folder.glob("chaos/rank*.jsonl") for line in path.read_text().splitlines()]
        by_step = {}
        for note in (note for note in map(json.loads, lines) if "fault" in note):
            fault = note["fault"]
            lasts_s = (fault["duration_s"] or 1.0) / timeout_s
            kind = _RECORDED.get(fault["kind"], fault["kind"])
            by_step[note["member"], fault["step"]] = Fault(kind, 0.0, 0, 0, lasts_s)
        settings = Settings(
            num_ranks=options["world_size"],
            num_steps=ran["results"][0]["steps"],
            step_s=ran["results"][0]["step_s"]["median"] / timeout_s,
            min_ranks=options["min_ranks"],
            topology=options["topology"],
            returns=options["local_size"] == 1,
            group_size=options["local_size"],
        )
        return cls(options["seed"], settings, by_step=by_step, bound_s=math.inf, restart_after_s=0.5)

    @classmethod
    def draw(cls, seed: int) -> FaultSchedule:
        rng = random.Random(seed)
        has_groups = seed % _NUM_SEEDS_OF_GROUPS == _NUM_SEEDS_OF_GROUPS - 1
        settings = Settings.draw_of_groups(rng) if has_groups else Settings.draw(rng)
        num_ranks = settings.num_ranks
        length_s = settings.num_steps * settings.step_s
        kinds = KINDS[:-1] if seed < _OF_TWO_KINDS else rng.sample(KINDS[:-1], 2)
        kinds = kinds if seed < _OF_CHANGES else ["leave", "join"]
        is_long, faults = settings.step_s > _LONG_STEP_S, []
        for _ in range(rng.randint(1, 2) if is_long else rng.randint(2 * (seed >= _OF_TWO_KINDS), _MOST_FAULTS)):
            kind = rng.choice(_SURVIVED if is_long else kinds)
            process, other = rng.sample(range(num_ranks + 1), 2)  # one that joins, too
            key = rng.choice(_KEYS) + str(rng.randint(1, 2)) if rng.random() < 0.4 else ""
            lasts_s = 10 ** (rng.uniform(0, 0.4) if is_long else rng.uniform(-2, 0.6))
            if kind == "silent store" and rng.random() < 0.2:
                lasts_s = math.inf
            who = frozenset(rng.sample(range(num_ranks + 1), rng.randint(1, num_ranks)))
            faults.append(Fault(kind, rng.random() * length_s / (1 + 2 * is_long), process, other, lasts_s, key, who))
        if rng.random() < 0.2:
            at = rng.random() * length_s
            for process in rng.sample(range(num_ranks), rng.randint(num_ranks // 2, num_ranks)):
                faults.append(Fault("preempt", at + rng.random() * 2 * settings.step_s, process, 0, 0.0))
        return cls(seed, settings, faults)


class _EndTogether(Exception):
    """All ranks save and end, in place of what this one was about to do."""


class _Leave(Exception):
    """The shard group of this rank leaves, in place of what it was about to do."""


class Simulation:
    """Ranks under a schedule of faults."""

    def __init__(self, schedule: FaultSchedule) -> None:
        self.schedule, self.settings = schedule, schedule.settings
        self.scheduler = Scheduler(schedule.seed)
        self.network = Network(self.scheduler, self.settings.timeout_s)
        self.store = Store(self.scheduler)
        settings = self.settings
        self.record = Record(settings.num_steps, settings.step_s, settings.group_size, settings.least)
        self.processes: list[Process] = []
        self.programs: list[Any] = []
        self.leaving: set[int] = set()
        self.told_to_leave: set[int] = set()  # one of a shard group is
        self.touched: set[int] = set()  # processes that faults concern
        self.outcomes: dict[int, str] = {}
        self.errors: dict[int, BaseException] = {}
        self.worlds: dict[int, SimulatedWorld] = {}
        self.log: list[str] = []
        self._first = 0  # the first process that may still run
        self._waiting = [fault for fault in schedule.faults if fault.key]
        self.applied: list[Fault] = []
        self.trained: set[int] = set()  # processes that have begun
        self.asking: set[int] = set()  # processes that join
        self.failed_early: set[int] = set()  # before any has made all its steps
        self.first_ended_at = math.inf  # when one has made all its steps
        self._fault_in_construction = False
        self.store.on_write = self._written
        self.record.on_step = self._at_step
        self.record.on_yes = self._voted_yes

    def run(self) -> Simulation:
        # Threads that are killed leave neither what they have entered nor torch's modes, which are those of all here.
        with torch.no_grad(), replaced(self.scheduler, self.network):
            try:
                for rank in range(0, self.settings.num_ranks, self.settings.group_size):
                    self._start(rank)
                for fault in self.schedule.faults:
                    if not fault.key:
                        self.scheduler.at(0.05 + fault.at, lambda fault=fault: self._apply(fault))
                is_over = self.scheduler.run(self._is_over, self.schedule.bound_s)
                if not is_over:
                    waiting = {index for index in range(len(self.processes)) if self._runs(index)}
                    if self.store.silent_until == math.inf:
                        waiting -= self.asking
                    if waiting:
                        raise Violation(f"after {self.schedule.bound_s:g} s processes {waiting} still wait")
                self._check_end()
            finally:
                self.scheduler.close()
        return self

    # ------------------------------------------------------------------ processes

    def _start(self, rank: int | None) -> None:
        """Start the processes of a shard group, of which ``rank`` is the first one, or that joins."""
        draw, connections = self.scheduler.random, GroupConnections(self.scheduler, self.network)
        for place in range(self.settings.group_size):
            index = len(self.processes)
            process = Process(f"process {index}", draw.uniform(0, 100), draw.uniform(*_CLOCK_RATES))
            self.processes.append(process)
            connections.processes.append(process)
            run = partial(self._run, index, None if rank is None else rank + place, connections)
            self.programs.append(self.scheduler.start(process, f"training {index}", run))

    def _run(self, index: int, rank: int | None, connections: GroupConnections) -> None:
        try:
            self._train(index, rank, connections)
        except (GossipError, ValueError, RuntimeError) as error:
            if "ended" not in self.outcomes.values():
                self.failed_early.add(index)
            self.outcomes[index], self.errors[index] = "error", error
            self.log.append(f"{self.scheduler.now:.3f} process {index}: {error}")
            if index in self.worlds:
                self.worlds[index].close()
        self._end(index)

    def _end(self, index: int, *, is_powered: bool = True) -> None:
        self.scheduler.kill(self.processes[index])
        self.network.end(self.processes[index], is_powered=is_powered)
        has_ended = "ended" in self.outcomes.values()
        group_has_ended = not any(map(self._runs, self._mates(index)))
        if self.schedule.restart_after_s is not None and group_has_ended and not has_ended:
            self.scheduler.at(self.scheduler.now + self.schedule.restart_after_s, lambda: self._start(None))
        if self.outcomes[index] in ("killed", "error"):
            self._look_after(index, self.scheduler.now)

    def _mates(self, index: int) -> range:
        """Return the processes of a shard group."""
        size = self.settings.group_size
        return range(index // size * size, index // size * size + size)

    def _look_after(self, index: int, since: float) -> None:
        """Check that the processes of a group end soon after one of them, or after they run and the store replies."""

        def look() -> None:
            running = [each for each in self._mates(index) if self._runs(each)]
            if any(self.processes[each].is_frozen for each in running) or self.store.silent_until > since:
                self._look_after(index, self.scheduler.now)
            elif running:
                raise Violation(f"processes {running} still run {_ENDS_WITHIN_S:g} s after process {index} has ended")

        if len(self._mates(index)) > 1 and self.store.silent_until < math.inf:
            self.scheduler.at(since + _ENDS_WITHIN_S, look)

    def _train(self, index: int, rank: int | None, connections: GroupConnections) -> None:
        if rank is None:
            self.asking.add(index)
        group, timeout = None, timedelta(seconds=self.settings.timeout_s)
        if self.settings.group_size > 1:
            group = SimulatedGroup(index % self.settings.group_size, connections, timeout)
        world = SimulatedWorld(rank, self.store, self.settings, self._is_gone, group)
        self.worlds[index] = world
        engine = Engine(world, self.settings, self.record, self.scheduler)
        engine.begin()
        if engine.step >= self.settings.num_steps:  # there is nothing left to do
            self.outcomes[index] = "late"
            world.close()
            return
        self.trained.add(index)
        self.asking.discard(index)
        try:
            self._make_steps(index, engine)
        except _Leave:
            engine.changes.leave()
            self.outcomes[index] = "left"
        except _EndTogether:
            world.on_end = lambda: None
            while engine.step < (world.consensus.ends_at or 0):
                engine.end_step()
            engine.sum_up()  # in place of saving
            self.record.saves(world.member, engine.step)
            self.outcomes[index] = "saved"
        world.close()

    def _make_steps(self, index: int, engine: Engine) -> None:
        world = engine.world

        def end() -> None:
            raise _Leave if world.consensus.ends_at is None else _EndTogether

        world.on_end = end
        while engine.step < self.settings.num_steps:
            if (index in self.leaving if world.shard_group is None else engine.told) and self._leaves(engine):
                self.outcomes[index] = "left"
                return
            engine.says, engine.told = "leave" if index in self.leaving else "", ""
            ends_at = world.consensus.ends_at
            if world.consensus.has_left or (ends_at is not None and engine.step >= ends_at):
                end()
            if index in self.told_to_leave and ends_at is None:
                self._tells_to_leave(index, world)
            engine.make_step()
            if engine.step % self.settings.sums_every == 0:
                engine.sum_up()
        engine.sum_up()
        self.record.ends_step(engine.world.member, self.scheduler.now)
        self.outcomes[index] = "ended"
        self.first_ended_at = min(self.first_ended_at, self.scheduler.now)

    def _leaves(self, engine: Engine) -> bool:
        try:
            engine.changes.leave()
        except ExchangeError:
            raise
        except GossipError:  # too few would remain, or all end together
            self.leaving.clear()
            return False
        return True

    def _tells_to_leave(self, index: int, world: SimulatedWorld) -> None:
        try:
            world.consensus.leave(waits=False)
        except ExchangeError:
            raise
        except GossipError:
            self.told_to_leave.discard(index)

    def _is_gone(self, rank: int) -> bool:
        return not self.processes[rank].is_alive

    def _runs(self, index: int) -> bool:
        return self.processes[index].is_alive and not self.programs[index].run.dead

    def _is_over(self) -> bool:
        while self._first < len(self.processes) and not self._runs(self._first):
            self._first += 1
        return self._first == len(self.processes)

    # ------------------------------------------------------------------ faults

    def _written(self, key: str, value: bytes) -> None:
        self.record.written(key, value)
        for fault in self._waiting_for(key):
            self.scheduler.at(self.scheduler.now, lambda fault=fault: self._apply(fault))

    def _voted_yes(self, member: int, number: int) -> None:
        """Let a fault concern the rank that has voted, while its vote is under way."""
        for fault in self._waiting_for(f"yes/{number}"):
            struck = self._of(fault, member)
            at = self.scheduler.now + self.scheduler.random.random() * _MOST_DELAY_S
            self.scheduler.at(at, lambda struck=struck: self._apply(struck))

    def _waiting_for(self, key: str) -> list[Fault]:
        """Return the faults that wait for this, which they do no longer."""
        found = [fault for fault in self._waiting if key.startswith(fault.key)]
        self._waiting = [fault for fault in self._waiting if fault not in found]
        return found

    def _of(self, fault: Fault, member: int) -> Fault:
        """Return a fault of this member's process."""
        index = next(index for index, world in self.worlds.items() if world.member == member)
        return dataclasses.replace(fault, process=index, who=frozenset({index}))

    def _at_step(self, member: int, step: int) -> None:
        fault = self.schedule.by_step.get((member, step))
        if fault is not None:
            struck = self._of(fault, member)
            self.scheduler.at(self.scheduler.now, lambda: self._apply(struck))

    def _apply(self, fault: Fault) -> None:
        scheduler, num_processes = self.scheduler, len(self.processes)
        if fault.process >= num_processes or (fault.kind == "reset" and fault.other >= num_processes):
            return  # nobody has joined
        process = self.processes[fault.process]
        self.log.append(f"{scheduler.now:.3f} {fault}")
        self.applied.append(fault)
        self._fault_in_construction |= not self.trained.issuperset(range(self.settings.num_ranks))
        ends_at = scheduler.now + fault.lasts_s * (fault.kind in _LASTING)
        self.record.healed_at = max(self.record.healed_at, ends_at)

        def later(call: Any) -> None:
            scheduler.at(scheduler.now + fault.lasts_s, call)

        if fault.kind in ("kill", "power", "restart"):
            self.touched.add(fault.process)
            if process.is_alive and not self.programs[fault.process].run.dead:
                if fault.kind == "power":
                    self.network.isolate(process)
                self.outcomes[fault.process] = "killed"
                self._end(fault.process, is_powered=fault.kind != "power")
                if fault.kind == "restart":
                    later(lambda: self._start(None))
        elif fault.kind == "freeze":
            self.touched.add(fault.process)
            scheduler.freeze(process)
            later(lambda: scheduler.thaw(process))
        elif fault.kind in ("cut", "one-way cut"):
            side = {self.processes[each] for each in fault.who if each < num_processes}
            self.touched |= set(range(len(self.processes)))
            both = fault.kind == "cut"
            self.network.cut(lambda a, b: (a in side and b not in side) or (both and b in side and a not in side))
            later(lambda: self.network.cut(lambda *_: False))
        elif fault.kind == "reset":
            self.touched |= {fault.process, fault.other}
            self.network.reset(process, self.processes[fault.other])
        elif fault.kind == "slow":
            self.network.delay(process, min(fault.lasts_s, 0.1))
        elif fault.kind == "leave":
            if self.settings.group_size == 1 or fault.other % 2:
                self.leaving |= set(self._mates(fault.process))
            else:
                self.told_to_leave.add(fault.process)
        elif fault.kind == "preempt":
            world = self.worlds.get(fault.process)
            if world is not None and not world.is_alone and self._runs(fault.process):
                scheduler.start(process, "SIGTERM", world.consensus.tell_of_preemption)
        elif fault.kind == "join":
            self._start(None)
        elif fault.kind == "silent store":
            # What torch's client of the store waits for has no time-out: whoever asks it itself waits for ever.
            lasts_s = min(fault.lasts_s, 1.0) if self._fault_in_construction else fault.lasts_s
            self.store.silent_until = max(self.store.silent_until, scheduler.now + lasts_s)
        elif fault.kind == "end of store":
            self.store.has_ended = True

    # ------------------------------------------------------------------ the end

    def _not_struck(self) -> set[int]:
        """Return the processes that go on after the only fault: of the groups that it does not concern, or cut off."""
        if len(self.applied) != 1 or self._fault_in_construction or self.applied[0].kind not in _OF_FEW:
            return set()
        (fault,), processes = self.applied, set(range(self.settings.num_ranks))
        struck = {fault.process} | ({fault.other} if fault.kind == "reset" else set())
        if fault.kind == "cut":
            side = processes & fault.who
            if 2 * len(side) == len(processes):
                return set()
            struck = min(side, processes - side, key=len)
        others = processes - {each for index in struck for each in self._mates(index)}
        # A cut through most groups is one that the others are behind.
        return set() if fault.kind == "cut" and 2 * len(others) < len(processes) else others

    def _check_end(self) -> None:
        remaining = {self.worlds[index].member for index, outcome in self.outcomes.items() if outcome == "ended"}
        applied = {fault.kind for fault in self.applied}
        untouched = [index for index in self.worlds if index not in self.touched]
        left, saved = (
            {self.worlds[index].member for index in untouched if self.outcomes.get(index) == outcome}
            for outcome in ("left", "saved")
        )
        worlds = [world for world in self.worlds.values() if not world.is_alone]
        self.record.check_left(left, {each.number: each for world in worlds for each in world.consensus._generations})
        self.record.check_end(remaining, self.settings.topology, applied, saved=saved, left=left)
        size = self.settings.group_size
        touched = {index // size for index in self.touched}
        of_group = {index for index, error in self.errors.items() if any(sign in str(error) for sign in _OF_GROUP)}
        others = self._not_struck()
        if len(others) >= self.settings.least and any(self.outcomes[each] != "ended" for each in others):
            raise Violation(f"one fault has ended one of {others}, which it did not concern: {self.errors}")
        has_had_time = self.record.healed_at + RECOVERS_WITHIN_S < self.first_ended_at < math.inf
        for index, error in self.errors.items():
            if "could not rejoin" in str(error) and has_had_time:
                raise Violation(f"process {index} did not come back: {error}") from error
            if index >= self.settings.num_ranks and index not in self.trained:
                if applied.issubset(("join", "slow")) and index in self.failed_early:
                    raise Violation(f"process {index} did not join, which no fault prevented: {error}") from error
                continue  # it can be started again
            is_expected = any(sign in str(error) for sign in _ERRORS) or index in of_group
            if not is_expected:
                raise Violation(f"process {index} ended: {error}") from error
            if 2 * len(touched) >= self.settings.num_groups:
                continue  # it is this rank that most others have lost
            ended = [each for each in self._mates(index) if self.outcomes[each] in ("killed", "error")]
            if index in of_group and not of_group.issuperset(ended):
                continue  # another one of its group has ended before
            may_fail = (
                index // size in touched
                or any(sign in str(error) for sign in _ERRORS[:2])
                or (self._fault_in_construction and "connecting" in str(error))
                or not applied.isdisjoint(_STORE_FAULTS)
            )
            is_enough = len(remaining) >= self.settings.least
            is_wrong = "fewer than min_ranks" in str(error) and index // size not in touched and is_enough
            if is_wrong or not may_fail:
                raise Violation(f"process {index}, which no fault concerns, ended: {error}") from error


def simulate(seed: int) -> Simulation:
    """Return what became of the ranks under the schedule of a seed."""
    return Simulation(FaultSchedule.draw(seed)).run()
