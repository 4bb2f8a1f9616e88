"""GossipTrainer: the same bits as the loop by hand, and refusals by name of what cannot train by gossip."""

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ParallelismConfig
from loops_by_hand import Case, collectives_counted
from ranks import on_ranks
from replicas import flat, gathered
from tiny_gpt2 import Tokens, batch_of, make_module, make_trainer
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, get_linear_schedule_with_warmup
from transformers.trainer_pt_utils import LabelSmoother

import gossip.integrations.transformers
from gossip import GossipDataParallel
from gossip.integrations.transformers import GossipTrainer

NUM_STEPS = 10
LR, MAX_NORM, WEIGHT_DECAY = 0.01, 0.5, 0.1


class Columns(Tokens):
    """One of which is no argument of the model."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "source": torch.tensor(index)}


class ScalingTrainer(GossipTrainer):
    """With the loss scale that fp16 has on a GPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


class Watch(TrainerCallback):
    """What there is to be seen of a model before the end, and the default group's collectives but those of logging."""

    def __init__(self) -> None:
        self.replica = torch.empty(0)
        self.norms: list[float] = []
        self.steps: list[int] = []
        self.called: list[str] = []
        self.trainer: Any = None
        self._counting = contextlib.ExitStack()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._counting.enter_context(collectives_counted(self.called))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._counting.close()
        self.replica = flat(self.trainer.model_wrapped)
        self.steps.append(self.trainer.model_wrapped.step)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "grad_norm" in logs:
            self.norms.append(logs["grad_norm"])
            self._counting.enter_context(collectives_counted(self.called))

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._counting.close()


@dataclass(frozen=True)
class TrainerCase(Case):
    trains: int = 1
    smoothing: float = 0.0
    compiles: bool = False
    scales: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.step_in_backward else {"step_in_backward": False}

    @property
    def num_batches(self) -> int:
        """Of one rank: the last step has one batch less, if it has several."""
        return NUM_STEPS * self.accumulates - (self.accumulates > 1)


CASES = {
    "fused": TrainerCase(),
    "fused, accumulated with a remainder": TrainerCase(clip=MAX_NORM, accumulates=3),
    "plain, accumulated with a remainder": TrainerCase(clip=MAX_NORM, accumulates=3, step_in_backward=False),
    "fused, bfloat16": TrainerCase(clip=MAX_NORM, half=torch.bfloat16, trains=2),
    "label smoothing": TrainerCase(smoothing=0.1),
    "fused, scaled": TrainerCase(clip=MAX_NORM, scales=True),
    "plain, scaled": TrainerCase(step_in_backward=False, scales=True),
    "compiled, trained twice": TrainerCase(compiles=True, trains=2),
}


def train_both_ways(case: TrainerCase) -> None:
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        trainer = make_trainer(
            Path(folder),
            make_module(),
            watch,
            ScalingTrainer if case.scales else GossipTrainer,
            train_dataset=Columns(2 * dist.get_world_size() * case.num_batches),
            gossip=case.options or None,
            max_steps=NUM_STEPS,
            train_sampling_strategy="sequential",
            learning_rate=LR,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=case.clip or 0.0,
            gradient_accumulation_steps=case.accumulates,
            label_smoothing_factor=case.smoothing,
            bf16=case.half is not None,
            torch_compile=case.compiles,
            torch_compile_backend="aot_eager" if case.compiles else None,
        )
        if case.compiles:
            trainer.evaluate(Columns(2))
        for _ in range(case.trains):
            trainer.train()
    assert trainer.model_wrapped is trainer.model or case.compiles
    assert isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule) == case.compiles
    if case.half is not None:
        assert trainer.model._original_forward.__func__ is type(trainer.model).forward, "cast once"
    columns = list(next(iter(trainer.get_train_dataloader())))
    assert columns == ["input_ids", "labels"], "found by the signature of forward"
    assert watch.steps == [*range(1, NUM_STEPS + 1)] * case.trains, "one exchange for each step"
    assert watch.called == [], "collectives of the default group within steps"
    replica, average, norms = by_hand(case)
    torch.testing.assert_close(watch.replica, replica, rtol=0, atol=0)
    torch.testing.assert_close(flat(trainer.model), average, rtol=0, atol=0)
    assert torch.equal(gathered(average)[0], average)
    assert dist.get_world_size() == 1 or not torch.equal(*gathered(replica))
    if not case.scales or case.step_in_backward:
        assert watch.norms == pytest.approx(norms, rel=1e-6), "norms that are logged"
    if case.clip is not None:
        assert max(norms) > case.clip, "nothing was clipped"


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    decayed = Trainer.get_decay_parameter_names(None, module)  # type: ignore[arg-type]
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": WEIGHT_DECAY}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in module.named_parameters():
        groups[name not in decayed]["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=LR, fused=True)


def by_hand(case: TrainerCase) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    module = make_module()
    optimizer = make_optimizer(module)
    norms: list[float] = []
    for _ in range(case.trains):
        called = torch.compile(module, backend="aot_eager") if case.compiles else module
        model = GossipDataParallel(called, optimizer, **case.clipping, **case.options)
        train_by_hand(case, model, norms)
        replica = flat(model)
        model.global_avg()
        model.close()
    return replica, flat(module), norms


def train_by_hand(case: TrainerCase, model: GossipDataParallel, norms: list[float]) -> None:
    firsts = range(2 * model.rank, 2 * model.world_size * case.num_batches, 2 * model.world_size)
    batches = [batch_of(range(first, first + 2)) for first in firsts]
    scheduler = get_linear_schedule_with_warmup(model.optimizer, 0, NUM_STEPS)
    for first in range(0, len(batches), case.accumulates):
        window = batches[first : first + case.accumulates]
        num_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
        for number, batch in enumerate(window, 1):
            with (
                contextlib.nullcontext() if number == len(window) else model.no_sync(),
                torch.autocast("cpu", torch.bfloat16, enabled=case.half is not None),
            ):
                if case.smoothing:
                    logits = model(input_ids=batch["input_ids"], num_items_in_batch=num_items)
                    smoother = LabelSmoother(case.smoothing)
                    loss = smoother(logits, batch["labels"], shift_labels=True, num_items_in_batch=num_items)
                else:
                    loss = model(**batch, num_items_in_batch=num_items).loss
                loss.backward()
        if case.step_in_backward:
            norms.append(model.grad_norm)  # type: ignore[arg-type]
        else:
            norms.append(float(model.clip_grad_norm_(case.clip or float("inf"))))
            model.optimizer.step()
            model.zero_grad()
        scheduler.step()


@pytest.mark.parametrize(("world_size", "names"), [(2, [*CASES]), (1, ["fused, accumulated with a remainder"])])
@on_ranks(anew=True)
def test_trainer_makes_the_same_bits_as_the_loop_by_hand(world_size: int, names: list[str]) -> None:
    for name in names:
        print(name, "on", world_size)
        train_both_ways(CASES[name])


def of_arguments(**given: Any) -> Callable[[TrainingArguments, nn.Module], dict[str, Any]]:
    def change(arguments: TrainingArguments, _: nn.Module) -> dict[str, Any]:
        for name, value in given.items():
            setattr(arguments, name, value)
        return {}

    return change


def of_tensor_parallelism(_: TrainingArguments, module: nn.Module) -> dict[str, Any]:
    module._tp_size = 2  # type: ignore[assignment]
    return {}


def of_options(**given: Any) -> Callable[[TrainingArguments, nn.Module], dict[str, Any]]:
    return lambda *_: {"gossip": given}


def wrapped(_: TrainingArguments, module: nn.Module) -> dict[str, Any]:
    return {"model": GossipDataParallel(module, None)}


REFUSED: dict[str, tuple[Callable[[TrainingArguments, nn.Module], dict[str, Any]], str]] = {
    "DeepSpeed": (of_arguments(deepspeed={"zero_optimization": {"stage": 2}}), r"deepspeed=\{.*a whole replica"),
    "just in time": (of_arguments(enable_jit_checkpoint=True), r"enable_jit_checkpoint=True.*save_steps"),
    "batch size": (of_arguments(auto_find_batch_size=True), "auto_find_batch_size=True.*per_device_train_batch_size"),
    "unused parameters": (of_arguments(ddp_find_unused_parameters=False), "ddp_find_unused_parameters=False.*no flag"),
    "LOMO": (of_arguments(optim="lomo"), "optim='lomo'.*choose another"),
    "DataParallel": (of_arguments(_n_gpu=2), r"DataParallel for 2 GPUs.*torchrun --nproc-per-node"),
    "tensor parallelism": (of_tensor_parallelism, "a sharded model.*without tp_plan"),
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
    for name, (_, text) in (REFUSED | SURROUNDINGS).items():
        AcceleratorState._reset_state()
        GradientState._reset_state()
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1, disable_tqdm=True)
        module = make_module()
        changes = REFUSED[name][0](arguments, module) if name in REFUSED else {}
        surrounding = mock.patch.object(*SURROUNDINGS[name][0]) if name in SURROUNDINGS else contextlib.nullcontext()
        with surrounding, pytest.raises((ValueError, TypeError), match=text):
            GossipTrainer(**{"model": module, "args": arguments, "train_dataset": Tokens(2)} | changes)
