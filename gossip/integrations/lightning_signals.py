"""Signal handling in a Trainer whose ranks wait only for peers."""

from __future__ import annotations

from types import FrameType
from typing import Any

from loguru import logger


def keep_signals_local(trainer: Any) -> None:
    """Let every rank react to the signals that it receives itself, independently of the others. Local.

    Lightning broadcasts in every batch whether rank 0 received SIGTERM, and once more in the signal's handler: every
    step would wait for rank 0, and a rank that alone receives the signal would wait for a broadcast that no other rank
    makes. Schedulers, torchrun and Lightning's launcher send the signal to all ranks.

    To requeue a SLURM job, Lightning saves in the handler of another signal, at whatever point of a step the rank is.
    """
    connector = trainer._signal_connector

    def on_sigterm(number: int, _: FrameType | None) -> None:
        if not connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(number)
        connector.received_sigterm = True

    def on_requeue(number: int, _: FrameType | None) -> None:
        logger.error(
            "rank {}: signal {}: the job is not requeued, because a checkpoint needs all ranks between two steps; "
            "requeue it in the batch script, save with ModelCheckpoint(every_n_train_steps=...) and resume with fit("
            'ckpt_path="last")',
            trainer.global_rank,
            number,
        )

    connector._sigterm_notifier_fn = on_sigterm
    connector._slurm_sigusr_handler_fn = on_requeue
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
