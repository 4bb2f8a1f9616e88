"""The trials of a tuning and the value that it chose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """A value of the grid and its result.

    Attributes
    ----------
    value : float
        The value of the tuned parameter.
    accuracy, loss : float or None
        The final accuracy and loss of the averaged model; None if not finite, or if the run failed.
    reason : str
        The reason why the run failed; empty if it did not.
    """

    value: float
    accuracy: float | None
    loss: float | None
    reason: str


@dataclass(frozen=True)
class Choice:
    """The tuned value with which a setting is run.

    Attributes
    ----------
    parameter : str
        The config key of the tuned parameter.
    seed : int
        The seed of the trials, which none of the compared runs has.
    trials : tuple of Trial
        The trials, in the order of the grid.
    value : float or None
        The best value of the grid; None if no trial ended with a finite loss.
    """

    parameter: str
    seed: int
    trials: tuple[Trial, ...]
    value: float | None

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides that the choice adds to those of a run."""
        return () if self.value is None else (f"{self.parameter}={self.value!r}",)

    @property
    def is_at_end(self) -> bool:
        """Whether the best value is the smallest or the largest of the grid, so that a better one may lie beyond."""
        values = [trial.value for trial in self.trials]
        return self.value in (min(values), max(values))

    @property
    def problem(self) -> str:
        """The reason why there is no value; empty if there is one."""
        if self.value is not None:
            return ""
        reasons = [f"{trial.value:g}: {trial.reason or 'its loss is not finite'}" for trial in self.trials]
        return f"no value of {self.parameter} could be chosen with seed {self.seed}: {'; '.join(reasons)}"
