"""The command line of ``gossip bench``: composes the configuration with hydra and reports a user's mistakes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from loguru import logger

from gossip.lab.benchmarks.harness import run
from gossip.lab.benchmarks.step_time import StepTimeSettings
from gossip.lab.experiments import folder_cleanup, run_folder
from gossip.lab.experiments.config_errors import check_flags
from gossip.lab.experiments.option_help import FLAGS, help_text
from gossip.lab.experiments.train_command import REFUSED, report
from gossip.lab.experiments.validated_models import ConfigurationError, read


def main(config_folder: Path, config_name: str) -> int:
    """Run the benchmark that ``sys.argv`` describes.

    Returns
    -------
    int
        The exit status: 0 on success; 1 if a worker failed; 2 if the requested benchmark cannot be run; 130 after
        Ctrl-C. SIGTERM raises ``SystemExit(143)``.
    """
    if set(FLAGS).intersection(sys.argv[1:]):
        print(help_text(sys.argv[0], config_folder, config_name))
        return 0
    signal.signal(signal.SIGTERM, _terminate)
    logger.remove()
    logger.add(sys.stderr, format="{message}", level="INFO", filter="gossip.lab.benchmarks")
    try:
        if {"-m", "--multirun"}.intersection(sys.argv):
            raise ConfigurationError("the benchmark measures all methods in one run: give lists, and leave out -m")
        _run_hydra(config_folder, config_name)
    except BrokenPipeError:
        raise  # a closed standard output is handled by the caller
    except (Exception, KeyboardInterrupt) as error:
        status = report(error, config_folder, config_name)
        if status == REFUSED:
            folder_cleanup.remove_new()
        return status
    return 0


def _run_hydra(config_folder: Path, config_name: str) -> None:
    """Compose the configuration and run the benchmark; every error is raised, and none is printed."""
    import hydra

    check_flags(sys.argv[1:])
    errors: list[Exception] = []

    def task(config: Any) -> None:
        try:
            _task(config)
        except Exception as error:  # hydra would print its own report of the error
            errors.append(error)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes hydra raise its own errors instead of printing them
    hydra.main(version_base="1.3", config_path=str(config_folder), config_name=config_name)(task)()
    if errors:
        raise errors[0]


def _task(hydra_config: Any) -> None:
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    hydra_settings = HydraConfig.get()
    folder = Path(hydra_settings.runtime.output_dir)
    config = OmegaConf.to_container(hydra_config, resolve=True, throw_on_missing=True)
    assert isinstance(config, dict)
    plain = {str(key): value for key, value in config.items()}
    settings = read(StepTimeSettings, plain["bench"], "bench")
    with run_folder.lock(folder):
        run_folder.claim(folder, plain, list(hydra_settings.overrides.task))
        try:
            _, text = run("step_time", settings, folder)
        except ConfigurationError:
            run_folder.unclaim(folder)
            raise
        print(text)
        print(f"run folder: {folder}")


def _terminate(signal_number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)
