"""A run that is stopped at any step and resumed is, bit for bit, one that was not."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointing import ADAMW, assert_same, everything, log_of, make_model, names_in, one_step
from ranks import on_ranks, run_ranks
from replicas import SGD
from torch import nn

import gossip
import topologies

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
