"""The hydra sweeper: it turns the command line into runs for hydra's launchers, and reports on all of them.

The table over the runs of a multirun (``-m``) with hydra's own sweeper is written here, too, as sweep.csv.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger
from pydantic import Field

from gossip.lab.experiments import run_folder
from gossip.lab.experiments.config_store import plain
from gossip.lab.experiments.terminal import configure_logging, print_table, print_text
from gossip.lab.experiments.validated_models import ConfigurationError, Model, read, value_of
from gossip.lab.report.report_document import Choice, Document, Metric, Number, Trial
from gossip.lab.report.report_page import DOCUMENT_FILE, LEGEND, MARKDOWN_FILE, PAGE_FILE, texts, verdict, write_report
from gossip.lab.sweeps.sweep_document import check_described, make_document, make_metric
from gossip.lab.sweeps.sweep_jobs import Axes, Job, Plan, Run, is_gossip_only, make_plan, read_variants

if TYPE_CHECKING:
    from hydra.plugins.launcher import Launcher
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

SWEEP_FILE = "sweep.csv"
_COLUMNS = (
    "job", "overrides", "status", "reason", "method", "engine", "topology", "algorithm", "compression", "clipping",
    "data", "seed", "world_size", "averaged_test_accuracy", "averaged_test_loss", "local_test_accuracy_mean",
    "local_test_accuracy_worst", "local_test_accuracy_best", "consensus_distance_before",
    "consensus_distance_before_relative", "consensus_distance_after", "steps", "wall_time_s", "training_time_s",
    "exposed_wait_s", "overlapped_s", "bytes_sent_per_step",
)  # fmt: skip


class Tuning(Model):
    """The section ``sweep.tune``: the parameter that every setting tunes, its grid, and the seed of the trials.

    The effort is equal: each setting takes the best value of the same grid, found with the same seed.
    """

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
    if (tune := value_of(config, "sweep.tune")) is None:
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


class GridSweeper:
    """Launches the runs of a sweep that have not been completed, and writes the report over all of them.

    The axes are given as in hydra, ``topology=ring,torus``, by ``params`` and on the command line, which takes
    precedence. :func:`gossip.lab.sweeps.sweep_jobs.expand` defines the runs that result. Each run has a folder whose
    name is derived from its configuration.
    """

    def __init__(self, params: Mapping[str, str]) -> None:
        self._params = dict(params)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the primary config and make the launcher. Called once by hydra."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.core.plugins import Plugins

        self._context, self._config = hydra_context, config
        HydraConfig.instance().set_config(config)  # resolves ${hydra:...} in the path of the sweep folder
        self._launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the sweep; exit with status 1 if a run failed that is compared, and not only tried for the tuning.

        Raises ConfigurationError if the sweep that the command line describes cannot be run.
        """
        configure_logging(rank=0)
        folder = Path(self._config.hydra.sweep.dir)
        axes = self._axes(arguments)
        config, _ = self._compose([overrides[0] for overrides in axes.values()])
        tuning, variants = read_tuning(config, axes), read_variants(config, axes)
        plan = make_plan(axes if tuning is None else tuning.trial_axes(axes), self._compose, variants)
        check_described(plan)
        for line in plan.left_out:
            logger.info("{}", line)
        trials: Sequence[Job] = ()
        with run_folder.lock(folder):
            if tuning is not None:
                trials = plan.jobs
                logger.info("tuning of {} with seed {}", tuning.parameter, tuning.seed)
                self._run_missing(trials, folder)
                choose = tuning.choose(trials, folder, make_metric(config))
                plan = make_plan(tuning.compared_axes(axes), self._compose, variants, choose)
            try:
                self._run_missing(plan.jobs, folder)
            except Exception:  # raised by the launcher itself: the runs that have ended are still worth a report
                finish(plan, folder, trials)
                raise
            summaries = finish(plan, folder, trials)
        if any(summary["status"] != "completed" for summary in summaries):
            raise SystemExit(1)

    def _run_missing(self, jobs: Sequence[Job], folder: Path) -> None:
        """Launch the jobs that have not been completed."""
        waiting = [job for job in jobs if not job.is_finished(folder) and not job.problem]
        num_finished = len(jobs) - len(waiting)
        logger.info("{} runs, {} of them finished before; sweep folder: {}", len(jobs), num_finished, folder)
        for job in waiting:
            job.forget(folder)
        # A killed process takes joblib's other processes with it, whose jobs then run again.
        while waiting:
            try:
                self._launch(waiting)
                return
            except BrokenProcessPool:
                left = [job for job in waiting if not (folder / job.name / run_folder.SUMMARY_FILE).exists()]
                interrupted = [job for job in left if (folder / job.name / run_folder.CONFIG_FILE).exists()]
                if left == waiting and not interrupted:
                    raise  # the processes end before they begin a run, so another attempt would not help
                logger.error("a process was killed; {} runs begin again, one by one", len(interrupted))
                for job in interrupted:
                    job.forget(folder)
                    try:
                        self._launch([job])
                    except BrokenProcessPool:
                        logger.error("{}: its process was killed", job.name)
                waiting = [job for job in left if job not in interrupted]

    def _launch(self, jobs: Sequence[Job]) -> None:
        self._launcher.launch([[*job.overrides, f"hydra.sweep.subdir={job.name}"] for job in jobs], initial_job_idx=0)

    def _axes(self, arguments: Sequence[str]) -> dict[str, list[str]]:
        """Return the list of overrides of each key."""
        from hydra.core.override_parser.overrides_parser import OverridesParser

        parser = OverridesParser.create(config_loader=self._context.config_loader)
        axes: dict[str, list[str]] = {}
        params = [f"{key}={value}" for key, value in self._params.items()]
        for override in parser.parse_overrides([*params, *arguments]):
            key = override.get_key_element()
            if override.is_discrete_sweep():
                axes[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            elif override.is_sweep_override():
                raise ConfigurationError(f"{override.input_line} is no list of values; write {key}=value,value")
            else:
                axes[key] = [str(override.input_line)]
        return axes

    def _compose(self, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        choices = dict(config.hydra.runtime.choices)
        del config.hydra
        return plain(config), choices


def finish(plan: Plan, folder: Path, trials: Sequence[Job] = ()) -> list[dict[str, Any]]:
    """Write the report and the tables over the runs of a sweep, and print the result; returns the summaries of a plan.

    The trials of a tuning are in the table of all runs, but not in the report.
    """
    tried, summaries = ([job.summary(folder) for job in jobs] for jobs in (trials, plan.jobs))
    write_csv([*tried, *summaries], folder / SWEEP_FILE)
    if num_failed := sum(summary["status"] != "completed" for summary in tried):
        logger.warning("{} of the tuning's {} trials failed; {} has the reasons", num_failed, len(tried), SWEEP_FILE)
    document = make_document(plan, folder)
    earlier = run_folder.read_json(folder / DOCUMENT_FILE).get("rows", ())
    had = {command for row in earlier for command in row["commands"]}
    if left_out := had.difference(*(row.commands for row in document.rows)):
        logger.warning(
            "the report leaves out {} runs of the earlier one, which this command does not ask for; their folders stay "
            "in {}, and hydra.sweep.dir=... chooses another folder for a report of its own", len(left_out), folder,
        )  # fmt: skip
    write_report(document, folder)
    _print(document, folder)
    return summaries


def _print(document: Document, folder: Path) -> None:
    """Print the table of results.md, then the reason of each failure, the verdict and the path of the report."""
    columns, rows = texts(document)
    headings = ["setting", *(column.heading for column in columns)]
    if left_out := print_table(f"{document.title}: {LEGEND}", headings, rows):
        print_text(f"{MARKDOWN_FILE} also has: {'; '.join(left_out)}")
    for row in document.rows:
        for reason in row.reasons:
            place = ", ".join(filter(None, (row.label, f"{row.world_size} ranks", row.partition, row.condition)))
            print_text(f"{place}: failed: {reason}")
    for sentence in verdict(document):
        print_text(sentence)
    print(f"report: {folder / PAGE_FILE}")


def register() -> None:
    """Register the sweeper in hydra as ``hydra/sweeper=grid``.

    Hydra instantiates plugins of its own package only, so the class is entered in hydra's table of plugins.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from hydra.plugins.sweeper import Sweeper

    Sweeper.register(GridSweeper)  # a virtual subclass, so that hydra need not be imported at module level
    name = "hydra_plugins.gossip_training.GridSweeper"
    known: dict[str, Any] = Plugins.instance().class_name_to_class
    known[name] = GridSweeper
    ConfigStore.instance().store(group="hydra/sweeper", name="grid", node={"_target_": name, "params": {}})


def callback(*, ends_with_table: bool) -> Any:
    """Return the hydra callback (``hydra.callbacks`` in the configuration) that notes which folders are new.

    With ``ends_with_table`` it writes the table at the end of a multirun, and exits with status 1 if a run failed,
    because hydra itself only sees tasks that returned. The class is defined here to import hydra lazily.
    """
    from hydra.experimental.callback import Callback

    class RunCallback(Callback):
        def on_run_start(self, config: Any, **_: Any) -> None:
            run_folder.note_new(config.hydra.run)

        def on_multirun_start(self, config: Any, **_: Any) -> None:
            run_folder.note_new(config.hydra.sweep)

        def on_multirun_end(self, config: Any, **_: Any) -> None:
            if ends_with_table:
                summaries = finish_sweep(Path(config.hydra.sweep.dir))
                if any(summary["status"] != "completed" for summary in summaries):
                    raise SystemExit(1)

    return RunCallback()


def finish_sweep(folder: Path) -> list[dict[str, Any]]:
    """Write sweep.csv over the runs under ``folder``, print its path and why runs failed, and return the summaries.

    Each has the path of its run, relative to ``folder``, as ``job``.
    """
    found = {path.parent for name in (run_folder.CONFIG_FILE, run_folder.SUMMARY_FILE) for path in folder.rglob(name)}
    runs = [job for job in found if found.isdisjoint(job.parents)]  # not what loggers keep within a run
    jobs = sorted(runs, key=lambda job: _natural(job.relative_to(folder)))
    summaries = [{**run_folder.read_summary(job), "job": str(job.relative_to(folder))} for job in jobs]
    write_csv(summaries, folder / SWEEP_FILE)
    for summary in summaries:
        if summary["status"] != "completed":
            print(f"job {summary['job']} {summary['status']}: {summary['reason']}")
    print(f"{len(summaries)} runs: {folder / SWEEP_FILE}")
    return summaries


def write_csv(summaries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write one row per run as CSV; missing values are left empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS, restval="", extrasaction="ignore")
        writer.writeheader()
        for summary in summaries:
            writer.writerow({**summary, "overrides": " ".join(summary["overrides"])})


def _natural(path: Path) -> tuple[tuple[int, str], ...]:
    """Return a natural sort key, by which 10 comes after 9."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in path.parts)
