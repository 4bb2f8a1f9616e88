"""What torch calls private does what the package takes it to do; and nothing else of the package touches any of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from repository import GOSSIP
from torch import nn

from gossip import private_torch

PRIVATE = re.compile(
    r"\btorch\.(\w+\.)*_(?!_)\w|\bdist\._(?!_)|from torch(\.\w+)*\._|distributed_c10d|_execution_engine"
    r"|\b_optimizer_step_p|_opt_called|_wrapped_by_lr|_active_ddp|_is_fsdp|_coalescing\(|(?<!self)\._(parameters|buffers|modules)\b"
    r"|_non_persistent_buffers|_compiled_call_impl|_step_supports_amp"
)
OTHERS = sorted(path for path in GOSSIP.rglob("*.py") if path.name != "private_torch.py")
WORDS = re.compile(r"#.*|\"[^\"]*\"|_coalescing\((group|\w+, device)")
"""Comments and texts may name it."""


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.relative_to(GOSSIP).as_posix())
def test_only_one_file_touches_what_is_private(path: Path) -> None:
    found = [line for line in path.read_text().splitlines() if PRIVATE.search(WORDS.sub("", line))]
    assert found == []


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


def test_fused_optimizers_set_their_flag_in_the_first_step() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(1)
    before = dict(vars(optimizer))
    optimizer.step()
    changed = {name for name, value in vars(optimizer).items() if before.get(name) is not value}
    assert private_torch.FLAG_OF_FUSED in changed
