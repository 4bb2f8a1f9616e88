"""What users of another library pass on to GossipDataParallel, and what is refused in common, each by name."""

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from gossip import GossipDataParallel, GossipError
from gossip.integrations.remaining_ranks import RemainingRanks
from gossip.optimizers.bucket_optimizer import OptimizerArgument
from gossip.step.building.wrapper_arguments import refuse_any

_DISTRIBUTED_TYPES = ("NO", "MULTI_")  # prefixes of accelerate's: one process, or one per device


def check_options(owner: str, options: Mapping[str, Any], taken: Mapping[str, str]) -> None:
    """Refuse what is not an argument of GossipDataParallel, or is ``taken`` from elsewhere. Local."""
    known = sorted(inspect.signature(GossipDataParallel).parameters.keys() - taken.keys())
    for name, value in options.items():
        if name in taken:
            raise TypeError(f"{owner} got {name}={value!r}; leave it out, and {taken[name]}")
        if name not in known:
            raise TypeError(
                f"{owner} got {name!r}, which is not an argument of GossipDataParallel; choose from {', '.join(known)}"
            )


def wrap(
    module: nn.Module, optimizer: OptimizerArgument, remaining: RemainingRanks | None, **options: Any
) -> GossipDataParallel:
    """Wrap a module for a library that calls ``optimizer.step()`` in every mode: nothing is said of it. Collective.

    Raises GossipError if ranks may be lost, and one has been already.
    """
    if remaining is not None:
        remaining.check_complete()
    model = GossipDataParallel(module, optimizer, **options)
    model._live().optimizer_step_calls.explains = False
    if remaining is not None:
        remaining.use(model)
    return model


def weakly(method: Callable[..., object]) -> Callable[..., None]:
    """Return a function that calls a bound method while its object lives, which it does not keep alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (found := reference()) is not None:
            found(*args)

    return call


def steps_in_backward(options: Mapping[str, Any]) -> bool:
    """Return whether backward passes make the steps, as they do by default."""
    return bool(options.get("step_in_backward", True))


def released_gradients(call: str, remedy: str) -> GossipError:
    """Return the error of a call that comes when the gradients have been released."""
    return GossipError(
        f"{call} finds no gradients: the update was made inside backward; {remedy}, or choose step_in_backward=False, "
        "which keeps gradients until optimizer.step()"
    )


def check_accelerator(accelerator: Any, *, steps_in_backward: bool) -> None:
    """Refuse what Accelerate, its launcher or the environment has set up and gossip cannot train with. Local."""
    kind = accelerator.distributed_type.value
    syncs_each_batch = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    refused = {
        f"distributed_type {kind}, which divides or steps the model in its own way": (
            not kind.startswith(_DISTRIBUTED_TYPES)
        ),
        "a parallelism_config, whose groups of ranks hold parts of one model": (
            accelerator.parallelism_config is not None
        ),
        'mixed_precision="fp8", which replaces layers': accelerator.mixed_precision == "fp8",
        "sync_each_batch=True, with which every backward pass would be a step": steps_in_backward and syncs_each_batch,
    }
    refuse_any(
        refused,
        "the accelerator is set up with {}: gossip trains one whole replica on each rank; leave it out of "
        "Accelerator(...), TrainingArguments(...) and `accelerate config`",
    )


class SampleCount:
    """The samples of the batches since the newest step, told to a model whose algorithm counts ranks by them."""

    def __init__(self) -> None:
        self._step, self._num_samples = -1, 0

    def add(self, model: GossipDataParallel, count: Callable[[], int]) -> None:
        """Add those of a batch that is about to be trained on, and tell the model. Local."""
        if model.algorithm.weighted:
            if self._step != model.step:
                self._step, self._num_samples = model.step, 0
            self._num_samples += count()
            model.weigh(self._num_samples)
