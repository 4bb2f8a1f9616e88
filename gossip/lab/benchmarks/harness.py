"""A whole run of a benchmark: the network and the workers of every case, and the results in one folder.

And the command lines of benchmarks: their options are the settings with a description, or those of a file. That of
``gossip bench`` is hydra's, as of ``gossip train``.
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from pydantic_core import to_json

from gossip import LaunchError
from gossip.communication.training_store import STORE
from gossip.compression.compiled_passes import quantized_by
from gossip.lab.benchmarks.benchmark import Benchmark, BenchmarkSettings, Place, Record, S
from gossip.lab.benchmarks.network.shaped_hosts import CONGESTION_CONTROL, Lab, enter
from gossip.lab.benchmarks.step_time import StepTime, StepTimeSettings
from gossip.lab.experiments import run_folder
from gossip.lab.experiments.config_store import plain
from gossip.lab.experiments.records import JsonlWriter, read_jsonl, record_files
from gossip.lab.experiments.validated_models import ConfigurationError, read
from gossip.launching import find_placement, launch
from topologies.command_lines import Parser

LEVELS: dict[str | None, str | int | bool] = {"": "WARNING", "gossip.lab.benchmarks": "INFO"}
"""What of loguru's records is shown, by the module that says it."""
_SETTINGS = "settings.json"
_PRELOAD = ("sklearn.datasets", "sklearn.model_selection")


def run(kind: type[Benchmark[S, Any]], settings: S, folder: Path) -> tuple[list[Any], str]:
    """Run a benchmark of this kind; results, report, figures and the workers' records are written to ``folder``.

    Results, report and figures are written anew after every case. Started as one of several ranks, by torchrun or
    srun, this process is one worker. Returns the result of each case, and the report as Markdown, empty on a rank other
    than 0. Raises ConfigurationError if the lab cannot be created on this machine, and LaunchError if a worker failed.
    """
    benchmark, placement = kind(), find_placement()
    if placement is not None and placement.rendezvous is not None:
        raise ConfigurationError(
            f"{STORE} is set in the environment, but what is measured must not change while ranks come "
            "and go; unset it, and start all ranks by one torchrun or srun"
        )
    if placement is not None:
        settings = settings.model_copy(update={"world_size": placement.world_size})
    results: list[Any] = []
    report = ""
    for case_name, case in settings.cases():
        logger.info("{}: {} ranks on {}", case_name, case.world_size, case.network)
        records = _measured(case, folder / case_name) if benchmark.resumes else []
        lab = None if case.link is None or benchmark.starts_ranks else case.make_lab()
        if not records and (placement is None or placement.rank == 0):
            for path in (folder / case_name / _SETTINGS, *record_files(folder / case_name)):
                path.unlink(missing_ok=True)  # of other settings
        with contextlib.nullcontext() if lab is None else contextlib.closing(lab):
            records = records or run_workers(kind, case, lab, folder / case_name)
            (folder / case_name / _SETTINGS).write_text(case.model_dump_json(), encoding="utf-8")
        if placement is not None and placement.rank > 0:
            continue
        results.append(benchmark.result(case, records))
        document = {"settings": settings, "results": results}
        content = to_json(document, indent=2, by_alias=False, inf_nan_mode="null")
        (folder / benchmark.files[0]).write_bytes(content + b"\n")
        report = benchmark.report(settings, results, _machine(case))
        (folder / benchmark.files[1]).write_text(report, encoding="utf-8")
        benchmark.draw(settings, results, folder)
    return results, report


def _measured(case: BenchmarkSettings, folder: Path) -> list[list[Record]]:
    """Return the records of a case that an earlier run has measured; none if it has not."""
    settings = folder / _SETTINGS
    if not settings.exists() or settings.read_text(encoding="utf-8") != case.model_dump_json():
        return []
    return [read_jsonl(path) for path in record_files(folder)]


def _machine(case: BenchmarkSettings) -> str:
    """Describe versions, processors, the congestion control in the lab, and the quantizer of int8 and int4."""
    others = {"the link of the last host": case.last_link, "links between the halves of hosts": case.far_link}
    said = "".join(f" {which} {link};" for which, link in others.items() if link is not None)
    tcp = "" if case.link is None else f"{said} TCP by {CONGESTION_CONTROL};"
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, kernel {platform.release()}, "
        f"{os.cpu_count()} cores ({platform.machine()});{tcp} int8 and int4 by {quantized_by()}."
    )


Hosts = tuple[list[str], tuple[str, int]]
"""Where the workers of a case in the lab go: to namespaces of hosts, and to the store by which they meet."""


def run_workers(kind: type[Benchmark[S, Any]], case: S, lab: Lab | None, folder: Path) -> list[list[Record]]:
    """Run the ranks of a case until all have measured, and return the records of each.

    The records of rank i are written to rank<i>.jsonl as soon as they are known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    timeout = timedelta(seconds=case.timeout_s)
    hosts, store, place = None, None, Place(0, "lo", case.world_size)
    if lab is not None:
        store = lab.start_store(timeout)
        hosts, place = (lab.namespaces(), (store.host, store.port)), Place(0, lab.interface, case.local_size)
    preload = (__name__, kind.__module__, *_PRELOAD)
    options: dict[str, Any] = {"num_threads": case.num_threads, "timeout": timeout, "preload": preload}
    options["world_size"] = 1 if kind.starts_ranks else case.world_size
    options |= kind().launch_options(case)
    launch(_work, kind, case, place, hosts, folder, **options)
    del store
    return [read_jsonl(path) for path in record_files(folder)]


def _work(kind: type[Benchmark[S, Any]], case: S, place: Place, hosts: Hosts | None, folder: Path) -> None:
    """Measure on one rank. Collective."""
    logger.remove()
    logger.add(sys.stderr, format="{message}", filter=LEVELS)
    benchmark, rank = kind(), int(os.environ["RANK"])  # one that is restarted is alone in its group
    if hosts is not None:
        dist.barrier()
        dist.destroy_process_group()
        paths, address = hosts
        enter(paths[rank // case.local_size])
        os.environ["GLOO_SOCKET_IFNAME"] = place.interface
        timeout = timedelta(seconds=case.timeout_s)
        store = dist.TCPStore(*address, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world_size, timeout=timeout)
    os.environ["LOCAL_WORLD_SIZE"] = str(case.local_size)
    num_written = 0
    with JsonlWriter(folder / f"rank{rank}.jsonl") as writer:

        def write(record: Record) -> None:
            nonlocal num_written
            writer.write(record)
            if rank == 0 and (line := benchmark.progress(case, num_written, record)):
                logger.info(line)
            num_written += 1

        benchmark.work(case, place._replace(rank=rank), write)


def main(benchmark: type[Benchmark[Any, Any]], description: str | None, config: Path | None = None) -> int:
    """Run a benchmark with the settings of ``sys.argv``, print its report, and return the exit status.

    With ``config`` the settings are those of a file, and the command line has other values for some of its keys.
    Invalid settings end the program with status 2 and one line.
    """
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
    if placement is not None and placement.rendezvous is None and not benchmark.takes_ranks:
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
            results, text = run(benchmark, settings, folder)
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
            _, text = run(StepTime, settings, folder)
        except ConfigurationError:
            run_folder.unclaim(folder)
            raise
        print(text)
        print(f"run folder: {folder}")
