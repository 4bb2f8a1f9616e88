"""The part of a run in one process, for one rank or for all: training loop, records, averaged model and summary."""

import itertools
import json
import math
import os
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from loguru import logger
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerAction, profile

from gossip import export
from gossip.checkpoints.exporting import write_module
from gossip.lab.experiments.evaluation import Evaluation, cross_entropy, evaluate
from gossip.lab.experiments.experiment_build import Experiment, build
from gossip.lab.experiments.graceful_stop import SIGNALS, GracefulStop
from gossip.lab.experiments.records import TOGETHER_FILE, JsonlWriter, Record
from gossip.lab.experiments.run_settings import every, own_device
from gossip.lab.experiments.run_state import RunState
from gossip.lab.experiments.terminal import configure_logging, progress_bar
from gossip.lab.experiments.training_methods import GossipMethod, Method, VirtualMethod, make_method
from gossip.private_torch import profile_all_threads

MODEL_FILE = "model.safetensors"
_FIRST_PROFILED, _NUM_PROFILED = 5, 5  # the first steps allocate and warm up

_AVERAGED = ("exposed_wait_s", "overlapped_s", "forward_s", "backward_s", "update_s")
_SUMMED = (*_AVERAGED, "bytes_sent", "num_refused", "num_skipped", "evaluation_s")
_TOTALS = {"step_time_s": "training_time_s", **dict(zip(_SUMMED, _SUMMED, strict=True))}
"""The keys of a record that are summed over the steps, and the name of each sum."""


class _EndTogether(Exception):
    """All ranks have saved, in place of what they were about to do."""


def train(config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Build the experiment from its configuration and call :func:`train_experiment`: the entry point of a worker.

    Collective; ``config`` is the resolved configuration as plain data, the same on every rank.
    """
    return train_experiment(build(config), Path(folder))


def train_experiment(
    experiment: Experiment, folder: Path, last_words: Callable[[str], str] = lambda _: ""
) -> dict[str, Any]:
    """Train the replicas of this process: the replica of its rank, or those of all ranks. Collective.

    Writes their records and, on rank 0, the averaged model to ``folder``, which must exist. ``last_words`` is as in
    :class:`gossip.lab.experiments.graceful_stop.GracefulStop`.

    Returns the summary of the run, the same on every rank, with the ``wall_time_s`` before the run was resumed and the
    ``rank`` at the end; or, if checkpoints are enabled and a signal ended the run, only ``signal``, the number of that
    signal.
    """
    settings, shards = experiment.settings, experiment.shards
    experiment = experiment.on(own_device(settings.launch.device))
    rank = int(os.environ.get("RANK", dist.get_rank())) if dist.is_initialized() else 0
    configure_logging(rank)
    if rank == 0 and shards.left_out_per_epoch:
        steps = f"{shards.steps_per_epoch} steps per epoch (whole batches of the smallest shard)"
        left_out = f"{shards.left_out_per_epoch} of {len(experiment.data.train_targets)} samples are left out"
        logger.info("{}: {}, others each time", steps, left_out)
    saves = settings.checkpoint.every > 0
    with ExitStack() as stack:
        leaves = saves and experiment.wrapper_options.get("on_peer_loss") == "continue"
        if leaves and threading.current_thread() is threading.main_thread():  # the model handles it
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.SIG_DFL))
        is_virtual = settings.engine == "virtual"
        method: Method = VirtualMethod(experiment, stack) if is_virtual else make_method(experiment)
        world = method.world
        state = RunState(experiment, method, folder)
        if world.member >= settings.launch.world_size:
            state.join()
        elif settings.resume is not None:
            state.load()
        records = stack.enter_context(JsonlWriter(folder / f"{method.name}.jsonl", state.step))
        profiler = None
        if settings.profile:
            profiler = stack.enter_context(tracer(folder / f"rank{rank}.trace.json", experiment.total_steps))
        show = stack.enter_context(progress_bar(state.total_steps, first_step=state.step, visible=world.rank == 0))
        last: Record = {}
        store = world.keys("stopping") if saves else None

        def save_and_end() -> NoReturn:
            if state.step < state.total_steps:
                state.catch_up()
                if state.record is not None:
                    records.write(state.record)
                records.sync()
                state.save(is_last=True)
            raise _EndTogether

        if leaves:
            assert isinstance(method, GossipMethod)
            method.save_and_end = save_and_end
        try:
            with GracefulStop(
                store,
                world.member,
                lambda: method.members,
                state.step + 1,
                signals=(signal.SIGUSR1,) if leaves else SIGNALS,
                saves=saves,
                last_words=last_words,
            ) as stopping:
                for last in _steps(experiment, method, profiler, state):
                    show(last)
                    if state.step == state.total_steps:  # its record is completed by the final evaluation
                        break
                    records.write(last)
                    state.record = None
                    stops = not stopping.goes_on(state.step)
                    if stops or every(settings.checkpoint.every, state.step):
                        records.sync()  # a checkpoint must not be more durable than the records before it
                        state.save(is_last=stops)
                    if stops:
                        method.close()
                        return {"signal": stopping.signal_number}
            summary = _finish(experiment, method, state, last, folder)
            summary |= {"wall_time_s": state.earlier_wall_time_s, "rank": world.rank}
            records.write(last)
        except _EndTogether:
            method.close()
            return {"signal": int(signal.SIGTERM)}
    if settings.launch.local_size > 1 and method.model is not None:
        export(method.model, folder / MODEL_FILE)
    elif world.rank == 0:
        write_module(method.module, folder / MODEL_FILE)
    method.close()
    return summary


def _steps(experiment: Experiment, method: Method, profiler: profile | None, state: RunState) -> Iterator[Record]:
    """Make all remaining steps and yield the record of each; that of the last step lacks its evaluation."""
    settings, shards, data = experiment.settings, experiment.shards, experiment.data
    while state.step < state.total_steps:
        epoch = state.position // shards.steps_per_epoch
        if state.elastic_shards is not None:
            samples = state.elastic_shards.batch(state.position)
        else:
            samples = shards.batch(method.ranks, state.position)
        inputs, targets = data.train_inputs[samples], data.train_targets[samples]
        num_ranks = len(method.members)
        start = time.perf_counter()
        with record_function("forward"):
            logits = method.forward(inputs)
            forward_s = time.perf_counter() - start
            loss = cross_entropy(logits, targets)
        with record_function("backward"):
            costs = method.backward(loss)
            loss_value = loss.item()  # waits for a GPU
        step_time_s = time.perf_counter() - start
        if profiler is not None:
            profiler.step()
        record = {
            "step": state.step,
            "epoch": epoch,
            "loss": loss_value,
            "accuracy": (logits.argmax(-1) == targets).float().mean().item(),
            "learning_rate": state.scheduler.get_last_lr()[0],
            "step_time_s": step_time_s,
            "forward_s": forward_s,
            **costs,
        }
        if state.elastic_shards is not None:
            record |= {"num_ranks": num_ranks, "num_samples": len(samples)}
        state.advance()
        state.record = record
        if state.step < state.total_steps:
            is_evaluated = every(settings.training.evaluate_every_steps, state.step)
            if state.position % shards.steps_per_epoch == 0:
                is_evaluated |= every(settings.training.evaluate_every_epochs, epoch + 1)
            if is_evaluated or every(settings.training.consensus_every_steps, state.step):
                start = time.perf_counter()
                record["consensus_distance"], record["consensus_distance_relative"] = method.consensus_distance()
                if is_evaluated:
                    if len(method.ranks) == 1:  # evaluating many replicas takes long
                        record |= _mean(method.evaluate(data.test_inputs, data.test_targets)).named("test")
                    with method.averaged():
                        average = evaluate(method.module, data.test_inputs, data.test_targets, method.groups)
                    record |= average.named("averaged_test")
                record["evaluation_s"] = time.perf_counter() - start
        yield record


def tracer(path: Path, total_steps: int) -> profile:
    """Return a profiler of steps 5 to 9 of a run, or the last five of a shorter one; call its ``step`` after each.

    It writes a Chrome trace, with the messages in all threads of gloo, after the last of them, or when it is left.
    """
    end = min(_FIRST_PROFILED + _NUM_PROFILED, total_steps)

    def action(step: int) -> ProfilerAction:
        if not end - _NUM_PROFILED <= step < end:
            return ProfilerAction.NONE
        return ProfilerAction.RECORD if step < end - 1 else ProfilerAction.RECORD_AND_SAVE

    return profile(
        schedule=action,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        experimental_config=profile_all_threads(),
    )


def _finish(experiment: Experiment, method: Method, state: RunState, last: Record, folder: Path) -> dict[str, Any]:
    """Evaluate the replicas, replace them by their average, evaluate it and complete the last record.

    Returns the summary of the run.
    """
    inputs, targets = experiment.data.test_inputs, experiment.data.test_targets
    logger.info("{} steps made; evaluating the replicas and their average on {} samples", state.step, len(targets))
    start = time.perf_counter()
    local = method.evaluate(inputs, targets)
    before = method.consensus_distance()
    method.global_avg()
    after = method.consensus_distance()
    average = evaluate(method.module, inputs, targets, method.groups)  # which all processes hold
    last |= _mean(local).named("test") | average.named("averaged_test")
    last["consensus_distance"], last["consensus_distance_relative"] = before
    last["evaluation_s"] = time.perf_counter() - start
    costs = step_costs(folder, f"{method.name}.jsonl", last)
    own = [costs | evaluation.named("test") for evaluation in local]
    reports = list(itertools.chain(*method.world.gather_json(own, "gathering the ranks' reports")))
    return summarise(experiment, reports) | {
        "averaged_test_accuracy": average.accuracy,
        "averaged_test_loss": average.loss,
        "consensus_distance_before": before[0],
        "consensus_distance_before_relative": before[1],
        "consensus_distance_after": after[0],
        "consensus_distance_after_relative": after[1],
        "parameter_bytes": sum(parameter.nbytes for parameter in method.module.parameters()),
        "changes_of_ranks": state.elastic_shards.changes if state.elastic_shards is not None else [],
    }


def _mean(evaluations: Sequence[Evaluation]) -> Evaluation:
    losses, accuracies = zip(*((evaluation.loss, evaluation.accuracy) for evaluation in evaluations), strict=True)
    return Evaluation(sum(losses) / len(losses), sum(accuracies) / len(accuracies))


def step_costs(folder: Path, name: str, last: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums over the steps of a rank from its record file ``name``, which lacks the ``last`` record.

    A run that has gone on with the other engine has the records of its earlier steps in another file: in that for all
    ranks, or in those of the ranks, of which the first counts.
    """
    sums: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    other = "rank0.jsonl" if name == TOGETHER_FILE else TOGETHER_FILE
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in (folder / other, folder / name) if path.exists()]
        for record in itertools.chain(map(json.loads, itertools.chain(*files)), [last]):
            sums.update({"steps": 1} | {sum_: record[key] for key, sum_ in _TOTALS.items() if key in record})
            waits.update(record.get("wait_by_peer_s", {}))
    return {**sums, "wait_by_peer_s": dict(waits)}


def summarise(experiment: Experiment, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the summary of a completed run says of its settings, its steps and its replicas.

    ``reports`` are the :func:`step_costs` of each rank with the evaluation of its replica.
    """
    settings = experiment.settings
    accuracies = [report["test_accuracy"] for report in reports]
    losses = [report["test_loss"] for report in reports]
    steps, options = reports[0]["steps"], experiment.wrapper_options
    waits = [report["wait_by_peer_s"] for report in reports]  # of the ranks that receive messages from a peer
    norm, which = options["clip_grad_norm"], "global" if settings.method == "ddp" else options["clip"]
    return {
        "status": "completed",
        "reason": "",
        "method": settings.method,
        "engine": settings.engine,
        "topology": experiment.topology.name if experiment.topology is not None else None,
        "algorithm": None if settings.method == "ddp" else experiment.algorithm.describe(),
        "compression": None if settings.method == "ddp" else experiment.compression.describe(),
        "clipping": None if norm is None else f"{norm:g} ({which})",
        "data": experiment.data.name,
        "data_notes": experiment.data.notes,
        "seed": settings.seed,
        "world_size": settings.launch.world_size,
        "local_size": settings.launch.local_size,
        "shard": settings.shard if settings.launch.local_size > 1 else None,
        "local_test_accuracy_mean": statistics.fmean(accuracies),
        "local_test_accuracy_worst": min(accuracies),
        "local_test_accuracy_best": max(accuracies),
        "local_test_loss_mean": statistics.fmean(losses),
        "local_test_loss_worst": max(losses, key=lambda loss: (math.isnan(loss), loss)),
        "epochs": -(-experiment.total_steps // experiment.shards.steps_per_epoch),  # the last one may be incomplete
        "steps": steps,
        "training_time_s": max(report["training_time_s"] for report in reports),
        "evaluation_s": max(report["evaluation_s"] for report in reports),
        **{name: _mean_cost(reports, name) for name in _AVERAGED},
        "wait_by_peer_s": {peer: _mean_cost(waits, peer) for peer in sorted(set().union(*waits), key=int)},
        "bytes_sent_per_step": statistics.fmean(report["bytes_sent"] / report["steps"] for report in reports),
        **{name: sum(report.get(name, 0) for report in reports) for name in ("num_refused", "num_skipped")},
    }


def _mean_cost(reports: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of a cost over the ranks; None if the method does not measure it."""
    values = [report[name] for report in reports if name in report]
    return statistics.fmean(values) if values else None
