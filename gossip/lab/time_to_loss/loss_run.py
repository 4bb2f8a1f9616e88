"""A whole run: every task on every kind of link, and the results in one folder."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from gossip import Cluster, Workload
from gossip.lab.benchmarks.bench_specification import MethodSpecification
from gossip.lab.benchmarks.bench_workers import Record, run_workers
from gossip.lab.benchmarks.machine import machine
from gossip.lab.benchmarks.networks import Loopback, Network
from gossip.lab.benchmarks.shaped_hosts import Lab
from gossip.lab.experiments.records import without_non_finite
from gossip.lab.time_to_loss.loss_curves import Curve, Point
from gossip.lab.time_to_loss.loss_figure import loss_figure
from gossip.lab.time_to_loss.loss_prediction import VirtualRuns
from gossip.lab.time_to_loss.loss_settings import LossSettings
from gossip.lab.time_to_loss.loss_specification import LossSpecification
from gossip.lab.time_to_loss.loss_table import LossResult, markdown, rows_of

_QUIET_S = 0.15


def run(settings: LossSettings, folder: Path) -> str:
    """Run the measurement, and write results.json, report.md, loss.svg and the workers' records to ``folder``.

    Returns
    -------
    str
        The report as Markdown.

    Raises
    ------
    LabUnavailable
        The lab cannot be created on this machine.
    LaunchError
        A worker failed.
    """
    results: list[LossResult] = []
    virtual = {task: VirtualRuns(settings, task) for task in settings.tasks if settings.predict}
    for name in [link.name for link in settings.links] if settings.network == "lab" else ["loopback"]:
        with contextlib.closing(_network(settings, name)) as network:
            for task in settings.tasks:
                results.append(_measure(settings, network, name, task, virtual.get(task), folder / name / task))
                text = _write(settings, network, results, folder)
    return text


def _network(settings: LossSettings, name: str) -> Network:
    if settings.network == "loopback":
        return Loopback()
    link = next(link for link in settings.links if link.name == name)
    lab = Lab(settings.world_size, link.delay_s)
    try:
        lab.shape(link.bits_per_second)
    except BaseException:
        lab.close()
        raise
    return lab


def _measure(
    settings: LossSettings, network: Network, name: str, task: str, virtual: VirtualRuns | None, folder: Path
) -> LossResult:
    logger.info("{}, {}: {} ranks", task, name, settings.world_size)
    delay_s = max((link.delay_s for link in settings.links if link.name == name), default=0.0)
    make = partial(
        LossSpecification,
        methods=settings.methods,
        num_threads=settings.num_threads,
        task=task,
        seeds=settings.seeds,
        steps=settings.steps,
        evaluate_every=settings.evaluate_every,
        max_time_ratio=settings.max_time_ratio,
        as_probed=settings.as_probed,
        quiet_s=0.0 if network.shared else _QUIET_S + 2 * delay_s,
    )
    records, *_ = run_workers(
        "gossip.lab.time_to_loss.loss_worker",
        make,
        network,
        folder,
        world_size=settings.world_size,
        timeout_s=settings.timeout_s,
        on_record=_tell,
    )
    probe, chosen, advice = (records[0][key] for key in ("probe", "chosen", "advice"))
    methods = [*settings.methods, *([MethodSpecification(**chosen)] if chosen else [])]
    curves = [_curve(record) for record in records[1:]]
    predicted_s = {} if virtual is None else virtual.predicted_s(methods, *_described(probe))
    ends = [curve.points[-1] for curve in curves if curve.method == settings.methods[0].label]
    return LossResult(
        task=task,
        link=name,
        curves=curves,
        rows=rows_of(methods, curves, predicted_s),
        step_s=statistics.fmean(end.seconds / end.step for end in ends),
        compute_s=_described(probe)[1].compute_s,
        probe=probe,
        advice=advice,
    )


def _tell(record: Record) -> None:
    if "points" in record:
        end = _curve(record).points[-1]
        logger.info(
            "seed {}, {}: loss {:.3f} after {} steps, {:.2f} s, {:.1f} MB",
            *(record["seed"], record["method"], end.loss, end.step, end.seconds, end.sent_bytes / 1e6),
        )


def _curve(record: Record) -> Curve:
    points = [Point(**{**point, "loss": _number(point["loss"])}) for point in record["points"]]
    return Curve(record["method"], record["seed"], points)


def _number(value: float | None) -> float:
    """Return the value, or NaN for None, since JSON has no NaN."""
    return math.nan if value is None else value


def _described(probe: Mapping[str, Any]) -> tuple[Cluster, Workload]:
    workload = {key: value for key, value in probe["workload"].items() if key not in ("stragglers", "drop_outs")}
    return Cluster(**probe["cluster"]), Workload(**{**workload, "bucket_bytes": tuple(workload["bucket_bytes"])})


def _write(settings: LossSettings, network: Network, results: list[LossResult], folder: Path) -> str:
    """Write all results and the report; called again after every result."""
    facts = [
        f"{settings.world_size} ranks on {settings.network}, {settings.num_threads} "
        f"thread{'' if settings.num_threads == 1 else 's'} each, SGD with momentum 0.9; seeds "
        f"{', '.join(map(str, settings.seeds))}.",
        f"All-reduce makes {settings.steps} steps; the others have {settings.max_time_ratio:g} times its time; an "
        f"evaluation every {settings.evaluate_every} steps.",
        machine(network),
    ]
    content = {"settings": asdict(settings), "results": [result.to_dict() for result in results]}
    text = json.dumps(without_non_finite(content), indent=1, allow_nan=False)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    report = markdown(facts, results)
    (folder / "report.md").write_text(report, encoding="utf-8")
    loss_figure(results, folder / "loss.svg")
    return report
