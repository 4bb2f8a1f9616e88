"""GossipTrainer: checkpoints, what is evaluated and what is saved."""

import contextlib
import functools
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from replicas import flat
from safetensors.torch import load_file
from tiny_gpt2 import LENGTH, VOCABULARY, Tokens, batch_of, make_module, make_trainer
from torch import nn
from transformers import GPT2LMHeadModel, TrainerCallback

from gossip import LaunchError, launch

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's
LORA = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)


class Watch(TrainerCallback):
    """Every rank's own parameters after each step; and the end of a rank at one of them."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.replicas: dict[int, torch.Tensor] = {}
        self.trainer: Any = None
        self._dies_at = dies_at

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        self.replicas[state.global_step] = flat(self.trainer.model_wrapped)
        assert self.trainer.model_wrapped.step == state.global_step
        if state.global_step == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------- kill and resume


@dataclass
class Run:
    """What one rank saw of a run."""

    replicas: dict[int, torch.Tensor]
    final: torch.Tensor
    history: list[dict[str, float]] = field(default_factory=list)


def adapted() -> peft.PeftModel:
    return peft.get_peft_model(make_module(), LORA)


def run(folder: Path, *, dies_at: int | None = None, resumes: bool = False) -> Run:
    watch = Watch(dies_at)
    strategies = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 4, "eval_steps": 4}
    trainer = make_trainer(folder, adapted(), watch, gossip=OPTIONS, save_total_limit=2, **strategies)
    with contextlib.redirect_stdout(None):
        trainer.train(resume_from_checkpoint=True if resumes else None)
    return Run(watch.replicas, flat(trainer.model), trainer.state.log_history)


OPTIONS = {"step_in_backward": False, "compression": "int8", "topology": "ring"}


def losses(history: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]


def test_kill_and_resume_give_the_same_bits(tmp_path: Path) -> None:
    whole = launch(run, tmp_path / "whole", world_size=2)
    assert sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-8"]

    with pytest.raises(LaunchError):
        launch(functools.partial(run, dies_at=6), tmp_path / "killed", world_size=2)
    checkpoint = tmp_path / "killed" / "checkpoint-4"
    assert (checkpoint / "gossip" / "step_0000000004").is_dir()
    assert not (checkpoint / "optimizer.pt").exists()
    average = (whole[0].replicas[4] + whole[1].replicas[4]) / 2
    saved = adapted()
    peft.set_peft_model_state_dict(saved, load_file(checkpoint / "adapter_model.safetensors"))
    assert torch.equal(flat(saved), average), "what is saved is the average"
    assert not torch.equal(whole[0].replicas[4], whole[1].replicas[4])

    resumed = launch(functools.partial(run, resumes=True), tmp_path / "killed", world_size=2)
    for rank in range(2):
        assert torch.equal(resumed[rank].final, whole[rank].final)
        assert torch.equal(whole[rank].final, whole[0].final), "all ranks end with the same module"
        for step in range(5, 11):
            assert torch.equal(resumed[rank].replicas[step], whole[rank].replicas[step])
        assert losses(resumed[rank].history) == losses(whole[rank].history)

    evaluated = next(entry["eval_loss"] for entry in whole[0].history if entry["step"] == 4 and "eval_loss" in entry)
    assert evaluated == pytest.approx(loss_of(saved), abs=1e-6), "what is evaluated is the average"


def loss_of(module: nn.Module) -> float:
    module.eval()
    with torch.no_grad():
        return sum(float(module(**batch_of(range(first, first + 8))).loss) for first in (0, 8)) / 2


# ---------------------------------------------------------------------- before, within and after train()


class Counted(Exception):
    pass


def evaluate_and_save(folder: Path) -> None:
    watch, is_failing = Watch(), False

    def metrics(_: Any) -> dict[str, float]:
        assert trainer._gossip_model is None or not torch.equal(
            flat(trainer.model), watch.replicas[trainer.state.global_step]
        )
        if is_failing:
            raise Counted
        return {}

    module = make_module()
    before = flat(module)
    options = {"eval_strategy": "steps", "eval_steps": 3}
    trainer = make_trainer(folder, module, watch, compute_metrics=metrics, bf16=True, **options)
    with contextlib.redirect_stdout(None):
        assert trainer.evaluate()["eval_loss"] > 0
        trainer.train()
        after = flat(trainer.model)
        assert not torch.equal(before, after)
        loss = trainer.evaluate()["eval_loss"]
        predicted = trainer.predict(Tokens(6)).predictions

        is_failing = True
        with pytest.raises(Counted):
            trainer.train()
        assert trainer.state.global_step == 3
        assert torch.equal(flat(trainer.model), watch.replicas[3]), "what a rank trains is put back"
        assert trainer.model_wrapped is trainer.model
        is_failing = False
        with torch.no_grad():
            nn.utils.vector_to_parameters(after, trainer.model.parameters())
        assert trainer.evaluate()["eval_loss"] == loss
    assert predicted.shape == (6, LENGTH, VOCABULARY)
    if dist.get_rank() == 0:  # nobody else: the module is the same everywhere
        trainer.save_model(str(folder / "final"))
        assert torch.equal(flat(GPT2LMHeadModel.from_pretrained(folder / "final")), after)


def keep_the_best(folder: Path) -> None:
    class Hide(Watch):
        def on_log(self, _: Any, state: Any, *__: Any, logs: dict[str, float], **___: Any) -> None:
            if "train_loss" in logs and dist.get_rank() == 1:
                self.best = state.best_model_checkpoint
                state.best_model_checkpoint = str(folder / "not here")

    watch = Hide()
    trainer = make_trainer(
        folder,
        make_module(dropout=0.1),
        watch,
        load_best_model_at_end=True,
        greater_is_better=True,  # so that the first one is kept
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=2,
        eval_steps=2,
    )
    with contextlib.redirect_stdout(None):
        trainer.train()
    best = trainer.state.best_model_checkpoint if dist.get_rank() == 0 else watch.best
    assert best.endswith("checkpoint-2")
    kept = flat(GPT2LMHeadModel.from_pretrained(best))
    assert torch.equal(flat(trainer.model), kept), "also where the checkpoint cannot be seen"


def schedule_free(folder: Path) -> None:
    watch = Watch()
    strategies = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 4, "eval_steps": 3}
    given = {"optim": "schedule_free_adamw", "gossip": {"step_in_backward": False}}
    trainer = make_trainer(folder, make_module(dropout=0.1), watch, **given, **strategies)
    with contextlib.redirect_stdout(None):
        trainer.train()
    averages = [torch.empty_like(flat(trainer.model)) for _ in range(2)]
    dist.all_gather(averages, flat(trainer.model))
    assert torch.equal(*averages)
    assert trainer.state.log_history[-2]["eval_loss"] < trainer.state.log_history[3]["eval_loss"]


@on_ranks(2, anew=True)
def test_evaluating_saving_and_what_is_kept(tmp_path: Path) -> None:
    evaluate_and_save(tmp_path / "first")
    schedule_free(tmp_path / "second")
    keep_the_best(tmp_path / "fourth")
