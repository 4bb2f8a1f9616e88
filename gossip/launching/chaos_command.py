"""The command ``gossip chaos``: a program of one's own, while ranks are killed, frozen and told to leave at random."""

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

from gossip.communication.authenticated_store import training_key
from gossip.elastic.training_status import VARIABLE, statuses, trainings
from gossip.exchange import message_notes
from gossip.launching.rendezvous import GROUPS, STORE, serve

KINDS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "leave": signal.SIGTERM}
_FROZEN_S = 5.0
_POLL_S = 0.05
_STATUS_S = 0.5
_BEGINNING_S = 120.0
_DESCRIPTION = f"""\
Start a program several times, as ranks that meet in a store of this command, and kill, freeze (for {_FROZEN_S:g} s) or
tell to leave one of them at random again and again, once all of them train. Who fails is started again at once, and
joins the others. Ends when all are done, or after --seconds, and says how many steps were made.

    gossip chaos --ranks 4 --every 10 --kinds kill,freeze -- python train.py

The program calls gossip.launch, or gossip.join_training() in a loop of its own, and wraps its model with
on_peer_loss="continue". The digest of each message is noted where it is sent and where it is mixed, and compared at the
end: the status is 1 if one was mixed that nobody had sent."""


def main(arguments: Sequence[str]) -> int:
    """Run a program under faults; return 0 if all its ranks ended well and no message was torn, and 1 otherwise."""
    parser = argparse.ArgumentParser(
        "gossip chaos", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="how many begin (%(default)s)")
    parser.add_argument(
        "--every", type=seconds, default=10.0, help="seconds between two faults, on average (%(default)s); also 10s"
    )
    parser.add_argument("--kinds", default="kill", help=f"of faults: some of {','.join(KINDS)} (%(default)s)")
    parser.add_argument("--seconds", type=seconds, default=float("inf"), help="after which all are told to leave")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (%(default)s)")
    parser.add_argument("program", nargs="+", help="after --: the program and its arguments")
    parsed = parser.parse_args(arguments)
    kinds = parsed.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"there is no kind {unknown[0]!r} of fault; choose from {', '.join(KINDS)}")
    if parsed.ranks < 2 or not parsed.every > 0:
        parser.error("--ranks must be at least 2, and --every above 0")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no rank is left
    with contextlib.closing(_Ranks(parsed.program, parsed.ranks)) as ranks:
        try:
            return ranks.strike(kinds, parsed.every, parsed.seconds, random.Random(parsed.seed))
        except KeyboardInterrupt:
            return 130


def seconds(text: str) -> float:
    """Return the number of a text such as "10" or "10s"."""
    return float(text.removesuffix("s"))


class _Ranks:
    """The processes of a program, which are started again when they fail."""

    def __init__(self, program: Sequence[str], num_ranks: int) -> None:
        self._program, self._num_ranks = program, num_ranks
        self._store = serve("127.0.0.1", socket.create_server(("127.0.0.1", 0)), timedelta(seconds=60))
        self._notes = tempfile.TemporaryDirectory()
        where = {STORE: f"127.0.0.1:{self._store.port}", GROUPS: str(num_ranks), VARIABLE: "1"}
        self._environment = os.environ | where | {message_notes.VARIABLE: self._notes.name}
        self._processes = [self._started() for _ in range(num_ranks)]
        self._steps: dict[int, tuple[int, int]] = {}  # of each rank, the first and the last that it was seen in
        self._counts = Counter[str]()
        self._looked_at, self._num_training = 0.0, 0

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._program, env=self._environment, start_new_session=True)

    def strike(self, kinds: Sequence[str], every_s: float, seconds: float, drawn: random.Random) -> int:
        """Make faults until all ranks are done; return the exit status."""
        began, due_at, ends_at = time.monotonic(), float("inf"), float("inf")
        thaws: list[tuple[float, Callable[[], None]]] = []
        while any(process.poll() != 0 for process in self._processes):
            time.sleep(_POLL_S)
            now = time.monotonic()
            self._look(now, restarts=now < ends_at)
            for at, thaw in [each for each in thaws if each[0] <= now or now >= ends_at]:
                thaws.remove((at, thaw))
                thaw()
            if due_at == float("inf") and len(self._steps) >= self._num_ranks:
                began, due_at, ends_at = now, now + every_s * drawn.uniform(0.5, 1.5), now + seconds
                print(f"{self._num_ranks} ranks train", flush=True)
            elif due_at == float("inf") and now - began > _BEGINNING_S:
                print(
                    f"error: {len(self._steps)} of {self._num_ranks} ranks train after {_BEGINNING_S:g} s; the program "
                    'must call gossip.launch or gossip.join_training, and wrap its model with on_peer_loss="continue"',
                    file=sys.stderr,
                )
                return 2
            alive = [process for process in self._processes if process.poll() is None]
            if now >= ends_at + _BEGINNING_S * bool(alive):
                break
            if now >= ends_at:
                self._signal(alive, signal.SIGTERM)
            elif now >= due_at and self._num_training >= self._num_ranks:
                due_at = now + every_s * drawn.uniform(0.5, 1.5)
                thaws += self._fault(drawn.choice(kinds), drawn, now)
        self._tell(time.monotonic() - began)
        num_mixed, num_torn = message_notes.num_mixed_and_torn(self._notes.name)
        print(f"{num_mixed} messages were mixed; {num_torn} were not what was sent")
        failed = [process.returncode for process in self._processes if process.poll() not in (0, 143, -signal.SIGTERM)]
        return 1 if failed or num_torn else 0

    def _fault(self, kind: str, drawn: random.Random, now: float) -> list[tuple[float, Callable[[], None]]]:
        alive = [process for process in self._processes if process.poll() is None]
        if len(alive) < 2 or any(process.poll() == 0 for process in self._processes):
            return []  # the last one has nobody to go on with, or the training is complete
        struck = drawn.choice(alive)
        print(f"{kind}: process {struck.pid}", flush=True)
        self._counts[kind] += 1
        self._signal([struck], KINDS[kind])
        if kind != "freeze":
            return []
        # If it has ended by then, another one may have its number.
        return [(now + _FROZEN_S, lambda: self._signal([struck] * (struck.poll() is None), signal.SIGCONT))]

    def _look(self, now: float, *, restarts: bool) -> None:
        """Note which steps the ranks have made, and start again who has failed."""
        for place, process in enumerate(self._processes):
            if restarts and process.poll() not in (None, 0):
                self._counts["started again"] += 1
                self._processes[place] = self._started()
        if now < self._looked_at + _STATUS_S:
            return
        self._looked_at = now
        for found in list(trainings(self._store, training_key()))[:1]:
            told = statuses(*found)
            newest = max(told.values(), key=lambda status: status.generation, default=None)
            self._num_training = 0 if newest is None else len(newest.members)
            for rank, status in told.items():
                first, last = self._steps.get(rank, (status.step, status.step))
                self._steps[rank] = first, max(last, status.step)

    def _tell(self, seconds: float) -> None:
        last = max((end for _, end in self._steps.values()), default=0)
        first = min((begin for begin, _ in self._steps.values()), default=0)
        made = sum(end - begin for begin, end in self._steps.values())
        share = made / max(1, self._num_ranks * (last - first))
        faults = ", ".join(f"{number} {what}" for what, number in sorted(self._counts.items())) or "no faults"
        print(f"{seconds:.0f} s, {last} steps: {faults}; goodput {share:.3f} of the steps of {self._num_ranks} ranks")

    @staticmethod
    def _signal(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def close(self) -> None:
        """End what is left."""
        self._signal(self._processes, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._notes.cleanup()
