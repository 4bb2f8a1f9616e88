"""A run that is stopped at any step and resumed is, bit for bit, one that was not; what a model keeps is in it."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointing import ADAMW, assert_same, everything, log_of, make_model, names_in, one_step
from kept import SCHEDULERS, Ema, advance
from ranks import on_ranks, run_ranks
from replicas import SGD
from torch import nn

import gossip
import topologies
from gossip import CheckpointError, VirtualWorkers

COSINE = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=12)
MULTI_STEP = functools.partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 3])
NADAM = functools.partial(torch.optim.NAdam, lr=0.01)

RUNS = {
    "ring": ({"topology": "ring"}, COSINE),
    "groups": ({"topology": topologies.build("local_global", 4, local_size=2), "optimizer": SGD}, MULTI_STEP),
    "one bucket": ({"topology": "directed_ring", "bucket_cap_mb": 25, "optimizer": NADAM}, MULTI_STEP),
    "then": ({"algorithm": gossip.AdaptThenCombine(0.5), "buffers": "average"}, COSINE),
    "outside": ({"step_in_backward": False, "buffers": "average"}, COSINE),
    "clipped": ({"clip_grad_norm": 0.1, "topology": topologies.build("ring", 4)}, MULTI_STEP),
    "complete": ({"topology": "complete", "optimizer": functools.partial(ADAMW, fused=True)}, COSINE),
}


def start(name: str, seed: int = 0) -> tuple[gossip.GossipDataParallel, Any]:
    options, schedule = RUNS[name]
    model = make_model(seed, **options)
    return model, schedule(model.optimizer)


def run_with_and_without_saving(folder: str, names: Sequence[str], num_steps: int) -> None:
    for name in names:
        model, scheduler = start(name)
        for _ in range(num_steps):
            one_step(model, scheduler)
        undisturbed = everything(model)

        model, scheduler = start(name)
        for step in range(num_steps):
            path = gossip.save(
                model, f"{folder}/{name}", keep=num_steps, background=step % 2 == 1, scheduler=scheduler, position=step
            )
            assert path == Path(folder) / name / f"step_{step:010d}"
            one_step(model, scheduler)
        assert_same(everything(model), undisturbed)
        torch.save(undisturbed, f"{folder}/{name}.{model.rank}")


def resume_at_every_step(folder: str, names: Sequence[str], num_steps: int) -> None:
    for name in names:
        undisturbed = torch.load(f"{folder}/{name}.{torch.distributed.get_rank()}")
        for step in range(num_steps):
            if step % 2 == 0:
                model, scheduler = start(name, seed=step + 1)
            else:  # whatever the model has done before
                one_step(model, scheduler)
            checkpoint = gossip.load(model, f"{folder}/{name}/step_{step:010d}", scheduler=scheduler)
            assert (checkpoint.step, checkpoint.world_size, checkpoint.data) == (step, 4, {"position": step})
            assert model.step == step
            for _ in range(step, num_steps):
                one_step(model, scheduler)
            assert_same(everything(model), undisturbed)


@pytest.mark.slow
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(run_with_and_without_saving, str(tmp_path), list(RUNS), 4, world_size=4)
    run_ranks(resume_at_every_step, str(tmp_path), list(RUNS), 4, world_size=4)


def scaled_run(folder: str, resume: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Rank 1 overflows in step 1, and the run is saved before the others have heard of it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 if resume else 1024.0, growth_interval=100)
    model = make_model(scaler=scaler, module=lambda: nn.Linear(4, 2))
    if resume:
        gossip.load(model, folder)
    scales = []
    for step in range(model.step, 6):
        if step == 2 and not resume:
            gossip.save(model, folder)
        overflow = float("inf") if step == 1 and model.rank == 1 else 1.0
        scaler.scale(model(torch.randn(8, 4)).square().mean() * overflow).backward()
        scales.append(scaler.get_scale())
    return scales, everything(model)


def test_scale_and_overflow_that_is_under_way_go_through_a_checkpoint(tmp_path: Path) -> None:
    whole = run_ranks(scaled_run, str(tmp_path), False, world_size=2)
    resumed = run_ranks(scaled_run, str(tmp_path), True, world_size=2)
    for (scales, state), (later_scales, later_state) in zip(whole, resumed, strict=True):
        assert later_scales == scales[2:]
        assert min(scales) == 512.0
        assert_same(later_state, state)


def odd_places(folder: Path, resume: bool) -> dict[str, torch.Tensor]:
    """After averaging, inside accumulation, in a world that is not a power of two."""
    model = make_model(topology="exponential")
    for step in range(6):
        if step == 2 and not resume:
            model.global_avg()  # nothing is in flight
            gossip.save(model, folder)
        if step == 4 and not resume:
            with model.averaged(), pytest.raises(gossip.GossipError, match="leave the block first"):
                gossip.save(model, folder)
        with model.no_sync():
            one_step(model)
            if step == 4 and not resume:
                gossip.save(model, folder)
                gossip.save(model, folder)  # the same step once more
            if step == 4 and resume:
                checkpoint = gossip.load(model, folder)
                assert checkpoint == gossip.Checkpoint(4, Path(folder) / "step_0000000004", 3, {})
        one_step(model)
    return everything(model)


@on_ranks(3)
def test_save_between_backward_passes_after_averaging_and_twice(tmp_path: Path) -> None:
    wanted = odd_places(tmp_path, resume=False)
    assert names_in(tmp_path) == ["step_0000000002", "step_0000000004"]
    assert_same(odd_places(tmp_path, resume=True), wanted)


def test_parts_keep_their_states_and_data(tmp_path: Path) -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=7.0)
    data = {"epoch": 3, "order": torch.arange(4)[1:], "names": ["a", ("b", None)], "loss": np.float64(0.1)}
    gossip.save(model, tmp_path, scaler=scaler, data=data, text="x")
    scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    checkpoint = gossip.load(model, tmp_path, scaler=scaler)
    assert scaler.state_dict()["scale"] == 7.0
    assert checkpoint.data["text"] == "x"
    loaded = checkpoint.data["data"]
    assert loaded["order"].tolist() == [1, 2, 3]
    assert (loaded["epoch"], loaded["names"], loaded["loss"]) == (3, ["a", ("b", None)], 0.1)
    with log_of() as lines:
        gossip.load(model, tmp_path)
    assert "the state of 'scaler': it was not requested" in lines[0]


class Sampler:
    def state_dict(self) -> dict[str, Any]:
        return {"seen": [1, {2: np.arange(3)}]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("parts", "error", "reason"),
    [
        ({"position": [1, lambda: 0]}, TypeError, r"^position\[\d\] is a builtins.function, which a checkpoint cannot"),
        (
            {"sampler": Sampler()},
            TypeError,
            r"sampler\.state_dict\(\)\['seen'\]\[1\]\[2\] is a numpy.ndarray.*from_numpy",
        ),
        ({"lazy": torch.ones(2, device="meta")}, TypeError, "lazy is a tensor without values"),
        ({"keep": 0}, ValueError, "keep must be at least 1, got 0"),
    ],
)
def test_save_refuses_by_name_before_anything_is_written(
    parts: dict[str, Any], error: type, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        gossip.save(make_model(), tmp_path / "new", **parts)
    assert not (tmp_path / "new").exists()


def test_load_refuses_parts_that_cannot_take_a_state(tmp_path: Path) -> None:
    model = make_model()
    gossip.save(model, tmp_path, position=1)
    with pytest.raises(TypeError, match="position is a int, which has no load_state_dict"):
        gossip.load(model, tmp_path, position=1)
    with pytest.raises(gossip.CheckpointError, match="holds no state for 'sampler', only for no part at all"):
        gossip.load(model, tmp_path, sampler=Sampler())


def with_objects(name: str, *, keeps: bool) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A model, all objects, and those that a call must be told."""
    model = make_model(optimizer=SGD)
    objects = {"scheduler": SCHEDULERS[name](model.optimizer), "ema": Ema(model.module)}
    if keeps:
        model.keep(**objects)
    return model, objects, {} if keeps else objects


def train_with(model: Any, objects: dict[str, Any], num_steps: int) -> list[float]:
    rates = []
    for _ in range(num_steps):
        rates.append(model.optimizer.param_groups[0]["lr"])
        one_step(model)
        objects["ema"].update(model.module)
        advance(objects["scheduler"])
    return rates


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [*((name, True, True) for name in SCHEDULERS), ("cosine", False, True), ("cosine", True, False)],
)
def test_a_run_resumes_whether_objects_were_kept_or_passed(
    name: str, saved: bool, loaded: bool, tmp_path: Path
) -> None:
    model, objects, told = with_objects(name, keeps=saved)
    train_with(model, objects, 5)
    gossip.save(model, tmp_path, **told)
    rates = train_with(model, objects, 10)
    model, others, told = with_objects(name, keeps=loaded)
    with log_of() as lines:
        gossip.load(model, tmp_path, **told)
    assert lines == []
    assert train_with(model, others, 10) == rates
    assert len(set(rates)) > 1
    assert others["ema"].num_updates == objects["ema"].num_updates == 15
    assert_same(others["ema"].values, objects["ema"].values)


def test_names_that_stand_for_two_things_are_refused(tmp_path: Path) -> None:
    model, objects, _ = with_objects("cosine", keeps=True)
    for function in (gossip.save, gossip.load):
        with pytest.raises(
            ValueError, match=r"^ema was passed, but the model .*model\.keep\(ema=\.\.\.\).*leave it out"
        ):
            function(model, tmp_path, ema=objects["ema"])
    assert list(tmp_path.iterdir()) == []
    gossip.save(model, tmp_path, position=3)
    assert gossip.load(model, tmp_path).data == {"position": 3}


def test_an_object_that_the_checkpoint_does_not_hold_is_kept_afterwards(tmp_path: Path) -> None:
    model = make_model()
    one_step(model)
    gossip.save(model, tmp_path)
    before = everything(model)
    model.keep(ema=Ema(model.module))
    with pytest.raises(CheckpointError, match=r"no state for 'ema', only for no part.*model\.keep\(ema=\.\.\.\) after"):
        gossip.load(model, tmp_path)
    assert_same(everything(model), before)


def test_virtual_workers_keep_objects_as_well(tmp_path: Path) -> None:
    states = []
    for is_first in (True, False):
        workers = VirtualWorkers(nn.Linear(4, 2), 2, SGD, devices=["cpu"])
        scheduler = SCHEDULERS["exponential"](workers.optimizer)
        workers.keep(scheduler=scheduler)
        if is_first:
            for _ in range(3):
                workers(torch.ones(2, 4)).sum().backward()
                scheduler.step()
            gossip.save(workers, tmp_path)
        gossip.load(workers, tmp_path)
        states.append([scheduler.state_dict(), workers.optimizer.param_groups[0]["lr"]])
    assert states[0] == states[1]
