"""A tiny GPT-2 of random weights, and what it is trained on."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from gossip.integrations.transformers import GossipTrainer

VOCABULARY, LENGTH = 20, 8


def sample(index: int) -> dict[str, torch.Tensor]:
    """Of which some tokens are not to be predicted, the first among them: nothing comes before it."""
    tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
    labels = tokens.clone()
    labels[: 1 + index % 5] = -100
    return {"input_ids": tokens, "labels": labels}


def batch_of(indices: range) -> dict[str, torch.Tensor]:
    samples = [sample(index) for index in indices]
    return {key: torch.stack([each[key] for each in samples]) for key in samples[0]}


class Tokens(Dataset):
    """Samples from ``first`` on."""

    def __init__(self, length: int, first: int = 0) -> None:
        self._length, self._first = length, first

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return sample(self._first + index)


def make_module(*, dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


def make_trainer(
    folder: Path, module: nn.Module, watch: TrainerCallback, kind: type[GossipTrainer] = GossipTrainer, **given: Any
) -> Any:
    """A trainer of 2 epochs of 5 steps on 2 ranks; ``given`` are its own arguments and its TrainingArguments."""
    defaults = {
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.05,
        "num_train_epochs": 2,
    }
    names = ("gossip", "join", "total_batch_size", "train_dataset", "compute_metrics")
    own = {name: given.pop(name) for name in names if name in given}
    arguments = TrainingArguments(str(folder), use_cpu=True, **defaults | given)
    data = {"train_dataset": Tokens(20), "eval_dataset": Tokens(16)}
    watch.trainer = trainer = kind(module, arguments, callbacks=[watch], **data | own)
    return trainer
