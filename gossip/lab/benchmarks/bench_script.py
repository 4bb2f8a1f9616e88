"""The command lines of benchmarks: their options are the settings with a description, or those of a file.

That of ``gossip bench`` is hydra's, as of ``gossip train``.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from loguru import logger

from gossip import LaunchError
from gossip.lab.benchmarks.benchmark import Benchmark
from gossip.lab.benchmarks.harness import BENCHMARKS, LEVELS, run
from gossip.lab.benchmarks.step_time import StepTimeSettings
from gossip.lab.experiments import run_folder
from gossip.lab.experiments.config_store import plain
from gossip.lab.experiments.validated_models import ConfigurationError, read
from gossip.launching import find_placement
from topologies.command_lines import Parser


def main(name: str, description: str | None, config: Path | None = None) -> int:
    """Run a benchmark with the settings of ``sys.argv``, print its report, and return the exit status.

    With ``config`` the settings are those of a file, and the command line has other values for some of its keys.
    Invalid settings end the program with status 2 and one line.
    """
    benchmark = BENCHMARKS[name]
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    kept = "for results, report, figures and the records of all ranks; new. Without one, nothing is kept"
    parser.add_argument("folder", nargs=None if config else "?", type=Path, help=kept)
    if config is not None:
        parser.spelling = "world_size"
        parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"of {config}")
    else:
        _add_options(parser, benchmark)
    arguments = vars(parser.parse_args())
    folder: Path | None = arguments.pop("folder")
    placement = find_placement()
    if placement is not None and placement.rendezvous is None and name != "probe":
        parser.error("a benchmark starts its ranks itself: start it without torchrun or srun")
    if placement is not None and placement.rank > 0:
        folder = None
    if folder is not None and folder.exists() and not benchmark.resumes:
        parser.error(f"{folder} is there already; name a new folder")
    logger.remove()
    logger.add(sys.stderr, format="{message}", filter=LEVELS)
    with contextlib.ExitStack() as stack:
        try:
            content = arguments if config is None else _configured(config, arguments["overrides"])
            settings = read(benchmark.settings, content)
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(parents=True, exist_ok=True)
            results, text = run(name, settings, folder)
        except ConfigurationError as error:
            parser.error(str(error))
        except LaunchError as error:
            print(error, file=sys.stderr)
            return 1
    print(text, end="")
    return 0 if benchmark().is_sound(results) else 1


def _add_options(parser: argparse.ArgumentParser, benchmark: type[Benchmark[Any, Any]]) -> None:
    for name, field in benchmark.settings.model_fields.items():
        if field.description is not None:
            key, default = field.alias or name, field.get_default(call_default_factory=True)
            several = isinstance(default, tuple)
            kind: dict[str, Any] = {"type": _value, "nargs": "+" if several else None}
            parser.add_argument(
                f"--{key.replace('_', '-')}",
                dest=key,
                default=list(default) if several else default,
                help=field.description + ("" if default is None or default is False else " (%(default)s)"),
                **({"action": "store_true"} if default is False else kind),
            )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _configured(file: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the content of a configuration file with other values for some keys."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.load(file)
    try:
        for override in overrides:
            key = override.partition("=")[0]
            OmegaConf.update(config, key, OmegaConf.select(OmegaConf.from_dotlist([override]), key), merge=False)
    except OmegaConfBaseException as error:
        raise ConfigurationError(str(error).partition("\n")[0]) from error
    return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]


def measure_steps(hydra_config: Any) -> None:
    """Run the benchmark of steps of a composed configuration, and print its report."""
    from hydra.core.hydra_config import HydraConfig

    logger.remove()
    logger.add(sys.stderr, format="{message}", filter=LEVELS)
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
