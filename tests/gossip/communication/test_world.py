"""Sub-groups of the processes as worlds of their own; nothing is left of a world; absent ranks are named."""

import gc
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, on_ranks
from replicas import SGD, TINY_BUCKETS, rank_module
from torch import nn

from gossip import ExchangeError, GossipDataParallel, World
from gossip.communication.liveness.progress_markers import ProgressMarkers
from gossip.communication.waiting import wait_for
from gossip.parameters.digests import bytes_of

SHORT = timedelta(seconds=2)


# ---------------------------------------------------------------------- process groups


@on_ranks(5)
def test_ranks_of_overlapping_groups_never_meet_each_other() -> None:
    """One world in each of the groups that a rank belongs to, all open at once, used in turn."""
    # Rank 1 is in three groups, rank 4 in none, and two groups have the same members.
    groups, own = ((1, 3), (0, 1), (1, 2, 3), (1, 3)), dist.get_rank()
    made = [dist.new_group(list(ranks)) for ranks in groups]
    mine = [(group, ranks) for group, ranks in zip(made, groups, strict=True) if own in ranks]
    worlds = [(World(timedelta(seconds=60), process_group=group), ranks) for group, ranks in mine]
    for world, ranks in (*worlds, *reversed(worlds)):
        total = torch.tensor([float(own)])
        world.average_(total, "averaging")
        assert world.gather_bytes(b"%d" % own, "asking") == [b"%d" % each for each in ranks]
        assert (world.rank, world.world_size, float(total)) == (ranks.index(own), len(ranks), sum(ranks) / len(ranks))
    for world, _ in worlds:
        world.close()


@on_ranks(3)
def test_rank_outside_the_process_group_is_refused() -> None:
    group = dist.new_group([0, 1])
    with pytest.raises(ValueError, match=r"^process_group must be a group that torch\.distributed\.new_group returned"):
        GossipDataParallel(nn.Linear(2, 1), None, process_group=object())
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match=r"^rank 2 of the default process group is not a member of process_group"):
            GossipDataParallel(nn.Linear(2, 1), None, process_group=group)


def test_process_group_without_torch_distributed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"process_group was passed, but torch\.distributed is not initialised"):
        World(SHORT, process_group=object())


# ---------------------------------------------------------------------- nothing is left


@pytest.mark.parametrize(("world_size", "transport"), [(4, "distributed"), (2, "debug")])
@on_ranks(anew=True)
def test_wrapping_and_closing_or_dropping_leaves_no_thread_file_or_group(world_size: int, transport: str) -> None:
    """Every other model is dropped, and is not closed."""
    left = []
    assert dist.get_world_size() == world_size
    for turn in range(8):
        with pytest.raises(ValueError, match="rign"):
            GossipDataParallel(nn.Linear(300, 300), SGD, "rign", transport=transport)
        model = GossipDataParallel(nn.Linear(300, 300), SGD, "one_peer_exponential", transport=transport)
        for _ in range(2):
            model(torch.ones(1, 300)).sum().backward()
        if turn % 2:
            model.global_avg()
            del model
            gc.collect()
        else:  # a closed model that is still referenced holds nothing either
            model.close()
        dist.barrier()
        threads, files = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
        left.append((len(threading.enumerate()), threads, files, len(dist.distributed_c10d._world.pg_map)))
    assert left[-2:] == left[2:4]


# ---------------------------------------------------------------------- few messages


@on_ranks(3)
def test_construction_takes_as_many_collectives_for_many_tensors_as_for_one() -> None:
    """With many buckets, frozen parameters and buffers."""
    for num_layers in (1, 20):
        module = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(num_layers)))
        for layer in module:
            layer[0].bias.requires_grad_(False)
        model = GossipDataParallel(module, SGD, "one_peer_exponential", bucket_cap_mb=TINY_BUCKETS)
        # The manifests; the values of rank 0; who is on this machine; and whose memory they can read.
        assert model._world.progress_markers.sequence == 4


@on_ranks(3)
def test_tensors_of_all_sizes_and_dtypes_are_broadcast_at_once() -> None:
    world = World(timedelta(seconds=60))
    dtypes = (torch.bool, torch.float64, torch.int8, torch.float16, torch.complex64, torch.float32, torch.int16)
    dtypes += (torch.uint16, torch.uint32, torch.uint64, torch.int64, torch.float8_e4m3fn)
    shapes = ((3,), (), (0,), (5, 7), (2**18,), (2**17 - 3,), (1,))  # below 1 MiB, alone and together, and above
    values = [
        torch.arange(torch.Size(shape).numel()).fmod(93).add(rank).to(dtype).view(shape)
        for rank in (0, world.rank)
        for shape in shapes
        for dtype in dtypes
    ]
    wanted, own = values[: len(values) // 2], values[len(values) // 2 :]
    own[3 * len(dtypes)] = own[3 * len(dtypes)].t().contiguous().t()
    world.broadcast_(own, "broadcasting")
    world.close()
    assert all(torch.equal(bytes_of(one), bytes_of(other)) for one, other in zip(own, wanted, strict=True))


# ---------------------------------------------------------------------- who is absent


@on_ranks(4)
def test_ranks_absent_at_construction_are_named() -> None:
    rank, names = dist.get_rank(), "ranks 0 and 3 are absent; rank 0 was never seen; rank 3 was never seen"
    dist.barrier()
    if rank not in (0, 3):
        assert error_of(ExchangeError, World, SHORT).startswith(
            f"rank {rank}: constructing the model: not all of the 4 ranks took part within 2 s: {names}; every"
        )
    dist.monitored_barrier(timeout=timedelta(seconds=60))


@on_ranks(2)
def test_rank_that_comes_too_late_is_told_who_gave_up() -> None:
    text = "rank 1 is absent; rank 1 was never seen"
    if dist.get_rank() == 1:
        text = "rank 0 is absent; rank 0 has given up waiting in 'constructing the model'"
        dist.monitored_barrier(timeout=timedelta(seconds=60))
    assert text in error_of(ExchangeError, World, SHORT)
    if dist.get_rank() == 0:
        dist.monitored_barrier(timeout=timedelta(seconds=60))
    dist.monitored_barrier(timeout=timedelta(seconds=60))


@on_ranks(3)
def test_rank_absent_from_a_collective_is_named() -> None:
    """Rank 1 stays away from one collective of each model; it was last seen in the collective before."""
    calls: list[Callable[[GossipDataParallel], object]] = [
        lambda model: model.global_avg(),
        lambda model: model.averaged().__enter__(),
        lambda model: model.consensus_distance(),
    ]
    for call in calls:
        model = GossipDataParallel(rank_module(), SGD, "ring", bucket_cap_mb=1)
        model.world.timeout = SHORT  # once all are there
        if model.rank != 1:
            # Whoever gives up second may learn it from the first.
            text = error_of(ExchangeError, call, model).replace(f" (so rank {2 - model.rank} found)", "")
            assert text == (
                f"rank {model.rank}: comparing frozen parameters: every rank must call it, after the same number of "
                "steps; not all of the 3 ranks took part within 2 s: rank 1 is absent (dead, frozen, cut off or busy); "
                "it was last seen in 'finding neighbours'"
            )
        dist.monitored_barrier(timeout=timedelta(seconds=60))


@on_ranks(2)
def test_closed_connection_names_who_is_absent() -> None:
    world = World(timedelta(seconds=30))
    world.sum_(torch.ones(1), "the first sum")
    if world.rank == 0:
        text = error_of(ExchangeError, world.sum_, torch.ones(1), "the second sum")
        assert text.startswith("rank 0: the second sum: ")
        assert text.endswith(": rank 1 is absent (dead, frozen, cut off or busy); it was last seen in 'the first sum'")
    world.close()
    dist.monitored_barrier(timeout=timedelta(seconds=60))


class BrokenStore(dist.Store):
    """As a TCPStore whose server is gone."""

    def set(self, *_: object) -> None:
        raise dist.DistNetworkError("Broken pipe")

    def check(self, *_: object) -> bool:
        raise dist.DistNetworkError("failed to recv, got 0 bytes")


class Never:
    """What is awaited in vain."""

    error = None

    @staticmethod
    def wait(timeout: timedelta) -> bool:
        threading.Event().wait(timeout.total_seconds())
        return False


def wait_in_vain(progress_markers: ProgressMarkers, where: str = "averaging") -> str:
    """What is found out, where rank 1 does not come to this rank's latest collective."""
    failure = wait_for(
        Never(), progress_markers, SHORT, where=where, ranks=lambda: [1], sequence=progress_markers.sequence
    )
    return failure.verdict.text


def test_store_that_is_gone_is_said_to_be() -> None:
    progress_markers = ProgressMarkers(BrokenStore(), 0, 2)
    progress_markers.note("averaging")
    gone = (
        "the key-value store does not reply: this rank is cut off from it, or the process that holds it is gone (rank"
    )
    assert wait_in_vain(progress_markers).startswith(gone)
    with pytest.raises(ExchangeError, match=r"the key-value store does not reply: .* \(failed to recv, got 0 bytes\)"):
        progress_markers.wait_for_all(timedelta(seconds=5))


class SilentStore(dist.Store):
    """As a TCPStore whose host was cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def set(self, *_: object) -> None:
        pass

    def check(self, *_: object) -> bool:
        self.released.wait()
        return False

    def get(self, _: str) -> bytes:
        raise AssertionError


def test_store_that_answers_nothing_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossip.communication.waiting.STORE_PATIENCE_S", 0.05)
    store = SilentStore()
    progress_markers = ProgressMarkers(store, 0, 2)
    assert "does not reply" in wait_in_vain(progress_markers)
    assert progress_markers.is_silent
    store.released.set()
    for thread in threading.enumerate():
        if thread.name == "gossip-watch":
            thread.join(10)
    assert not any(thread.name == "gossip-watch" for thread in threading.enumerate())


def test_arrivals_are_read_from_any_store(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    first, second = (ProgressMarkers(dist.PrefixStore("x", store), rank, 2) for rank in range(2))
    first.note("here")
    absent = "rank 1 is absent (dead, frozen, cut off or busy); it was "
    assert wait_in_vain(first) == f"{absent}never seen"
    second.note("here")
    first.note("here")
    assert first.wait_for_all(timedelta(seconds=5)) is None
    assert first.processes[1].pid == os.getpid()
    assert wait_in_vain(first) == f"{absent}last seen in 'here'"
    second.note_giving_up([0], "rank 0 is tired")
    assert wait_in_vain(first) == "rank 0 is tired (so rank 1 found)"


@on_ranks(2, anew=True)
def test_ctrl_c_gets_through_to_a_construction_that_waits() -> None:
    def meet(_: ProgressMarkers, stop: threading.Event, __: timedelta) -> None:
        """In a thread of its own, for which the main one waits."""
        main = threading.main_thread().ident
        signal.pthread_kill(main, signal.SIGUSR1)
        stop.wait()

    if dist.get_rank() == 0:
        signal.signal(signal.SIGUSR1, signal.default_int_handler)  # launch() leaves SIGINT itself to the launcher
        with mock.patch.object(ProgressMarkers, "_meet", meet), pytest.raises(KeyboardInterrupt):
            World(timedelta(minutes=5))
    dist.monitored_barrier(timeout=timedelta(seconds=60))
