"""What users do to a model between steps: edits, copies, pickles, other wrappers."""

import copy
import io

import pytest
import torch
from ranks import error_of, on_ranks
from replicas import SGD, TINY_BUCKETS, assert_equal_states, saved
from torch import nn

from gossip import GossipDataParallel, GossipError

ALGORITHMS = ["adapt_while_communicating", "adapt_then_combine"]


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * rank + step))


def train(model: nn.Module, steps: range, rank: int = 0) -> None:
    for step in steps:
        model(batch(step, rank)).square().mean().backward()


def wrap(**arguments: object) -> GossipDataParallel:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    return GossipDataParallel(module, SGD, "ring", bucket_cap_mb=TINY_BUCKETS, **arguments)


# ------------------------------------------------------------------ edits, with what is in flight


def load_assigning(model: GossipDataParallel, values: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(copy.deepcopy(values), assign=True)


def load_the_bare_module_assigning(model: GossipDataParallel, values: dict[str, torch.Tensor]) -> None:
    model.state_dict()  # as in all other ways, what must be combined first is
    model.module.load_state_dict(copy.deepcopy(values), assign=True)


def replace_data(model: GossipDataParallel, values: dict[str, torch.Tensor]) -> None:
    model.state_dict()
    for name, parameter in model.named_parameters():
        parameter.data = values[name].clone()


def replace_parameters(model: GossipDataParallel, values: dict[str, torch.Tensor]) -> None:
    model.state_dict()
    for name, _ in list(model.named_parameters()):
        owner, _, key = name.rpartition(".")
        setattr(model.module.get_submodule(owner), key, nn.Parameter(values[name].clone()))


EDITS = [load_assigning, load_the_bare_module_assigning, replace_data, replace_parameters]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks(2)
def test_every_way_to_write_values_survives(algorithm: str) -> None:
    """Each way to write values is the same as an in-place write, and is not undone by what was in flight."""
    results = []
    for edit in (None, *EDITS):
        model = wrap(algorithm=algorithm)
        train(model, range(2), model.rank)
        values = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
        values["1.num_batches_tracked"] = torch.tensor(7)
        if edit is None:
            with torch.no_grad():
                for name, value in model.state_dict().items():
                    value.copy_(values[name])
        else:
            edit(model, values)
            if edit in (replace_data, replace_parameters):
                with torch.no_grad():
                    for name, buffer in model.named_buffers():
                        buffer.copy_(values[name])
        train(model, range(2, 4), model.rank)
        assert len(list(model.module.parameters())) == 6
        results.append(copy.deepcopy(model.state_dict()))
    for other, edit in zip(results[1:], EDITS, strict=True):
        assert_equal_states(other, results[0], edit.__name__)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda module: module.half(), "has left its bucket: it is now float16"),
        (
            lambda module: setattr(module[3], "weight", nn.Parameter(torch.zeros(2, 5))),
            "'3.weight' was replaced by one",
        ),
    ],
)
def test_edit_that_cannot_be_taken_over_is_refused_by_name(edit: object, text: str) -> None:
    model = wrap()
    train(model, range(1))
    edit(model.module)
    assert text in error_of(GossipError, model.idle_step)


# ------------------------------------------------------------------ copies


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks(2)
def test_copies_are_detached_and_the_model_trains_on(algorithm: str) -> None:
    model, undisturbed = wrap(algorithm=algorithm), wrap(algorithm=algorithm)
    train(model, range(2), model.rank)
    train(undisturbed, range(2), model.rank)
    loaded = torch.load(io.BytesIO(saved(model)), weights_only=False)
    copies = [copy.deepcopy(model), copy.deepcopy(model.module), loaded]
    for each in copies:
        assert_equal_states(each.state_dict(), model.state_dict())
        each(batch(5)).sum().backward()  # plain: no step, gradients stay
        assert all(parameter.grad is not None for parameter in each.parameters())
        blocks = {parameter.untyped_storage().data_ptr() for parameter in each.parameters()}
        assert len(blocks) == 6
    assert model.step == 2
    train(model, range(2, 4), model.rank)
    train(undisturbed, range(2, 4), model.rank)
    assert_equal_states(model.state_dict(), undisturbed.state_dict())
    detached = copies[0]
    assert detached.step == 2
    assert detached.optimizer is None
    for call in (detached.global_avg, detached.idle_step, detached.consensus_distance, detached.stats):
        with pytest.raises(GossipError, match="detached copy"):
            call()
    detached.close()
