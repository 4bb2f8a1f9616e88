"""Lightning Fabric by gossip: the same bits as the loop by hand; checkpoints with every rank's replica."""

import functools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning_fabric
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import MixedPrecision
from lightning_modules import NUM_BATCHES, batches, batches_of, network, precision
from loops_by_hand import Case, train_by_hand
from ranks import on_ranks
from replicas import SGD, flat, gathered
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import LBFGS

from gossip import GossipDataParallel, GossipError
from gossip.integrations import pytorch_lightning as of_lightning_fabric
from gossip.integrations.lightning import GossipFabricStrategy, replica


@dataclass(frozen=True)
class FabricCase(Case):
    optimizer: Any = SGD
    closure: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"topology": "ring", "step_in_backward": self.step_in_backward, **self.clipping}


CASES = {
    "fused": FabricCase(),
    "fused, accumulated": FabricCase(accumulates=2),
    "plain, accumulated": FabricCase(step_in_backward=False, accumulates=2, clip=0.5),
    "fused, bfloat16": FabricCase(half=torch.bfloat16),
    "fused, float16": FabricCase(half=torch.float16, clip=0.5),
    "plain, float16": FabricCase(half=torch.float16, clip=0.5, step_in_backward=False),
    "fused, closure": FabricCase(closure=True),
    "plain, closure": FabricCase(closure=True, step_in_backward=False),
    "lbfgs": FabricCase(optimizer=functools.partial(LBFGS, lr=0.1, max_iter=3), closure=True, step_in_backward=False),
}


def fabric_of(strategy: Any, library: Any = lightning.fabric, **options: Any) -> Any:
    fabric = library.Fabric(accelerator="cpu", strategy=strategy, **{"devices": 2, **options})
    fabric.launch()
    return fabric


def by_fabric(
    case: FabricCase, strategy: Any, library: Any = lightning.fabric
) -> tuple[torch.Tensor, int, torch.Tensor]:
    fabric = fabric_of(strategy, library, **precision(case, MixedPrecision))
    module = network(case.dtype)
    model, optimizer = fabric.setup(module, case.optimizer(module.parameters()))
    loader = fabric.setup_dataloaders(batches(case.dtype))
    for number, (x, y) in enumerate(loader, 1):
        is_step = case.is_step(number, NUM_BATCHES)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            fabric.backward(loss)
            return loss

        if case.closure:
            optimizer.step(closure)
            continue
        with fabric.no_backward_sync(model, enabled=not is_step):
            fabric.backward(mse_loss(model(x), y) / case.accumulates)
        if is_step:
            if case.clip is not None and not case.step_in_backward:
                fabric.clip_gradients(model, optimizer, max_norm=case.clip, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
    parameters, step = flat(module), replica(model).step
    replica(model).global_avg()
    fabric.strategy.teardown()
    return parameters, step, flat(module)


def by_hand(case: FabricCase) -> tuple[torch.Tensor, int]:
    scaler = case.scaler()
    module = network(case.dtype)
    model = GossipDataParallel(module, case.optimizer(module.parameters()), scaler=scaler, **case.options)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", case.half, enabled=case.half is not None):
            output = model(x if case.half is None else x.to(case.half))
        return mse_loss(output.to(y.dtype), y)

    dealt = batches_of(dist.get_rank(), 0, case.dtype, shuffles=False)
    if not case.closure:
        train_by_hand(case, model, dealt, loss_of, scaler)
    for x, y in dealt if case.closure else ():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            model.optimizer.zero_grad()
            loss = loss_of(x, y)
            loss.backward()
            return loss

        if case.step_in_backward:
            closure()
            model.optimizer.step()
        else:
            model.optimizer.step(closure)
    return flat(model), model.step


def check(case: FabricCase, found: tuple[torch.Tensor, int, torch.Tensor], expected: tuple[torch.Tensor, int]) -> None:
    parameters, step, average = found
    assert torch.equal(parameters, expected[0])
    assert step == expected[1] == case.num_steps(NUM_BATCHES), "one exchange for each step"
    assert not torch.equal(*gathered(parameters))
    assert torch.equal(*gathered(average))


@on_ranks(2, anew=True)
def test_fabric_is_the_loop_by_hand() -> None:
    for name, case in CASES.items():
        print(name)
        check(case, by_fabric(case, GossipFabricStrategy(**case.options)), by_hand(case))
    fused = CASES["fused"]
    other: Any = of_lightning_fabric.GossipFabricStrategy("ring")
    check(fused, by_fabric(fused, other, lightning_fabric), by_hand(fused))
    check(fused, by_fabric(fused, "gossip"), by_hand(fused))


@on_ranks(2, anew=True)
def test_what_is_saved_is_restored_bit_for_bit(tmp_path: Path) -> None:
    """Saved after three steps; gone on; restored, and gone on with the same batches."""
    path = os.path.join(tmp_path, "x.ckpt")
    fabric = fabric_of(GossipFabricStrategy("ring", compression="int8"))
    module = nn.Sequential(network(), nn.Dropout(0.3))
    adam = torch.optim.AdamW(module.parameters(), lr=0.05)
    model, optimizer = fabric.setup(module, adam)
    dealt = batches_of(dist.get_rank(), 0)
    state = {"model": model, "optimizer": optimizer, "number": 3}

    def train(some: list[Any]) -> list[torch.Tensor]:
        for x, y in some:
            fabric.backward(mse_loss(model(x), y))
        return [flat(module), *(each["exp_avg"].clone() for each in adam.state_dict()["state"].values())]

    at_saving = train(dealt[:3])[0]
    fabric.save(path, state)
    whole = train(dealt[3:])
    state["number"] = 0
    assert fabric.load(path, state) == {}
    assert torch.equal(flat(module), at_saving)
    assert all(map(torch.equal, train(dealt[3:]), whole)), "it goes on bit for bit"
    assert (state["number"], replica(model).step) == (3, NUM_BATCHES)
    bare = torch.load(path, weights_only=False)
    average = torch.cat([values.flatten() for values in bare["model"].values()])
    rows = gathered(at_saving)
    assert not torch.equal(*rows)
    torch.testing.assert_close(average, rows.mean(0), rtol=1e-12, atol=0)
    fabric.barrier()
    if fabric.is_global_zero:
        shutil.rmtree(f"{path}.gossip")
    fabric.barrier()
    fabric.load(path, state)
    assert torch.equal(flat(module), average), "without replicas all begin with it"
    fabric.strategy.teardown()


@on_ranks(2, anew=True)
def test_what_cannot_work_is_refused_by_name() -> None:
    fabric = fabric_of("gossip")
    module = network()
    model, optimizer = fabric.setup(module, SGD(module.parameters()))
    text = r"max_norm=...\) finds no gradients.*clip_grad_norm to the strategy.*step_in_backward=False"
    with pytest.raises(GossipError, match=text):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(GossipError, match=r"clip_val=...\) finds no gradients.*step_in_backward=False"):
        fabric.clip_gradients(model, optimizer, clip_val=1.0)
    with pytest.raises(GossipError, match=r"Sequential has parameters to be trained.*fabric.setup\(module, optimizer"):
        fabric.setup_module(network())
    with pytest.raises(GossipError, match=r"SGD was set up without the module.*fabric.setup\(module, optimizer"):
        fabric.setup_optimizers(SGD(network().parameters()))
    with pytest.raises(TypeError, match=r"fabric.setup\(module, optimizer\) returned with a gossip.*, got Sequential"):
        replica(module)
    frozen = network().requires_grad_(False)
    assert fabric.setup_module(frozen).module is frozen
    fabric.strategy.teardown()
    fabric = fabric_of("gossip", plugins=MixedPrecision("16-mixed", "cpu"))
    first, second = network(torch.float32), network(torch.float32)
    fabric.setup(first, SGD(first.parameters()))
    with pytest.raises(ValueError, match=r'precision="16-mixed": one GradScaler.*"bf16-mixed"'):
        fabric.setup(second, SGD(second.parameters()))
    fabric.strategy.teardown()
