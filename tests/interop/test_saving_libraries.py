"""transformers saves every weight of a model, wrapped, bare and after close."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from torch import nn

from gossip import GossipDataParallel, launch

SGD = functools.partial(torch.optim.SGD, lr=0.1)
TOKENS = torch.arange(12).view(2, 6)


def gpt() -> transformers.GPT2LMHeadModel:
    """Its head is its embedding."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=12, n_positions=6, n_embd=8, n_layer=2, n_head=2)
    )


def train(model: nn.Module) -> None:
    model(input_ids=TOKENS).logits.square().mean().backward()


def stages() -> Iterator[tuple[str, nn.Module]]:
    """A model as it is saved: wrapped, bare while it is wrapped, after close."""
    model = GossipDataParallel(gpt(), SGD, "complete")
    train(model)
    yield "wrapped", model
    train(model)
    yield "bare", model.module
    model.close()
    yield "closed", model.module


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name


def distinct(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a file has: a tied tensor once."""
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return {name: values for name, values in module.state_dict().items() if name in names}


def save_with_transformers(folder: Path) -> None:
    for name, model in stages():
        path = folder / name
        model.save_pretrained(path)
        if dist.get_rank() == 0:  # it writes there alone
            assert_same(safetensors.torch.load_file(path / "model.safetensors"), distinct(model))
            found = transformers.GPT2LMHeadModel.from_pretrained(path)
            assert_same(found.state_dict(), model.state_dict())


def test_transformers_saves_every_weight_at_two_ranks(tmp_path: Path) -> None:
    launch(save_with_transformers, tmp_path, world_size=2)
