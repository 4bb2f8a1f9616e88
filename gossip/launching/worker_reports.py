"""Reports that workers send when they end, and how a launch evaluates them."""

import math
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from loguru import logger

from gossip.communication.liveness.process_liveness import is_suspended
from gossip.errors import LaunchError

_SIBLING_GRACE_S = 0.5
_GROUP_GRACE_S = 10.0
_GLANCE_S = 1.0
_EXIT_PATIENCE_S = 1.0


@dataclass(frozen=True)
class Failure:
    """A worker's exception as text.

    A secondary failure reports that another rank is gone, and blames that rank if it is known. A final one would recur
    if the worker were started again. With an ``exit_status`` all ranks have ended together.
    """

    summary: str
    traceback: str
    secondary: bool
    blames: tuple[int, ...] = ()
    is_final: bool = False
    exit_status: int | None = None


def collect(
    workers: Sequence[ForkServerProcess],
    channels: Sequence[Connection],
    start: Callable[[int, int], None] | None,
    restart: int,
    group_size: int = 1,
) -> list[Any]:
    """Wait for every rank's report; after a failure, wait a moment longer for its cause, then raise it.

    With ``start`` the other ranks continue: failures are logged, and raised only if all ranks failed, as SystemExit if
    they ended together. It starts the worker of a rank again, ``restart`` times, and appends it and its channel; it is
    told how often this has been done. Ranks of a shard group are started again together, once all of them have ended;
    those that do not end soon after another has failed are killed.
    """
    waiting = {channel: (rank, worker) for rank, (channel, worker) in enumerate(zip(channels, workers, strict=True))}
    results: list[Any] = [None] * len(workers)
    failures: dict[int, Failure] = {}
    num_starts: Counter[int] = Counter()  # of a group
    doomed: dict[int, float] = {}  # groups of which a rank has failed, and when the others are killed
    deadline: float | None = None
    while waiting:
        patience_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), timeout=patience_s if start is None else _GLANCE_S)
        # When the others have ended, no report can be expected of suspended ones.
        if not ready and (start is None or all(is_suspended(worker.pid or 0) for _, worker in waiting.values())):
            break
        for rank, worker in list(waiting.values()):
            if time.monotonic() > doomed.get(rank // group_size, math.inf):
                worker.kill()
        for channel in ready:
            assert isinstance(channel, Connection)
            rank, worker = waiting.pop(channel)
            group, others = rank // group_size, {other for other, _ in waiting.values()}
            report = _receive(worker, channel)
            if not isinstance(report, Failure):
                results[rank] = report
                failures.pop(rank, None)
                continue
            failures[rank] = report
            if start is None:
                deadline = deadline or time.monotonic() + _SIBLING_GRACE_S
                continue
            if report.exit_status is not None:
                continue
            members = range(group * group_size, (group + 1) * group_size)
            is_over = num_starts[group] >= restart or others.issubset(members) or report.is_final
            whom = "it" if group_size == 1 else f"its shard group, ranks {members.start} to {members.stop - 1},"
            how = f"{whom} is restarted ({num_starts[group] + 1} of {restart} restarts)"
            logger.warning(
                "rank {} failed: {}; {}", rank, report.summary, "the others continue if they can" if is_over else how
            )
            doomed.setdefault(group, time.monotonic() + _GROUP_GRACE_S)
            if not others.isdisjoint(members):
                continue
            del doomed[group]
            if not is_over:
                num_starts[group] += 1
                for member in members:
                    start(member, num_starts[group])
                    waiting[channels[-1]] = member, workers[-1]
    if failures and (start is None or len(failures) == len(results)):
        for failure in failures.values():
            if failure.exit_status is not None:
                raise SystemExit(failure.exit_status)
        raise _first_cause(failures, dict(waiting.values()))
    return results


def _first_cause(failures: Mapping[int, Failure], silent: Mapping[int, ForkServerProcess]) -> LaunchError:
    """Return the error that names the rank that failed first: one with its own cause, or else the most blamed rank."""
    rank, failure = min(failures.items(), key=lambda item: item[1].secondary)
    text = f"rank {rank} failed: {failure.summary}"
    blamed = Counter(
        failed_rank for other in failures.values() for failed_rank in other.blames if failed_rank in silent
    )
    if failure.secondary and blamed:
        ((failed_rank, _),) = blamed.most_common(1)
        pid = silent[failed_rank].pid
        assert pid is not None
        how = f"its process {pid} is suspended (SIGSTOP, or a debugger)" if is_suspended(pid) else "it does not answer"
        rank, text = failed_rank, f"rank {failed_rank} failed: {how}; {text}"
    error = LaunchError(text, rank=rank, worker_traceback=failure.traceback)
    error.add_note(failure.traceback)
    return error


def _receive(worker: ForkServerProcess, channel: Connection) -> Any:
    try:
        data = channel.recv_bytes()
    except (EOFError, OSError):
        worker.join(_EXIT_PATIENCE_S)
        code = worker.exitcode
        how = (
            f"signal {-code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"exit status {code}"
        )
        text = f"the process ended without an error message, with {how}"
        if code == 1:  # as where it cannot import the script, before there is a way to report
            text += (
                "; if a traceback above ends in gossip.launch, the script calls it while a worker imports it: put the "
                'call under if __name__ == "__main__":'
            )
        return Failure(text, "", secondary=False)
    try:
        return pickle.loads(data)
    except Exception as error:
        return Failure(f"its result cannot be unpickled by the launcher: {error!r}", "", secondary=False)
