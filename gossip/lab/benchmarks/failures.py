"""Goodput: what of the samples that ranks could train on is in the model, when some are killed, frozen or cut off."""

from __future__ import annotations

import bisect
import contextlib
import importlib.util
import itertools
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch.distributed as dist
from pydantic import BaseModel, Field, PositiveFloat, model_validator

from gossip import LaunchError
from gossip.lab.benchmarks.benchmark import Benchmark, BenchmarkSettings, Links, Place, Records, Spread, Write, table
from gossip.lab.benchmarks.failures_worker import METHODS, SLOWER, TIMEOUT, end_with_parent
from gossip.lab.benchmarks.network.shaped_hosts import BRIDGE_ADDRESS, Lab, store_at
from gossip.lab.benchmarks.workloads import LOSS_TASKS
from gossip.lab.experiments.run_figures import drawn, look
from gossip.lab.experiments.validated_models import ConfigurationError, OneOf
from gossip.launching import GROUPS, STORE

WARM = "gossip_warm"
NAMES = (WARM, "gossip_cold", *METHODS)
KINDS = {"kill": (math.inf, 1.0), "freeze": (5.0, 1.0), "slow": (20.0, 1 - 1 / SLOWER), "cut": (5.0, 1.0)}
"""How many seconds a fault lasts at most, and what share of them the rank loses."""
MIXTURE, NO_FAULT = "mixture", "none"
_WORKER = "gossip.lab.benchmarks.failures_worker"
_SAVING_S = 0.05  # of a checkpoint of DDP, by which it chooses how often to save
_NEXT_STEPS = 3
_OF_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", STORE, GROUPS)
_FIRST_STEPS = 5  # of every rank, before the clock starts
_NUM_UNSENT = 2  # updates of a rank that is lost to the others, which no other has
_BEGINNING_S = 120.0
_NUM_SAID = 1500  # characters
_POLL_S = 0.02


class FailuresSettings(BenchmarkSettings):
    """The settings of the benchmark; a case has one method, kind of faults, seconds between them, and seed."""

    world_size: int = Field(6, ge=2, description="ranks that train")
    network: Literal["loopback", "lab"] = Field("loopback", description="or lab: each rank is a host; needs root")
    links: Links = Field(("200mbit",), description="of the hosts of the lab")
    methods: tuple[Annotated[str, OneOf(NAMES)], ...] = Field(NAMES, description="of training")
    kinds: tuple[Annotated[str, OneOf((*KINDS, MIXTURE))], ...] = Field(
        ("kill",), description=f"of faults, a run for each: {', '.join(KINDS)} (in the lab), or a {MIXTURE}"
    )
    every_s: tuple[PositiveFloat, ...] = Field((30.0, 10.0), description="seconds between two faults of any rank")
    seconds: PositiveFloat = Field(120.0, description="that are counted in each run")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), description="of the faults and of the training")
    step_s: PositiveFloat = Field(0.4, description="how long a step lasts, by a sleep at its end")
    period: int = Field(10, ge=1, description="steps between synchronisations of local steps")
    loss: PositiveFloat = Field(1.0, description="on held-out samples, whose time is told")
    task: Annotated[str, OneOf(LOSS_TASKS)] = Field("digits_cnn", description="what is trained")

    @model_validator(mode="after")
    def _check_kinds(self) -> Self:
        if "cut" in self.kinds and self.network != "lab":
            raise ValueError("kinds: links are cut in the lab only; leave cut out, or pass --network lab")
        return self

    def cases(self) -> Iterator[tuple[str, Self]]:
        for (link, case), method in itertools.product(super().cases(), self.methods):
            runs = itertools.product(self.kinds, self.every_s, self.seeds)
            for kind, every_s, seed in (NO_FAULT, self.seconds, self.seeds[0]), *runs:
                if method != WARM or case.link is None:
                    update = {"methods": (method,), "kinds": (kind,), "every_s": (every_s,), "seeds": (seed,)}
                    yield f"{link}/{method}/{kind}_every_{every_s:g}_s/seed_{seed}", case.model_copy(update=update)

    def faults(self) -> list[Fault]:
        """Return the faults of a run, the same for every method."""
        every_s, drawn = self.every_s[0], random.Random(self.seeds[0])
        every = [kind for kind in KINDS if self.link or kind != "cut"]
        kinds = every if self.kinds == (MIXTURE,) else self.kinds
        found: list[Fault] = []
        at = 0.0
        while kinds != (NO_FAULT,) and (at := at + every_s * drawn.uniform(0.5, 1.5)) < self.seconds:
            found.append(Fault(at, drawn.choice(kinds), drawn.randrange(self.world_size)))
        return found


class Fault(NamedTuple):
    """One fault, some seconds after the clock has started, of the rank in a slot."""

    at: float
    kind: str
    slot: int


class Run(BaseModel):
    """One run: ``goodput`` are batches of updates that count, per second and rank."""

    link: str | None
    method: str
    kind: str
    every_s: float
    seed: int
    num_faults: int
    batches: int
    lost: int
    goodput: float
    bound: float
    others_s: list[float]
    started_s: list[float]
    back_s: list[float]
    loss_s: float | None

    @property
    def row(self) -> tuple[Any, ...]:
        """What a row of the table is about; runs of several seeds share one."""
        return self.link, self.method, self.kind, self.every_s


class Failures(Benchmark[FailuresSettings, Run]):
    """Methods train in turns under the same faults, which one process outside of all ranks makes."""

    settings = FailuresSettings
    title = "Goodput under faults"
    resumes: ClassVar[bool] = True
    starts_ranks: ClassVar[bool] = True
    explanation = (
        "Goodput: batches per second whose updates are in the model, over those of the same method without faults. Of "
        f"a rank that is killed, frozen or cut off the newest {_NUM_UNSENT} updates count as lost with gossip, and "
        "else what was not committed. The bound is what remains if nothing is lost but the time of the struck ranks "
        "themselves: of a killed one until its next step, of one that is frozen or cut off 5 s, of a slow one 15 s."
    )

    def work(self, case: FailuresSettings, place: Place, write: Write) -> None:  # noqa: ARG002
        """Run the case's method under its faults, and write what became of it."""
        with contextlib.ExitStack() as stack:
            lab = None
            if case.link is not None:
                lab = stack.enter_context(contextlib.closing(case.make_lab()))
                stack.enter_context(lab.on_bridge())
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            write(_Supervised(case, Path(folder), lab).run().model_dump())

    def result(self, case: FailuresSettings, records: Records) -> Run:  # noqa: ARG002
        return Run.model_validate(records[0][0])

    def facts(self, settings: FailuresSettings) -> list[str]:
        return [
            f"{settings.world_size} ranks train {settings.task}, {settings.seconds:g} s a run; each step lasts "
            f"{settings.step_s:g} s by a sleep. Seeds: {', '.join(map(str, settings.seeds))}.",
            f"To the loss: until the replicas, as they are, have {settings.loss:g} on average on held-out samples.",
            f"DDP saves at the period of Young and Daly; local steps are synchronised every {settings.period} steps.",
            *([f"{WARM}: not in the lab, as one launcher starts all ranks."] if settings.network == "lab" else []),
        ]

    def sections(self, results: Sequence[Run]) -> list[str]:
        tables: defaultdict[str | None, list[list[str]]] = defaultdict(list)
        for row in dict.fromkeys(run.row for run in results):
            (link, method, kind, every_s), runs = row, [run for run in results if run.row == row]
            if shares := _shares(results, row):
                measured = zip(*((run.others_s, run.started_s, run.back_s) for run in runs), strict=True)
                times = [_seconds(list(itertools.chain(*of_runs))) for of_runs in measured]
                lost = statistics.fmean(run.lost / max(1, run.num_faults) for run in runs)
                bound = statistics.fmean(run.bound for run in runs)
                cells = [method, kind, "never" if kind == NO_FAULT else f"{every_s:g}"]
                cells += [str(sum(run.num_faults for run in runs)), Spread.over(shares).shown(".3f"), f"{bound:.3f}"]
                to_loss = [run.loss_s for run in runs if run.loss_s is not None]
                tables[link].append([*cells, f"{lost:.1f}", *times, _seconds(to_loss, ".0f")])
        titles = ("method", "faults", "every, s", "number", "goodput", "bound", "batches lost per fault")
        heads = ("others step again after, s", "started after, s", "back after, s", "to the loss, s")
        parts = []
        for link, rows in tables.items():
            parts += [f"## {link}" if link else "", table((*titles, *heads), rows)]
        return parts

    def draw(self, settings: FailuresSettings, results: Sequence[Run], folder: Path) -> None:
        link = results[0].link
        with drawn(folder / "failures.svg", 3 + 4 * len(settings.kinds), 4) as figure:
            all_axes = figure.subplots(1, len(settings.kinds), sharey=True, squeeze=False)[0]
            for axes, kind in zip(all_axes, settings.kinds, strict=True):
                for number, method in enumerate(settings.methods):
                    shares = {60 / each: _shares(results, (link, method, kind, each)) for each in settings.every_s}
                    known = {rate: statistics.fmean(found) for rate, found in sorted(shares.items()) if found}
                    axes.plot([0.0, *known], [1.0, *known.values()], label=method, marker="o", **look(number))
                axes.set(title=kind, xlabel="faults per minute", ylim=(0, 1.05))
            all_axes[0].set_ylabel("goodput")
            all_axes[-1].legend()


def _shares(results: Sequence[Run], row: tuple[Any, ...]) -> list[float]:
    """Return the goodput of the runs of a row, over that of the run without faults."""
    without = [run.goodput for run in results if run.row[:3] == (*row[:2], NO_FAULT)]
    return [run.goodput / without[0] for run in results if without and run.row == row]


def _seconds(values: Sequence[float], form: str = ".2f") -> str:
    return Spread.over(values).shown(form) if values else "-"


class _Note(NamedTuple):
    """Steps that count of the rank in a slot, in a process, up to ``step``, and at times the loss of its replica."""

    at: float
    slot: int
    pid: int
    step: int
    num: int
    loss: float | None = None


class _Supervised:
    """The processes of one run: started, struck and started again by this one."""

    def __init__(self, case: FailuresSettings, folder: Path, lab: Lab | None = None) -> None:
        self._case, self._folder, self._lab, self._method = case, folder, lab, case.methods[0]
        self._log = folder / "log.txt"
        self._address = BRIDGE_ADDRESS if lab else "127.0.0.1"  # of this process, which serves the stores
        self._is_one = self._method in (WARM, "ddp")  # process that starts all ranks again
        saving = max(1, round(math.sqrt(2 * _SAVING_S * case.every_s[0]) / case.step_s))
        period = saving if self._method == "ddp" else case.period
        content = {"ranks": case.world_size, "step_s": case.step_s, "seed": case.seeds[0], "task": case.task}
        content |= {"period": period, "folder": str(folder), "hosts": lab.namespaces() if lab else None}
        self._content = json.dumps(content)
        self._environment: dict[str, str] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stores: list[dist.TCPStore] = []
        self._places: dict[Path, int] = {}
        self._notes: list[_Note] = []
        self._begun: dict[int, list[tuple[float, int]]] = defaultdict(list)  # by slot, when its processes began

    def run(self) -> Run:
        """Train for the case's seconds, and return what became of the run."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            self._environment = self._meeting_place(stack)
            for slot in range(1 if self._is_one else self._case.world_size):
                self._start(slot)
            deadline = time.time() + _BEGINNING_S
            while len({note.slot for note in self._notes if note.step >= _FIRST_STEPS}) < self._case.world_size:
                self._look()
                if time.time() > deadline:
                    why = f"{self._method}: not all ranks made {_FIRST_STEPS} steps in {_BEGINNING_S:g} s"
                    said = self._log.read_text(errors="replace")[-_NUM_SAID:]
                    raise LaunchError(f"{why}; they said last: {said}")
            began = time.time()
            struck = self._train(began)
        return self._result(began, struck)

    def _train(self, began: float) -> list[tuple[float, Fault]]:
        """Make the faults when they are due, and return them with the times at which they were made."""
        due, struck = self._case.faults(), list[tuple[float, Fault]]()
        ends: dict[int, tuple[float, Callable[[], object]]] = {}  # of temporary faults, by slot
        while (now := time.time()) < began + self._case.seconds:
            self._look()
            for slot in [slot for slot, (at, _) in ends.items() if at <= now]:
                _, end = ends.pop(slot)
                end()
            if due and now >= began + due[0].at:
                fault = due.pop(0)
                pid = self._pid_of(fault.slot)
                if pid is not None and fault.slot not in ends:  # else it is about to come back
                    struck.append((now, fault))
                    if (undo := self._strike(fault, pid)) is not None:
                        ends[fault.slot] = now + KINDS[fault.kind][0], undo
        return struck

    def _strike(self, fault: Fault, pid: int) -> Callable[[], object] | None:
        """Make a fault, and return what ends it if it is temporary."""
        send = os.kill if self._is_one else os.killpg  # else to its helpers, too, as hivemind's
        if fault.kind == "kill":
            send(pid, signal.SIGKILL)
            return None
        if fault.kind == "freeze":
            send(pid, signal.SIGSTOP)
            return lambda: send(pid, signal.SIGCONT) if _is_there(pid) else None
        if fault.kind == "cut":
            assert self._lab is not None
            self._lab.set_link(fault.slot, "down")
            return partial(self._lab.set_link, fault.slot, "up")
        mark = self._folder / f"slow{fault.slot}"
        mark.touch()
        return partial(mark.unlink, missing_ok=True)

    def _pid_of(self, slot: int) -> int | None:
        """Return the process of a slot that trains, if there is one."""
        newest = max(self._begun[slot])[1] if self._begun[slot] else None
        has_trained = any(note.pid == newest for note in reversed(self._notes))
        return newest if newest is not None and has_trained and _is_there(newest) else None

    def _look(self) -> None:
        """Read new notes, and start again at once what has ended."""
        time.sleep(_POLL_S)
        for path in self._folder.glob("*-*.jsonl"):
            with path.open() as file:
                file.seek(self._places.get(path, 0))
                lines = file.readlines()
            slot, pid = map(int, path.stem.split("-"))
            for line in lines:
                if not line.endswith("\n"):
                    break
                self._places[path] = self._places.get(path, 0) + len(line)
                note = json.loads(line)
                if "step" in note:
                    self._notes.append(_Note(note["at"], slot, pid, note["step"], note["count"], note["loss"]))
                else:
                    self._begun[slot].append((note["at"], pid))
        for slot, process in self._processes.items():
            if process.poll() is not None:
                self._start(slot)

    def _meeting_place(self, stack: contextlib.ExitStack) -> dict[str, str]:
        if self._method == "gossip_cold":
            return {STORE: f"{self._address}:{self._serve()}", GROUPS: str(self._case.world_size)}
        rival = self._method.partition("_")[0]
        if rival not in ("torchft", "hivemind"):
            return {}
        if importlib.util.find_spec(rival) is None:
            raise ConfigurationError(f"{self._method} needs {rival}; install the extra: pip install '.[rivals]'")
        if rival == "hivemind":
            dht = importlib.import_module(rival).DHT(start=True, host_maddrs=[f"/ip4/{self._address}/tcp/0"])
            stack.callback(dht.shutdown)
            return {"PEER": str(dht.get_visible_maddrs()[0])}
        with socket.create_server((self._address, 0)) as server:
            address = f"{self._address}:{server.getsockname()[1]}"
        program = self._folder / "lighthouse.py"  # which reads the process's second and later arguments
        program.write_text("from torchft._torchft import lighthouse_main as main\n\nmain()\n")
        options = ["--min_replicas", "2", "--quorum_tick_ms", "100", "--join_timeout_ms", "1000"]
        options += ["--heartbeat_timeout_ms", "1000"]
        command = [sys.executable, str(program), *options, "--bind", address]
        lighthouse = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._log.open("ab"))
        stack.callback(lighthouse.wait)
        stack.callback(lighthouse.kill)
        return {"TORCHFT_LIGHTHOUSE": f"http://{address}", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}

    def _serve(self) -> int:
        self._stores.append(store_at(self._address, TIMEOUT))
        return self._stores[-1].port

    def _start(self, slot: int) -> None:
        more = {} if self._is_one else {"SLOT": str(slot)}
        if self._method.startswith("torchft"):  # a store for each life of a replica
            more |= {"MASTER_ADDR": self._address, "MASTER_PORT": str(self._serve())}
        command = [sys.executable, "-m"]
        if self._method == "ddp":
            command += ["torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-conf=is_host=1"]
            command += [f"--rdzv-endpoint={self._address}:0", f"--local-addr={self._address}"]
            command += [f"--nproc-per-node={self._case.world_size}", "--max-restarts=100000"]
            command += ["--monitor-interval=0.1", "-m"]
        command += [_WORKER, self._method, self._content]
        inherited = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHER}
        self._processes[slot] = subprocess.Popen(
            command,
            env={**inherited, "OMP_NUM_THREADS": "1", **self._environment, **more},
            stdout=subprocess.DEVNULL,
            stderr=self._log.open("ab"),
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    def _end(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for begun in self._begun.values():
            for _, pid in begun:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _result(self, began: float, struck: Sequence[tuple[float, Fault]]) -> Run:
        case = self._case
        end = began + case.seconds
        made = [note for note in self._notes if began <= note.at < end]
        counted = {(note.slot, note.step): note.num for note in made}
        leave = sum(fault.kind != "slow" for _, fault in struck)
        lost = _NUM_UNSENT * leave if self._method.startswith("gossip") else 0
        batches = sum(counted.values()) - lost
        started_s, back_s, lost_s = list[float](), list[float](), 0.0
        for at, fault in struck:
            lasts_s, share = KINDS[fault.kind]
            if fault.kind == "kill" and (begun := {pid: when for when, pid in self._begun[fault.slot] if when > at}):
                started_s.append(min(begun.values()) - at)
                if back := [note.at - at for note in self._notes if note.pid in begun]:
                    lasts_s = min(back)
                    back_s.append(lasts_s)
            lost_s += min(lasts_s, end - at) * share
        return Run(
            link=case.link,
            method=self._method,
            kind=case.kinds[0],
            every_s=case.every_s[0],
            seed=case.seeds[0],
            num_faults=len(struck),
            batches=batches,
            lost=sum(note.num for note in made) - batches,
            goodput=batches / case.seconds / case.world_size,
            bound=1 - lost_s / (case.seconds * case.world_size),
            others_s=[self._others_s(at, fault.slot, end) for at, fault in struck],
            started_s=started_s,
            back_s=back_s,
            loss_s=self._loss_s(began),
        )

    def _loss_s(self, began: float) -> float | None:
        """Return after how long the mean of the replicas' newest losses was small enough, if it was."""
        newest: dict[int, float] = {}
        for note in sorted(self._notes, key=lambda note: note.at):
            if note.loss is not None:
                newest[note.slot] = note.loss
                if len(newest) == self._case.world_size and statistics.fmean(newest.values()) <= self._case.loss:
                    return note.at - began
        return None

    def _others_s(self, at: float, slot: int, end: float) -> float:
        """Return how long the longest of the next steps took of the others that trained then, restarted or not."""
        longest, since = 0.0, at - _NEXT_STEPS * self._case.step_s
        for other in {note.slot for note in self._notes if note.slot != slot and since < note.at <= at}:
            times = [*sorted(note.at for note in self._notes if note.slot == other), end]
            first = bisect.bisect_right(times, at)
            around = times[max(0, first - 1) : first + _NEXT_STEPS]
            longest = max([longest, *(later - earlier for earlier, later in itertools.pairwise(around))])
        return longest


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
