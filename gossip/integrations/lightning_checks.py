"""Refusal of Trainer settings that cannot work with gossip, before training starts."""

from collections.abc import Mapping
from typing import Any

from gossip.communication import training_store
from gossip.integrations.common_checks import steps_in_backward


def check_trainer(trainer: Any, library: Any, options: Mapping[str, Any]) -> None:
    """Refuse settings of the Trainer, its callbacks and its module that cannot work. Local."""
    if trainer.strategy._layer_sync is not None:
        raise ValueError(
            "Trainer(sync_batchnorm=True): batch norm would all-reduce its statistics in every forward pass, which "
            'gossip avoids; leave it out, or pass buffers="average" to the strategy'
        )
    for callback in trainer.callbacks:
        kind = type(callback).__name__
        on_exception = isinstance(callback, library.callbacks.OnExceptionCheckpoint)
        if on_exception or getattr(callback, "save_on_exception", False):
            raise ValueError(
                f"{kind if on_exception else f'{kind}(save_on_exception=True)'}: an exception occurs on a single rank, "
                "but a checkpoint needs all ranks after the same step; save with "
                "ModelCheckpoint(every_n_train_steps=...)"
            )
        if isinstance(callback, library.callbacks.WeightAveraging):
            raise ValueError(
                f"{kind} averages the replica of each rank over time, and would validate and save rank 0's; choose "
                "StochasticWeightAveraging, whose averages are themselves averaged at the end of training"
            )
    counts = "the Trainer counts batches, epochs and the schedulers' steps from its own beginning"
    if training_store.joined() is not None:
        raise ValueError(
            f"this process joins a training, but {counts}, and makes collective calls that the others do not; start "
            'all ranks again with fit(ckpt_path="last"), or write the loop yourself, with Fabric'
        )
    if options.get("partition_timeout") is not None:
        raise ValueError(
            f"partition_timeout={options['partition_timeout']} would let a rank come back at the others' step, but "
            f"{counts}; leave it out, or write the loop yourself, with Fabric"
        )
    if steps_in_backward(options):
        _check_clipping(trainer, library, options)


def _check_clipping(trainer: Any, library: Any, options: Mapping[str, Any]) -> None:
    module, value = trainer.lightning_module, trainer.gradient_clip_val
    keeps_gradients = "pass step_in_backward=False to the strategy, which keeps gradients until optimizer.step()"
    if value and trainer.gradient_clip_algorithm == "value":
        raise ValueError(
            f'gradient_clip_algorithm="value", gradient_clip_val={value}: inside backward only the norm can be '
            f'clipped; choose "norm", or {keeps_gradients}'
        )
    if type(module).configure_gradient_clipping is not library.LightningModule.configure_gradient_clipping:
        raise ValueError(
            f"{type(module).__name__}.configure_gradient_clipping() would be called after the steps were made inside "
            f"backward and the gradients released; pass gradient_clip_val to the Trainer instead, or {keeps_gradients}"
        )
    if value and options.get("clip_grad_norm") is not None:
        raise ValueError(
            f"gradient_clip_val={value} of the Trainer and clip_grad_norm={options['clip_grad_norm']} of the strategy "
            "are the same thing; leave one of them out"
        )
