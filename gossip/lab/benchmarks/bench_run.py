"""A whole benchmark: the network, the workers at every rate, and the results in one folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loguru import logger

from gossip.lab.benchmarks import bench_figures, bench_workers
from gossip.lab.benchmarks.bench_methods import decent_dp_is_installed
from gossip.lab.benchmarks.bench_report import as_dict, ratios_of, rows_of
from gossip.lab.benchmarks.bench_settings import Settings
from gossip.lab.benchmarks.bench_tables import Result, markdown
from gossip.lab.benchmarks.machine import machine
from gossip.lab.benchmarks.networks import Loopback, Network, bits_per_second
from gossip.lab.benchmarks.shaped_hosts import Lab, LabUnavailable
from gossip.lab.experiments.records import without_non_finite
from gossip.lab.experiments.validated_models import ConfigurationError

WITHOUT_DECENT_DP = "decent_dp is left out: it is not installed; in a clone of the repository: pip install '.[bench]'"


def run(settings: Settings, folder: Path) -> str:
    """Run the benchmark, and write bench.json, bench.md, figures and the workers' records to ``folder``.

    Returns
    -------
    str
        The report as Markdown.

    Raises
    ------
    ConfigurationError
        No method is left to measure.
    LaunchError
        A worker failed.
    """
    settings, notes = _available(settings)
    results = []
    with _network(settings, notes) as network:
        rates = settings.rates if network.name == "lab" else (None,)
        for rate in rates:
            if rate is not None:
                network.shape(bits_per_second(rate))
            result = _measure(settings, network, rate, folder if len(rates) == 1 else folder / str(rate))
            results.append(result)
            text = _write(settings, network, notes, results, folder)
    return text


def _available(settings: Settings) -> tuple[Settings, list[str]]:
    """Drop the methods whose library is not installed, with a note about each omission."""
    if decent_dp_is_installed() or all(method.kind != "decent_dp" for method in settings.methods):
        return settings, []
    logger.warning(WITHOUT_DECENT_DP)
    methods = tuple(method for method in settings.methods if method.kind != "decent_dp")
    if not methods:
        raise ConfigurationError(WITHOUT_DECENT_DP)
    return dataclasses.replace(settings, methods=methods), [WITHOUT_DECENT_DP]


@contextlib.contextmanager
def _network(settings: Settings, notes: list[str]) -> Iterator[Network]:
    network: Network = Loopback()
    if settings.network == "lab":
        try:
            network = _shaped_lab(settings)
        except LabUnavailable as error:
            notes.append(f"no lab: {error}; the links are loopback, unshaped")
            logger.warning(notes[-1])
    try:
        yield network
    finally:
        network.close()


def _shaped_lab(settings: Settings) -> Lab:
    lab = Lab(settings.world_size // settings.local_size)
    try:
        lab.shape(bits_per_second(settings.rates[0]))
    except BaseException:
        lab.close()
        raise
    return lab


def _measure(settings: Settings, network: Network, rate: str | None, folder: Path) -> Result:
    total = len(settings.methods) * settings.repetitions
    num_done = 0

    def tell(record: bench_workers.Record) -> None:
        nonlocal num_done
        if "method" in record:
            num_done += 1
            median_ms = 1e3 * statistics.median(record["step_s"])
            logger.info("{}/{} {}: {:.1f} ms a step on rank 0", num_done, total, record["method"], median_ms)

    logger.info("{} ranks, {}, {}", settings.world_size, network.name, rate or "unshaped")
    by_rank = bench_workers.measure(settings, network, folder, tell)
    carried = [record["goodput_bytes_per_s"] for records in by_rank for record in records if "method" not in record]
    measured = [value for value in carried if value is not None]
    goodput = statistics.median(measured) if measured else None
    rows = rows_of(by_rank, settings.methods, goodput)
    return Result(rate, goodput, rows, ratios_of(rows))


def _write(settings: Settings, network: Network, notes: list[str], results: list[Result], folder: Path) -> str:
    """Write all results and the report; called again after every rate."""
    facts = [
        f"Model {settings.model}, {settings.world_size} ranks on {network.name}"
        f"{f', {settings.local_size} on each host' if settings.local_size > 1 else ''}, {settings.num_threads} "
        f"thread{'' if settings.num_threads == 1 else 's'} each, SGD with momentum 0.9.",
        f"{settings.repetitions} repetitions of {settings.steps} steps after {settings.warmup_steps} of warm-up; "
        f"delays: {settings.straggler}.",
        machine(network),
        *notes,
    ]
    content: dict[str, Any] = {
        "settings": asdict(settings),
        "network": network.name,
        "notes": notes,
        "results": [
            {
                "rate": result.rate,
                "goodput_bytes_per_s": result.goodput_bytes_per_s,
                **as_dict(result.rows, result.ratios),
            }
            for result in results
        ],
    }
    text = json.dumps(without_non_finite(content), indent=2, allow_nan=False)
    (folder / "bench.json").write_text(text + "\n", encoding="utf-8")
    report = markdown("Benchmark", facts, results)
    (folder / "bench.md").write_text(report, encoding="utf-8")
    bench_figures.parts_figure(results, folder / "parts.svg")
    if len(results) > 1:
        bench_figures.rates_figure(results, folder / "rates.svg")
    return report
