"""Loops that are written for Accelerate, trained by gossip: the same bits as the loop by hand."""

import functools
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate.checkpointing
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin
from loops_by_hand import BATCH_SIZE, Case, collectives_counted, network, samples, train_by_hand
from ranks import on_ranks
from replicas import flat, gathered
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from gossip import GossipDataParallel, GossipError
from gossip.integrations.accelerate import prepare

NUM_STEPS = 10
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def accelerator_of(**options: Any) -> Accelerator:
    """A new one: they share their state within a process, and mean to be made once."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


CASES = {
    "fused": Case(),
    "fused, clipped": Case(clip=0.5),
    "fused, accumulated with a remainder": Case(accumulates=3),
    "plain, accumulated with a remainder": Case(step_in_backward=False, accumulates=3, clip=0.5),
    "fused, bfloat16": Case(half=torch.bfloat16),
}


def options_of(case: Case) -> dict[str, Any]:
    return {"topology": "one_peer_exponential", "step_in_backward": case.step_in_backward, **case.clipping}


def by_accelerate(case: Case) -> tuple[torch.Tensor, list[float], int, list[str]]:
    accelerator = accelerator_of(
        mixed_precision="no" if case.half is None else "bf16", gradient_accumulation_steps=case.accumulates
    )
    module = network(case.dtype)
    optimizer = SGD(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    loader = DataLoader(samples(2 * NUM_STEPS, case.dtype), BATCH_SIZE)
    model, optimizer, loader, scheduler = prepare(accelerator, module, optimizer, loader, scheduler, **options_of(case))
    norms: list[float] = []
    batches = iter(loader)
    first = next(batches)  # an iterator begins with a collective for the random numbers
    with collectives_counted([]) as called:
        for x, y in itertools.chain([first], batches):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients and case.clip is not None:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), case.clip)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert not model.module.state_dict().keys() ^ accelerator.unwrap_model(model).state_dict().keys()
    outcome = flat(model), norms, model.step, called
    model.close()
    return outcome


def by_hand(case: Case) -> tuple[torch.Tensor, list[float], int]:
    module = network(case.dtype)
    model = GossipDataParallel(module, SGD(module.parameters()), **options_of(case))
    scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 3, gamma=0.5)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.half is not None):
            output = model(x)
        return nn.functional.mse_loss(output.to(case.dtype), y)

    def end_step() -> None:
        for _ in range(2):  # accelerate's schedulers count the steps of all ranks
            scheduler.step()

    batches = list(DataLoader(samples(2 * NUM_STEPS, case.dtype), BATCH_SIZE))[model.rank :: 2]
    norms = train_by_hand(case, model, batches, loss_of, case.scaler(), end_step)
    return flat(model), norms, model.step


@on_ranks(2, anew=True)
def test_it_is_the_loop_by_hand() -> None:
    for name, case in CASES.items():
        parameters, norms, step, called = by_accelerate(case)
        expected, *others = by_hand(case)
        assert torch.equal(parameters, expected), name
        assert [norms, step] == others
        assert step == case.num_steps(NUM_STEPS), "one exchange for each optimizer step"
        assert len(norms) == (step if case.clip is not None else 0)
        assert called == [], "a step needs none of all ranks"
        assert not torch.equal(*gathered(parameters)), "replicas of their own, until they are averaged"


# ---------------------------------------------------------------------- checkpoints, evaluation


def train(accelerator: Accelerator, folder: Path, steps: range, *, resumes: bool) -> dict[str, Any]:
    module = network()
    adamw = functools.partial(torch.optim.AdamW, lr=0.05)
    loader = DataLoader(samples(2 * NUM_STEPS), BATCH_SIZE)
    options = {"topology": "ring", "compression": "int8"}
    model, optimizer, loader = prepare(accelerator, module, adamw, loader, **options)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 3, gamma=0.5))
    if resumes:
        accelerator.load_state(str(folder))
    for x, y in list(loader)[steps.start : steps.stop]:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if not resumes and steps.stop < NUM_STEPS:
        accelerator.save_state(str(folder))
    with model.averaged():
        average = flat(module)
    state = optimizer.optimizer.state_dict()["state"]
    model.global_avg()
    return {
        "average": average,
        "in the end": flat(module),
        "moments": [each["exp_avg"].clone() for each in state.values()],
        "rate": optimizer.param_groups[0]["lr"],
        "step": model.step,
    }


@on_ranks(2, anew=True)
def test_what_is_saved_and_resumed(tmp_path: Path) -> None:
    whole = train(accelerator_of(), tmp_path, range(NUM_STEPS), resumes=False)
    half = train(accelerator_of(), tmp_path, range(NUM_STEPS // 2), resumes=False)
    rest = train(accelerator_of(), tmp_path, range(NUM_STEPS // 2, NUM_STEPS), resumes=True)
    assert torch.equal(rest["average"], whole["average"])
    assert all(map(torch.equal, rest["moments"], whole["moments"]))
    assert (rest["rate"], rest["step"]) == (whole["rate"], whole["step"]) == (0.05 * 0.5**6, NUM_STEPS)
    assert torch.equal(*gathered(whole["in the end"])), "the same on all ranks"
    saved = network()
    saved.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(flat(saved), half["average"])
    assert not torch.equal(*gathered(whole["moments"][0])), "every rank has an optimizer of its own"


@on_ranks(2, anew=True)
def test_uneven_inputs() -> None:
    loaders = DataLoaderConfiguration(even_batches=False)
    accelerator = accelerator_of(dataloader_config=loaders)
    loader = DataLoader(samples(5), BATCH_SIZE)
    model, optimizer, loader = prepare(accelerator, network(), SGD, loader, topology="ring")
    with pytest.raises(GossipError, match=r"with model\.join\(\):"):
        accelerator.join_uneven_inputs([model])
    num_batches = 0
    with model.join():
        for x, y in loader:
            num_batches += 1
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
    with model.averaged(), torch.no_grad():
        outputs = [accelerator.gather_for_metrics(model(x)) for x, _ in accelerator.prepare(DataLoader(samples(2)))]
    assert sum(map(len, outputs)) == 6
    assert (num_batches, model.step) == (3 - dist.get_rank(), 3)


# ---------------------------------------------------------------------- one process, refusals


def test_in_one_process_accumulated_passes_make_no_steps() -> None:
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = prepare(accelerator, network(), SGD, topology="ring")
    for number in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 4, dtype=torch.float64)).sum())
            optimizer.step()
            assert model.step == (number + 1) // 2


def tied() -> nn.Sequential:
    """One weight at both ends, as of a language model."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    module[2].weight = module[0].weight
    return module.double()


def test_two_models_are_saved_beside_each_other_and_tied_weights_once(tmp_path: Path) -> None:
    accelerator = accelerator_of()
    x = torch.ones(1, 4, dtype=torch.float64)
    models = [prepare(accelerator, each, SGD, topology="ring")[0] for each in (network(), tied())]
    for model in models:
        accelerator.backward(model(x).sum())
    saved = [flat(model) for model in models]
    accelerator.save_state(str(tmp_path))
    for model in models:
        accelerator.backward(model(x).sum())
    accelerator.load_state(str(tmp_path))
    assert all(map(torch.equal, map(flat, models), saved))
    assert models[1].module[2].weight is models[1].module[0].weight
    assert len(load_file(tmp_path / "model_1.safetensors")) == 1


@on_ranks(2, anew=True)
def test_a_rank_loads_only_what_rank_0_has_written_to_the_end(tmp_path: Path) -> None:
    """Rank 0 writes its files after the other one has left ``save_state``."""
    accelerator = accelerator_of()
    prepare(accelerator, network(), SGD, topology="ring")
    store = dist.PrefixStore("left", dist.distributed_c10d._get_default_store())
    written = accelerate.checkpointing.save

    def late(*args: Any, **kwargs: Any) -> None:
        if accelerator.is_main_process:
            store.wait(["rank 1"])
        written(*args, **kwargs)

    with mock.patch.object(accelerate.checkpointing, "save", late):
        accelerator.save_state(str(tmp_path))
    if not accelerator.is_main_process:
        store.set("rank 1", "")
    accelerator.load_state(str(tmp_path))


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({}, "FSDP", "distributed_type FSDP, .*whole replica on each rank"),
        (
            {"kwargs_handlers": [DistributedDataParallelKwargs()]},
            "NO",
            "DistributedDataParallelKwargs, which have no effect",
        ),
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)},
            "NO",
            "sync_each_batch=True, with which every backward pass would be a step",
        ),
    ],
)
def test_what_the_accelerator_is_set_up_for_is_refused(given: dict[str, Any], kind: str, text: str) -> None:
    accelerator = accelerator_of(**given)
    with (
        mock.patch.object(Accelerator, "distributed_type", mock.Mock(value=kind)),
        pytest.raises(ValueError, match=text),
    ):
        prepare(accelerator, network(), SGD)


def test_what_cannot_be_prepared_is_refused() -> None:
    accelerator = accelerator_of()
    module = network()
    with pytest.raises(ValueError, match="optimizer has already been prepared"):
        prepare(accelerator, module, accelerator.prepare(SGD(module.parameters())))
    with pytest.raises(TypeError, match=r"got a Linear; call prepare\(\.\.\.\) once for each model"):
        prepare(accelerator, module, SGD, nn.Linear(1, 1))
    with pytest.raises(TypeError, match='scaler=None; leave it out, and pass mixed_precision="fp16"'):
        prepare(accelerator, module, SGD, scaler=None)
    model, _ = prepare(accelerator, module, SGD, topology="ring")
    with pytest.raises(ValueError, match="already been prepared or wrapped"):
        prepare(accelerator, model, SGD)


def test_clipping_that_finds_no_gradients_is_refused() -> None:
    accelerator = accelerator_of()
    model, optimizer = prepare(accelerator, network(), SGD, topology="ring", clip_grad_norm=1.0)
    accelerator.backward(model(torch.ones(1, 4, dtype=torch.float64)).sum())
    assert float(accelerator.clip_grad_norm_(model.parameters(), 1.0)) == model.grad_norm
    with pytest.raises(
        GossipError, match=r"pass clip_grad_norm=2.0 to prepare\(...\), where it is 1.0, or .*step_in_backward=False"
    ):
        accelerator.clip_grad_norm_(model.parameters(), 2.0)
    with pytest.raises(GossipError, match="step_in_backward=False"):
        accelerator.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    other = nn.Linear(1, 1)
    other(torch.ones(1, 1)).sum().backward()
    assert float(accelerator.clip_grad_norm_(other.parameters(), 1.0)) > 1, "of others it is as ever"
