"""The program of a rank of :mod:`.failures`: it trains by one method, paced, and notes every step that counts."""

import ctypes
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossip
from gossip.lab.benchmarks.bench_methods import sgd
from gossip.lab.benchmarks.network.shaped_hosts import Lab, enter
from gossip.lab.benchmarks.workloads import LOSS_TASKS, Batch, loss_of

TIMEOUT = timedelta(seconds=10)  # longer than a rank is frozen or cut off
_LONG = timedelta(seconds=60)
_OF_GLOO = timedelta(seconds=4)  # in torchft
_MAX_STALENESS = 20  # steps of 0.4 s, which last longer than a rank is frozen or cut off
SLOWER = 4
CHECKPOINT = "checkpoint.pt"
_STEPS_BETWEEN_LOSSES = 10
_NUM_HELD_OUT = 64


class Paced:
    """The steps of one rank: its batches, a sleep until each has lasted ``step_s``, and notes of what counts."""

    def __init__(self, case: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.case, self.folder, self.slot = case, Path(case["folder"]), _slot()
        task = LOSS_TASKS[case["task"]]
        data = task.make_data()
        self.module = task.initial_module(data, case["seed"])
        self._held_out = data.test_inputs[:_NUM_HELD_OUT], data.test_targets[:_NUM_HELD_OUT]
        self.make_optimizer = sgd(task.learning_rate)
        self.batches: Iterator[Batch] = task.batches(data, case["ranks"], case["seed"], range(self.slot, self.slot + 1))
        self._notes = (self.folder / f"{self.slot}-{os.getpid()}.jsonl").open("a", buffering=1)
        self._write({"at": time.time()})
        self._is_slow = self.folder / f"slow{self.slot}"
        self._began = time.monotonic()

    def _write(self, note: dict[str, Any]) -> None:
        self._notes.write(json.dumps(note) + "\n")

    def pace(self) -> None:
        """Sleep until the step has lasted as long as it is to."""
        step_s = self.case["step_s"] * (SLOWER if self._is_slow.exists() else 1)
        time.sleep(max(0.0, self._began + step_s - time.monotonic()))
        self._began = time.monotonic()

    def note(self, step: int, count: int = 1) -> None:
        """Note that this rank's part of a step, or of ``count`` steps up to it, counts."""
        loss = None
        if step % _STEPS_BETWEEN_LOSSES == 0:
            with torch.no_grad():
                loss = loss_of(self.module, self._held_out).item()
        self._write({"at": time.time(), "step": step, "count": count, "loss": loss})


def end_with_parent() -> None:
    """Let this process be killed as soon as the one that started it has ended, in whatever way. Local; on Linux."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _slot() -> int:
    return int(os.environ.get("SLOT") or os.environ["RANK"])


def gossips(case: dict[str, Any]) -> None:
    """Train by gossip with ``on_peer_loss="continue"``, in averages of pairs, which wait for no rank that is slow."""
    paced = Paced(case)
    model = gossip.GossipDataParallel(
        paced.module,
        paced.make_optimizer,
        algorithm=gossip.Asynchronous(_MAX_STALENESS),
        on_peer_loss="continue",
        min_ranks=1,
        partition_timeout=_LONG.total_seconds(),
        timeout=TIMEOUT,
    )
    while True:
        loss_of(model, next(paced.batches)).backward()
        paced.note(model.step)
        paced.pace()


def averages_gradients(paced: Paced) -> None:
    """Train with DistributedDataParallel and checkpoints, from which torchrun's restarts go on."""
    # torchrun's store still has the addresses of the ranks before the restart, and gloo's ranks would connect to these.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_LONG)
    keys = dist.PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=keys, rank=rank, world_size=num_ranks, timeout=_LONG)
    module, path = paced.module, paced.folder / CHECKPOINT
    optimizer = paced.make_optimizer(list(module.named_parameters()))
    step = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = DistributedDataParallel(module)
    while True:
        loss_of(model, next(paced.batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        paced.note(step)
        if step % paced.case["period"] == 0 and dist.get_rank() == 0:
            part = path.with_suffix(".part")
            torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
            part.replace(path)
        paced.pace()


def _manager(paced: Paced, states: dict[str, Any], **options: Any) -> Any:
    from torchft import Manager, ProcessGroupGloo

    return Manager(
        pg=ProcessGroupGloo(timeout=_OF_GLOO),
        min_replica_size=2,
        load_state_dict=lambda state: [each.load_state_dict(state[name]) for name, each in states.items()],
        state_dict=lambda: {name: each.state_dict() for name, each in states.items()},
        replica_id=f"slot{paced.slot}",
        timeout=TIMEOUT,
        quorum_timeout=_LONG,
        connect_timeout=TIMEOUT,
        **options,
    )


def torchft_ddp(paced: Paced) -> None:
    """Train with torchft's fault-tolerant DDP."""
    from torchft import DistributedDataParallel as FaultTolerantDDP
    from torchft import Optimizer

    inner = paced.make_optimizer(list(paced.module.named_parameters()))
    manager = _manager(paced, {"module": paced.module, "optimizer": inner})
    model, optimizer = FaultTolerantDDP(manager, paced.module), Optimizer(manager, inner)
    while True:
        step = manager.current_step()
        optimizer.zero_grad()
        loss_of(model, next(paced.batches)).backward()
        optimizer.step()
        if manager.current_step() > step:
            paced.note(manager.current_step())
        paced.pace()


def _train_locally(paced: Paced, optimizer: Any, num_synchronised: Callable[[], int], most: float) -> None:
    """Make local steps, of which at most ``most`` count at a synchronisation."""
    num_local, before = 0, 0
    while True:
        loss_of(paced.module, next(paced.batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        num_local += 1
        if (now := num_synchronised()) > before:  # by more than one for a rank that takes over the state of another
            paced.note(now * paced.case["period"], num_local if now == before + 1 else 0)
        num_local = 0 if now > before or num_local == most else num_local
        before = now
        paced.pace()


def _torchft_locally(paced: Paced, synchronised: Callable[[Any, nn.Module, Any], Any]) -> None:
    optimizer = paced.make_optimizer(list(paced.module.named_parameters()))
    manager = _manager(paced, {"module": paced.module, "optimizer": optimizer}, use_async_quorum=False)
    with synchronised(manager, paced.module, optimizer):
        _train_locally(paced, optimizer, manager.current_step, paced.case["period"])


def torchft_local_sgd(paced: Paced) -> None:
    """Train with torchft's LocalSGD."""
    from torchft.local_sgd import LocalSGD

    _torchft_locally(paced, lambda *parts: LocalSGD(*parts, sync_every=paced.case["period"]))


def torchft_diloco(paced: Paced) -> None:
    """Train with torchft's DiLoCo."""
    from torchft.local_sgd import DiLoCo

    def synchronised(manager: Any, module: nn.Module, optimizer: Any) -> Any:
        outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        return DiLoCo(manager, [module], optimizer, outer, sync_every=paced.case["period"])

    _torchft_locally(paced, synchronised)


def hivemind_local(paced: Paced) -> None:
    """Train by local steps with hivemind's Optimizer, whose peers average in the background once all made a period."""
    from hivemind import DHT, Optimizer

    case = paced.case
    address = Lab.address(paced.slot) if case["hosts"] else "127.0.0.1"
    optimizer = Optimizer(
        dht=DHT(initial_peers=[os.environ["PEER"]], host_maddrs=[f"/ip4/{address}/tcp/0"], start=True),
        run_id="failures",
        optimizer=paced.make_optimizer(list(paced.module.named_parameters())),
        batch_size_per_step=1,  # its samples are batches here
        target_batch_size=case["period"] * case["ranks"],
        use_local_updates=True,
        delay_state_averaging=True,
        matchmaking_time=2.0,
        averaging_timeout=TIMEOUT.total_seconds(),
    )
    _train_locally(paced, optimizer, lambda: optimizer.local_epoch, math.inf)


METHODS: dict[str, Callable[[Paced], None]] = {
    "ddp": averages_gradients,
    "torchft_ddp": torchft_ddp,
    "torchft_local_sgd": torchft_local_sgd,
    "torchft_diloco": torchft_diloco,
    "hivemind": hivemind_local,
}


def main(method: str, text: str) -> None:
    """Train by a method, or, as "gossip_warm" or "gossip_cold", start what does."""
    from gossip.lab.benchmarks.failures_worker import gossips  # not that of __main__, which workers lack

    end_with_parent()
    case = json.loads(text)
    if case["hosts"]:
        enter(case["hosts"][_slot()])
        os.environ["GLOO_SOCKET_IFNAME"] = Lab.interface
        socket.gethostname = lambda: Lab.address(_slot())  # by which torchft's servers are found
    if method == "gossip_warm":
        preload = ("gossip.lab.benchmarks.failures_worker", "sklearn.datasets", "sklearn.model_selection")
        options = {"world_size": case["ranks"], "restart": 10**6, "preload": preload}
        gossip.launch(gossips, case, on_peer_loss="continue", **options)
    elif method == "gossip_cold":
        gossip.launch(gossips, case, on_peer_loss="continue")
    else:
        METHODS[method](Paced(case))


if __name__ == "__main__":
    main(*sys.argv[1:])
