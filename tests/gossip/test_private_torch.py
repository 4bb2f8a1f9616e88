"""What torch calls private does what the package takes it to do, in every release."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gossip import launch, private_torch


def test_range_is_seen_by_the_profiler() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities, acc_events=True) as profile,
        private_torch.fast_range("a range of ours"),
    ):
        torch.ones(2).sum()
    assert "a range of ours" in {event.name for event in profile.events()}


def test_backward_passes_have_numbers_and_an_end() -> None:
    seen: list[object] = []
    parameter = nn.Parameter(torch.ones(2))

    def on_gradient(_: torch.Tensor) -> None:
        seen.append((private_torch.is_in_backward(), private_torch.backward_task()))
        private_torch.at_end_of_backward(lambda: seen.append(parameter.grad is not None))

    parameter.register_hook(on_gradient)
    for _ in range(2):
        parameter.grad = None
        parameter.sum().backward()
    assert not private_torch.is_in_backward()
    assert private_torch.backward_task() == private_torch.OUTSIDE_BACKWARD
    (first, first_number), first_end, (second, second_number), second_end = seen
    assert first is second is first_end is second_end is True
    assert first_number != second_number


def test_tensors_are_flattened_and_multiplied_together() -> None:
    tensors = [torch.ones(2, 3), torch.full((4,), 2.0)]
    flat = private_torch.flatten_tensors(tensors)
    assert flat.tolist() == [1.0] * 6 + [2.0] * 4
    private_torch.multiply_(tensors, 0.5)
    assert tensors[1].tolist() == [1.0] * 4


def test_trees_are_taken_apart_and_put_together() -> None:
    tree = {"a": [torch.ones(1), 2], "b": (3,)}
    leaves, spec = private_torch.tree_flatten(tree)
    assert private_torch.tree_leaves(tree) == leaves == [torch.ones(1), 2, 3]
    assert private_torch.tree_unflatten([4, 5, 6], spec) == {"a": [4, 5], "b": (6,)}
    assert private_torch.tree_map(lambda _: 0, tree) == {"a": [0, 0], "b": (0,)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, by the import of the compiler
def test_compiler_is_asked_and_kept_out() -> None:
    assert not private_torch.is_autograd_compiled()
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert private_torch.is_autograd_compiled()
    module = nn.Linear(1, 1)
    assert not private_torch.is_compiled(module)
    assert private_torch.is_compiled(torch.compile(module))  # nothing runs yet
    module.compile()
    assert private_torch.is_compiled(module)

    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def left_alone(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1

    def traced(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 2

    private_torch.keep_out_of_graphs(left_alone.__code__)
    assert torch.compile(left_alone, backend=note)(torch.zeros(1)).item() == 1
    assert not graphs
    assert torch.compile(traced, backend=note)(torch.zeros(1)).item() == 2
    assert len(graphs) == 1


def test_modules_show_what_is_their_own() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("transient", torch.zeros(1), persistent=False)
    assert list(private_torch.own_buffers(module)) == ["kept", "transient"]
    assert private_torch.names_of_transient_buffers(module) == {"transient"}
    assert list(private_torch.own_children(module)) == ["0"]
    assert list(private_torch.own_parameters(module[0])) == ["weight", "bias"]
    assert not private_torch.own_parameters(module)
    private_torch.own_parameters(module[0])["bias"] = None
    assert module[0].bias is None
    assert not private_torch.is_sharded(module)
    assert private_torch.active_ddp() is None


class NotesItsScale(torch.optim.SGD):
    """Its own step() would have to divide by the scale."""

    def step(self, closure: object = None) -> None:
        assert closure is None
        self.seen = float(self.grad_scale)


class NotesItsWrapper(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.wrapper = private_torch.active_ddp()
        return super().forward(inputs)


def wrap_and_shard() -> None:
    from torch.distributed.fsdp import fully_shard

    module = NotesItsWrapper(2, 2)
    outer = DistributedDataParallel(module)
    outer(torch.ones(1, 2))
    assert module.wrapper is outer
    assert private_torch.active_ddp() is None
    sharded = nn.Linear(2, 2)
    fully_shard(sharded)
    assert private_torch.is_sharded(sharded)
    group = dist.new_group([0, 1])
    assert any(known is group for known in private_torch.known_groups())
    dist.destroy_process_group(group)
    assert len(private_torch.known_groups()) == 1
    private_torch.default_store().set(f"key{dist.get_rank()}", "value")
    private_torch.default_store().wait([f"key{1 - dist.get_rank()}"])


def test_other_wrappers_and_groups_are_seen() -> None:
    launch(wrap_and_shard, world_size=2)


def test_optimizers_show_their_hooks_and_schedulers_are_content(recwarn: pytest.WarningsRecorder) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert not private_torch.step_pre_hooks(optimizer)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    assert len(private_torch.step_pre_hooks(optimizer)) == 1
    assert not private_torch.is_watched_by_scheduler(optimizer.step)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert private_torch.is_watched_by_scheduler(optimizer.step)
    private_torch.note_step_called(optimizer)
    scheduler.step()
    assert not recwarn.list  # "call optimizer.step() before lr_scheduler.step()"
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert called == ["before", "after"]
    private_torch.without_step_hooks(optimizer.__dict__)
    optimizer.step()
    assert called == ["before", "after"]

    def step() -> None:
        pass

    private_torch.note_watched_by_scheduler(step)
    assert private_torch.is_watched_by_scheduler(step)


def test_gradient_scaler_leaves_it_to_optimizers_that_say_so() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = NotesItsScale([parameter], lr=0.1)
    setattr(optimizer, private_torch.SUPPORTS_SCALING, True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert optimizer.seen == 4.0
    assert parameter.grad is not None
    assert parameter.grad.item() == 4.0  # nobody has divided it


def test_fused_optimizers_set_their_flag_in_the_first_step() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(1)
    before = dict(vars(optimizer))
    optimizer.step()
    changed = {name for name, value in vars(optimizer).items() if before.get(name) is not value}
    assert private_torch.FLAG_OF_FUSED in changed
