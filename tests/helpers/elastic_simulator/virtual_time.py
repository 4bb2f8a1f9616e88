"""Threads of several processes in one thread, with virtual time: the order in which they run is drawn from a seed.

What the simulated modules use of ``time``, ``threading`` and :mod:`gossip.communication.host.daemon_threads` is
replaced by the classes here. A thread runs until it waits: for a lock that another one holds, a condition, an event,
another thread, the time, the network or the store. It may also be suspended where it takes or releases a lock, like a
thread that loses its processor.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

_SUSPENDED = 60  # of so many times that a lock is taken, in one
_MOST_SUSPENDED_S = 0.02


class Process:
    """A process: it has threads and a clock, and is frozen, thawed and killed as a whole."""

    def __init__(self, name: str, clock_offset_s: float, clock_rate: float) -> None:
        self.name = name
        self.is_alive, self.is_frozen = True, False
        self.held: list[Thread] = []  # that would run if it were not frozen
        self.offset_s, self.rate = clock_offset_s, clock_rate

    def clock(self, now: float) -> float:
        """Return what its clock shows."""
        return self.offset_s + now * self.rate

    def seconds(self, duration: float) -> float:
        """Return how long a duration by its clock takes."""
        return duration / self.rate


class Thread:
    """A thread of a process."""

    def __init__(self, process: Process, name: str, run: Callable[[], object]) -> None:
        self.process, self.name = process, name
        self.run = greenlet(run)
        self.num_waits = 0  # a timer is of one wait
        self.is_waiting = self.has_timed_out = False
        self.joining: list[Thread] = []

    def is_alive(self) -> bool:
        return not self.run.dead


class Scheduler:
    """Runs the threads of all processes.

    Attributes
    ----------
    now : float
        The virtual time, in seconds.
    current : Thread
        The thread that runs.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.num_events = 0
        self.current: Any = None
        self.has_ended, self._may_be_done = False, True
        self.num_until_suspended = _SUSPENDED
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, Callable[[], None] | None, Any, int]] = []  # what to call, or who waits
        self._ready: list[Thread] = []
        self._threads: list[Thread] = []
        self._hub = getcurrent()

    # ------------------------------------------------------------------ from outside

    def start(self, process: Process, name: str, run: Callable[[], object]) -> Thread:
        """Start a thread; what it raises is raised by :meth:`run`."""
        thread = Thread(process, name, run)
        thread.run.parent = self._hub
        self._threads.append(thread)
        self._ready.append(thread)
        return thread

    def run(self, is_done: Callable[[], bool], until: float) -> bool:
        """Run until it is done, and return True; or until this time, and return False."""
        ready, draw = self._ready, self.random.random
        while True:
            if self._may_be_done and is_done():
                return True
            self._may_be_done = False
            if not ready:
                if not self._timers or self._timers[0][0] > until:
                    self.now = max(self.now, until)
                    return False
                self.now, _, call, waiting, number = heapq.heappop(self._timers)
                if call is not None:
                    call()
                elif waiting.is_waiting and waiting.num_waits == number:
                    waiting.is_waiting, waiting.has_timed_out = False, True
                    ready.append(waiting)
                continue
            place = int(draw() * len(ready))
            ready[place], ready[-1] = ready[-1], ready[place]
            thread = ready.pop()
            process = thread.process
            if not process.is_alive:
                continue
            if process.is_frozen:
                process.held.append(thread)
                continue
            self.num_events += 1
            self.current = thread
            thread.run.switch()
            self.current = None
            if thread.run.dead:
                self._may_be_done = True
                for other in thread.joining:
                    self.wake(other)

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call a function at this time."""
        heapq.heappush(self._timers, (max(time, self.now), next(self._numbers), call, None, 0))

    def freeze(self, process: Process) -> None:
        process.is_frozen = True

    def thaw(self, process: Process) -> None:
        process.is_frozen = False
        self._ready += process.held
        process.held = []

    def kill(self, process: Process) -> None:
        process.is_alive, self._may_be_done = False, True

    def close(self) -> None:
        """End all threads, without effects."""
        self.has_ended = True
        for thread in self._threads:
            self.current = thread
            if not thread.run.dead:
                thread.run.throw(GreenletExit)
        self.current = None

    # ------------------------------------------------------------------ called by threads

    def wait(self, duration: float | None = None) -> bool:
        """Let others run until this thread is woken, and return True; or for this long, and return False."""
        thread = self.current
        if self.has_ended or thread is None:
            raise GreenletExit
        thread.num_waits += 1
        thread.is_waiting, thread.has_timed_out = True, False
        if duration is not None:
            due = self.now + max(0.0, duration) / thread.process.rate
            heapq.heappush(self._timers, (due, next(self._numbers), None, thread, thread.num_waits))
        self._hub.switch()
        if self.has_ended:
            raise GreenletExit
        return not thread.has_timed_out

    def wake(self, thread: Thread) -> None:
        """Let a thread that waits go on."""
        if thread.is_waiting:
            thread.is_waiting = False
            self._ready.append(thread)

    def suspend(self) -> None:
        """Let others run now and then."""
        self.num_until_suspended -= 1
        if self.num_until_suspended <= 0 and self.current is not None:
            self.num_until_suspended = self.random.randint(1, 2 * _SUSPENDED)
            self.wait(self.random.random() ** 3 * _MOST_SUSPENDED_S)


class Lock:
    """A lock that its thread may take several times."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Thread | None = None
        self._depth = 0
        self._waiting: list[Thread] = []

    def acquire(self) -> bool:
        scheduler = self._scheduler
        thread = scheduler.current
        if self._owner is thread or scheduler.has_ended:
            self._depth += 1
            return True
        scheduler.num_until_suspended -= 1
        if scheduler.num_until_suspended <= 0:
            scheduler.suspend()
        while self._owner is not None:
            self._waiting.append(thread)
            scheduler.wait()
        self._owner = thread
        self._depth = 1
        return True

    def release(self) -> None:
        self.__exit__()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            scheduler, self._owner = self._scheduler, None
            while self._waiting:
                scheduler.wake(self._waiting.pop())
            scheduler.num_until_suspended -= 1
            if scheduler.num_until_suspended <= 0 and not scheduler.has_ended:
                scheduler.suspend()


class Condition(Lock):
    """A condition with a lock of its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._told: dict[Thread, Callable[[], Any]] = {}  # who waits, and for what

    def wait(self, timeout: float | None = None, is_met: Callable[[], Any] = lambda: True) -> bool:
        scheduler, depth = self._scheduler, self._depth
        thread = scheduler.current
        self._told[thread] = is_met
        self._depth, self._owner = 0, None
        while self._waiting:
            scheduler.wake(self._waiting.pop())
        is_told = scheduler.wait(timeout)
        self._told.pop(thread, None)
        self.acquire()
        self._depth = depth
        return is_told

    def wait_for(self, is_met: Callable[[], Any], timeout: float | None = None) -> Any:
        process = self._scheduler.current.process
        ends_at = None if timeout is None else self._scheduler.now + process.seconds(timeout)
        while not (result := is_met()):
            left = None if ends_at is None else ends_at - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left, is_met)
        return result

    def notify_all(self) -> None:
        for thread in [thread for thread, is_met in self._told.items() if is_met()]:
            del self._told[thread]
            self._scheduler.wake(thread)


class Event:
    """An event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._is_set or self._scheduler.has_ended

    def set(self) -> None:
        self._is_set = True
        while self._waiting:
            self._scheduler.wake(self._waiting.pop())

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._waiting.append(self._scheduler.current)
            self._scheduler.wait(timeout)
        return self._is_set


class VirtualTime:
    """In place of the module ``time``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        scheduler = self._scheduler
        thread, now = scheduler.current, scheduler.now
        return now if thread is None else thread.process.offset_s + now * thread.process.rate

    perf_counter = monotonic

    def sleep(self, duration: float) -> None:
        self._scheduler.wait(duration)


class VirtualThreading:
    """In place of the module ``threading``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Lock(self) -> Lock:
        return Lock(self._scheduler)

    def Condition(self) -> Condition:
        return Condition(self._scheduler)

    def Event(self) -> Event:
        return Event(self._scheduler)

    def current_thread(self) -> Any:
        return self._scheduler.current


class VirtualDaemonThreads:
    """In place of :mod:`gossip.communication.host.daemon_threads`."""

    CLOSING_PATIENCE = timedelta(seconds=1)

    def __init__(self, scheduler: Scheduler, real: Any) -> None:
        self._scheduler = scheduler
        self.weak_run, self.weak_call = real.weak_run, real.weak_call

    def start(
        self, name: str, run: Callable[[], None], *, failed: Callable[[Exception], object], **_: object
    ) -> StartedThread:
        def run_or_fail() -> None:
            try:
                run()
            except Exception as error:
                failed(error)

        scheduler = self._scheduler
        return StartedThread(scheduler, scheduler.start(scheduler.current.process, name, run_or_fail))


class StartedThread:
    """What starting a thread returns."""

    def __init__(self, scheduler: Scheduler, thread: Thread) -> None:
        self._scheduler, self._thread = scheduler, thread

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        if self._thread.is_alive() and not self._scheduler.has_ended:
            self._thread.joining.append(self._scheduler.current)
            self._scheduler.wait(timeout)
