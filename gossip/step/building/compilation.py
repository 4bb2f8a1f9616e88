"""What ``torch.compile`` must leave alone: all of this package's code around a module and in its hooks."""

from __future__ import annotations

import functools
import types

import torch

from gossip import private_torch
from gossip.parameters.double_wrapping import Outermost
from gossip.step.backward_steps import BackwardSteps, BucketwiseSteps
from gossip.step.engine import StepEngine
from gossip.step.forward_waits import AwaitHook, ForwardWaits
from gossip.step.optimizer_steps import OptimizerSteps

_OURS: dict[type, tuple[str, ...]] = {
    StepEngine: ("begin_forward", "watched", "end_forward", "_on_backward", "_on_backward_ended"),
    BackwardSteps: ("begin_forward", "_on_first_gradient", "step_optimizer"),
    BucketwiseSteps: ("_launch_ready",),
    OptimizerSteps: ("step_optimizer",),
    Outermost: ("check_outermost",),
    ForwardWaits: ("call_watched",),
    AwaitHook: ("__call__",),
}


@functools.cache
def keep_out_of_graphs() -> None:
    """Keep the compiler out of this package's functions, which it would trace with graph breaks and warnings.

    Called with the first model, because it imports the compiler: decorators would make importing gossip take a second
    longer in every program.
    """
    for owner, names in _OURS.items():
        for name in names:
            setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
    # These are called once per parameter: torch.compiler.disable would make them ten times slower.
    for constant in BackwardSteps._make_hook.__code__.co_consts:
        if isinstance(constant, types.CodeType):
            private_torch.keep_out_of_graphs(constant)
