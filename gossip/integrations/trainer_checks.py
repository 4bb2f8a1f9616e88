"""Refusal of settings of Transformers' Trainer that gossip does not support, each with the remedy."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils import is_sagemaker_dp_enabled, is_sagemaker_mp_enabled

from gossip import GossipDataParallel
from gossip.communication import training_store
from gossip.integrations.common_checks import check_options, refuse
from topologies.validation import check_integer

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
    refuse(refused, f"total_batch_size={total} cannot be held with {{}}")


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
    refuse(refused, "GossipTrainer does not train with {}")


def check_joining(args: Any, accelerator: Any) -> None:
    """Refuse what would have all ranks wait in every step for one without batches. Local."""
    seen = args.include_num_input_tokens_seen
    refused = {
        "average_tokens_across_devices=True": args.average_tokens_across_devices,
        f"include_num_input_tokens_seen={seen!r}": seen != "no",
        "dispatch_batches=True": accelerator.dataloader_config.dispatch_batches,
    }
    refuse(
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
