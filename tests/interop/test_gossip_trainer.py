"""GossipTrainer: the same bits as the loop by hand."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import collectives_counted
from replicas import flat, gathered
from tiny_gpt2 import batch_of, make_module, make_trainer, sample
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, get_linear_schedule_with_warmup
from transformers.trainer_pt_utils import LabelSmoother

from gossip import GossipDataParallel, launch
from gossip.integrations.transformers import GossipTrainer

NUM_STEPS = 10
LR, MAX_NORM, WEIGHT_DECAY = 0.01, 0.5, 0.1


class Columns(Dataset):
    """One of which is no argument of the model."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**sample(index), "source": torch.tensor(index)}


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
class Case:
    """How a model is trained."""

    max_norm: float = 0.0
    accumulates: int = 1
    trains: int = 1
    smoothing: float = 0.0
    bf16: bool = False
    compiles: bool = False
    scales: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_fused(self) -> bool:
        return self.options.get("step_in_backward", True)

    @property
    def num_batches(self) -> int:
        """Of one rank: the last step has one batch less, if it has several."""
        return NUM_STEPS * self.accumulates - (self.accumulates > 1)


PLAIN = {"step_in_backward": False}
CASES = {
    "fused": Case(),
    "fused, accumulated with a remainder": Case(max_norm=MAX_NORM, accumulates=3),
    "plain, accumulated with a remainder": Case(max_norm=MAX_NORM, accumulates=3, options=PLAIN),
    "fused, bfloat16": Case(max_norm=MAX_NORM, bf16=True, trains=2),
    "label smoothing": Case(smoothing=0.1),
    "fused, scaled": Case(max_norm=MAX_NORM, scales=True),
    "plain, scaled": Case(options=PLAIN, scales=True),
    "compiled, trained twice": Case(compiles=True, trains=2),
}


def train_both_ways(case: Case) -> None:
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
            max_grad_norm=case.max_norm,
            gradient_accumulation_steps=case.accumulates,
            label_smoothing_factor=case.smoothing,
            bf16=case.bf16,
            torch_compile=case.compiles,
            torch_compile_backend="aot_eager" if case.compiles else None,
        )
        if case.compiles:
            trainer.evaluate(Columns(2))
        for _ in range(case.trains):
            trainer.train()
    assert trainer.model_wrapped is trainer.model or case.compiles
    assert isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule) == case.compiles
    if case.bf16:
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
    if not case.scales or case.is_fused:
        assert watch.norms == pytest.approx(norms, rel=1e-6), "norms that are logged"
    if case.max_norm:
        assert max(norms) > case.max_norm, "nothing was clipped"


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    decayed = Trainer.get_decay_parameter_names(None, module)  # type: ignore[arg-type]
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": WEIGHT_DECAY}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in module.named_parameters():
        groups[name not in decayed]["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=LR, fused=True)


def by_hand(case: Case) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    module = make_module()
    optimizer = make_optimizer(module)
    clips = {"clip_grad_norm": case.max_norm} if case.is_fused and case.max_norm else {}
    norms: list[float] = []
    for _ in range(case.trains):
        called = torch.compile(module, backend="aot_eager") if case.compiles else module
        model = GossipDataParallel(called, optimizer, **clips, **case.options)
        train_by_hand(case, model, norms)
        replica = flat(model)
        model.global_avg()
        model.close()
    return replica, flat(module), norms


def train_by_hand(case: Case, model: GossipDataParallel, norms: list[float]) -> None:
    firsts = range(2 * model.rank, 2 * model.world_size * case.num_batches, 2 * model.world_size)
    batches = [batch_of(range(first, first + 2)) for first in firsts]
    scheduler = get_linear_schedule_with_warmup(model.optimizer, 0, NUM_STEPS)
    for first in range(0, len(batches), case.accumulates):
        window = batches[first : first + case.accumulates]
        num_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
        for number, batch in enumerate(window, 1):
            with (
                contextlib.nullcontext() if number == len(window) else model.no_sync(),
                torch.autocast("cpu", torch.bfloat16, enabled=case.bf16),
            ):
                if case.smoothing:
                    logits = model(input_ids=batch["input_ids"], num_items_in_batch=num_items)
                    smoother = LabelSmoother(case.smoothing)
                    loss = smoother(logits, batch["labels"], shift_labels=True, num_items_in_batch=num_items)
                else:
                    loss = model(**batch, num_items_in_batch=num_items).loss
                loss.backward()
        if case.is_fused:
            norms.append(model.grad_norm)  # type: ignore[arg-type]
        else:
            norms.append(float(model.clip_grad_norm_(case.max_norm or float("inf"))))
            model.optimizer.step()
            model.zero_grad()
        scheduler.step()


def train_all(names: list[str]) -> None:
    for name in names:
        print(name)
        train_both_ways(CASES[name])


@pytest.mark.parametrize(("world_size", "names"), [(2, [*CASES]), (1, ["fused, accumulated with a remainder"])])
def test_trainer_makes_the_same_bits_as_the_loop_by_hand(world_size: int, names: list[str]) -> None:
    launch(train_all, names, world_size=world_size)
