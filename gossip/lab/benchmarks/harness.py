"""A whole run of a benchmark: the network and the workers of every case, and the results in one folder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from loguru import logger
from pydantic import BaseModel, SerializeAsAny

from gossip.lab.benchmarks.benchmark import Benchmark, BenchmarkSettings, Record, S
from gossip.lab.benchmarks.benchmark_names import BENCHMARKS
from gossip.lab.benchmarks.network.machine import machine
from gossip.lab.benchmarks.network.networks import Link, Network
from gossip.lab.benchmarks.network.shaped_hosts import Lab
from gossip.lab.benchmarks.worker_processes import run_workers


class Document(BaseModel):
    """The results of a run, as they are written; numbers that are not finite are null there."""

    settings: SerializeAsAny[BenchmarkSettings]
    network: str
    notes: list[str]
    results: list[SerializeAsAny[BaseModel]]


def run(name: str, settings: S, folder: Path) -> tuple[list[Any], str]:
    """Run a benchmark; the results, the report, the figures and the workers' records are written to ``folder``.

    Results, report and figures are written anew after every case.

    Parameters
    ----------
    name : str
        A key of :data:`gossip.lab.benchmarks.benchmark_names.BENCHMARKS`.
    settings : BenchmarkSettings
        The settings of that benchmark.
    folder : Path

    Returns
    -------
    list of BaseModel
        The result of each case.
    str
        The report as Markdown.

    Raises
    ------
    ConfigurationError
        No method is left to measure.
    LabUnavailable
        The lab cannot be created on this machine, and the benchmark does not do without.
    LaunchError
        A worker failed.
    """
    benchmark = BENCHMARKS[name]()
    settings, notes = benchmark.available(settings)
    for note in notes:
        logger.warning(note)
    results: list[Any] = []
    for case_name, case in settings.cases():
        logger.info("{}: {} ranks on {}", case_name, case.world_size, case.network)
        with contextlib.closing(_network_of(case)) as network:

            def tell(number: int, record: Record, case: S = case) -> None:
                if line := benchmark.progress(case, number, record):
                    logger.info(line)

            records = run_workers(name, case, network, folder / case_name, tell)
            results.append(benchmark.result(case, records))
            text = _write(benchmark, settings, network, notes, results, folder)
    return results, text


def _network_of(case: S) -> Network:
    return Network() if case.link is None else Lab(case.num_hosts, Link.parse(case.link))


def _write(
    benchmark: Benchmark[S, Any], settings: S, network: Network, notes: list[str], results: list[Any], folder: Path
) -> str:
    document_file, report_file = benchmark.files
    document = Document(settings=settings, network=network.name, notes=notes, results=results)
    (folder / document_file).write_text(document.model_dump_json(indent=2) + "\n", encoding="utf-8")
    facts = "\n".join(f"- {fact}" for fact in [*benchmark.facts(settings), machine(network), *notes])
    parts = [f"# {benchmark.title}", facts, *benchmark.sections(results), benchmark.explanation]
    report = "\n\n".join(filter(None, parts)) + "\n"
    (folder / report_file).write_text(report, encoding="utf-8")
    benchmark.draw(results, folder)
    return report
