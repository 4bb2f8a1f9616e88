"""Optimizers of schedulefree: they train at other parameters than those that are evaluated, and averaged."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from replicas import flat, gathered
from safetensors.torch import load_file
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from torch import nn

import gossip
from gossip import GossipDataParallel, GossipError

OPTIMIZERS = {
    "AdamW": functools.partial(AdamWScheduleFree, lr=0.05, foreach=False),
    "SGD": functools.partial(SGDScheduleFree, lr=0.5, foreach=False),
}


def step(model: GossipDataParallel, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * model.rank + number)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    nn.functional.mse_loss(model(x), x[:, :2] * (1 + model.rank)).backward()
    model.optimizer.step()
    model.optimizer.zero_grad()


def trained(name: str, looks: bool, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GossipDataParallel(
        nn.Linear(3, 2).double(), OPTIMIZERS[name], "one_peer_exponential", step_in_backward=False, bucket_cap_mb=1e-5
    )
    model.optimizer.train()
    seen = {}
    for number in range(8):
        step(model, number)
        if looks and number == 4:
            x, y, z = (torch.cat(values) for values in zip(*points(model), strict=True))
            assert torch.equal(y, flat(model.module))
            with model.averaged():
                seen["averaged"] = flat(model.module)
                model.optimizer.eval()  # as a trainer does in its evaluation
                assert torch.equal(flat(model.module), seen["averaged"])
                gossip.export(model, folder / "exported.safetensors")
            assert torch.equal(flat(model.module), y), "put back to the bit"
            seen |= {"x": x, "z": z}
            with pytest.raises(GossipError, match=r"call its eval\(\) before global_avg\(\)"):
                model.global_avg()
            with pytest.raises(GossipError, match=r"call its eval\(\) before export\(\)"):
                gossip.export(model, folder / "refused.safetensors")
    seen["y"] = flat(model.module)
    model.optimizer.eval()
    seen["own"] = flat(model.module)
    model.global_avg()
    seen["in the end"] = flat(model.module)
    model.close()
    return seen


def points(model: GossipDataParallel) -> list[tuple[torch.Tensor, ...]]:
    """For each parameter what is evaluated, by the definition y = beta x + (1 - beta) z; y; and z."""
    (group,) = model.optimizer.param_groups
    beta = group["betas"][0] if "betas" in group else group["momentum"]
    found = []
    for parameter in group["params"]:
        z, y = model.optimizer.state[parameter]["z"].flatten(), parameter.detach().flatten()
        found.append(((y - (1 - beta) * z) / beta, y.clone(), z))
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2, anew=True)
def test_the_average_is_that_of_what_is_evaluated(name: str, tmp_path: Path) -> None:
    seen, unseen = (trained(name, looks, tmp_path) for looks in (True, False))
    assert not torch.equal(*gathered(seen["z"]))
    exported = load_file(tmp_path / "exported.safetensors")
    assert not (tmp_path / "refused.safetensors").exists()
    torch.testing.assert_close(seen["averaged"], gathered(seen["x"]).mean(0), rtol=0, atol=1e-12)
    assert torch.equal(torch.cat([exported[key].flatten() for key in ("weight", "bias")]), seen["averaged"])
    assert torch.equal(seen["y"], unseen["y"]), "training goes on as if no average had been taken"
    assert torch.equal(*gathered(seen["in the end"]))
    torch.testing.assert_close(seen["in the end"], gathered(seen["own"]).mean(0), rtol=0, atol=1e-12)


def test_steps_bucket_by_bucket_are_refused() -> None:
    model = GossipDataParallel(nn.Linear(3, 2), functools.partial(AdamWScheduleFree, lr=0.1), "ring")
    model.optimizer.train()
    with pytest.raises(GossipError, match=r"AdamWScheduleFree keeps .* step_in_backward=False"):
        model(torch.ones(1, 3)).sum().backward()
    model.close()
