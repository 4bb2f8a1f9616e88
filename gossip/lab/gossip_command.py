"""The command ``gossip``: which application its first argument names, and how that is started."""

import importlib
import importlib.util
import sys
from pathlib import Path

from gossip.lab.experiments.option_help import FLAGS
from gossip.lab.experiments.validated_models import nearest
from topologies.command_lines import ends_quietly, with_world_size

APPLICATIONS = {
    "train": "train one experiment, or with -m several",
    "sweep": "run many experiments, and report on all of them",
    "bench": "measure gossip against all-reduce and Decent-DP",
    "probe": "measure this cluster, and predict whether gossip helps on it",
    "store": "serve the key-value store in which ranks meet that are started on their own",
    "status": "show a training while it runs: who trains, how fast, who waits for whom",
    "chaos": "run a program of your own while its ranks are killed, frozen and told to leave",
}

PROBE = """\
Measure this cluster, and predict whether gossip helps on it and with which topology.

    gossip probe world_size=4
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint HOST:29500 --rdzv-backend c10d --no-python gossip probe
    srun --nodes 4 --ntasks-per-node 8 gossip probe
    gossip probe FOLDER world_size=4 --parameters-mb 400 --batch-size 256 --data different

Every rank trains an MLP of the given size without communication: compute per step, and jitter. Pairs of ranks exchange
small and large messages: latency and bandwidth; once more while all compute: what the two cost each other.
gossip.simulate_time then predicts a step of all-reduce and of every topology that serves the world size, and with the
best one of every algorithm, compression and number of steps between exchanges that is worth it. Without torchrun or
srun the workers are started on this machine. FOLDER gets what was measured and predicted as results.json."""

FAILURES = """\
Train by gossip, DistributedDataParallel and torchft while ranks are killed, frozen and slowed, and measure goodput.

    gossip bench failures FOLDER
    gossip bench failures FOLDER --methods gossip_warm ddp --kinds kill freeze slow --every-s 10 --seconds 60

One process starts the ranks, strikes them at times that follow from the seed, the same for every method, and starts
again at once those that have ended. A run without faults comes first for each method. With a folder that is there
already, what has been measured with the same settings is not measured again. torchft is in the extra "rivals"."""

PACKAGES = {"matplotlib": "matplotlib", "rich": "rich", "sklearn": "scikit-learn"}
"""What an installation without the extra ``lab`` lacks: the name that is imported, and the one that is installed."""

WORLD_SIZES = {"train": "launch.world_size", "sweep": "launch.world_size", "bench": "bench.world_size"}
"""Where ``world_size=N`` lies in the configuration of an application that has one."""

REFUSED = 2
INTERRUPTED = 130


def main() -> int:
    """Run the console command: its first argument names the application, which reads the others."""
    name = sys.argv[1] if len(sys.argv) > 1 else FLAGS[0]
    if name in FLAGS:
        rows = [f"  gossip {application}  {what}" for application, what in APPLICATIONS.items()]
        head = "gossip COMMAND [world_size=N] [option ...]; --help after a command shows its options\n"
        print(head, *rows, sep="\n")
        return 0
    if name not in APPLICATIONS:
        known = f"{nearest(name, list(APPLICATIONS))} Available: {', '.join(APPLICATIONS)}"
        print(f"error: there is no gossip {name}{known}", file=sys.stderr)
        return REFUSED
    sys.argv[:2] = [f"gossip {name}"]
    return run(name)


def run(name: str) -> int:
    """Run one of :data:`APPLICATIONS` with the other arguments of the command line.

    Returns the exit status: 2 if the extra is not installed, 130 after Ctrl-C, else the application's.
    """
    if name in ("store", "status", "chaos"):
        return int(importlib.import_module(f"gossip.launching.{name}_command").main(sys.argv[1:]))
    try:
        missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
        if missing:
            remedy = "install what the applications need in a clone of the repository: pip install '.[lab]'"
            print(f"error: gossip {name} needs {', '.join(missing)}; {remedy}", file=sys.stderr)
            return REFUSED
        return ends_quietly(lambda: _start(name))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def config_folder() -> Path:
    """Where the configuration lies: within an installed package, beside the packages in a clone of the repository."""
    installed = Path(__file__).resolve().parent / "configs"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "configs"


def _start(name: str) -> int:
    if name in WORLD_SIZES:
        try:
            sys.argv[1:] = with_world_size(sys.argv[1:], WORLD_SIZES[name])
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return REFUSED
    from gossip.lab.experiments import train_command

    if name not in ("bench", "probe"):
        return train_command.main(config_folder(), name)
    from gossip.lab.benchmarks import harness

    if name == "probe":
        from gossip.lab.probe.probe import Probe

        return harness.main(Probe, PROBE)
    if sys.argv[1:2] == ["failures"]:
        from gossip.lab.benchmarks.failures import Failures

        del sys.argv[1]
        return harness.main(Failures, FAILURES)
    return train_command.main(config_folder(), name, harness.measure_steps)
