"""Libraries that put DistributedDataParallel around a model that is wrapped already: refused, with the remedy."""

from __future__ import annotations

import functools
import inspect
import tempfile

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gossip import GossipDataParallel, GossipError, launch

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


class Tokens(Dataset):
    """Of which one column is no argument of the model."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(20, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens, "source": tokens}


def make_module() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def make_trainer(model: GossipDataParallel, folder: str) -> Trainer:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        max_steps=3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    return Trainer(model=model, args=arguments, train_dataset=Tokens(), optimizers=(model.optimizer, None))


def trained_by_trainer() -> str:
    model = GossipDataParallel(make_module(), ADAMW, "ring", step_in_backward=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, folder)
        with pytest.raises(GossipError) as caught:
            trainer.train()
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    model.close()
    return str(caught.value)


def test_trainer_is_refused() -> None:
    for text in launch(trained_by_trainer, world_size=2):
        assert "wrapped by a DistributedDataParallel" in text
        assert "gossip.integrations.transformers.GossipTrainer" in text


def trained_by_accelerate() -> tuple[str, int, float]:
    accelerator = Accelerator(cpu=True)
    model = GossipDataParallel(make_module(), ADAMW, "ring")
    prepared, loader = accelerator.prepare(model, DataLoader(Tokens(), batch_size=2))
    assert isinstance(prepared, DistributedDataParallel)
    batches = [{key: batch[key] for key in ("input_ids", "labels")} for batch in loader]
    with pytest.raises(GossipError) as caught:
        prepared(**batches[0])
    for batch in batches:
        accelerator.backward(model(**batch).loss)
    distance, _ = model.consensus_distance()
    model.close()
    return str(caught.value), model.step, distance


def test_accelerate_is_refused_and_the_model_itself_trains() -> None:
    for text, steps, distance in launch(trained_by_accelerate, world_size=2):
        assert "gossip.integrations.accelerate.prepare(accelerator, module, ...)" in text
        assert steps == 4
        assert distance > 0, "gradients were all-reduced"


def test_signature_is_that_of_a_model_of_transformers() -> None:
    with GossipDataParallel(make_module(), ADAMW) as model:
        assert inspect.signature(model.forward) == inspect.signature(model.module.forward)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # between the libraries
def test_adapter_that_peft_adds_after_wrapping_is_refused_by_name() -> None:
    module = get_peft_model(make_module(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    tokens = Tokens()[0]["input_ids"][None]
    with GossipDataParallel(module, ADAMW) as model:
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert model.step == 1
        model.add_adapter("second", LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        with pytest.raises(GossipError, match=r"lora_A\.second\.weight' was added after the module was wrapped"):
            model(input_ids=tokens)
