"""GossipTrainer: what cannot train by gossip is refused at the start, by name and with the remedy."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ParallelismConfig
from ranks import on_ranks
from tiny_gpt2 import Tokens, make_module
from torch import nn
from transformers import TrainingArguments

import gossip.integrations.transformers
from gossip import GossipDataParallel
from gossip.integrations.transformers import GossipTrainer


def of_arguments(**given: Any) -> Callable[[TrainingArguments, nn.Module], dict[str, Any]]:
    def change(arguments: TrainingArguments, _: nn.Module) -> dict[str, Any]:
        for name, value in given.items():
            setattr(arguments, name, value)
        return {}

    return change


def sharded(_: TrainingArguments, module: nn.Module) -> dict[str, Any]:
    module._tp_size = 2  # type: ignore[assignment]
    return {}


def of_options(**given: Any) -> Callable[[TrainingArguments, nn.Module], dict[str, Any]]:
    return lambda *_: {"gossip": given}


def wrapped(_: TrainingArguments, module: nn.Module) -> dict[str, Any]:
    return {"model": GossipDataParallel(module, None)}


CASES: dict[str, tuple[Callable[[TrainingArguments, nn.Module], dict[str, Any]], str]] = {
    "DeepSpeed": (of_arguments(deepspeed={"zero_optimization": {"stage": 2}}), r"deepspeed=\{.*a whole replica"),
    "just in time": (of_arguments(enable_jit_checkpoint=True), r"enable_jit_checkpoint=True.*save_steps"),
    "batch size": (of_arguments(auto_find_batch_size=True), "auto_find_batch_size=True.*per_device_train_batch_size"),
    "unused parameters": (of_arguments(ddp_find_unused_parameters=False), "ddp_find_unused_parameters=False.*no flag"),
    "LOMO": (of_arguments(optim="lomo"), "optim='lomo'.*choose another"),
    "DataParallel": (of_arguments(_n_gpu=2), r"DataParallel for 2 GPUs.*torchrun --nproc-per-node"),
    "tensor parallelism": (sharded, "a sharded model.*without tp_plan"),
    "groups of ranks": (of_arguments(parallelism_config=ParallelismConfig(tp_size=1, cp_size=2)), "parallelism_config"),
    "a wrapped model": (wrapped, "model is a GossipDataParallel; pass the module itself"),
    "a norm": (of_options(clip_grad_norm=1.0), r"gossip got clip_grad_norm=1.0; leave it out.*max_grad_norm"),
    "coming back": (of_options(partition_timeout=9), "partition_timeout=9; leave it out, and train to the end without"),
    "a misspelled option": (of_options(topologie="ring"), "'topologie', which is not an argument of .*topology"),
    "no mapping": (lambda *_: {"gossip": "ring"}, r"gossip must be a mapping.*'topology': 'ring'.*got 'ring'"),
    "no truth value": (lambda *_: {"join": 1}, "join must be True or False, got 1"),
}


SURROUNDINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "SageMaker": (
        (gossip.integrations.transformers, "is_sagemaker_dp_enabled", lambda: True),
        "SageMaker's parallelism.*torchrun",
    ),
    "accelerate's FSDP": (
        (Accelerator, "distributed_type", DistributedType.FSDP),
        "distributed_type FSDP.*accelerate config",
    ),
}


@on_ranks(1, anew=True)
def test_what_cannot_train_by_gossip_is_refused_by_name(tmp_path: Path) -> None:
    for name, (_, text) in (CASES | SURROUNDINGS).items():
        AcceleratorState._reset_state()
        GradientState._reset_state()
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1, disable_tqdm=True)
        module = make_module()
        changes = CASES[name][0](arguments, module) if name in CASES else {}
        surrounding = mock.patch.object(*SURROUNDINGS[name][0]) if name in SURROUNDINGS else contextlib.nullcontext()
        with surrounding, pytest.raises((ValueError, TypeError), match=text):
            GossipTrainer(**{"model": module, "args": arguments, "train_dataset": Tokens(2)} | changes)
