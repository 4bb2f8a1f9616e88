"""Seconds and bytes until a method's averaged model is as good as all-reduce's (configs/time_to_loss.yaml)."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, BeforeValidator, Field, PositiveFloat, TypeAdapter, model_validator

from gossip import World
from gossip.lab.benchmarks.bench_methods import MethodSpecification, sgd
from gossip.lab.benchmarks.benchmark import Benchmark, ComparisonSettings, Place, Record, Records, Spread, Write, table
from gossip.lab.benchmarks.network.counters import interface_bytes
from gossip.lab.benchmarks.workloads import LOSS_TASKS, loss_of
from gossip.lab.experiments.evaluation import evaluate
from gossip.lab.experiments.run_figures import drawn, look
from gossip.lab.experiments.validated_models import OneOf
from gossip.lab.probe.cluster_measuring import Measured, measure
from gossip.lab.probe.probe_advice import advise

_POLL_S = 0.01
_NOISE_BYTES = 2000  # traffic of an interface that does not belong to training, such as keep-alives
_LEAD_S = 0.2  # time within which every rank has received the moment at which training begins
_QUIET_S = 0.15  # without traffic on the wire, after which the clock may stop

TOLERANCE = 0.01
_WAY = np.linspace(0, 1, 51)
EXPLANATION = """\
Median (lowest to highest) over the seeds that reached the target. Seconds: of training, evaluations of the averaged
model not counted. Of ...: the part of that method's seconds, with the same seed. Sent: by the interface, per rank."""


class TimeToLossSettings(ComparisonSettings):
    """The settings of a run; a case has a single task.

    The first method is all-reduce, which makes ``steps`` steps; the others are to reach its final loss within
    ``max_time_ratio`` times its time. All train from each seed in turn. With ``as_probed`` gossip as the probe
    chooses it is an additional method.
    """

    tasks: tuple[Annotated[str, OneOf(LOSS_TASKS)], ...] = Field(min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    steps: int = Field(ge=1)
    evaluate_every: int = Field(ge=1)
    max_time_ratio: PositiveFloat
    as_probed: bool

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if self.methods[0].kind != "ddp":
            raise ValueError(
                f"methods must begin with all-reduce, method ddp, whose loss the others are to reach; the first is "
                f"{self.methods[0].label}"
            )
        return self

    def cases(self) -> Iterator[tuple[str, Self]]:
        for name, case in super().cases():
            for task in self.tasks:
                yield f"{name}/{task}", case.model_copy(update={"tasks": (task,)})


class Point(BaseModel):
    """One evaluation of the averaged model on held-out data: its loss, which is null in JSON if it is NaN.

    Until then, ``step`` steps, ``seconds`` of training without evaluations, and the bytes that a rank has sent.
    """

    step: int
    seconds: float
    sent_bytes: float
    loss: Annotated[float, BeforeValidator(lambda loss: math.nan if loss is None else loss)]


class Curve(BaseModel):
    """The evaluations of one method's training from one seed."""

    method: str
    seed: int
    points: list[Point]

    def reached(self, target: float) -> Point | None:
        """Return the first evaluation with at most this loss, or None if there is none."""
        return next((point for point in self.points if point.loss <= target), None)


class LossResult(BaseModel):
    """The results of one task on one kind of link.

    The references are methods with which seconds are compared, all-reduce first. ``step_s`` is the mean step time of
    all-reduce; the probe has that of a step without communication while all ranks compute. Its advice is empty unless
    asked for.
    """

    task: str
    link: str
    curves: list[Curve]
    references: list[str]
    step_s: float
    probe: Measured
    advice: str

    def targets(self) -> dict[int, float]:
        """Return the loss to be reached from each seed."""
        return {each.seed: target_of(each.points) for each in self.curves if each.method == self.references[0]}


def target_of(reference: Sequence[Point]) -> float:
    """Return the target: the loss at the end of all-reduce's training plus 1 %."""
    return (1 + TOLERANCE) * reference[-1].loss


class TimeToLoss(Benchmark[TimeToLossSettings, LossResult]):
    """All methods train in turns from the same initial values and batches; all-reduce sets the target."""

    settings = TimeToLossSettings
    title = "Time to all-reduce's final loss plus 1 %"
    explanation = EXPLANATION

    def work(self, case: TimeToLossSettings, place: Place, write: Write) -> None:
        """Write what the probe measured, and then the curve of every method from every seed."""
        training = _Training(case, place)
        measured = training.probe()
        others, sentence = list(case.methods[1:]), ""
        if case.as_probed:  # every rank has measured the same, and is advised alike
            advice = advise(measured, "different")
            assert advice.choice is not None, "complete serves all ranks, and agrees at once"
            options, sentence = advice.choice.arguments(), advice.sentence
            others.append(MethodSpecification(label="gossip as probed", kind="gossip", options=options))
        write({"probe": asdict(measured), "advice": sentence})
        for seed in case.seeds:
            curve = training.train(case.methods[0], seed, lambda point: point.step >= case.steps)
            write(curve.model_dump())
            target, limit_s = target_of(curve.points), case.max_time_ratio * curve.points[-1].seconds
            for method in others:
                write(training.train(method, seed, partial(reaches_or_ends, target, limit_s)).model_dump())
        training.world.close()

    def progress(self, case: TimeToLossSettings, number: int, record: Record) -> str | None:  # noqa: ARG002
        if "points" not in record:
            return None
        curve = Curve.model_validate(record)
        end = curve.points[-1]
        return (
            f"seed {curve.seed}, {curve.method}: loss {end.loss:.3f} after {end.step} steps, {end.seconds:.2f} s, "
            f"{end.sent_bytes / 1e6:.1f} MB"
        )

    def result(self, case: TimeToLossSettings, records: Records) -> LossResult:
        probed, *trained = records[0]
        references = [case.methods[0].label, *(each.label for each in case.methods if each.kind == "decent_dp")]
        curves = [Curve.model_validate(record) for record in trained]
        ends = [curve.points[-1] for curve in curves if curve.method == references[0]]
        return LossResult(
            task=case.tasks[0],
            link=case.link or case.network,
            curves=curves,
            references=references,
            step_s=statistics.fmean(end.seconds / end.step for end in ends),
            probe=TypeAdapter(Measured).validate_python(probed["probe"]),
            advice=probed["advice"],
        )

    def facts(self, settings: TimeToLossSettings) -> list[str]:
        return [
            f"{settings.world_size} ranks on {settings.network}, {settings.num_threads} "
            f"thread{'s' * (settings.num_threads > 1)} each, SGD with momentum 0.9; seeds "
            f"{', '.join(map(str, settings.seeds))}.",
            f"All-reduce makes {settings.steps} steps; the others have {settings.max_time_ratio:g} times its time; an "
            f"evaluation every {settings.evaluate_every} steps.",
        ]

    def sections(self, results: Sequence[LossResult]) -> list[str]:
        return [part for result in results for part in section(result)]

    def draw(self, settings: TimeToLossSettings, results: Sequence[LossResult], folder: Path) -> None:  # noqa: ARG002
        loss_figure(results, folder / "loss.svg")


def reaches_or_ends(target: float, limit_s: float, point: Point) -> bool:
    """Return whether a training has reached the target or used up its time."""
    return point.loss <= target or point.seconds >= limit_s


class TrainingClock:
    """A clock that starts on all ranks at the same moment and stops when all messages have arrived. Collective.

    A message in flight during an evaluation is therefore not free: a method that overlaps communication with its next
    step waits for the message here, until there has been no traffic on the interface for ``quiet_s`` (0: not at all),
    at most ``timeout_s``. ``seconds`` and ``sent_bytes`` sum up the time from each start to the last rank's stop, and
    the bytes sent, averaged over the ranks.
    """

    def __init__(self, place: Place, quiet_s: float, timeout_s: float) -> None:
        self._place, self._quiet_s, self._timeout_s = place, quiet_s, timeout_s
        self.seconds = self.sent_bytes = 0.0

    def start(self) -> None:
        """Agree on a starting moment, and wait for it."""
        moment = torch.tensor([time.monotonic() + _LEAD_S + self._quiet_s], dtype=torch.float64)
        dist.all_reduce(moment, dist.ReduceOp.MAX)
        _, self._sent_before = interface_bytes(self._place.interface)
        self._began = float(moment)
        time.sleep(max(0.0, self._began - time.monotonic()))

    def stop(self) -> None:
        """Wait for messages in flight, and add the seconds and bytes since the start."""
        ended = torch.tensor([self._quiet_since()], dtype=torch.float64)
        sent = (interface_bytes(self._place.interface)[1] - self._sent_before) / self._place.num_sharing
        total = torch.tensor([sent], dtype=torch.float64)
        dist.all_reduce(ended, dist.ReduceOp.MAX)
        dist.all_reduce(total)
        self.seconds += float(ended) - self._began
        self.sent_bytes += float(total) / dist.get_world_size()

    def _quiet_since(self) -> float:
        began = changed = time.monotonic()
        seen = sum(interface_bytes(self._place.interface))
        while (now := time.monotonic()) - changed < self._quiet_s and now - began < self._timeout_s:
            time.sleep(_POLL_S)
            if (num_bytes := sum(interface_bytes(self._place.interface))) - seen > _NOISE_BYTES:
                seen, changed = num_bytes, time.monotonic()
        return changed


class _Training:
    """Trainings with methods one after another, from the same initial values and batches. Collective."""

    def __init__(self, case: TimeToLossSettings, place: Place) -> None:
        self._case, self._place = case, place
        self._task = LOSS_TASKS[case.tasks[0]]
        self._data = self._task.make_data()
        self.world = World(timedelta(seconds=case.timeout_s))

    def probe(self) -> Measured:
        """Measure what :func:`gossip.simulate_time` needs to know about these ranks; equal on every rank."""
        seed = self._case.seeds[0]
        module, batches = self._task.initial_module(self._data, seed), self._batches(seed)
        return measure(module, lambda _: loss_of(module, next(batches)), sgd(self._task.learning_rate))

    def _batches(self, seed: int) -> Iterator[Any]:
        rank = self._place.rank
        return self._task.batches(self._data, self._case.world_size, seed, range(rank, rank + 1))

    def train(self, method: MethodSpecification, seed: int, is_done: Callable[[Point], bool]) -> Curve:
        """Train until ``is_done`` holds for an evaluation; the points are the same on every rank."""
        case, data = self._case, self._data
        module, batches = self._task.initial_module(data, seed), self._batches(seed)
        running = method.start(module, sgd(self._task.learning_rate), case.timeout_s)
        clock = TrainingClock(self._place, 0.0 if case.link is None else _QUIET_S, case.timeout_s)
        points: list[Point] = []
        while not points or not (is_done(points[-1]) or math.isnan(points[-1].loss)):
            clock.start()
            for _ in range(case.evaluate_every):
                running.step(next(batches))
            clock.stop()
            with running.averaged():
                loss = evaluate(module, data.test_inputs, data.test_targets, self.world).loss
            step = (len(points) + 1) * case.evaluate_every
            points.append(Point(step=step, seconds=clock.seconds, sent_bytes=clock.sent_bytes, loss=loss))
        dist.barrier()
        running.close()
        return Curve(method=method.label, seed=seed, points=points)


def section(result: LossResult) -> list[str]:
    """Return the heading, what a step takes, the advice of the probe, and the table of a result."""
    targets, compute_s = result.targets(), result.probe.workload.compute_s
    found: dict[str, dict[int, Point]] = {curve.method: {} for curve in result.curves}
    for curve in result.curves:
        if (point := curve.reached(targets[curve.seed])) is not None:
            found[curve.method][curve.seed] = point
    of_references = [found[label] for label in result.references]
    cells = (
        [
            method,
            f"{len(points)} of {len(targets)}",
            _words([point.seconds for point in points.values()], ".2f"),
            *(
                _words([point.seconds / of[seed].seconds for seed, point in points.items() if seed in of], ".3f")
                for of in of_references
            ),
            _words([point.step for point in points.values()], ".0f"),
            _words([point.sent_bytes for point in points.values()], ".1f", 1e-6),
        ]
        for method, points in found.items()
    )
    titles = ["method", "reached", "seconds", *(f"of {label}'s" for label in result.references), "steps", "sent, MB"]
    return [
        f"## {result.task}, {result.link}",
        f"All-reduce's step: {1e3 * result.step_s:.0f} ms; computing alone, on all ranks at once: "
        f"{1e3 * compute_s:.0f} ms ({compute_s / result.step_s:.0%}).",
        f"The probe: {result.advice}" if result.advice else "",
        table(titles, cells),
    ]


def _words(values: Sequence[float], form: str, factor: float = 1.0) -> str:
    return Spread.over(values).shown(form, factor) if values else "not reached"


def loss_figure(results: Sequence[LossResult], path: Path) -> None:
    """Draw a row of two panels per result: what the way to the target took, as a median over the seeds in their range.

    The way is that of the loss's logarithm, from all-reduce's first evaluation to the target of the seed. A line ends
    where not all seeds got further. The axis of bytes begins at the bytes per step of the method that sends least,
    because next to nothing is sent before the first exchange.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    with drawn(path, 9.2, 2.9 * len(results) + 0.6) as figure:
        panels = figure.subplots(len(results), 2, sharey="row", squeeze=False)
        for (seconds, sent), result in zip(panels, results, strict=True):
            firsts = {each.seed: each.points[0] for each in result.curves if each.method == result.references[0]}
            ways = {seed: np.geomspace(firsts[seed].loss, end, len(_WAY)) for seed, end in result.targets().items()}
            for number, label in enumerate(dict.fromkeys(each.method for each in result.curves)):
                of_seeds = [each for each in result.curves if each.method == label]
                found = [[curve.reached(loss) for loss in ways[curve.seed]] for curve in of_seeds]
                for axes, quantity, unit in ((seconds, "seconds", 1.0), (sent, "sent_bytes", 1e6)):
                    costs = [[getattr(point, quantity, math.nan) / unit for point in points] for points in found]
                    low, median, high = np.quantile(costs, (0, 0.5, 1), axis=0)
                    style = look(number)
                    axes.plot(median, _WAY, **style, label=label)
                    axes.fill_betweenx(_WAY, low, high, color=style["color"], alpha=0.12, linewidth=0)
            step_bytes = [curve.points[-1].sent_bytes / curve.points[-1].step for curve in result.curves]
            if smallest := min(filter(None, step_bytes), default=None):
                sent.set_xlim(left=smallest / 1e6)
            for axes, quantity in ((seconds, "seconds of training"), (sent, "MB sent per rank")):
                axes.set(xscale="log", xlabel=quantity, ylim=(0, 1))
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.xaxis.set_major_formatter("{x:g}")
                axes.xaxis.set_minor_formatter(NullFormatter())
            seconds.yaxis.set_major_formatter("{x:.0%}")
            seconds.set_ylabel("way to the target loss")
            seconds.set_title(f"{result.task}, {result.link}")
            seeds = f"median and range of {len(ways)} seeds" if len(ways) > 1 else "one seed"
            sent.set_title(seeds, loc="right", fontsize=8.5, fontweight="normal")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
