"""Measure the time and the bytes until the averaged model reaches all-reduce's final loss plus 1 %, in the lab.

    sudo python scripts/time_to_loss.py outputs/time_to_loss
    sudo python scripts/time_to_loss.py outputs/quick links=[200mbit] tasks=[digits_cnn] seeds=[0] predict=false
    python scripts/time_to_loss.py outputs/loopback network=loopback steps=20

The options are those of configs/time_to_loss.yaml. Every worker is a host of its own behind a shaped link (network
namespaces: Linux, root, iproute2); all methods train in the same processes, in turns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from loguru import logger
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gossip import LaunchError
from gossip.lab.benchmarks.harness import run
from gossip.lab.benchmarks.network.shaped_hosts import LabUnavailable
from gossip.lab.benchmarks.time_to_loss import TimeToLossSettings
from gossip.lab.experiments.validated_models import ConfigurationError, read
from gossip.lab.gossip_command import config_folder


def settings_of(overrides: list[str]) -> TimeToLossSettings:
    """The file's, with other values for some keys."""
    config = OmegaConf.load(config_folder() / "time_to_loss.yaml")
    OmegaConf.set_struct(config, True)
    OmegaConf.set_struct(config.methods, False)
    try:
        for override in overrides:
            key = override.partition("=")[0]
            OmegaConf.update(config, key, OmegaConf.select(OmegaConf.from_dotlist([override]), key), merge=False)
    except OmegaConfBaseException as error:
        raise ConfigurationError(str(error).partition("\n")[0]) from error
    content: Any = OmegaConf.to_container(config, resolve=True)
    return read(TimeToLossSettings, content)


def main() -> int | str:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for results.json, report.md, loss.svg and the workers' records; new")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of configs/time_to_loss.yaml")
    arguments = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, format="{message}", level="INFO", filter="gossip.lab.benchmarks")
    try:
        settings = settings_of(arguments.overrides)
        arguments.folder.mkdir(parents=True)
    except (ConfigurationError, FileExistsError) as error:
        parser.error(str(error))
    try:
        _, report = run("time_to_loss", settings, arguments.folder)
        print(report)
    except LabUnavailable as error:
        return f"no lab: {error}"
    except LaunchError as error:
        return str(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
