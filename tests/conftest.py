"""Every test leaves the process as it found it."""

import os

# For torch and numpy, here and in what tests start: tensors are small, and the cores are shared with other processes.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
# torch asks what the loopback address is called with every connection to a store: a name server that does not answer
# holds each up for 5 s, longer than most time-outs of tests.
os.environ["RES_OPTIONS"] = "attempts:0"

import functools
import gc
import signal
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType
from unittest import mock

import pytest
import torch.distributed as dist
from listening import logged
from preloaded import PRELOAD

from gossip.launching import fork_server
from topologies.topology import FAMILIES

# A shell's background job begins with interrupts ignored, and all that it starts does so too.
signal.signal(signal.SIGINT, signal.default_int_handler)

SET_BY_LIBRARIES = ("PYTEST_CURRENT_TEST", "KMP_", "TORCHINDUCTOR_", "TRITON_")
"""pytest's own, and what scikit-learn and torch set when they are first imported, or compile for a GPU."""
OF_COMPILER = ("InductorSubproc", "subproc_worker_timer", "tqdm_monitor")
"""The threads that torch keeps once it has compiled for a GPU."""

STARTERS = frozenset(
    (
        "gossip.launching.launcher",
        "multiprocessing",
        "preloaded",
        "programs",
        "ranks",
        "running",
        "sharded_models",
        "slurm_cluster",
        "subprocess",
        "unsupervised",
    )
)
"""The modules by which tests start processes."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups after it
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes; and begin with what takes long, so that no worker is alone with it at the end."""
    for item in items:
        if isinstance(item, pytest.Function) and starts_processes(item.module):
            item.add_marker(pytest.mark.processes)
        if isinstance(item, pytest.Function) and shares_a_fixture(item) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))  # so that one worker makes it, once
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # xdist puts large groups before all


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what is there for good out of every later garbage collection: several tests ask for many."""
    for item in session.items:
        if hasattr(item, "_id") and hasattr(item, "_nodeid"):
            item._id = type(item._id).parse(item._nodeid)  # where pytest 9.2 reads the group that pytest-xdist 3.8 adds
    gc.freeze()


def shares_a_fixture(item: pytest.Function) -> bool:
    """Whether something that is made once for its module is made for this test."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(fixture.scope == "module" for defined in fixtures for fixture in defined)


@functools.cache
def starts_processes(module: ModuleType) -> bool:
    """Whether a test module has imported what starts processes, or something of it."""
    origins = (
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        for value in vars(module).values()
    )
    return any(origin in STARTERS for origin in origins)


@pytest.fixture
def warnings_told(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The warnings that are logged during the test."""
    request.node.add_marker(pytest.mark.filterwarnings("ignore::UserWarning"))  # some are issued by ``warnings`` too
    with logged() as texts:
        yield texts


@pytest.fixture
def own_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(FAMILIES, "_entries", dict(FAMILIES._entries))


@pytest.fixture(scope="session")
def preloaded_modules() -> Sequence[str]:
    """What any of the ranks needs."""
    return PRELOAD


@pytest.fixture(scope="session", autouse=True)
def _one_fork_server(preloaded_modules: Sequence[str]) -> Iterator[None]:
    """Ranks of all tests are forked from one process."""
    start = fork_server.start
    with mock.patch.multiple(fork_server, start=lambda _: start(preloaded_modules), stop=lambda: None):
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    threads, environment = set(threading.enumerate()), dict(os.environ)
    yield
    changed = {name for name in environment | dict(os.environ) if environment.get(name) != os.environ.get(name)}
    ours = {name for name in changed if not name.startswith(SET_BY_LIBRARIES)}
    assert not ours, f"environment variables were changed: {ours}"
    assert not dist.is_initialized(), "a process group was left open"
    left = {each for each in threading.enumerate() if each.is_alive() and each.name not in OF_COMPILER} - threads
    # The fork server and the key-value store's clients are kept for the next launch; they are no Python threads.
    assert not left, f"threads were left running: {left}"
