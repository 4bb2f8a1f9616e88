"""The result document of a sweep, validated and typed."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator, computed_field

from gossip.lab.experiments.validated_models import Model

Numbers = tuple[float | None, ...]

FEWEST_SEEDS = 3
"""The smallest number of seeds with which a difference has an interval, and may be called significant."""


class Value(Model):
    """A result, aggregated over the seeds: mean, sample standard deviation (None for one seed) and number of seeds.

    The interval is the 95 % confidence interval of the mean, if known.
    """

    mean: float
    spread: float | None = Field(None, ge=0)
    count: int = Field(ge=1)
    interval: tuple[float, float] | None = None


def _as_written(number: Any, check: ValidatorFunctionWrapHandler) -> Any:
    check(number)
    return number


Number = Annotated[float, WrapValidator(_as_written)]
"""A number of the configuration, which remains an integer if it was written as one."""


class Trial(Model):
    """A tuning trial: the value, the final accuracy and loss of the averaged model, and the reason of a failure."""

    value: Number
    accuracy: float | None
    loss: float | None
    reason: str

    @property
    def text(self) -> str:
        """The trial in words."""
        if self.reason:
            return f"{self.value:g}: {self.reason}"
        accuracy, loss = ("not finite" if what is None else f"{what:.4f}" for what in (self.accuracy, self.loss))
        return f"{self.value:g}: accuracy {accuracy}, loss {loss}"


class Choice(Model):
    """The value of a parameter with which a row was run, the best of its trials, which had a seed of their own.

    Without a trial that ended with a finite loss, the value is None and the row cannot be run.
    """

    parameter: str
    seed: int
    trials: tuple[Trial, ...]
    value: Number | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def is_at_end(self) -> bool:
        """Whether the value is the smallest or the largest of the grid, so that a better one may lie beyond."""
        values = [trial.value for trial in self.trials]
        return self.value is not None and self.value in (min(values), max(values))

    @property
    def text(self) -> str:
        """The value, and whether it is at the end of the grid; a dash if there is none."""
        if self.value is None:
            return "-"
        return f"{self.value:g}, at the end of the grid" if self.is_at_end else f"{self.value:g}"


class Curves(Model, extra="allow"):
    """The measurements during training, as means over the seeds; all sequences have the same length.

    They are: the local updates, the bytes sent per rank and the predicted time so far; the metric of the averaged model
    on held-out data; the relative consensus distance. There may be more: ``accuracy`` or ``loss``, whichever is not the
    metric, ``consensus_absolute``, and with several seeds the lowest and the highest of each as ``NAME_low`` and
    ``NAME_high``. None stands for what was not measured there.
    """

    __pydantic_extra__: dict[str, Numbers]

    step: Numbers
    bytes: Numbers
    time_s: Numbers
    metric: Numbers
    consensus: Numbers

    def named(self, name: str) -> Numbers:
        """Return the measurements of this name; None everywhere if there are none."""
        found: Numbers = getattr(self, name, (None,) * len(self.step))
        return found


class Setting(Model):
    """What distinguishes a row; fields that do not apply to its method are None.

    Rows are compared with others of the same number of ranks, partition and condition. The condition states the other
    varied options that apply to all-reduce too, such as ``data=digits``; None if there are none.
    """

    label: str
    method: Literal["gossip", "ddp", "local"]
    topology: str | None = None
    world_size: int = Field(ge=1)
    partition: str | None = None
    condition: str | None = None
    algorithm: str | None = None
    compression: str | None = None
    engine: str | None = None


class Row(Setting):
    """The results of one setting over its seeds."""

    seeds: tuple[int, ...]
    num_failed: int = Field(ge=0)
    status: Literal["completed", "partly failed", "failed"]
    reasons: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    values: dict[str, Value | None]
    tuning: Choice | None = None
    curves: Curves | None = None

    def mean(self, name: str) -> float | None:
        """Return the mean of a value; None if there is none."""
        value = self.values.get(name)
        return None if value is None else value.mean


class Metric(Model, extra="ignore"):
    """The metric of the averaged model by which runs are compared, and the target; ``sweep`` of a configuration."""

    name: Literal["accuracy", "loss"] = Field(alias="metric")
    target: float | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def higher_is_better(self) -> bool:
        """Whether the higher of two values is the better one."""
        return self.name == "accuracy"


class Document(Model):
    """The results of a sweep, with one or more rows; the cluster is described."""

    title: str
    description: str | None = None
    settings: dict[str, str] = Field(default_factory=dict)
    metric: Metric
    cluster: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    rows: tuple[Row, ...]
