"""The command line of ``gossip bench``: composes the configuration with hydra and reports a user's mistakes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from loguru import logger

from gossip.lab.benchmarks.harness import LEVELS, run
from gossip.lab.benchmarks.step_time import StepTimeSettings
from gossip.lab.experiments import run_folder
from gossip.lab.experiments.config_errors import check_flags
from gossip.lab.experiments.config_store import plain
from gossip.lab.experiments.option_help import FLAGS, help_text
from gossip.lab.experiments.train_command import REFUSED, composed, report, terminate
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
    signal.signal(signal.SIGTERM, terminate)
    logger.remove()
    logger.add(sys.stderr, format="{message}", filter=LEVELS)
    try:
        if {"-m", "--multirun"}.intersection(sys.argv):
            raise ConfigurationError("the benchmark measures all methods in one run: give lists, and leave out -m")
        check_flags(sys.argv[1:])
        composed(config_folder, config_name, _task)
    except BrokenPipeError:
        raise  # a closed standard output is handled by the caller
    except (Exception, KeyboardInterrupt) as error:
        status = report(error, config_folder, config_name)
        if status == REFUSED:
            run_folder.remove_new()
        return status
    return 0


def _task(hydra_config: Any) -> None:
    from hydra.core.hydra_config import HydraConfig

    hydra_settings = HydraConfig.get()
    folder, config = Path(hydra_settings.runtime.output_dir), plain(hydra_config)
    settings = read(StepTimeSettings, config["bench"], "bench")
    with run_folder.lock(folder):
        run_folder.claim(folder, config, list(hydra_settings.overrides.task))
        try:
            _, text = run("step_time", settings, folder)
        except ConfigurationError:
            run_folder.unclaim(folder)
            raise
        print(text)
        print(f"run folder: {folder}")
