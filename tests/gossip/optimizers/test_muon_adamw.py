"""Muon and AdamW as one optimizer."""

import pytest
import torch
from small_runs import MODES, TINY_BUCKETS, assert_same, finish, loss_of, make_module
from torch import nn

from gossip import GossipDataParallel, MuonAdamW
from gossip.optimizers.scopes import Scope, names_needed_whole, scope_of


@pytest.mark.parametrize("mode", MODES)
def test_the_results_are_those_of_two_optimizers_bit_for_bit(mode: str) -> None:
    plain, module = make_module(), make_module()
    matrices = [parameter for parameter in plain.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in plain.parameters() if parameter.ndim != 2]
    muon, adamw = torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, 0.01, (0.9, 0.95), weight_decay=0.1)
    model = GossipDataParallel(
        module, lambda named: MuonAdamW(named, 0.05, adamw_lr=0.01), bucket_cap_mb=TINY_BUCKETS, **MODES[mode]
    )
    for step in range(4):
        loss_of(plain, 0, step).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        finish(model)
    assert_same(model, plain)


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
