"""Gradient norms, clipping, loss scales, and values that are not finite."""

import copy
import functools
import math

import pytest
import torch
from ranks import on_ranks
from replicas import SGD
from small_runs import TINY_BUCKETS, assert_same, batch, finish, make_module
from torch import nn

from gossip import GossipDataParallel, GossipError


@pytest.mark.parametrize("bucket_cap_mb", [TINY_BUCKETS, 25])
@pytest.mark.parametrize("max_norm", [0.05, 1e9])
@pytest.mark.parametrize("how", ["global", "bucket", "usual loop"])
def test_clipping_is_torch_s_own_and_reports_the_whole_norm(how: str, max_norm: float, bucket_cap_mb: float) -> None:
    options = {"step_in_backward": False} if how == "usual loop" else {"clip_grad_norm": max_norm, "clip": how}
    plain, model = make_module(), GossipDataParallel(make_module(), SGD, bucket_cap_mb=bucket_cap_mb, **options)
    optimizer, names = SGD(plain.parameters()), dict(plain.named_parameters())
    assert model.grad_norm is None
    for step in range(3):
        plain(batch(0, step)).square().mean().backward()
        whole = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
        for bucket in model._buckets if how == "bucket" else ():
            torch.nn.utils.clip_grad_norm_([names[name] for name in bucket.names], max_norm)
        if how != "bucket":
            torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        model(batch(0, step)).square().mean().backward()
        if how == "usual loop":
            assert model.clip_grad_norm_(max_norm) == whole
            model.optimizer.step()
            model.optimizer.zero_grad()
        else:
            assert model.grad_norm == pytest.approx(whole.item(), rel=1e-6)
    assert_same(model, plain, 1e-6 if how == "bucket" else 0)
    model.idle_step()
    assert model.grad_norm is None


def test_clip_grad_norm_in_fused_mode_says_what_to_do() -> None:
    model = GossipDataParallel(make_module(), SGD)
    model(batch(0, 0)).sum().backward()
    with pytest.raises(GossipError, match=r"pass clip_grad_norm=1 to GossipDataParallel, or step_in_backward=False"):
        model.clip_grad_norm_(1.0)


# ------------------------------------------------------------------ loss scaling


@pytest.mark.parametrize("fused_optimizer", [False, True])
@pytest.mark.parametrize("mode", ["in backward", "outside", "outside, unscaled"])
def test_scaled_training_equals_plain_scaled_training(mode: str, fused_optimizer: bool) -> None:
    """At world size 1, but for the scale's growth, which comes one step later."""
    factory = functools.partial(torch.optim.AdamW, lr=0.01, fused=fused_optimizer)
    plain, module = make_module(), make_module()
    optimizer = factory(plain.parameters())
    reference = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    outside = mode != "in backward"
    clip = {} if outside else {"clip_grad_norm": 0.05}
    model = GossipDataParallel(module, factory, step_in_backward=not outside, scaler=scaler, **clip)
    for step in range(6):
        reference.scale(plain(batch(0, step)).square().mean()).backward()
        if mode != "outside":
            reference.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        reference.step(optimizer)
        reference.update()
        optimizer.zero_grad()
        scaler.scale(model(batch(0, step)).square().mean()).backward()
        if outside:
            if mode == "outside, unscaled":
                scaler.unscale_(model.optimizer)
                model.clip_grad_norm_(0.05)
            scaler.step(model.optimizer)
            scaler.update()
            model.optimizer.zero_grad()
    assert_same(model, plain, 1e-7)
    assert scaler.get_scale() == 2.0**12


def test_gradients_that_no_optimizer_holds_are_unscaled_before_they_are_clipped() -> None:
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**12)):
        module = make_module()
        model = GossipDataParallel(module, SGD(list(module[-1].parameters())), clip_grad_norm=0.5, scaler=scaler)
        loss = model(batch(0, 0)).square().sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        found.append(torch.cat([each.detach().flatten() for each in module.parameters()]))
    torch.testing.assert_close(*found)


def test_calls_of_the_scaler_that_backward_has_made_are_refused_with_the_remedy() -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    model = GossipDataParallel(make_module(), SGD, scaler=scaler)
    for name, arguments in (("unscale_", [model.optimizer]), ("step", [model.optimizer]), ("update", [])):
        scale = scaler.get_scale()
        scaler.scale(model(batch(0, 0)).sum()).backward()
        assert scaler.get_scale() == 2 * scale
        text = rf"^scaler\.{name}\(\) cannot .* call only scaler\.scale\(loss\)\.backward\("
        with pytest.raises(ValueError, match=text):
            getattr(scaler, name)(*arguments)
    model.close()
    assert not {"unscale_", "step", "update"} & vars(scaler).keys()


@pytest.mark.parametrize(
    ("knows", "outside", "text"),
    [
        (True, True, r"call scaler\.step\(model\.optimizer\)"),
        (False, True, "pass scaler="),
        (False, False, r"scaler\.step\(\) cannot work here"),
    ],
)
def test_step_with_a_scaler_that_only_one_side_knows_is_refused(knows: bool, outside: bool, text: str) -> None:
    scaler = torch.amp.GradScaler("cpu")
    model = GossipDataParallel(make_module(), SGD, step_in_backward=not outside, scaler=scaler if knows else None)
    scaler.scale(model(batch(0, 0)).sum()).backward()
    with pytest.raises((GossipError, ValueError), match=text):
        model.optimizer.step() if knows else scaler.step(model.optimizer)


def test_scaler_with_half_precision_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scaler: parameter '0\.weight' is float16"):
        GossipDataParallel(make_module().half(), SGD, scaler=torch.amp.GradScaler("cpu"))


# ------------------------------------------------------------------ not finite


@pytest.mark.parametrize("mode", [{}, {"clip_grad_norm": 1.0}, {"step_in_backward": False}])
@on_ranks(4)
def test_gradient_that_is_not_finite_stays_on_its_rank(mode: dict) -> None:
    model = GossipDataParallel(make_module(), SGD, "ring", bucket_cap_mb=TINY_BUCKETS, **mode)
    skipped = []
    for step in range(5):
        before = copy.deepcopy(model.state_dict())
        loss = model(batch(model.rank, step)).square().mean()
        (loss * float("nan") if model.rank == 0 and step in (0, 3) else loss).backward()
        finish(model)
        skipped.append(model.stats().num_skipped)
        if model.rank == 0 and step == 0:
            assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert list(map(bool, skipped)) == [model.rank == 0 and step in (0, 3) for step in range(5)]


@on_ranks(3)
def test_message_that_is_not_finite_is_refused_by_its_peers() -> None:
    model, told = GossipDataParallel(make_module(), SGD, "ring"), ""
    for step in range(4):
        if model.rank == 1 and step == 1:
            with torch.no_grad():
                model.module[0].weight[0, 0] = float("nan")  # a user's edit
        try:
            model(batch(model.rank, step)).square().mean().backward()
        except GossipError as error:
            told = str(error)
            break
        if model.rank != 1:
            assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
            if model.stats().num_refused:
                break
    assert ("what this rank sent in round 1 is not finite" in told) == (model.rank == 1)
    assert model.rank == 1 or model.stats().num_refused


def test_many_steps_that_are_not_finite_end_the_training() -> None:
    model = GossipDataParallel(make_module(), SGD)
    for _ in range(2):
        model(batch(0, 0)).sum().backward()  # from here on they are counted anew
        for _ in range(15):
            (model(batch(0, 0)).sum() * float("nan")).backward()
    with pytest.raises(GossipError, match="in 16 consecutive steps gradients or messages were not finite"):
        (model(batch(0, 0)).sum() * float("nan")).backward()


def test_large_gradients_whose_norm_overflows_are_applied() -> None:
    model = GossipDataParallel(nn.Linear(4, 1, bias=False), functools.partial(torch.optim.SGD, lr=1e-30))
    (model(torch.ones(1, 4)).sum() * 1e30).backward()
    assert model.stats().num_skipped == 0


@pytest.mark.parametrize("clip", ["global", "bucket"])
@pytest.mark.parametrize("num_features", [64, 8192])  # a small tensor, and one whose norm is taken by itself
def test_norm_of_half_precision_gradients_does_not_overflow(num_features: int, clip: str) -> None:
    dtype = torch.float16
    module = nn.Linear(num_features, 1, bias=False, dtype=dtype)
    optimizer = functools.partial(torch.optim.SGD, lr=1.0)
    model = GossipDataParallel(module, optimizer, clip_grad_norm=1.0, clip=clip)
    before = module.weight.detach().float()
    inputs = torch.full((1, num_features), 3.0e4, dtype=dtype)
    model(inputs).backward(torch.ones(1, 1, dtype=dtype))
    assert model.grad_norm == pytest.approx(3.0e4 * math.sqrt(num_features), rel=0.01)
    assert (module.weight.float() - before).norm().item() == pytest.approx(1.0, rel=0.1)
