"""Refusal of settings of Transformers' Trainer that gossip does not support, with the remedy for each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils import is_sagemaker_dp_enabled, is_sagemaker_mp_enabled

from gossip import GossipDataParallel

_OF_TRAINER = {
    "module": "pass model= to the Trainer",
    "optimizer": "pass optimizers=(optimizer, None) to the Trainer, or TrainingArguments(optim=...)",
    "clip_grad_norm": "pass TrainingArguments(max_grad_norm=...)",
    "scaler": "pass TrainingArguments(fp16=True), whose scaler is used",
    "process_group": "train with all ranks of the default process group",
    "on_peer_loss": "train with all ranks to the end: the Trainer needs all of them to log, evaluate and save",
}
"""Arguments of the wrapper that are not passed to it directly, and what to do instead."""

_OF_DDP = {
    "ddp_find_unused_parameters": "a parameter without a gradient needs no flag",
    "ddp_bucket_cap_mb": 'pass gossip={"bucket_cap_mb": ...}',
    "ddp_broadcast_buffers": 'pass gossip={"buffers": "average"} to mix them in every step',
    "ddp_static_graph": "gossip needs no assumption about the graph",
}
_OF_ACCELERATE = ("NO", "MULTI_")
"""Prefixes of accelerate's distributed types: one process, or one per device."""


def check_options(options: Mapping[str, Any] | None, join: bool) -> None:
    """Refuse what is not an option, or is passed elsewhere. Local.

    Raises
    ------
    TypeError, ValueError
        An option is refused; the text says where it belongs.
    """
    if not isinstance(options, Mapping | None):
        raise TypeError(
            f"gossip must be a mapping of GossipDataParallel's arguments, such as {{'topology': 'ring'}}, got "
            f"{options!r}"
        )
    if type(join) is not bool:
        raise TypeError(f"join must be True or False, got {join!r}")
    known = inspect.signature(GossipDataParallel).parameters.keys() - _OF_TRAINER.keys()
    for name, value in (options or {}).items():
        if name in _OF_TRAINER and (name, value) != ("on_peer_loss", "raise"):
            raise ValueError(f"gossip has {name}={value!r}; leave it out, and {_OF_TRAINER[name]}")
        if name not in known and name not in _OF_TRAINER:
            raise TypeError(
                f"gossip has {name!r}, which is not an argument of GossipDataParallel: {', '.join(sorted(known))}"
            )


def check_arguments(args: Any, model: Any) -> None:
    """Refuse what can be refused before accelerate is set up. Local.

    Raises
    ------
    ValueError
        An argument is refused; the text names it and says what to do.
    """
    if isinstance(model, GossipDataParallel):
        raise ValueError("model is a GossipDataParallel; pass the module itself, which the GossipTrainer wraps")
    refused = {
        f"deepspeed={args.deepspeed!r}": bool(args.deepspeed),
        f"fsdp={args.fsdp!r}": bool(args.fsdp),
    }
    for text, is_refused in refused.items():
        if is_refused:
            _refuse(text, "it divides the model among the ranks, whereas each rank of gossip has a whole replica")
    if is_sagemaker_mp_enabled() or is_sagemaker_dp_enabled():
        _refuse("SageMaker's parallelism", "it replaces torch.distributed; start the job with torchrun")
    _check_parallelism(args.parallelism_config, model)
    if args.enable_jit_checkpoint:
        _refuse(
            "enable_jit_checkpoint=True",
            "ranks receive the signal at different steps, but a checkpoint is of one step; pass save_steps",
        )
    for name, remedy in _OF_DDP.items():
        if (value := getattr(args, name)) is not None:
            _refuse(f"{name}={value!r}", f"there is no DistributedDataParallel: {remedy}")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        _refuse(f"optim={optimizer!r}", "it updates in its own hooks, where nothing is exchanged; choose another")


def check_accelerator(accelerator: Any, args: Any) -> None:
    """Refuse what the environment or ``accelerate launch`` has set up. Local.

    Raises
    ------
    ValueError
        A setting is refused; the text names it and says what to do.
    """
    kind = accelerator.distributed_type.value
    if not kind.startswith(_OF_ACCELERATE):
        _refuse(f"accelerate's {kind}", "each rank of gossip has a whole replica; leave it out of `accelerate config`")
    if args.n_gpu > 1:
        _refuse(
            f"torch.nn.DataParallel for {args.n_gpu} GPUs",
            "start one process per GPU, with torchrun --nproc-per-node, or expose one GPU with CUDA_VISIBLE_DEVICES",
        )
    _check_parallelism(accelerator.parallelism_config, None)
    if accelerator.mixed_precision == "fp8":
        _refuse('mixed precision "fp8"', "it replaces layers; pass TrainingArguments(bf16=True)")


def _check_parallelism(config: Any, model: Any) -> None:
    sizes = [getattr(config, f"{name}_size", 1) for name in ("tp", "cp", "sp", "dp_shard")]
    sizes += [getattr(model, name, None) or 1 for name in ("_tp_size", "tp_size")]
    if max(sizes) > 1 or getattr(model, "is_distributed_loading_by_transformers", False):
        _refuse(
            "tensor, context or sequence parallelism, or a sharded model",
            "each rank of gossip has a whole replica; load the model without tp_plan and distributed_config, and leave "
            "parallelism_config out",
        )


def _refuse(what: str, remedy: str) -> None:
    raise ValueError(f"GossipTrainer does not train with {what}: {remedy}")


def check_join(args: Any) -> None:
    """Refuse what cannot work when ranks make different numbers of steps. Local.

    Raises
    ------
    ValueError
        An argument is refused; the text names it and says what to do.
    """
    if args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices=True with join=True: all ranks would wait in every step; set it to False"
        )
    if args.include_num_input_tokens_seen != "no":
        raise ValueError(
            f"include_num_input_tokens_seen={args.include_num_input_tokens_seen!r} with join=True: all ranks would "
            "wait after every batch; leave it out"
        )


def check_search(args: Any, accelerator: Any) -> None:
    """Refuse what a rank that runs out of memory would leave its peers waiting in, unknown to gossip. Local.

    Raises
    ------
    ValueError
        An argument is refused; the text names it and says what to do.
    """
    refused = {
        "average_tokens_across_devices=True": args.average_tokens_across_devices,
        f"include_num_input_tokens_seen={args.include_num_input_tokens_seen!r}": args.include_num_input_tokens_seen
        != "no",
        "dispatch_batches=True": accelerator.dataloader_config.dispatch_batches,
    }
    for text, is_refused in refused.items():
        if is_refused:
            raise ValueError(
                f"{text} with auto_find_batch_size=True: all ranks would wait in every step for one that has run out "
                "of memory; leave one of the two out"
            )


def check_lengths(lengths: Sequence[Sequence[int]], *, joins: bool) -> None:
    """Refuse ranks with different numbers of batches unless they join. Local.

    Raises
    ------
    ValueError
        The numbers differ; the text says how many batches each rank has, and what to do.
    """
    if not joins and any(other != lengths[0] for other in lengths):
        raise ValueError(
            f"the ranks have different numbers of batches in an epoch, {', '.join(str(n) for n, _ in lengths)}, "
            "and would wait for each other until the time-out; pass join=True to GossipTrainer, or give all ranks "
            "the same number"
        )
