"""Gossip training in loops that are written for Accelerate."""

import contextlib
import copy
import os
import weakref
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.optim import Optimizer

from gossip import GossipDataParallel, GossipError, load, save
from gossip.communication import training_store
from gossip.integrations.common_checks import (
    check_accelerator,
    check_options,
    released_gradients,
    steps_in_backward,
    wrap,
)
from gossip.integrations.remaining_ranks import RemainingRanks, remaining_ranks

_FOLDER = "gossip"
_TAKEN = {"module": "pass it as model", "scaler": 'pass mixed_precision="fp16" to Accelerator, whose scaler is used'}


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, *others: Any, **options: Any
) -> tuple[Any, ...]:
    """Prepare a model and its optimizer for gossip, where ``accelerator.prepare`` would wrap them in DDP. Collective.

    The loop stays unchanged: ``accelerator.accumulate(model)``, ``accelerator.backward(loss)``, ``optimizer.step()``,
    ``scheduler.step()``, ``optimizer.zero_grad()``, ``accelerator.gather_for_metrics(...)``. Each rank trains its own
    replica; evaluate and save within ``with model.averaged():`` on all ranks, and end with ``model.global_avg()``.

    ``accelerator.save_state(folder)`` and ``accelerator.load_state(folder)`` save and restore every rank's replica, the
    state of its optimizer and the messages in flight (:func:`gossip.save`, in ``folder/gossip``): training continues
    bit for bit. The weights in ``folder/model.safetensors`` are those of ``averaged()``.

    With ``step_in_backward=True``, the default, updates are made inside ``accelerator.backward``. To clip, pass
    ``clip_grad_norm=``: ``accelerator.clip_grad_norm_`` then reports the norm, and raises if it is called with another
    value.

    With ``on_peer_loss="continue"`` ranks can be lost: the accelerator's collective calls are made by those that
    remain, which are numbered anew. Ranks can join loops that make no such call: keep schedulers
    (``model.keep(scheduler=scheduler)``) instead of preparing them, and divide the samples by ``model.rank``.

    Parameters
    ----------
    accelerator : Accelerator
        The accelerator. From now on its ``no_sync``, ``clip_grad_norm_``, ``clip_grad_value_``, ``join_uneven_inputs``
        and ``unwrap_model`` handle models that train by gossip.
    model : Module
        The module, neither wrapped nor prepared.
    optimizer : callable, Optimizer, sequence of Optimizer, or None
        The optimizer, as for :class:`gossip.GossipDataParallel`.
    *others : DataLoader or scheduler
        Objects that ``accelerator.prepare`` prepares as usual.
    **options
        Arguments of :class:`gossip.GossipDataParallel`, such as ``topology="one_peer_exponential"``.

    Returns
    -------
    tuple
        The :class:`gossip.GossipDataParallel`, the prepared optimizer (a tuple, if there are several), and the other
        objects, prepared, in their order.

    Raises
    ------
    ValueError, TypeError
        The accelerator is set up for something that gossip does not support (FSDP, DeepSpeed, tensor parallelism, fp8,
        options of DDP), or an argument cannot be used, such as ``others`` in a process that joins a training.

    Examples
    --------
    >>> accelerator = Accelerator(cpu=True)
    >>> module = nn.Linear(2, 1)
    >>> sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    >>> model, optimizer = prepare(accelerator, module, sgd, topology="ring")
    >>> accelerator.backward(model(torch.ones(1, 2)).sum())
    >>> optimizer.step()
    >>> model.step
    1
    """
    check_accelerator(accelerator, steps_in_backward=steps_in_backward(options))
    check_options("prepare(...)", options, _TAKEN)
    _check_arguments(accelerator, model, optimizer, others)
    remaining = _remaining.get(accelerator) or remaining_ranks(accelerator, options, renumber)
    if remaining is not None:
        _remaining[accelerator] = remaining
    placed = accelerator.prepare_model(model, evaluation_mode=True)  # not wrapped: moved, cast and compiled
    accelerator._models.remove(placed if placed in accelerator._models else model)
    wrapped = wrap(placed, optimizer, remaining, scaler=accelerator.scaler, **options)
    wrapped._is_accelerate_prepared = True
    if not _replicas(accelerator):
        _know_replicas(accelerator)
    accelerator._models.append(wrapped)
    replica = _Replica(accelerator, wrapped)
    accelerator.register_for_checkpointing(replica)
    accelerator.register_save_state_pre_hook(replica.save)
    accelerator.register_load_state_pre_hook(replica.find)
    optimizers = wrapped.optimizer if isinstance(wrapped.optimizer, tuple) else (wrapped.optimizer,)
    prepared = [accelerator.prepare_optimizer(each, device_placement=False) for each in optimizers if each is not None]
    if steps_in_backward(options):
        for each in prepared:
            each.scaler = None  # the model's engine has it
    others = tuple(accelerator.prepare(other) for other in others)
    return wrapped, tuple(prepared) if len(prepared) > 1 else next(iter(prepared), None), *others


_remaining: MutableMapping[Accelerator, RemainingRanks] = weakref.WeakKeyDictionary()


def renumber(rank: int, world_size: int) -> None:
    """Let Accelerate know the ranks that remain. Local."""
    numbers = {"process_index": rank, "num_processes": world_size}
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        numbers["local_process_index"] = rank
    for state in (PartialState, AcceleratorState):
        state._shared_state.update(numbers)


def _check_arguments(accelerator: Accelerator, model: Any, optimizer: Any, others: tuple[Any, ...]) -> None:
    if accelerator.ddp_handler is not None:
        raise ValueError(
            "accelerator has DistributedDataParallelKwargs, which have no effect; leave them out of Accelerator(...)"
        )
    if getattr(model, "_is_accelerate_prepared", False) or isinstance(model, GossipDataParallel):
        raise ValueError(
            f"model is a {type(model).__name__} that has already been prepared or wrapped; pass the module itself, and "
            "leave it out of accelerator.prepare(...)"
        )
    if isinstance(optimizer, AcceleratedOptimizer):
        raise ValueError(
            "optimizer has already been prepared; pass the torch optimizer itself, or a function that makes it, and "
            "leave it out of accelerator.prepare(...)"
        )
    for other in others:
        if isinstance(other, nn.Module | Optimizer):
            raise TypeError(
                f"others must be data loaders and schedulers, got a {type(other).__name__}; call prepare(...) once for "
                "each model with its optimizer"
            )
    if others and training_store.joined() is not None:
        raise ValueError(
            f"others has a {type(others[0]).__name__}, but this process joins a training: it is alone for the "
            "accelerator, which would leave loaders undivided and step schedulers less often than on the other ranks; "
            "on every rank divide the samples by model.rank and model.world_size, and call "
            "model.keep(scheduler=scheduler) and scheduler.step() without preparing them"
        )


# ---------------------------------------------------------------------- checkpoints


class _Replica:
    """An object that saves and restores one rank's replica together with the accelerator's state.

    The accelerator saves it as a registered object. Such objects are loaded last, after the averaged weights and rank
    0's optimizer, which the accelerator loads on every rank.
    """

    def __init__(self, accelerator: Accelerator, model: GossipDataParallel) -> None:
        self._accelerator = accelerator
        self._model = model
        self._folder = Path()

    def _place(self, folder: str) -> Path:
        index = _replicas(self._accelerator).index(self._model)
        return Path(folder) / (_FOLDER if index == 0 else f"{_FOLDER}_{index}")

    def save(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        """Save the replica, and put the average in place of rank 0's weights. Collective."""
        save(self._model, self._place(folder))
        with self._model.averaged():
            weights[models.index(self._model)] = copy.deepcopy(self._model.state_dict())  # tied weights stay tied

    def find(self, _: list[nn.Module], folder: str) -> None:
        """Note where the replica was saved, once rank 0 has written its files. Collective."""
        self._accelerator.wait_for_everyone()
        self._folder = self._place(folder)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the accelerator's own file, which one rank writes."""
        return {"step": self._model.step}

    def load_state_dict(self, _: Mapping[str, Any]) -> None:
        """Restore the replica. Collective."""
        load(self._model, self._folder)


# ---------------------------------------------------------------------- the accelerator's methods


def _replicas(accelerator: Accelerator) -> list[GossipDataParallel]:
    return [model for model in accelerator._models if isinstance(model, GossipDataParallel)]


def _know_replicas(accelerator: Accelerator) -> None:
    """Make the accelerator's methods that check for DDP by its class handle models that train by gossip likewise."""
    suspend, unwrap = accelerator.no_sync, accelerator.unwrap_model
    clip_norm, clip_value_of_others = accelerator.clip_grad_norm_, accelerator.clip_grad_value_

    def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Suspend steps in a single process too, where DDP has nothing to suspend."""
        return model.no_sync() if isinstance(model, GossipDataParallel) else suspend(model)

    def unwrap_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return unwrap(model.module if isinstance(model, GossipDataParallel) else model, *args, **kwargs)

    def join_uneven_inputs(*_: Any, **__: Any) -> Any:
        raise GossipError(
            "accelerator.join_uneven_inputs joins all-reduces, of which gossip has none; write `with model.join():` "
            "instead, and pass dataloader_config=DataLoaderConfiguration(even_batches=False) to Accelerator"
        )

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        parameters, model = _with_stepped(accelerator, parameters)
        if model is None:
            return clip_norm(parameters, max_norm, norm_type)
        if model._arguments.clip_grad_norm != max_norm or norm_type != 2:
            raise released_gradients(
                f"accelerator.clip_grad_norm_(..., {max_norm}, norm_type={norm_type})",
                f"pass clip_grad_norm={max_norm} to prepare(...), where it is {model._arguments.clip_grad_norm}",
            )
        return torch.tensor(float("nan") if model.grad_norm is None else model.grad_norm, dtype=torch.float64)

    def clip_grad_value_(parameters: Any, clip_value: float) -> None:
        parameters, model = _with_stepped(accelerator, parameters)
        if model is not None:
            raise released_gradients(
                f"accelerator.clip_grad_value_(..., {clip_value})", "pass clip_grad_norm= to prepare(...)"
            )
        clip_value_of_others(parameters, clip_value)

    for method in (no_sync, unwrap_model, join_uneven_inputs, clip_grad_norm_, clip_grad_value_):
        setattr(accelerator, method.__name__, method)


def _with_stepped(accelerator: Accelerator, parameters: Any) -> tuple[list[torch.Tensor], GossipDataParallel | None]:
    """Return the parameters as a list, with the model that has updated one of them in its backward pass, or None."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    wanted = set(map(id, parameters))
    for model in _replicas(accelerator):
        if model._arguments.step_in_backward and not wanted.isdisjoint(map(id, model.parameters())):
            return parameters, model
    return parameters, None
