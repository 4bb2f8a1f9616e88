"""Gossip training with the Trainer of Transformers, whose settings that gossip does not support are refused by name."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from loguru import logger
from torch import nn
from transformers import Trainer
from transformers.utils import is_sagemaker_dp_enabled, is_sagemaker_mp_enabled

from gossip import GossipDataParallel, World, load, save
from gossip.communication import training_store
from gossip.integrations.accelerate import renumber
from gossip.integrations.common_checks import (
    SampleCount,
    check_accelerator,
    check_options,
    steps_in_backward,
    weakly,
    wrap,
)
from gossip.integrations.remaining_ranks import remaining_ranks
from gossip.integrations.trainer_epochs import HeldBatches, HeldLoader, UnevenEpoch
from gossip.step.building.wrapper_arguments import refuse_any
from gossip.wrapper import DEFAULT_TIMEOUT
from topologies.validation import check_integer

_FOLDER = "gossip"
_OF_TRAINER = {
    "module": "pass model= to the Trainer",
    "optimizer": "pass optimizers=(optimizer, None) to the Trainer, or TrainingArguments(optim=...)",
    "clip_grad_norm": "pass TrainingArguments(max_grad_norm=...)",
    "scaler": "pass TrainingArguments(fp16=True), whose scaler is used",
    "process_group": "train with all ranks of the default process group",
    "partition_timeout": "train to the end without a rank that was cut off: the Trainer counts its steps on from where "
    "it was, and not from where the others are",
}
"""Arguments of the wrapper that are not passed to it directly, and what to do instead."""

_OF_DDP = {
    "ddp_find_unused_parameters": "a parameter without a gradient needs no flag",
    "ddp_bucket_cap_mb": 'pass gossip={"bucket_cap_mb": ...}',
    "ddp_broadcast_buffers": 'pass gossip={"buffers": "average"} to mix them in every step',
    "ddp_static_graph": "gossip needs no assumption about the graph",
}


class GossipTrainer(Trainer):
    """Transformers' Trainer with one replica per rank, mixed with its peers', in place of DDP.

    Accepts the arguments of ``transformers.Trainer`` and two more. Whatever is not mentioned here is as in the Trainer.
    It can be combined with a subclass of the Trainer by inheritance: ``class GossipSeq2SeqTrainer(GossipTrainer,
    Seq2SeqTrainer): pass``.

    Parameters
    ----------
    *args, **kwargs
        Arguments of the Trainer.
    gossip : mapping, optional
        Arguments of :class:`gossip.GossipDataParallel` by name, ``{"topology": "ring", "compression": "bf16"}``. Module
        and optimizer are the Trainer's, ``clip_grad_norm`` is ``TrainingArguments.max_grad_norm``, and the scaler is
        that of ``fp16``.
    join : bool
        Whether ranks may have different numbers of batches. Within an epoch, a rank that has no more batches keeps
        exchanging, without updates, until all are done (:meth:`gossip.GossipDataParallel.join`); logging, evaluation
        and saving that are due in an epoch take place at its end.
    total_batch_size : int, optional
        The number of samples of a step over all ranks and all batches that are accumulated, in place of
        ``per_device_train_batch_size``. It is held when ranks are lost: those that remain divide each step's samples,
        so that their batches become larger, and an epoch has every sample once. Only the samples are missing of a rank
        in the step in which it is lost, and at the end of an epoch those that do not fill a step. The samples' order is
        random (``data_seed``), and the loader is not divided by Accelerate.

    Raises
    ------
    ValueError, TypeError
        The Trainer is set up for something that gossip does not support (FSDP, DeepSpeed, tensor parallelism and
        others), or an argument cannot be used.

    Notes
    -----
    ``train()`` is collective, with evaluation and saving inside it, and so are ``evaluate()`` and ``predict()``.

    While ``train()`` runs, ``trainer.model_wrapped`` is the :class:`gossip.GossipDataParallel`, and ``trainer.model``
    is the module inside it. Evaluation and ``save_model`` then see the average of all replicas. ``train()`` ends with
    :meth:`gossip.GossipDataParallel.global_avg` and closes the wrapper, so ``trainer.model`` is equal on all ranks.

    A checkpoint has the averaged weights where the Trainer writes its own. In place of ``optimizer.pt`` and
    ``scheduler.pt`` it has a folder ``gossip`` with each rank's replica, the state of its optimizer and the messages in
    flight: ``train(resume_from_checkpoint=...)`` continues bit for bit. All ranks must share the output folder. The
    model keeps the scheduler (:meth:`gossip.GossipDataParallel.keep`).

    With ``gossip={"on_peer_loss": "continue"}`` training, evaluation and saving go on without ranks that are lost, and
    SIGTERM of all ranks saves a checkpoint. No rank can join.

    With an algorithm that counts ranks by their samples (``weighted=True``), the model is told how many tokens with
    labels the batches of each step have, or how many samples where the Trainer does not count tokens.

    Construction sets ``args.average_tokens_across_devices`` to False, because it makes every step wait for all ranks.
    """

    model: Any
    optimizer: Any

    def __init__(
        self,
        *args: Any,
        gossip: Mapping[str, Any] | None = None,
        join: bool = False,
        total_batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_trainer_options(gossip, join)
        self._total_batch_size = total_batch_size
        self._gossip_options = dict(gossip or {})
        self._joins = join
        self._gossip_model: GossipDataParallel | None = None
        self._training = contextlib.ExitStack()
        self._samples = SampleCount()
        self._epoch: UnevenEpoch | None = None
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Set up the accelerator as the Trainer does, and refuse settings that cannot train by gossip."""
        check_arguments(self.args, self.model)
        check_total_batch_size(self._total_batch_size, self.args, joins=self._joins)
        super().create_accelerator_and_postprocess()
        self._remaining = remaining_ranks(self, self._gossip_options, weakly(self._on_change))
        check_accelerator(self.accelerator, steps_in_backward=self._steps_in_backward)
        self.accelerator.unwrap_model = functools.partial(_unwrap_model, self.accelerator.unwrap_model)
        if self.accelerator.dataloader_config.dispatch_batches is None:
            self.accelerator.dataloader_config.dispatch_batches = False  # otherwise rank 0 would broadcast every batch
        if self.args.average_tokens_across_devices:
            logger.debug("average_tokens_across_devices is set to False: it would make every step wait for all ranks")
            self.args.average_tokens_across_devices = False

    def _on_change(self, rank: int, world_size: int) -> None:
        renumber(rank, world_size)
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()

    # ------------------------------------------------------------------ training

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader, or one whose batches are this rank's shares of held ones. Local."""
        loader: Any = super().get_train_dataloader()
        if self._total_batch_size is None:
            return loader
        args, dataset = self.args, loader.dataset
        if not hasattr(dataset, "__len__"):
            raise ValueError("total_batch_size needs a train_dataset with a length; divide a stream in its own loader")
        seed = args.seed if args.data_seed is None else args.data_seed
        batch_size = self._total_batch_size // args.gradient_accumulation_steps
        batches = HeldBatches(len(dataset), batch_size, seed, self._place)
        return HeldLoader(
            dataset, batch_sampler=batches, collate_fn=loader.collate_fn, pin_memory=args.dataloader_pin_memory
        )

    def _place(self) -> tuple[int, int]:
        if self._remaining is not None:
            return self._remaining.rank, self._remaining.world_size
        return self.args.process_index, self.args.world_size

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples of a step over all ranks. Local."""
        return self._total_batch_size or int(super().get_total_train_batch_size(args))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, with a model that ends up equal on all ranks. Collective."""
        if self._joins:
            check_joining(self.args, self.accelerator)
        with contextlib.ExitStack() as self._training:
            return super().train(*args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Return the Trainer's values, after comparing the ranks' numbers of batches. Collective."""
        values: tuple[Any, ...] = super().set_initial_training_values(args, dataloader)
        *others, steps_in_epoch, max_steps = values
        lengths = self.accelerator.gather(torch.tensor([[steps_in_epoch, max_steps]], device=args.device)).tolist()
        if not self._joins:
            check_lengths(lengths)
        return *others, steps_in_epoch, max(steps for _, steps in lengths)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if isinstance(self.optimizer, AcceleratedOptimizer):  # of an earlier train()
            self.optimizer = self.optimizer.optimizer
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self._steps_in_backward:
            self.optimizer.scaler = None  # the model has it
        self._keep()
        return prepared

    def _wrap_model(self, model: nn.Module, training: bool = True, *_: Any, **__: Any) -> nn.Module:
        if not training:
            return model
        module = self.accelerator.prepare_model(model, evaluation_mode=True)  # on its device, cast and compiled
        scaler, max_norm = self.accelerator.scaler, self.args.max_grad_norm
        options: dict[str, Any] = {"clip_grad_norm": max_norm} if self._steps_in_backward and max_norm > 0 else {}
        if self._remaining is not None:
            options["on_preemption"] = weakly(self._save_preempted)
        wrapped = wrap(module, self.optimizer, self._remaining, scaler=scaler, **options | self._gossip_options)
        self._gossip_model = self._training.enter_context(wrapped)
        self._training.callback(self._forget)
        return wrapped

    def _forget(self) -> None:
        assert self._gossip_model is not None
        self.model_wrapped = self._gossip_model.module
        self._gossip_model = None

    def training_step(self, model: GossipDataParallel, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Train on one batch as the Trainer does; a backward pass inside an accumulation makes no step. Local."""
        if num_items_in_batch is None:
            self._samples.add(model, lambda: next(len(each) for each in inputs.values() if hasattr(each, "shape")))
        elif model.algorithm.weighted:
            model.weigh(float(num_items_in_batch))  # of all batches of the step
        with contextlib.nullcontext() if self.accelerator.sync_gradients else model.no_sync():
            return super().training_step(model, inputs, num_items_in_batch)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return None if self._steps_in_backward else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return None if self._steps_in_backward else super()._get_grad_norm(model, grad_norm=grad_norm)

    @property
    def _steps_in_backward(self) -> bool:
        return steps_in_backward(self._gossip_options)

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self._epoch is not None:
            self._epoch.put_off(self.control, (tr_loss, grad_norm, *args), kwargs)
            return
        if self._steps_in_backward and self.control.should_log and self._gossip_model is not None:
            grad_norm = self._gossip_model.grad_norm  # read only where it is logged, since reading waits for the GPU
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epochs_trained, steps_trained = super()._init_training_state(*args, **kwargs)
        if not self._joins:
            return epochs_trained, steps_trained
        done = self.state.epoch or 0.0
        if done != int(done):
            raise ValueError(
                f"resume_from_checkpoint with join=True: the checkpoint was saved after {done:.2f} epochs, and how far "
                "each rank had come in its own batches is not saved; resume from one that was saved at the end of an "
                "epoch"
            )
        return int(done), 0  # the steps of a rank with more batches are counted on all

    def _run_epoch(self, model: GossipDataParallel, **kwargs: Any) -> None:
        if not self._joins:
            super()._run_epoch(model=model, **kwargs)
            return
        self._epoch = epoch = UnevenEpoch(model, self, kwargs["epoch"], kwargs["num_update_steps_per_epoch"])
        try:
            with model.join():
                super()._run_epoch(model=model, **kwargs)
        finally:
            self._epoch = None
        epoch.end()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        assert self._gossip_model is not None
        self.optimizer.eval()  # for schedule-free optimizers: keep the weights that are evaluated
        self._gossip_model.global_avg()
        self._training.close()
        return super()._finalize_training(*args, **kwargs)

    # ------------------------------------------------------------------ evaluating and saving

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._gossip_model is None else self._gossip_model.averaged()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer does, on the average of all replicas. Collective."""
        with self._averaged():
            return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch as the Trainer does, unless all ranks are preempted, which ends the evaluation. Local."""
        if self._gossip_model is not None:
            self._gossip_model._live().on_forward()
        return super().prediction_step(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save as the Trainer does, but the average of all replicas. Collective within ``train()``."""
        with self._averaged():
            super().save_model(*args, **kwargs)

    def _keep(self) -> GossipDataParallel:
        """Return the model, which keeps the scheduler that there is now, and the scaler. Local."""
        assert self._gossip_model is not None
        scaler = self.accelerator.scaler
        self._gossip_model.keep(scheduler=self.lr_scheduler, **({} if scaler is None else {"scaler": scaler}))
        return self._gossip_model

    def _save_preempted(self, _: GossipDataParallel) -> None:
        """Save a checkpoint when all ranks are preempted."""
        self._save_checkpoint(self.model_wrapped, trial=None)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(self._keep(), Path(output_dir) / _FOLDER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (Path(checkpoint) / _FOLDER).is_dir():
            load(self._keep(), Path(checkpoint) / _FOLDER)
            return
        if checkpoint is not None and self.args.process_index == 0:
            logger.warning("{} holds no replicas of the ranks: all ranks start from its weights", checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self._remaining is not None:
            self._remaining.broadcast_module(self.model, "broadcasting the best model from rank 0")
            return
        timeout = self._gossip_options.get("timeout", DEFAULT_TIMEOUT)
        with contextlib.closing(World(timeout)) as world:  # a rank might not see the checkpoint's folder
            tensors = itertools.chain(self.model.parameters(), self.model.buffers())
            world.broadcast_(tensors, "broadcasting the best model from rank 0")


def _unwrap_model(unwrap_model: Callable[..., nn.Module], model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Unwrap the gossip wrapper too: the Trainer decides by the class name of the model whether to shift labels."""
    if isinstance(model, GossipDataParallel):
        return unwrap_model(model.module, keep_torch_compile=False)
    return unwrap_model(model, *args, **kwargs)


def check_trainer_options(options: Mapping[str, Any] | None, join: bool) -> None:
    """Refuse what is not an option, or is passed elsewhere. Local."""
    if not isinstance(options, Mapping | None):
        raise TypeError(
            f"gossip must be a mapping of GossipDataParallel's arguments, such as {{'topology': 'ring'}}, got "
            f"{options!r}"
        )
    if type(join) is not bool:
        raise TypeError(f"join must be True or False, got {join!r}")
    check_options("gossip", options or {}, _OF_TRAINER)


def check_total_batch_size(total: int | None, args: Any, *, joins: bool) -> None:
    """Refuse a number of samples that cannot be held. Local."""
    if total is None:
        return
    least = args.world_size * args.gradient_accumulation_steps
    check_integer("total_batch_size", total, minimum=least)
    refused = {
        f"gradient_accumulation_steps={args.gradient_accumulation_steps}, which does not divide it": (
            total % args.gradient_accumulation_steps
        ),
        f"dataloader_num_workers={args.dataloader_num_workers}: batches that are fetched ahead are divided among the "
        "ranks of that time; leave it at 0": args.dataloader_num_workers,
        "join=True: all ranks have a share of every batch": joins,
        "group_by_length=True: batches are drawn at random": getattr(args, "group_by_length", False),
    }
    refuse_any(refused, f"total_batch_size={total} cannot be held with {{}}")


def check_arguments(args: Any, model: Any) -> None:
    """Refuse what can be refused before accelerate is set up. Local."""
    if training_store.joined() is not None:
        raise ValueError(
            "this process joins a training, but the Trainer counts batches and epochs from its own beginning, and "
            "logs, evaluates and saves together with the others; start all ranks again, and resume_from_checkpoint"
        )
    if isinstance(model, GossipDataParallel):
        raise ValueError("model is a GossipDataParallel; pass the module itself, which the GossipTrainer wraps")
    whole = "each rank of gossip has a whole replica; "
    optim = str(getattr(args.optim, "value", args.optim))
    is_sharded = getattr(model, "is_distributed_loading_by_transformers", False) or any(
        (getattr(model, name, None) or 1) > 1 for name in ("_tp_size", "tp_size")
    )
    sagemaker = is_sagemaker_mp_enabled() or is_sagemaker_dp_enabled()
    refused = {
        f"deepspeed={args.deepspeed!r}: {whole}leave it out": args.deepspeed,
        f"fsdp={args.fsdp!r}: {whole}leave it out": args.fsdp,
        "SageMaker's parallelism: it replaces torch.distributed; start the job with torchrun": sagemaker,
        f"a parallelism_config: {whole}leave it out": args.parallelism_config is not None,
        f"a sharded model: {whole}load the model without tp_plan and distributed_config": is_sharded,
        "enable_jit_checkpoint=True: ranks receive the signal at different steps, but a checkpoint is of one step; "
        "pass save_steps": args.enable_jit_checkpoint,
        "auto_find_batch_size=True: a rank that runs out of memory would start over alone; pass a "
        "per_device_train_batch_size that fits": args.auto_find_batch_size,
        f"optim={optim!r}: it updates in its own hooks, where nothing is exchanged; choose another": (
            "lomo" in optim or "layerwise" in optim
        ),
        f"torch.nn.DataParallel for {args.n_gpu} GPUs: start one process per GPU, with torchrun --nproc-per-node, or "
        "expose one GPU with CUDA_VISIBLE_DEVICES": args.n_gpu > 1,
        **{
            f"{name}={getattr(args, name)!r}: there is no DistributedDataParallel: {remedy}": (
                getattr(args, name) is not None
            )
            for name, remedy in _OF_DDP.items()
        },
    }
    refuse_any(refused, "GossipTrainer does not train with {}")


def check_joining(args: Any, accelerator: Any) -> None:
    """Refuse what would have all ranks wait in every step for one without batches. Local."""
    seen = args.include_num_input_tokens_seen
    refused = {
        "average_tokens_across_devices=True": args.average_tokens_across_devices,
        f"include_num_input_tokens_seen={seen!r}": seen != "no",
        "dispatch_batches=True": accelerator.dataloader_config.dispatch_batches,
    }
    refuse_any(
        refused,
        "{} with join=True: all ranks would wait in every step, also for one that has no more batches; leave one of "
        "the two out",
    )


def check_lengths(lengths: Sequence[Sequence[int]]) -> None:
    """Refuse ranks with different numbers of batches. Local."""
    if any(other != lengths[0] for other in lengths):
        raise ValueError(
            f"the ranks have different numbers of batches in an epoch, {', '.join(str(n) for n, _ in lengths)}, "
            "and would wait for each other until the time-out; pass join=True to GossipTrainer, or give all ranks "
            "the same number"
        )
