"""Step times measured in the lab, next to those that gossip.simulate_time predicts from a probe of the same hosts.

    sudo python scripts/predicted_steps.py
    sudo python scripts/predicted_steps.py --rates 200mbit --stragglers none --steps 10 --output steps.json

Every worker is a host of its own behind a shaped link (network namespaces: Linux, root, iproute2). Before the methods
run, compute per step is measured without communication, latency and bandwidth between pairs, and what computing and
sending cost each other: nothing else goes into the predictions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch
from loguru import logger

from gossip.lab.benchmarks.harness import run
from gossip.lab.benchmarks.network.shaped_hosts import LabUnavailable
from gossip.lab.benchmarks.predicted_steps import SIMULATED, PredictedStepsSettings
from gossip.lab.experiments.validated_models import ConfigurationError

METHODS = ("local", "ddp", "one_peer_exponential", "ring", "complete")


def machine() -> dict[str, str | int | None]:
    """What the numbers depend on."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": models[0].partition(": ")[2] if models else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> int | str:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rates", nargs="+", default=["1000mbit", "200mbit", "100mbit"], help="of every link, each way"
    )
    parser.add_argument("--stragglers", nargs="+", choices=SIMULATED, default=list(SIMULATED))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="local, ddp, and names of topologies")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="that are measured, of each method")
    parser.add_argument("--bucket-cap-mb", type=float, default=5.0, help="of every method, in MiB")
    parser.add_argument("--output", type=Path, help="a file for the numbers as JSON")
    arguments = parser.parse_args()
    if arguments.world_size < 2 or arguments.steps < 1:
        parser.error("--world-size must be at least 2 and --steps at least 1")
    logger.remove()
    try:
        settings = PredictedStepsSettings.of(
            arguments.methods,
            arguments.rates,
            arguments.stragglers,
            network="lab",
            world_size=arguments.world_size,
            num_steps=arguments.steps,
            bucket_cap_mb=arguments.bucket_cap_mb,
        )
        with tempfile.TemporaryDirectory() as folder:
            cases, report = run("predicted_steps", settings, Path(folder))
    except ConfigurationError as error:
        parser.error(str(error))
    except LabUnavailable as error:
        return f"no lab: {error}"
    print(report)
    if arguments.output is not None:
        content = {
            "command": " ".join(["python", "scripts/predicted_steps.py", *sys.argv[1:]]),
            "machine": machine(),
            "num_steps": arguments.steps,
            "cases": [case.model_dump() for case in cases],
        }
        arguments.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
