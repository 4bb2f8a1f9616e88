"""Tuning with equal effort: each setting of a sweep takes the best value of the same grid, found with the same seed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from gossip.lab.experiments.validated_models import ConfigurationError, Model, read, value_of
from gossip.lab.report.report_document import Choice, Metric, Number, Trial
from gossip.lab.sweeps.sweep_jobs import Job, Run, is_gossip_only

Axes = Mapping[str, Sequence[str]]


class Tuning(Model):
    """The section ``sweep.tune``: the parameter that every setting tunes, its grid, and the seed of the trials."""

    parameter: str
    values: tuple[Number, ...] = Field(min_length=2)
    seed: int = Field(ge=0)

    def trial_axes(self, axes: Axes) -> dict[str, Sequence[str]]:
        """Return the axes of the trials: every value of the grid, with the seed of the trials."""
        values = [f"{self.parameter}={value!r}" for value in self.values]
        return {**axes, "seed": [f"seed={self.seed}"], self.parameter: values}

    def compared_axes(self, axes: Axes) -> dict[str, Sequence[str]]:
        """Return the axes of the compared runs: all seeds except that of the trials."""
        return {**axes, "seed": [seed for seed in axes.get("seed", ()) if seed != f"seed={self.seed}"]}

    def choose(self, trials: Sequence[Job], folder: Path, metric: Metric) -> Callable[[Run], Choice | None]:
        """Return a function that maps each compared run to its choice, or to None if its setting had no trial.

        The best trial is the one with the best metric of the averaged model. Ties in accuracy are broken by the lower
        loss, and remaining ties by the order of the grid.
        """
        by_setting: dict[tuple[str, ...], list[Trial]] = {}
        for job in trials:
            summary = job.summary(folder)
            is_completed = summary["status"] == "completed"
            trial = Trial(
                value=value_of(job.config, self.parameter),
                accuracy=summary["averaged_test_accuracy"] if is_completed else None,
                loss=summary["averaged_test_loss"] if is_completed else None,
                reason="" if is_completed else summary["reason"],
            )
            by_setting.setdefault(self._setting(job.run), []).append(trial)
        choices = {
            setting: Choice(
                parameter=self.parameter, seed=self.seed, trials=tuple(of_setting), value=_best(of_setting, metric)
            )
            for setting, of_setting in by_setting.items()
        }
        return lambda run: choices.get(self._setting(run))

    def _setting(self, run: Run) -> tuple[str, ...]:
        own = ("seed", self.parameter)
        return tuple(override for override in run.overrides if override.partition("=")[0] not in own)


def _best(trials: Sequence[Trial], metric: Metric) -> float | None:
    usable = [
        (-trial.accuracy if metric.higher_is_better else 0.0, trial.loss, place)
        for place, trial in enumerate(trials)
        if trial.accuracy is not None and trial.loss is not None
    ]
    return trials[min(usable)[2]].value if usable else None


def read_tuning(config: Mapping[str, Any], axes: Axes) -> Tuning | None:
    """Read and check ``sweep.tune``; None if nothing is tuned."""
    tune = value_of(config, "sweep.tune")
    if tune is None:
        return None
    tuning = read(Tuning, tune, "sweep.tune")
    said = f"sweep.tune.parameter={tuning.parameter}"
    try:
        value_of(config, tuning.parameter)
    except ConfigurationError as error:
        raise ConfigurationError(f"{said}: {error}") from error
    if is_gossip_only(tuning.parameter):
        raise ConfigurationError(f"{said} means nothing to all-reduce, which is tuned too; choose one that all have")
    if tuning.parameter in axes or tuning.parameter == "seed":
        raise ConfigurationError(
            f"{said} is set besides, as an option of the sweep; leave it out there, or tune another"
        )
    if not tuning.compared_axes(axes)["seed"]:
        raise ConfigurationError(
            f"sweep.tune.seed={tuning.seed}: no other seed is left to compare with; add some, seed={tuning.seed},"
            f"{tuning.seed + 1},{tuning.seed + 2}"
        )
    return tuning
