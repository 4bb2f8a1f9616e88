"""One run from a resolved configuration: check it, start the ranks or act as one of them, and fill the run folder."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from loguru import logger

from gossip import LaunchError, World, launch
from gossip.communication import training_store
from gossip.lab.experiments import resuming, run_folder
from gossip.lab.experiments.experiment_build import check
from gossip.lab.experiments.graceful_stop import SIGNALS
from gossip.lab.experiments.run_figures import draw_figures
from gossip.lab.experiments.run_settings import Settings, backend_for
from gossip.lab.experiments.terminal import configure_logging, restore_cursor
from gossip.lab.experiments.training import MODEL_FILE, train, train_experiment
from gossip.lab.experiments.validated_models import ConfigurationError, value_of
from gossip.lab.loggers.log_forwarding import LogForwarding
from gossip.lab.loggers.logger import Ending
from gossip.lab.loggers.logger_choice import logging_settings
from gossip.launching import DEFAULT_TIMEOUT, fork_server, signals_for_workers

PRELOAD = (
    "gossip.lab.experiments.training", "hydra.utils", "safetensors.torch", "sklearn.datasets",
    "sklearn.model_selection",
)  # fmt: skip
"""The modules that the fork server imports in advance for the workers."""


def run_job(
    config: Mapping[str, Any],
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    again: bool = False,
    on_failure: Callable[[], str] = str,
) -> dict[str, Any]:
    """Run one configuration to completion, and return its summary, as in ``summary.json``.

    If ``torch.distributed`` is initialised (torchrun, srun), this process is one of the ranks, all of which call this
    function, and rank 0 writes the shared files. Otherwise ``launch.world_size`` workers are started from here.

    Parameters
    ----------
    config : mapping
        The resolved configuration as plain data. With ``resume``, the run in ``folder`` is continued, and ``config``
        replaces its configuration.
    folder : Path
        The folder of this run alone; it is locked while the run is in progress.
    overrides : sequence of str
        The overrides from the command line, for the summary.
    again : bool
        Whether the run starts afresh in the folder of an attempt that left no checkpoint.
    on_failure : callable
        Called once the failure of a run that had begun to train, or was about to, has been recorded, on the first rank
        to fail. Returns the text to print last, for a rank that is terminated without returning to the caller.

    Raises a ConfigurationError if the configuration cannot be run, before any worker is started, and a new run then
    leaves no files; a LaunchError if the port is in use, or a worker failed.
    """
    started_at = time.perf_counter()
    world = World(DEFAULT_TIMEOUT)
    configure_logging(world.rank)
    if dist.is_initialized() and config.get("engine") == "virtual":
        raise ConfigurationError(
            "engine=virtual runs all ranks in one process, but this one is a rank of a process group, because RANK "
            "and WORLD_SIZE, or SLURM's variables of a step, are set in its environment; unset them, or set "
            "engine=processes"
        )
    if training_store.shared_keys("") is not None:
        method, on_peer_loss = config.get("method"), value_of(config, "wrapper").get("on_peer_loss")
        if (method, on_peer_loss) != ("gossip", "continue"):
            raise ConfigurationError(
                f"ranks that meet in a store, since {training_store.STORE} is set, come and go; set method=gossip and "
                f"wrapper.on_peer_loss=continue, got method={method} and wrapper.on_peer_loss={on_peer_loss}"
            )
    is_resumed = config.get("resume") is not None
    with contextlib.ExitStack() as until_the_end:
        with _refused_by_all(world):
            if _leads(world):
                until_the_end.enter_context(run_folder.lock(folder))
                if again:
                    run_folder.clear(folder)
                if is_resumed:
                    resuming.check_resumable(folder)
                else:
                    run_folder.claim(folder, config, overrides)
                if launchers := resuming.identities():  # that may restart this run
                    run_folder.write_json(folder / run_folder.STARTED_BY_FILE, launchers)
        if is_resumed:
            overrides = list(dict.fromkeys([*run_folder.read_overrides(folder), *overrides]))
        return _run_in_folder(config, folder, overrides, world, started_at, on_failure)


def _run_in_folder(
    config: Mapping[str, Any],
    folder: Path,
    overrides: Sequence[str],
    world: World,
    started_at: float,
    on_failure: Callable[[], str],
) -> dict[str, Any]:
    """Run in a folder that is claimed and locked; unclaim it if a new run is refused."""
    has_begun = False
    forwarding: LogForwarding | None = None
    ending: Ending | None = None
    figures: tuple[Path, ...] = ()

    def failure(why: str) -> dict[str, Any]:
        topology = config.get("topology", {}).get("name") if config.get("method") == "gossip" else None
        known = {"method": config.get("method"), "topology": topology, "seed": config.get("seed")}
        return {"status": "failed", "reason": why, **known, "overrides": list(overrides)}

    def last_words(why: str) -> str:
        is_first = run_folder.write_failure(folder, failure(f"rank {world.rank} failed: {why}"))
        return on_failure() if is_first else ""

    try:
        with _refused_by_all(world):
            starts_workers = not dist.is_initialized() and config.get("engine") != "virtual"
            if starts_workers:
                fork_server.start(PRELOAD)  # in the background
            experiment = check(config)
            if _leads(world):
                logging_settings(config)
        world.close()
        has_begun = True
        if _leads(world):
            logger.info("run folder: {}", folder)
            if experiment.data.notes:
                logger.info("data: {}", experiment.data.notes)
            first_step = 0
            if config.get("resume") is not None:
                run_folder.update_config(folder, {**config, "resume": None})
                first_step = resuming.cut_records(folder)
            forwarding = LogForwarding(config, folder, first_step)
        if starts_workers:
            summary = _launch(config, str(folder), experiment.settings)
        else:
            summary = train_experiment(experiment, folder, last_words)
        if "signal" in summary:
            raise SystemExit(128 + summary["signal"])
        is_first = summary.pop("rank") == 0 or starts_workers
        summary["overrides"] = list(overrides)
        summary["wall_time_s"] += time.perf_counter() - started_at
        if is_first:
            if not math.isfinite(summary["averaged_test_loss"]):
                logger.warning("the run diverged: its test loss is not finite; try a smaller optimizer.lr")
            if config["figures"]:
                draw_figures(folder, summary, experiment.topology, form="svg")
                if forwarding:
                    figures = draw_figures(folder, summary, experiment.topology, form="png")
            run_folder.write_json(folder / run_folder.SUMMARY_FILE, summary)
        ending = Ending("completed", summary, figures, folder / MODEL_FILE)
    except BaseException as error:
        is_refused = is_refusal(error) and (isinstance(error, LaunchError) or not has_begun)
        if is_refused and config.get("resume") is None:
            if _leads(world):
                run_folder.unclaim(folder)
            raise
        why = reason(error)
        if dist.is_initialized() and isinstance(error, Exception) and not isinstance(error, ConfigurationError):
            why = f"rank {world.rank} failed: {why}"
        is_stopped = isinstance(error, SystemExit | KeyboardInterrupt)
        ending = Ending("stopped" if is_stopped else "failed", failure(why))
        if run_folder.write_failure(folder, ending.summary) and not is_refusal(error):
            on_failure()
        raise
    finally:
        if forwarding is not None:
            forwarding.end(ending)
        if world.rank == 0:
            restore_cursor()
    return summary


def _leads(world: World) -> bool:
    """Whether this process cares for the run folder: rank 0 of those that begin."""
    return world.rank == 0 and training_store.joined() is None


def is_refusal(error: BaseException) -> bool:
    """Whether the error means that the user's request cannot be run, as opposed to the failure of a rank."""
    return isinstance(error, ConfigurationError) or (isinstance(error, LaunchError) and error.rank is None)


def reason(error: BaseException) -> str:
    """Return the reason why a run ended, in one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)"
    if isinstance(error, SystemExit):
        return f"ended from outside, with exit status {error.code}"
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigurationError | LaunchError) else f"{type(error).__name__}: {text}"


def _launch(config: Mapping[str, Any], folder: str, settings: Settings) -> dict[str, Any]:
    with signals_for_workers(SIGNALS if settings.checkpoint.every else ()):
        summaries = launch(
            train,
            config,
            folder,
            world_size=settings.launch.world_size,
            backend=backend_for(settings.launch.world_size, settings.launch.device),
            local_size=settings.launch.local_size if settings.launch.local_size > 1 else None,
            port=settings.launch.port,
            timeout=settings.timeout,
            num_threads=settings.launch.num_threads,
            preload=PRELOAD,
            on_peer_loss=value_of(config, "wrapper").get("on_peer_loss", "raise"),
            restart=settings.launch.restart,
        )
    summary: dict[str, Any] = next(summary for summary in summaries if summary is not None)
    return summary


@contextlib.contextmanager
def _refused_by_all(world: World) -> Iterator[None]:
    """Raise a ConfigurationError of one rank within the block on all ranks, so that none waits for it. Collective."""
    own: ConfigurationError | None = None
    try:
        yield
    except ConfigurationError as error:
        own = error
    findings = world.gather_json(str(own or ""), "comparing what the ranks found wrong")
    if own is not None:
        raise own
    for rank, text in enumerate(findings):
        if text:
            raise ConfigurationError(f"rank {rank}: {text}")
