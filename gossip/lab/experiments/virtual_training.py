"""A run with all replicas in one process: the same data, initial values and steps as one process per rank has."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from loguru import logger

import gossip
from gossip.checkpoints.exporting import write_module
from gossip.lab.experiments.evaluation import Evaluation, cross_entropy, evaluate, evaluate_replicas
from gossip.lab.experiments.experiment_build import Experiment
from gossip.lab.experiments.loggers import Logger
from gossip.lab.experiments.progress_bar import ProgressBar
from gossip.lab.experiments.rank_training import MODEL_FILE
from gossip.lab.experiments.records import TOGETHER_FILE, JsonlWriter
from gossip.lab.experiments.run_settings import every
from gossip.lab.experiments.run_summary import RankReport, summarise
from gossip.lab.experiments.wrapper_options import ALL_REDUCE_OPTIONS, options_of_virtual_workers
from topologies import Round, Topology


def train_virtual(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """Train all replicas; leave records that are means over them, and the averaged model, in ``folder``. Local.

    Parameters
    ----------
    experiment : Experiment
        Its world size is the number of replicas.
    folder : Path
        Of the run; it exists.

    Returns
    -------
    dict
        The summary, as of :func:`gossip.lab.experiments.rank_training.train`.
    """
    settings = experiment.settings
    with _threads(settings.num_threads), warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.filterwarnings("ignore", message="There is a performance drop")  # torch.func's, of attention
        torch.manual_seed(settings.seed)
        workers = make_workers(experiment)
        logger.info("{} replicas in one process, {} steps", settings.world_size, experiment.total_steps)
        loggers: list[Logger] = [JsonlWriter(folder / TOGETHER_FILE)]
        if experiment.make_logger is not None:
            loggers.append(experiment.make_logger(str(folder / "tensorboard" / "workers")))
        for each in loggers:
            stack.callback(each.close)
        bar = stack.enter_context(ProgressBar(experiment.total_steps, visible=True))
        report = RankReport()
        last: dict[str, Any] = {}
        for last in _steps(experiment, workers):
            report.add(last)
            bar.update(last)
            if last["step"] + 1 < experiment.total_steps:
                _log(loggers, last)
        summary = _finish(experiment, workers, report, last)
        summary["wall_time_s"] = 0.0
        _log(loggers, last)
        write_module(workers.module, folder / MODEL_FILE)
    return summary


def make_workers(experiment: Experiment) -> gossip.VirtualWorkers:
    """The replicas of the experiment's method, with torch's present random state for the initial values."""
    settings = experiment.settings
    topology = experiment.topology
    if topology is None:
        topology = Topology.from_rounds([Round.identity(settings.world_size)], name="no exchange")
    options = options_of_virtual_workers(experiment.wrapper_options)
    if settings.method == "ddp":
        options = {name: options[name] for name in ALL_REDUCE_OPTIONS}
    workers = gossip.VirtualWorkers(
        experiment.make_module,
        settings.world_size,
        experiment.make_optimizer,
        topology,
        algorithm=experiment.algorithm,
        compression=experiment.compression if settings.method == "gossip" else None,
        devices=["cpu"],  # where the data are
        **options,
    )
    if settings.method == "ddp":
        for group in workers.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(_average_gradients)
    return workers


def _average_gradients(parameter: torch.Tensor) -> None:
    """All-reduce, on stacked gradients [n, ...]."""
    assert parameter.grad is not None
    parameter.grad.copy_(parameter.grad.mean(0, keepdim=True).expand_as(parameter.grad))


def _steps(experiment: Experiment, workers: gossip.VirtualWorkers) -> Iterator[dict[str, Any]]:
    """Make all steps; yield the record of each, the last one without its evaluation."""
    settings, shards, data = experiment.settings, experiment.shards, experiment.data
    scheduler = experiment.make_scheduler(workers.optimizer, experiment.total_steps)
    step = 0
    for epoch in range(experiment.num_epochs):
        batches = shards.batches_of_all(data.train_inputs, data.train_targets, epoch=epoch)
        for batch, (inputs, targets) in enumerate(batches, start=1):
            start = time.perf_counter()
            outputs = workers(inputs)
            loss = cross_entropy(outputs, targets)
            forward_ended = time.perf_counter()
            loss.backward()
            ended = time.perf_counter()
            record = {
                "step": step,
                "epoch": epoch,
                "loss": loss.item(),
                "accuracy": (outputs.argmax(-1) == targets).float().mean().item(),
                "learning_rate": scheduler.get_last_lr()[0],
                "step_time_s": ended - start,
                "forward_s": forward_ended - start,
                "backward_s": ended - forward_ended,
                **_costs(experiment, workers),
            }
            scheduler.step()
            step += 1
            if step < experiment.total_steps:
                is_evaluated = settings.evaluates_after(
                    step, epochs=epoch + 1 if batch == shards.steps_per_epoch else None
                )
                if is_evaluated or every(settings.consensus_every_steps, step):
                    record |= _consensus(workers)
                if is_evaluated:
                    record |= _evaluate_average(experiment, workers).named("averaged_test")
            yield record
            if step == experiment.total_steps:
                return


def _costs(experiment: Experiment, workers: gossip.VirtualWorkers) -> dict[str, float]:
    """What a rank of a cluster would send in this step, and what was skipped by a replica."""
    stats = workers.stats()
    assert stats is not None
    bytes_sent = stats.bytes_sent
    if experiment.settings.method == "ddp":
        world_size = experiment.settings.world_size
        gradient_bytes = sum(p.nbytes for p in workers.module.parameters() if p.requires_grad)
        bytes_sent = round(2 * (world_size - 1) / world_size * gradient_bytes)
    return {"bytes_sent": bytes_sent, "num_skipped": stats.num_skipped, "num_refused": stats.num_refused}


def _finish(
    experiment: Experiment, workers: gossip.VirtualWorkers, report: RankReport, last: dict[str, Any]
) -> dict[str, Any]:
    """Evaluate the replicas, average them for good, evaluate the average; complete the last record."""
    data = experiment.data
    local = evaluate_replicas(workers, data.test_inputs, data.test_targets)
    before = workers.consensus_distance()
    workers.global_avg()
    after = workers.consensus_distance()
    average = evaluate(workers.module, data.test_inputs, data.test_targets)
    mean = Evaluation(
        *(sum(values) / len(local) for values in zip(*((e.loss, e.accuracy) for e in local), strict=True))
    )
    last |= mean.named("test") | average.named("averaged_test")
    last |= {"consensus_distance": before[0], "consensus_distance_relative": before[1]}
    reports = []
    for evaluation in local:
        report.finish(evaluation)
        reports.append(report.as_dict())
    parameter_bytes = sum(parameter.nbytes for parameter in workers.module.parameters())
    return summarise(experiment, reports, average, before, after, parameter_bytes)


def _evaluate_average(experiment: Experiment, workers: gossip.VirtualWorkers) -> Evaluation:
    with workers.averaged():
        return evaluate(workers.module, experiment.data.test_inputs, experiment.data.test_targets)


def _consensus(workers: gossip.VirtualWorkers) -> dict[str, float]:
    distance, relative = workers.consensus_distance()
    return {"consensus_distance": distance, "consensus_distance_relative": relative}


def _log(loggers: list[Logger], record: Mapping[str, Any]) -> None:
    for each in loggers:
        each.log(record["step"], {key: value for key, value in record.items() if key != "step"})


@contextlib.contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    """Within the block torch uses so many."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads or before)
        yield
    finally:
        torch.set_num_threads(before)
