"""Tuning with equal effort: each setting of a sweep takes the best value of the same grid, found with the same seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from gossip.lab.experiments.validated_models import ConfigurationError, Model, read, value_of
from gossip.lab.sweeps.sweep_curves import Metric
from gossip.lab.sweeps.sweep_grid import Run, is_gossip_only
from gossip.lab.sweeps.sweep_jobs import Job
from gossip.lab.sweeps.sweep_trials import Choice, Trial

Axes = Mapping[str, Sequence[str]]


class _Tune(Model):
    """The section ``sweep.tune``, whose keys are those of :class:`Tuning`."""

    parameter: str
    values: list[float] = Field(min_length=2)
    seed: int = Field(ge=0)

    @field_validator("values")
    @classmethod
    def _are_distinct(cls, values: list[float]) -> list[float]:
        if len(set(values)) < len(values):
            raise ValueError(f"values {values} have a number twice; leave one of them out")
        return values


@dataclass(frozen=True)
class Tuning:
    """The tuning that applies to every setting of a sweep.

    Attributes
    ----------
    parameter : str
        The config key of the tuned parameter.
    values : tuple of float
        The grid: at least two distinct values.
    seed : int
        The seed of the trials.
    """

    parameter: str
    values: tuple[float, ...]
    seed: int

    def trial_axes(self, axes: Axes) -> dict[str, Sequence[str]]:
        """Return the axes of the trials: every value of the grid, with the seed of the trials."""
        return {
            **axes,
            "seed": [f"seed={self.seed}"],
            self.parameter: [f"{self.parameter}={value!r}" for value in self.values],
        }

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
            by_setting.setdefault(self._setting(job.run), []).append(_trial(self, job, folder))
        choices = {
            setting: Choice(self.parameter, self.seed, tuple(of_setting), _best(of_setting, metric))
            for setting, of_setting in by_setting.items()
        }
        return lambda run: choices.get(self._setting(run))

    def _setting(self, run: Run) -> tuple[str, ...]:
        own = ("seed", self.parameter)
        return tuple(override for override in run.overrides if override.partition("=")[0] not in own)


def read_tuning(config: Mapping[str, Any], axes: Axes) -> Tuning | None:
    """Read and check ``sweep.tune``; None if nothing is tuned.

    Parameters
    ----------
    config : mapping
        The resolved configuration.
    axes : mapping
        The axes of the sweep.

    Raises
    ------
    ConfigurationError
        The tuning is invalid; the message names the key.
    """
    tune = value_of(config, "sweep.tune")
    if tune is None:
        return None
    read_as = read(_Tune, tune, "sweep.tune")
    _check_parameter(config, read_as.parameter, axes)
    tuning = Tuning(read_as.parameter, tuple(tune["values"]), read_as.seed)  # as they were written, 1 and not 1.0
    if not tuning.compared_axes(axes)["seed"]:
        raise ConfigurationError(
            f"sweep.tune.seed={tuning.seed}: no other seed is left to compare with; add some, seed={tuning.seed},"
            f"{tuning.seed + 1},{tuning.seed + 2}"
        )
    return tuning


def _check_parameter(config: Mapping[str, Any], parameter: str, axes: Axes) -> None:
    said = f"sweep.tune.parameter={parameter}"
    try:
        value_of(config, parameter)
    except ConfigurationError as error:
        raise ConfigurationError(f"{said}: {error}") from error
    if is_gossip_only(parameter):
        raise ConfigurationError(f"{said} means nothing to all-reduce, which is tuned too; choose one that all have")
    if parameter in axes or parameter == "seed":
        raise ConfigurationError(
            f"{said} is set besides, as an option of the sweep; leave it out there, or tune another"
        )


def _trial(tuning: Tuning, job: Job, folder: Path) -> Trial:
    summary = job.summary(folder)
    value = value_of(job.config, tuning.parameter)
    if summary["status"] != "completed":
        return Trial(value, None, None, summary["reason"])
    return Trial(value, summary["averaged_test_accuracy"], summary["averaged_test_loss"], "")


def _best(trials: Sequence[Trial], metric: Metric) -> float | None:
    def badness(trial: Trial) -> tuple[float, float]:
        assert trial.accuracy is not None
        assert trial.loss is not None
        return (-trial.accuracy if metric.higher_is_better else 0.0, trial.loss)

    usable = [trial for trial in trials if trial.loss is not None]
    return min(usable, key=badness).value if usable else None
