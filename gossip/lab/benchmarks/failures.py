"""Goodput: what of the samples that ranks could train on is in the model, while ranks are killed, frozen and slowed."""

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
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch.distributed as dist
from pydantic import BaseModel, Field, PositiveFloat

from gossip import LaunchError
from gossip.lab.benchmarks.benchmark import Benchmark, BenchmarkSettings, Place, Records, Write
from gossip.lab.benchmarks.failures_worker import METHODS, SLOWER
from gossip.lab.benchmarks.summaries import Spread, look, table
from gossip.lab.benchmarks.workloads import LOSS_TASKS
from gossip.lab.experiments.run_figures import drawn
from gossip.lab.experiments.validated_models import ConfigurationError, OneOf
from gossip.launching import GROUPS, STORE

NAMES = ("gossip_warm", "gossip_cold", *(name for name in METHODS if name != "gossip"))
KINDS = ("kill", "freeze", "slow")
LASTS_S = {"freeze": 5.0, "slow": 20.0}
_COSTS_S = {"kill": 0.0, "freeze": 5.0, "slow": 20.0 * (1 - 1 / SLOWER)}  # of its time a rank
_WORKER = "gossip.lab.benchmarks.failures_worker"
_SAVING_S = 0.05  # of a checkpoint of DDP, by which it chooses how often to save
_NEXT_STEPS = 3
_OF_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", STORE, GROUPS)
_FIRST_STEPS = 5  # of every rank, before the clock starts
_NUM_UNSENT = 2  # updates of a killed rank that no other has
_BEGINNING_S = 120.0
_POLL_S = 0.02


class FailuresSettings(BenchmarkSettings):
    """The settings of the benchmark; a case has one method, seconds between faults and seed."""

    world_size: int = Field(6, ge=2, description="ranks that train")
    methods: tuple[Annotated[str, OneOf(NAMES)], ...] = Field(NAMES, description="of training")
    kinds: tuple[Annotated[str, OneOf(KINDS)], ...] = Field(("kill",), description="of faults, drawn at random")
    every_s: tuple[PositiveFloat, ...] = Field((30.0, 10.0), description="seconds between two faults of any rank")
    seconds: PositiveFloat = Field(120.0, description="that are counted in each run")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), description="of the faults and of the training")
    step_s: PositiveFloat = Field(0.4, description="how long a step lasts, by a sleep at its end")
    period: int = Field(10, ge=1, description="steps between synchronisations of local steps")
    task: Annotated[str, OneOf(LOSS_TASKS)] = Field("digits_cnn", description="what is trained")

    def cases(self) -> Iterator[tuple[str, Self]]:
        for method in self.methods:
            for every_s in (math.inf, *self.every_s):
                for seed in self.seeds if every_s < math.inf else self.seeds[:1]:
                    update = {"methods": (method,), "every_s": (every_s,), "seeds": (seed,)}
                    yield f"{method}/every_{every_s:g}_s/seed_{seed}", self.model_copy(update=update)

    def faults(self) -> list[Fault]:
        """Return the faults of a run, the same for every method."""
        every_s, drawn = self.every_s[0], random.Random(self.seeds[0])
        found: list[Fault] = []
        at = 0.0
        while (at := at + every_s * drawn.uniform(0.5, 1.5)) < self.seconds:
            found.append(Fault(at, drawn.choice(self.kinds), drawn.randrange(self.world_size)))
        return found


class Fault(NamedTuple):
    """One fault, some seconds after the clock has started, of the rank in a slot."""

    at: float
    kind: str
    slot: int


class Run(BaseModel):
    """One run: ``goodput`` are batches of updates that count, per second and rank."""

    method: str
    every_s: float | Literal["never"]
    seed: int
    num_faults: int
    batches: int
    lost: int
    goodput: float
    bound: float
    others_s: list[float]
    back_s: list[float]


class Failures(Benchmark[FailuresSettings, Run]):
    """Methods train in turns under the same faults, which one process outside of all ranks makes."""

    settings = FailuresSettings
    title = "Goodput under faults"
    resumes: ClassVar[bool] = True
    explanation = (
        "Goodput: batches per second whose updates are in the model, over those of the same method without faults. Of "
        f"a rank that is killed gossip loses its newest {_NUM_UNSENT} updates, DDP and torchft what was not committed. "
        "The bound is what remains if nothing is lost but the time of the struck ranks themselves: of a killed one "
        "until its next step, of a frozen one 5 s, of a slow one three quarters of 20 s."
    )

    def launch_options(self, case: FailuresSettings) -> dict[str, Any]:  # noqa: ARG002
        """Start one process, which starts the ranks."""
        return {"world_size": 1}

    def work(self, case: FailuresSettings, place: Place, write: Write) -> None:  # noqa: ARG002
        """Run the case's method under its faults, and write what became of it."""
        with tempfile.TemporaryDirectory() as folder:
            write(_Supervised(case, Path(folder)).run().model_dump())

    def result(self, case: FailuresSettings, records: Records) -> Run:  # noqa: ARG002
        return Run.model_validate(records[0][0])

    def facts(self, settings: FailuresSettings) -> list[str]:
        return [
            f"{settings.world_size} ranks train {settings.task}, {settings.seconds:g} s a run; each step lasts "
            f"{settings.step_s:g} s by a sleep. Faults: {', '.join(settings.kinds)}; seeds "
            f"{', '.join(map(str, settings.seeds))}.",
            f"DDP saves at the period of Young and Daly; local steps are synchronised every {settings.period} steps.",
        ]

    def sections(self, results: Sequence[Run]) -> list[str]:
        rows = []
        for (method, every_s), runs in _by_case(results).items():
            shares = _shares(results, method, every_s)
            if every_s != "never" and shares:
                others = _seconds([each for run in runs for each in run.others_s])
                back = _seconds([each for run in runs for each in run.back_s])
                lost = statistics.fmean(run.lost / max(1, run.num_faults) for run in runs)
                bound = statistics.fmean(run.bound for run in runs)
                row = [method, f"{every_s:g}", str(sum(run.num_faults for run in runs))]
                rows.append([*row, Spread.over(shares).shown(".3f"), f"{bound:.3f}", f"{lost:.1f}", others, back])
        titles = ("method", "s between faults", "faults", "goodput", "bound", "batches lost per fault")
        return [table((*titles, "others step again after, s", "back after, s"), rows)]

    def draw(self, settings: FailuresSettings, results: Sequence[Run], folder: Path) -> None:
        with drawn(folder / "failures.svg", 7, 4) as figure:
            axes = figure.subplots()
            for number, method in enumerate(settings.methods):
                shares = {60 / every: _shares(results, method, every) for every in settings.every_s}
                known = {0.0: 1.0, **{rate: statistics.fmean(found) for rate, found in shares.items() if found}}
                axes.plot(sorted(known), [known[rate] for rate in sorted(known)], label=method, **look(number))
            axes.set(xlabel="faults per minute", ylabel="goodput", ylim=(0, 1.05))
            axes.legend()


def _by_case(results: Sequence[Run]) -> dict[tuple[str, Any], list[Run]]:
    found: defaultdict[tuple[str, Any], list[Run]] = defaultdict(list)
    for run in results:
        found[run.method, run.every_s].append(run)
    return found


def _shares(results: Sequence[Run], method: str, every_s: Any) -> list[float]:
    without = [run.goodput for run in results if (run.method, run.every_s) == (method, "never")]
    return [run.goodput / without[0] for run in results if without and (run.method, run.every_s) == (method, every_s)]


def _seconds(values: Sequence[float]) -> str:
    return Spread.over(values).shown(".2f") if values else "-"


class _Note(NamedTuple):
    """Steps that count of the rank in a slot, in a process, up to ``step``."""

    at: float
    slot: int
    pid: int
    step: int
    num: int


class _Supervised:
    """The processes of one run: started, struck and started again by this one."""

    def __init__(self, case: FailuresSettings, folder: Path) -> None:
        self._case, self._folder, self._method = case, folder, case.methods[0]
        self._is_one = self._method in ("gossip_warm", "ddp")  # process that starts all ranks again
        every_s = case.every_s[0] if math.isfinite(case.every_s[0]) else case.seconds
        saving = max(1, round(math.sqrt(2 * _SAVING_S * every_s) / case.step_s))
        period = saving if self._method == "ddp" else case.period
        content = {"ranks": case.world_size, "step_s": case.step_s, "seed": case.seeds[0], "task": case.task}
        self._content = json.dumps({**content, "period": period, "folder": str(folder), "restarts": True})
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
                    raise LaunchError(f"{self._method}: not all ranks made {_FIRST_STEPS} steps in {_BEGINNING_S:g} s")
            began = time.time()
            struck = self._train(began)
        return self._result(began, struck)

    def _train(self, began: float) -> list[tuple[float, Fault]]:
        """Make the faults when they are due, and return them with the times at which they were made."""
        due, struck = self._case.faults(), list[tuple[float, Fault]]()
        ends: list[tuple[float, Callable[[], object]]] = []  # of temporary faults
        while (now := time.time()) < began + self._case.seconds:
            self._look()
            for at, end in [each for each in ends if each[0] <= now]:
                ends.remove((at, end))
                end()
            if due and now >= began + due[0].at:
                fault = due.pop(0)
                if (pid := self._pid_of(fault.slot)) is not None:  # else it is about to come back
                    struck.append((now, fault))
                    ends += self._strike(fault, pid, now)
        return struck

    def _strike(self, fault: Fault, pid: int, now: float) -> list[tuple[float, Callable[[], object]]]:
        if fault.kind == "kill":
            os.kill(pid, signal.SIGKILL)
            return []
        until = now + LASTS_S[fault.kind]
        if fault.kind == "freeze":
            os.kill(pid, signal.SIGSTOP)
            return [(until, lambda: os.kill(pid, signal.SIGCONT) if _is_there(pid) else None)]
        mark = self._folder / f"slow{fault.slot}"
        mark.touch()
        return [(until, lambda: mark.unlink(missing_ok=True))]

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
                    self._notes.append(_Note(note["at"], slot, pid, note["step"], note["count"]))
                else:
                    self._begun[slot].append((note["at"], pid))
        for slot, process in self._processes.items():
            if process.poll() is not None:
                self._start(slot)

    def _meeting_place(self, stack: contextlib.ExitStack) -> dict[str, str]:
        if self._method == "gossip_cold":
            return {STORE: f"127.0.0.1:{self._serve()}", GROUPS: str(self._case.world_size)}
        if not self._method.startswith("torchft"):
            return {}
        if importlib.util.find_spec("torchft") is None:
            raise ConfigurationError(f"{self._method} needs torchft; install the extra: pip install '.[rivals]'")
        port = _free_port()
        program = self._folder / "lighthouse.py"  # which reads the process's second and later arguments
        program.write_text("from torchft._torchft import lighthouse_main as main\n\nmain()\n")
        options = ["--min_replicas", "2", "--quorum_tick_ms", "100", "--join_timeout_ms", "1000"]
        options += ["--heartbeat_timeout_ms", "1000"]
        command = [sys.executable, str(program), *options, "--bind", f"127.0.0.1:{port}"]
        lighthouse = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._log())
        stack.callback(lighthouse.wait)
        stack.callback(lighthouse.kill)
        return {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}

    def _serve(self) -> int:
        self._stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return self._stores[-1].port

    def _start(self, slot: int) -> None:
        more = {} if self._is_one else {"SLOT": str(slot)}
        if self._method.startswith("torchft"):  # a store for each life of a replica
            more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._serve())}
        command = [sys.executable, "-m"]
        if self._method == "ddp":
            command += ["torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
            command += [
                f"--nproc-per-node={self._case.world_size}",
                "--max-restarts=100000",
                "--monitor-interval=0.1",
                "-m",
            ]
        command += [_WORKER, self._method, self._content]
        inherited = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHER}
        environment = {**inherited, "OMP_NUM_THREADS": "1", **self._environment, **more}
        self._processes[slot] = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=self._log(), start_new_session=True
        )

    def _log(self) -> Any:
        return (self._folder / "log.txt").open("ab")

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
        made = [note for note in self._notes if began <= note.at < began + case.seconds]
        counted = {(note.slot, note.step): note.num for note in made}
        kills = [(at, fault) for at, fault in struck if fault.kind == "kill"]
        lost = _NUM_UNSENT * len(kills) if self._method.startswith("gossip") else 0
        batches = sum(counted.values()) - lost
        back = [after - at for at, fault in kills if (after := self._back_at(at, fault.slot)) is not None]
        lost_s = sum(back) + sum(_COSTS_S[fault.kind] for _, fault in struck)
        return Run(
            method=self._method,
            every_s=case.every_s[0] if math.isfinite(case.every_s[0]) else "never",
            seed=case.seeds[0],
            num_faults=len(struck),
            batches=batches,
            lost=sum(note.num for note in made) - batches,
            goodput=batches / case.seconds / case.world_size,
            bound=1 - lost_s / (case.seconds * case.world_size),
            others_s=[self._others_s(at, fault.slot) for at, fault in struck],
            back_s=back,
        )

    def _back_at(self, at: float, slot: int) -> float | None:
        """Return when the rank in a slot that was killed makes a step that counts again."""
        begun = {pid for when, pid in self._begun[slot] if when > at}
        return min((note.at for note in self._notes if note.pid in begun), default=None)

    def _others_s(self, at: float, slot: int) -> float:
        """Return how long the longest of the next steps took of the others that trained then."""
        longest = 0.0
        for process in {note.pid for note in self._notes if note.slot != slot}:
            times = sorted(note.at for note in self._notes if note.pid == process)
            first = bisect.bisect_right(times, at)
            around = times[max(0, first - 1) : first + _NEXT_STEPS]
            longest = max([longest, *(later - earlier for earlier, later in itertools.pairwise(around))])
        return longest


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
