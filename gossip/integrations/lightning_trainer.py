"""The part of a strategy for the Trainer that makes a DDPStrategy train by gossip."""

import contextlib
import copy
import os
import shutil
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, ClassVar

import torch
from loguru import logger
from torch.optim import Optimizer

import gossip
from gossip import GossipDataParallel
from gossip.communication import training_store
from gossip.integrations.common_checks import SampleCount, released_gradients, steps_in_backward, weakly
from gossip.integrations.lightning_base import KEY, BaseStrategy, folder_beside, unscaled_by_owner
from gossip.optimizers.bucket_optimizer import requires_closure
from topologies import Topology


class TrainerStrategy(BaseStrategy):
    """A mixin that precedes a DDPStrategy; see :class:`gossip.integrations.lightning.GossipStrategy`."""

    library: ClassVar[Any]
    """The package of the Trainer: ``lightning.pytorch`` or ``pytorch_lightning``."""

    precision_argument = "precision_plugin"

    def __init__(
        self, topology: str | Topology = "one_peer_exponential", *, evaluate_averaged: bool = True, **options: Any
    ) -> None:
        super().__init__(topology, **options)
        self._evaluates_averaged = evaluate_averaged
        self._samples = SampleCount()
        self._average: contextlib.AbstractContextManager[None] | None = None
        self._loaded_from: str | os.PathLike[str] = ""

    @property
    def _replica(self) -> GossipDataParallel | None:
        """The model, while it trains."""
        return self.model if isinstance(self.model, GossipDataParallel) else None

    # ------------------------------------------------------------------ set-up and teardown

    def setup(self, trainer: Any) -> None:
        """Wrap the module around the optimizers that it has configured. Collective."""
        if trainer.state.fn != "fit" and self._remaining is None:
            super().setup(trainer)
            return
        if trainer.state.fn == "fit":
            check_trainer(trainer, self.library, self._options)
            _keep_signals_local(trainer, is_handled=self._remaining is not None)
        self.accelerator.setup(trainer)
        module = self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        if trainer.state.fn != "fit":
            assert self._remaining is not None
            self._remaining.broadcast_module(self.lightning_module, "broadcasting the module from rank 0")
            self.setup_precision_plugin()
            return
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        mock = self.library.core.optimizer._MockOptimizer  # of a module that configures none
        optimizers = [optimizer for optimizer in self.optimizers if not isinstance(optimizer, mock)]
        value = trainer.gradient_clip_val
        clips = {"clip_grad_norm": float(value)} if value and self._steps_in_backward else {}
        saves = {"on_preemption": weakly(self._save_preempted)} if self._remaining is not None else {}
        self.model = self._wrap(module, optimizers, **clips, **saves)
        if self._steps_in_backward:
            self._take_clipping_over()

    def on_exception(self, exception: BaseException) -> None:
        """Release the model without waiting for the other ranks, which might not come. Local."""
        super().on_exception(exception)
        self._leave_average()
        if (replica := self._replica) is not None:
            self.model = self.lightning_module
            replica.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self) -> None:
        """Leave the average of all replicas in the module. Collective after training, otherwise local."""
        if (replica := self._replica) is not None:
            self.model = self.lightning_module
            replica.global_avg()
            replica.close()
        for name in ("_clip_gradients", "clip_gradients"):
            self.precision_plugin.__dict__.pop(name, None)
        super().teardown()

    def _take_clipping_over(self) -> None:
        """Keep the precision plugin from clipping: either the model clips, or it is too late."""

        def refuse(*_: Any, **__: Any) -> None:
            raise released_gradients(
                "clip_gradients()", "pass gradient_clip_val to the Trainer, or clip_grad_norm to the strategy"
            )

        self.precision_plugin._clip_gradients = lambda *_, **__: None
        self.precision_plugin.clip_gradients = refuse

    def _on_change(self, rank: int, world_size: int) -> None:
        """Divide the samples of the next validation among the ranks that remain."""
        super()._on_change(rank, world_size)
        if (trainer := self.lightning_module._trainer) is not None:
            trainer.fit_loop.epoch_loop.val_loop._combined_loader = None

    def _save_preempted(self, _: GossipDataParallel) -> None:
        """Save a checkpoint when all ranks are preempted."""
        self._leave_average()
        trainer = self.lightning_module.trainer
        loop = trainer.fit_loop.epoch_loop
        if trainer.validating or (loop._is_training_done and trainer.enable_validation):
            # As if it had been interrupted in its first batch: its results are not saved, and callbacks need them.
            for progress in (loop.val_loop.batch_progress.total, loop.val_loop.batch_progress.current):
                progress.reset()
                progress.ready = progress.started = 1
        trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))

    # ------------------------------------------------------------------ steps

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch, after telling the model how many samples it has. Local."""
        if self._replica is not None:
            self._samples.add(self._replica, lambda: self.library.utilities.data.extract_batch_size(batch))
        return super().training_step(batch, *args, **kwargs)

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """Let backward passes within the block only accumulate gradients. Local."""
        return contextlib.nullcontext() if self._replica is None else self._replica.no_sync()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, then the hooks before the step, then the step if backward has not made it. Local.

        An optimizer whose ``step()`` requires a closure evaluates the closure itself.
        """
        replica = self._replica
        if replica is None or (not self._steps_in_backward and requires_closure(optimizer)):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        module, plugin = model or self.lightning_module, self.precision_plugin
        scaler = None if self._steps_in_backward else self._scaler
        result = closure()
        if scaler is None:
            plugin._after_closure(module, optimizer)
            optimizer.step(**kwargs)
        elif result is None and module.automatic_optimization:  # there was no backward pass, and nothing to unscale
            plugin._after_closure(module, optimizer)
        else:
            scaler.unscale_(optimizer)
            with unscaled_by_owner(optimizer):
                plugin._after_closure(module, optimizer)
            self._step_scaled(replica, optimizer, **kwargs)
        return result

    # ------------------------------------------------------------------ evaluation

    def on_validation_start(self) -> None:
        """Put the average of all replicas into the module. Collective."""
        super().on_validation_start()
        if self._replica is not None and self._evaluates_averaged:
            self._enter_average(self._replica)

    def on_validation_end(self) -> None:
        """Restore every rank's own replica. Local."""
        self._leave_average()
        super().on_validation_end()

    def _enter_average(self, replica: GossipDataParallel) -> None:
        with torch.inference_mode(False):  # the loop may run under inference_mode, whose tensors do not train
            average = replica.averaged()
            average.__enter__()
        self._average = average

    def _leave_average(self) -> None:
        average, self._average = self._average, None
        if average is not None:
            with torch.inference_mode(False):
                average.__exit__(None, None, None)

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the average of all replicas. Collective during training."""
        replica = self._replica
        if replica is None:
            return dict(super().lightning_module_state_dict())
        with contextlib.nullcontext() if self._average is not None else replica.averaged():
            return copy.deepcopy(dict(super().lightning_module_state_dict()))  # the module goes on

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write Lightning's checkpoint and, unless it is weights-only, all ranks' replicas next to it. Collective."""
        replica = self._replica
        if replica is None or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        filepath = self.broadcast(os.fspath(filepath))  # it may contain a metric, whose value differs between ranks
        folder = folder_beside(filepath)
        was_inside = self._average is not None
        self._leave_average()  # each rank saves its own
        checkpoint[KEY] = gossip.save(replica, folder, keep=2, **self._own_averages(checkpoint)).name
        if was_inside:
            self._enter_average(replica)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._keep_only(folder, checkpoint[KEY])

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove Lightning's checkpoint and the replicas next to it. Local, on rank 0."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero and "://" not in os.fspath(filepath):
            shutil.rmtree(f"{os.fspath(filepath)}.gossip", ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read Lightning's checkpoint. Local."""
        self._loaded_from = checkpoint_path
        return dict(super().load_checkpoint(checkpoint_path, *args, **kwargs))

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Restore every rank's replica with its optimizers, if it was saved next to the checkpoint. Collective.

        From a checkpoint without replicas, such as one of DDP, all ranks load the same weights and states.
        """
        replica, name = self._replica, checkpoint.get(KEY)
        if replica is not None and name is not None:
            folder = folder_beside(self._loaded_from) / name
            if self._load_replicas(replica, folder, **self._own_averages(checkpoint)):
                return
        super().load_optimizer_state_dict(checkpoint)

    def _own_averages(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the callbacks that average this rank's weights; Lightning itself saves only rank 0's."""
        kind = self.library.callbacks.StochasticWeightAveraging
        callbacks = [callback for callback in self.lightning_module.trainer.callbacks if isinstance(callback, kind)]
        return {
            f"stochastic_weight_averaging_{number}": callback
            for number, callback in enumerate(callbacks)
            if callback.state_key in checkpoint["callbacks"]
        }


def _keep_signals_local(trainer: Any, *, is_handled: bool) -> None:
    """Let every rank react to the signals that it receives itself, independently of the others. Local.

    Lightning broadcasts in every batch whether rank 0 received SIGTERM, and once more in the signal's handler: every
    step would wait for rank 0, and a rank that alone receives the signal would wait for a broadcast that no other rank
    makes. Schedulers, torchrun and Lightning's launcher send the signal to all ranks. Where ranks may be lost it
    ``is_handled`` by the model.

    To requeue a SLURM job, Lightning saves in the handler of another signal, at whatever point of a step the rank is.
    """
    connector = trainer._signal_connector

    def on_sigterm(number: int, _: FrameType | None) -> None:
        if is_handled:
            return
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
