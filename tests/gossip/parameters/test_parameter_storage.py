"""Every parameter has a storage of its own over its part of the block, so that what saves storages saves it alone."""

import copy
import functools
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from ranks import on_ranks
from replicas import Awkward, assert_equal_states, saved
from torch import nn

from gossip import GossipDataParallel
from gossip.parameters.buckets import make_buckets

SGD = functools.partial(torch.optim.SGD, lr=1e-3)


def train(model: nn.Module, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step + (100 * dist.get_rank() if dist.is_initialized() else 0))
        model(torch.randn(8, 3, generator=generator)).square().mean().backward()


def assert_own_storages(module: nn.Module) -> None:
    """One storage per parameter, of its values alone; none for those without values."""
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.itemsize, name
        assert parameter.storage_offset() == 0, name
    held = [parameter.untyped_storage().data_ptr() for parameter in parameters.values() if parameter.numel()]
    assert len(set(held)) == len(held)


# ------------------------------------------------------------------ in one process


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_storage_is_the_parameters_part_of_the_block(dtype: torch.dtype) -> None:
    pictures = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    shapes = [torch.randn(3), pictures, torch.randn(6, 4).t(), torch.tensor(2.0), torch.zeros(2, 0), torch.randn(5, 7)]
    parameters = [(f"p{i}", nn.Parameter(each.to(dtype))) for i, each in enumerate(shapes)]
    (bucket,) = make_buckets(parameters, cap_bytes=10**9)
    start = bucket.block.data_ptr()
    for parameter, (_, _, offset) in zip(bucket.parameters, bucket.shape.views, strict=True):
        storage = parameter.untyped_storage()
        assert storage.nbytes() == parameter.numel() * dtype.itemsize
        if parameter.numel():
            assert storage.data_ptr() == parameter.data_ptr() == start + offset * dtype.itemsize
            assert storage.data_ptr() % 16 == 0
    bucket.block.fill_(3)
    assert all(bool((parameter == 3).all()) for parameter in bucket.parameters)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_have_memory_of_their_own(copied: Any) -> None:
    with GossipDataParallel(Awkward(), SGD) as model:
        other = copied(model)
        assert_own_storages(other)
        assert copied(model.module.first.bias).untyped_storage().nbytes() == 4 * 4
        with torch.no_grad():
            for own, each in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(own, each)
                assert own.stride() == each.stride()
                each.add_(1)
                assert own.numel() == 0 or not torch.equal(own, each)


# ------------------------------------------------------------------ how parameters are packed


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.randn(shape).to(dtype))) for i, shape in enumerate(shapes)]


def test_buckets_fill_in_reverse_order_up_to_the_cap() -> None:
    parameters = parameters_of((4,), (4,), (4,), (100,), (4,))
    names = [bucket.names for bucket in make_buckets(parameters, cap_bytes=32)]
    assert names == [("p4",), ("p3",), ("p2", "p1"), ("p0",)]


def test_dtypes_have_buckets_of_their_own() -> None:
    parameters = [
        *((f"single{i}", parameter) for i, (_, parameter) in enumerate(parameters_of((4,), (4,)))),
        *((f"double{i}", parameter) for i, (_, parameter) in enumerate(parameters_of((4,), dtype=torch.float64))),
        *((f"half{i}", parameter) for i, (_, parameter) in enumerate(parameters_of((4,), dtype=torch.bfloat16))),
    ]
    buckets = make_buckets(parameters, cap_bytes=10**6, first_index=5)
    assert [bucket.names for bucket in buckets] == [("half0",), ("double0",), ("single1", "single0")]
    assert [bucket.index for bucket in buckets] == [5, 6, 7]
    assert [bucket.block.dtype for bucket in buckets] == [torch.bfloat16, torch.float64, torch.float32]


def test_write_to_the_block_is_seen_by_autograd() -> None:
    parameter = nn.Parameter(torch.ones(3))
    (bucket,) = make_buckets([("p", parameter)], cap_bytes=100)
    loss = (parameter * parameter).sum()
    bucket.block.add_(1)
    bucket.written()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ------------------------------------------------------------------ files, at 1 and 2 ranks


@pytest.mark.parametrize("when", ["wrapped", "bare", "after close"])
@on_ranks(2)
def test_files_hold_every_tensor_and_nothing_else(when: str, tmp_path: Path) -> None:
    """What is saved is as long as what an equal module that was never wrapped gives, and reads back the same."""
    plain = Awkward()
    model = GossipDataParallel(Awkward(), SGD, "complete")
    train(model, range(2))
    model.global_avg()
    if when == "after close":
        model.close()
    module = model if when == "wrapped" else model.module
    plain.load_state_dict(module.state_dict())
    assert_own_storages(module)
    for ours, theirs in ((module.state_dict(), plain.state_dict()), (module.second, plain.second)):
        assert len(saved(ours)) == len(saved(theirs))
    state = torch.load(io.BytesIO(saved(module.state_dict())))
    assert_equal_states(state, plain.state_dict())
    assert state["third.weight"].data_ptr() == state["second.weight"].data_ptr()
    path = tmp_path / f"{model.rank}.safetensors"
    values = {name: each.contiguous() for name, each in module.state_dict().items() if name != "third.weight"}
    safetensors.torch.save_file(values, path)
    assert_equal_states(safetensors.torch.load_file(path), {name: plain.state_dict()[name] for name in values})
    path.unlink()
    safetensors.torch.save_model(module, str(path))
    found = Awkward()
    assert safetensors.torch.load_model(found, path) == (set(), [])
    assert_equal_states(found.state_dict(), plain.state_dict())
    if when != "after close":
        train(model, range(2, 4))
        assert_own_storages(module)
        model.close()
