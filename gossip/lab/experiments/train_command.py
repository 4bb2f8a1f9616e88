"""The hydra command line: a run, a sweep, or one rank of a launched job; and the reporting of user errors."""

import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from loguru import logger

from gossip import ExchangeError, LaunchError, World
from gossip.communication import training_store
from gossip.lab.experiments import config_store, resuming, run_folder
from gossip.lab.experiments.config_store import plain
from gossip.lab.experiments.graceful_stop import SIGNALS
from gossip.lab.experiments.job import reason, run_job
from gossip.lab.experiments.option_help import FLAGS, check_flags, explain, help_text
from gossip.lab.experiments.resuming import State
from gossip.lab.experiments.run_settings import backend_for
from gossip.lab.experiments.terminal import configure_logging, print_run
from gossip.lab.experiments.validated_models import ConfigurationError
from gossip.launching import DEFAULT_TIMEOUT, Placement, find_placement, fork_server, joined_process_group

NAME_VARIABLE = "GOSSIP_RUN_NAME"
"""The environment variable from which the configuration reads the name of the run folder (its last component)."""

SWEEP = "sweep"
"""The name of the primary config of a sweep."""

FAILED = 1
REFUSED = 2
INTERRUPTED = 130


def main(config_folder: Path, config_name: str, task: Callable[[Any], None] | None = None) -> int:
    """Run the command that ``sys.argv`` describes, with a primary config of the folder, an absolute path.

    A configuration that is given to ``task`` is neither trained nor one of several.
    Returns the exit status: 0 for success, 1 if a run failed, 2 if the request cannot be run, 130 after Ctrl-C. SIGTERM
    raises ``SystemExit(143)`` and SIGUSR1 ``SystemExit(138)``, after a checkpoint if checkpoints are enabled.
    """
    if set(FLAGS).intersection(sys.argv[1:]):
        try:
            config_store.offer(sys.argv[1:], config_folder)
        except ConfigurationError as error:
            return report(error, config_folder, config_name)
        print(help_text(sys.argv[0], config_folder, config_name))
        return 0
    for number in SIGNALS:  # end as a program does that a signal ends, after the blocks that are open
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        placement = find_placement()
    except ValueError as error:  # invalid environment variables of SLURM
        return report(ConfigurationError(str(error)), config_folder, config_name)
    if placement is not None and task is None:
        try:
            with joined_process_group(backend=backend_for(placement.num_local_ranks)):
                return _run_one_rank(config_folder, config_name, placement)
        except LaunchError as error:
            return report(error, config_folder, config_name)
    os.environ[NAME_VARIABLE] = run_folder.new_name()
    last_words: list[str] = []
    try:
        if config_name == SWEEP:
            _prepare_sweep()
        if placement is not None and placement.rendezvous is None:
            raise ConfigurationError("a benchmark starts its ranks itself: start it without torchrun or srun")
        if task is not None and {"-m", "--multirun"}.intersection(sys.argv):
            raise ConfigurationError("the benchmark measures all methods in one run: give lists, and leave out -m")
        _run_hydra(config_folder, config_name, task or partial(_train, config_folder, config_name, last_words))
    except BrokenPipeError:
        raise  # the caller handles a closed standard output
    except (Exception, KeyboardInterrupt) as error:
        status = report(error, config_folder, config_name)
        if status == REFUSED:
            run_folder.remove_new()
        return status
    finally:
        fork_server.stop()
        print(*last_words, sep="", end="", file=sys.stderr)
    return 0


def _prepare_sweep() -> None:
    """Insert the options of a sweep into ``sys.argv``, such as ``--multirun``.

    Without that flag, hydra would treat arguments that it cannot compose as those of a single run.
    """
    from gossip.lab.sweeps import sweep_jobs

    arguments = sys.argv[1:]
    if not any(argument.startswith("-") for argument in arguments):
        sys.argv.append("--multirun")
    sys.argv[1:1] = sweep_jobs.folder_option(arguments)
    if not any(argument.startswith("hydra/launcher=") for argument in arguments):
        if importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is None:
            raise ConfigurationError(
                "the runs of a sweep are shared among the cores by hydra-joblib-launcher, which is not installed; "
                "install it in a clone of the repository, pip install '.[lab]', or set hydra/launcher=basic"
            )
        # Joblib then says ten times how many runs have ended, and how much time is left.
        sys.argv[1:1] = ["hydra.launcher.verbose=10", "hydra.launcher.pre_dispatch=all"]


def report(error: BaseException, config_folder: Path, config_name: str) -> int:
    """Report an error to the user on stderr, and return the corresponding exit status."""
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, LaunchError) and error.rank is not None:
        sys.stderr.write(error.worker_traceback)
        print(reason(error), file=sys.stderr)
        return FAILED
    refusal = error if isinstance(error, LaunchError) else _refusal_within(error)
    explanation = explain(error, config_folder, config_name) if refusal is None else reason(refusal)
    if explanation is not None:
        print(f"error: {explanation}", file=sys.stderr)
        return REFUSED
    traceback.print_exception(error)
    return FAILED


def _refusal_within(error: BaseException) -> ConfigurationError | None:
    """Return the ConfigurationError that OmegaConf wrapped while resolving the configuration; None if there is none."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, ConfigurationError):
        inner = inner.__cause__ or inner.__context__
    return inner


def _run_hydra(config_folder: Path, config_name: str, task: Callable[[Any], None]) -> None:
    """Compose the configuration, and give it to ``task``."""
    import hydra
    from omegaconf import OmegaConf

    from gossip.lab.sweeps import sweeper

    check_flags(sys.argv[1:])
    sys.argv[1:] = config_store.offer(sys.argv[1:], config_folder)
    sweeper.register()
    OmegaConf.register_new_resolver("gossip.run_folder", _FolderChoice(), replace=True)
    errors: list[Exception] = []

    def keep_error(config: Any) -> None:
        try:
            task(config)
        except Exception as error:  # hydra would add output of its own
            errors.append(error)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes hydra raise its errors instead of printing them
    hydra.main(version_base="1.3", config_path=str(config_folder), config_name=config_name)(keep_error)()
    if errors:
        raise errors[0]


def _train(config_folder: Path, config_name: str, last_words: list[str], hydra_config: Any) -> None:
    """Perform one hydra job. In a sweep, a failure is recorded and reported, and the next run follows.

    The text to print after an error is appended to ``last_words``.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    written: Any = OmegaConf.to_container(settings.overrides.task)  # as written, interpolations unresolved
    overrides = list(map(str, written))
    in_sweep = settings.mode == RunMode.MULTIRUN

    def on_failure() -> str:
        last_words.append("" if in_sweep else f"{resuming.advice(folder, config)}\n")
        return last_words[-1]

    try:
        if in_sweep and find_placement() is not None:
            raise ConfigurationError(
                "a run of a sweep starts its ranks itself, but SLURM has started several tasks for it; set "
                "hydra.launcher.tasks_per_node=1"
            )
        config = plain(hydra_config)
        if dist.is_initialized():
            num_ranks = _said_by_rank_0(lambda: str(dist.get_world_size()), "counting the ranks at the beginning")
            config["launch"]["world_size"] = int(num_ranks)
        state, resume = State.BEGIN, config.get("resume")
        if resume is not None and in_sweep:
            raise ConfigurationError("resume=... goes on with one run; leave out -m")
        if not in_sweep and _is_to_go_on_if_it_can(resume):
            name = _said_by_rank_0(lambda: resuming.state_of(folder, resume).name, "looking into the run folder")
            state = State[name]
            config["resume"] = str(folder) if state is State.GO_ON else None
        if state is State.ENDED:
            configure_logging(dist.get_rank() if dist.is_initialized() else 0)
            logger.info("the run in {} has ended: there is nothing left to do", folder)
            return
        if config.get("resume") is not None:
            config = _resumed(config, folder, overrides, str(settings.job.config_name))
        overrides = [override for override in overrides if not override.startswith("resume=")]
        summary = run_job(config, folder, overrides, again=state is State.BEGIN_AGAIN, on_failure=on_failure)
    except Exception as error:
        if not in_sweep:
            raise
        status = report(error, config_folder, config_name)
        if isinstance(error, run_folder.FolderError):
            raise SystemExit(status) from error  # the failure cannot be recorded in a folder that another run uses
        why = explain(error, config_folder, config_name) or reason(error)
        run_folder.write_failure(folder, {"status": "failed", "reason": why, "overrides": overrides})
        return
    if in_sweep:
        accuracy, time_s = summary["averaged_test_accuracy"], summary["wall_time_s"]
        logger.info("job {}: test accuracy of the average {:.2%} after {:.1f} s", folder.name, accuracy, time_s)
    elif not dist.is_initialized() or dist.get_rank() == 0:
        print_run(summary, folder)


def _is_to_go_on_if_it_can(resume: str | None) -> bool:
    """Whether the run may have been started before, in an attempt that failed."""
    return resume == resuming.AUTO or (resume is None and resuming.restarter() is not None)


class _FolderChoice:
    """The OmegaConf resolver for the run folder, which rank 0 chooses once. The first call is collective."""

    def __init__(self) -> None:
        self._found: str | None = None

    def __call__(self, output_root: str, name: str, resume: str | None, *, _root_: Any) -> str:
        from omegaconf import OmegaConf

        if not _is_to_go_on_if_it_can(resume):
            return resuming.folder_to_use(output_root, name, resume)
        if self._found is None:
            asked = plain(OmegaConf.masked_copy(_root_, [key for key in _root_ if key != "hydra"]), complete=False)
            self._found = _said_by_rank_0(
                lambda: str(resuming.find(Path(output_root), asked) or f"{output_root}/{name}"), "choosing a run folder"
            )
        return self._found


def _resumed(asked: dict[str, Any], folder: Path, overrides: list[str], config_name: str) -> dict[str, Any]:
    """Return the configuration of the run that is resumed in ``folder``."""
    from hydra import compose
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if folder.resolve() != Path(asked["resume"]).resolve():
        raise ConfigurationError(f"resume={asked['resume']} goes on in that folder; leave out hydra.run.dir={folder}")
    keys = [override.key_or_group for override in OverridesParser.create().parse_overrides(overrides)]
    if dist.is_initialized():
        keys.append("launch.world_size")  # set by the launcher of the ranks
    return resuming.continued_configuration(folder, asked, plain(compose(config_name), complete=False), keys)


def _run_one_rank(config_folder: Path, config_name: str, placement: Placement) -> int:
    """Run as one rank under torchrun or srun; all ranks share one run folder. Collective."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    rank = dist.get_rank()
    last_words: list[str] = []
    try:
        os.environ[NAME_VARIABLE] = _said_by_rank_0(run_folder.new_name, "agreeing on a run folder")
        if config_name == SWEEP or {"-m", "--multirun"}.intersection(sys.argv):
            raise ConfigurationError(
                f"a sweep (-m) cannot run in one of {placement.world_size} ranks, but this process is one, because "
                f"{placement.variables} are set in its environment; start it where they are not set"
            )
        _run_hydra(config_folder, config_name, partial(_train, config_folder, config_name, last_words))
    except (ConfigurationError, HydraException, OmegaConfBaseException) as error:
        # The error is the same on every rank. Torchrun ends all ranks when the first one exits, and rank 0 must have
        # reported the error by then.
        status = report(error, config_folder, config_name) if rank == 0 else REFUSED
        dist.barrier()
        run_folder.remove_new()
        return status
    except BaseException as error:
        status = _report_rank(error, rank)
        print(*last_words, sep="", end="", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # communication that can no longer complete must not block the exit
    return 0


def _report_rank(error: BaseException, rank: int) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if not isinstance(error, ExchangeError | dist.DistError):  # these are consequences of another rank's failure
        traceback.print_exception(error)
    print(f"rank {rank} failed: {reason(error)}", file=sys.stderr)
    return FAILED


def _said_by_rank_0(text: Callable[[], str], what: str) -> str:
    """Return on every rank what ``text`` returns on rank 0. Collective; a rank that joins others reads it later."""
    keys: Any = training_store.shared_keys("said by rank 0")
    if training_store.joined() is not None:
        return str(keys.get(what), "utf-8")
    with closing(World(DEFAULT_TIMEOUT)) as world:
        said: str = world.gather_json(text() if world.rank == 0 else "", what)[0]
        if world.rank == 0 and keys is not None:
            keys.set(what, said)
    return said
