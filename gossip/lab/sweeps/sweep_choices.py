"""What tuning tried, and what it chose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """A value of the grid and what it gave.

    Attributes
    ----------
    value : float
    accuracy, loss : float or None
        Of the averaged model at the end; None where it is not finite, or the run failed.
    reason : str
        Why the run failed; empty if it did not.
    """

    value: float
    accuracy: float | None
    loss: float | None
    reason: str


@dataclass(frozen=True)
class Choice:
    """What a setting is run with.

    Attributes
    ----------
    parameter : str
    seed : int
        Of the trials, and of none of the runs that are compared.
    trials : tuple of Trial
        In the order of the grid.
    value : float or None
        The best one of the grid; None if no trial ended with a finite loss.
    """

    parameter: str
    seed: int
    trials: tuple[Trial, ...]
    value: float | None

    @property
    def overrides(self) -> tuple[str, ...]:
        """What the choice adds to the overrides of a run."""
        return () if self.value is None else (f"{self.parameter}={self.value!r}",)

    @property
    def is_at_end(self) -> bool:
        """Whether the smallest or the largest value was the best: a better one may lie beyond."""
        values = [trial.value for trial in self.trials]
        return self.value in (min(values), max(values))

    @property
    def problem(self) -> str:
        """Why there is no value; empty if there is one."""
        if self.value is not None:
            return ""
        reasons = [f"{trial.value:g}: {trial.reason or 'its loss is not finite'}" for trial in self.trials]
        return f"no value of {self.parameter} could be chosen with seed {self.seed}: {'; '.join(reasons)}"
