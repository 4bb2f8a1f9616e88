"""Low-rank adapters on a model of transformers: what is frozen costs nothing."""

from __future__ import annotations

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gossip import GossipDataParallel, launch


class Int8Linear(nn.Linear):
    """A linear layer whose weights are codes with a scale for each row."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source.in_features, source.out_features, bias=source.bias is not None)
        scale = source.weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (source.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def quantize_(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, Int8Linear(child))
        else:
            quantize_(child)


def adapted(is_quantized: bool) -> tuple[list[int], int, bool, float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    base = LlamaForCausalLM(config)
    if is_quantized:
        quantize_(base.model)
    module = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trained = sum(each.nbytes for each in module.parameters() if each.requires_grad)
    places = {name: each.data_ptr() for name, each in module.named_parameters() if not each.requires_grad}
    with GossipDataParallel(module, functools.partial(torch.optim.AdamW, lr=0.1), "ring") as model:
        sent = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * model.rank + step)
            tokens = torch.randint(64, (2, 8), generator=generator)
            model(input_ids=tokens, labels=tokens).loss.backward()
            stats = model.stats()
            assert stats is not None
            sent.append(stats.bytes_sent)
        distance, _ = model.consensus_distance()
        stayed = all(each.data_ptr() == places[name] for name, each in module.named_parameters() if name in places)
    return sent, trained, stayed, distance


@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_step_of_lora_sends_the_adapters_alone(is_quantized: bool) -> None:
    for sent, trained, stayed, distance in launch(adapted, is_quantized, world_size=2):
        assert sent == [trained] * 3
        assert stayed, "the base model lies where it lay"
        assert distance > 0, "the ranks train on data of their own"
