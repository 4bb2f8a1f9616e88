"""Muon and AdamW as one optimizer; ``test_optimizers`` has what it computes."""

import pytest
import torch
from torch import nn

from gossip import MuonAdamW
from gossip.optimizers.scopes import Scope, names_needed_whole, scope_of


def test_each_group_has_what_its_optimizer_needs() -> None:
    module = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("multihead_attn", "head")})
    optimizer = MuonAdamW(module.named_parameters())
    assert [scope_of(optimizer, [group]) for group in optimizer.param_groups] == [Scope.PARAMETER, Scope.ELEMENT]
    assert names_needed_whole(MuonAdamW, module) == {"multihead_attn.weight"}
    added = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    added.grad = torch.ones(2)
    loss = optimizer.step(lambda: 3.0)
    assert (loss, added.tolist()) == (3.0, pytest.approx([0.45] * 2))


def test_what_it_cannot_use_is_refused() -> None:
    with pytest.raises(TypeError, match=r"was given a Parameter; pass module.named_parameters\(\)"):
        MuonAdamW(nn.Linear(2, 2).parameters())
    names = ("head", "lm_head", "embed_tokens", "wte")
    with pytest.raises(ValueError, match=r"begins with one of adamw_on, \['emb', 'wte', .*; choose AdamW"):
        MuonAdamW(nn.ModuleDict({name: nn.Linear(2, 2) for name in names}).named_parameters())
    with pytest.raises(ValueError, match=r"adamw_on must be a list .*, got 'head'"):
        MuonAdamW(nn.Linear(2, 2).named_parameters(), adamw_on="head")
    with pytest.raises(ValueError, match=r"adamw_lr must be at least 0 and finite, got -1"):
        MuonAdamW(nn.Linear(2, 2).named_parameters(), adamw_lr=-1)
