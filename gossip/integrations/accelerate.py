"""Gossip training in loops that are written for Accelerate."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

from gossip import GossipDataParallel, GossipError, load, save
from gossip.communication import training_store

_FOLDER = "gossip"
_KINDS = ("NO", "MULTI_")  # of accelerate's DistributedType: one process, or one per device
_MODELS = "_gossip_models"


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, *others: Any, **options: Any
) -> tuple[Any, ...]:
    """Prepare a model and its optimizer for gossip training, where ``accelerator.prepare`` would wrap them in DDP.

    The loop stays unchanged: ``accelerator.accumulate(model)``, ``accelerator.backward(loss)``, ``optimizer.step()``,
    ``scheduler.step()``, ``optimizer.zero_grad()``, ``accelerator.gather_for_metrics(...)``. Each rank trains its own
    replica; evaluate and save within ``with model.averaged():`` on all ranks, and end with ``model.global_avg()``.

    ``accelerator.save_state(folder)`` and ``accelerator.load_state(folder)`` save and restore every rank's replica, the
    state of its optimizer and the messages in flight (:func:`gossip.save`, in ``folder/gossip``): training continues
    bit for bit. The weights in ``folder/model.safetensors`` are those of ``averaged()``.

    With ``step_in_backward=True``, the default, updates are made inside ``accelerator.backward``. To clip, pass
    ``clip_grad_norm=``: ``accelerator.clip_grad_norm_`` then reports the norm, and raises if it is called with another
    value.

    With ``on_peer_loss="continue"`` ranks can be lost and can join, in loops that make no collective call of the
    accelerator's: keep schedulers (``model.keep(scheduler=scheduler)``) instead of preparing them, and divide the
    samples by ``model.rank``. The accelerator takes the number of ranks once, divides loaders by it, and steps a
    scheduler as many times.

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
        Arguments of :class:`gossip.GossipDataParallel`: ``topology="one_peer_exponential"``, ``algorithm=``,
        ``compression=``, ``clip_grad_norm=``, ``step_in_backward=`` and so on.

    Returns
    -------
    tuple
        The :class:`gossip.GossipDataParallel`, the prepared optimizer (a tuple, if there are several), and the other
        objects, prepared, in their order.

    Raises
    ------
    ValueError, TypeError
        The accelerator is set up for something that gossip does not support (FSDP, DeepSpeed, tensor parallelism, fp8,
        options of DDP), or an argument cannot be used, such as ``others`` in a process that joins a training; the text
        says what to do.

    Notes
    -----
    Collective: every rank must call it.

    Examples
    --------
    >>> accelerator = Accelerator(cpu=True)
    >>> module = nn.Linear(2, 1)
    >>> sgd = functools.partial(torch.optim.SGD, lr=0.1)
    >>> model, optimizer = prepare(accelerator, module, sgd, topology="ring")
    >>> accelerator.backward(model(torch.ones(1, 2)).sum())
    >>> optimizer.step()
    >>> model.step
    1
    """
    _check_accelerator(accelerator, steps_in_backward=options.get("step_in_backward", True))
    _check_arguments(model, optimizer, others, options)
    placed = accelerator.prepare_model(model, evaluation_mode=True)  # not wrapped: moved, cast and compiled
    accelerator._models.remove(placed if placed in accelerator._models else model)
    wrapped = GossipDataParallel(placed, optimizer, scaler=accelerator.scaler, **options)
    wrapped._is_accelerate_prepared = True
    accelerator._models.append(wrapped)
    _know(accelerator, wrapped)
    replica = _Replica(accelerator, wrapped)
    accelerator.register_for_checkpointing(replica)
    accelerator.register_save_state_pre_hook(replica.save)
    accelerator.register_load_state_pre_hook(replica.find)
    prepared = tuple(_prepared(accelerator, each, wrapped) for each in _optimizers_of(wrapped))
    others = tuple(accelerator.prepare(other) for other in others)
    return wrapped, prepared if len(prepared) > 1 else next(iter(prepared), None), *others


# ---------------------------------------------------------------------- refusals


def _check_accelerator(accelerator: Accelerator, *, steps_in_backward: bool) -> None:
    kind = accelerator.distributed_type.value
    refused = ""
    if not kind.startswith(_KINDS):
        refused = f"distributed_type {kind}, which divides or steps the model in its own way"
    elif accelerator.parallelism_config is not None:
        refused = "a parallelism_config, whose groups of ranks hold parts of one model"
    elif accelerator.mixed_precision == "fp8":
        refused = 'mixed_precision="fp8", which replaces layers'
    elif accelerator.ddp_handler is not None:
        refused = "DistributedDataParallelKwargs, which have no effect here"
    elif steps_in_backward and accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        refused = "sync_each_batch=True, with which every backward pass would be a step"
    if refused:
        raise ValueError(
            f"accelerator is set up with {refused}: gossip trains one whole replica on each rank; leave it out of "
            "Accelerator(...) and of `accelerate config`"
        )


def _check_arguments(model: Any, optimizer: Any, others: tuple[Any, ...], options: Mapping[str, Any]) -> None:
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
    if "scaler" in options:
        raise TypeError('scaler is the accelerator\'s; leave it out, and pass mixed_precision="fp16" to Accelerator')


# ---------------------------------------------------------------------- optimizers


def _optimizers_of(model: GossipDataParallel) -> tuple[Optimizer, ...]:
    if model.optimizer is None:
        return ()
    return model.optimizer if isinstance(model.optimizer, tuple) else (model.optimizer,)


def _prepared(accelerator: Accelerator, optimizer: Optimizer, model: GossipDataParallel) -> AcceleratedOptimizer:
    prepared = accelerator.prepare_optimizer(optimizer, device_placement=False)
    if _steps_in_backward(model):
        prepared.scaler = None  # the model's engine has it
    return prepared


def _steps_in_backward(model: GossipDataParallel) -> bool:
    return model._arguments.step_in_backward


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
        models = [model for model in self._accelerator._models if isinstance(model, GossipDataParallel)]
        index = models.index(self._model)
        return Path(folder) / (_FOLDER if index == 0 else f"{_FOLDER}_{index}")

    def save(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        """Save the replica, and put the average in place of rank 0's weights. Collective."""
        save(self._model, self._place(folder))
        with self._model.averaged():
            weights[models.index(self._model)] = _copied(self._model.state_dict())

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


def _copied(weights: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return copies of the tensors. Tied ones stay tied: the file must have them once, or it cannot be loaded.

    The accelerator removes what is there twice from an OrderedDict only.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    copied: OrderedDict[str, Any] = OrderedDict()
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            copied[name] = value
            continue
        place = value.data_ptr() or name, value.shape, value.stride(), value.dtype
        if place not in copies:
            copies[place] = value.clone()
        copied[name] = copies[place]
    return copied


# ---------------------------------------------------------------------- the accelerator's methods


def _know(accelerator: Accelerator, model: GossipDataParallel) -> None:
    """Make the accelerator's methods that check for DDP by its class handle this model likewise."""
    known: list[GossipDataParallel] | None = accelerator.__dict__.get(_MODELS)
    if known is not None:
        known.append(model)
        return
    accelerator.__dict__[_MODELS] = known = [model]
    accelerator.no_sync = functools.partial(_no_sync, accelerator.no_sync)
    accelerator.unwrap_model = functools.partial(_unwrap_model, accelerator.unwrap_model)
    accelerator.join_uneven_inputs = _join_uneven_inputs
    accelerator.clip_grad_norm_ = functools.partial(_clip_grad_norm, accelerator.clip_grad_norm_, known)
    accelerator.clip_grad_value_ = functools.partial(_clip_grad_value, accelerator.clip_grad_value_, known)


@contextlib.contextmanager
def _no_sync(no_sync: Callable[..., Any], model: nn.Module) -> Iterator[None]:
    """Suspend steps also in a single process, where DDP has nothing to suspend but every backward pass is a step."""
    with model.no_sync() if isinstance(model, GossipDataParallel) else no_sync(model):
        yield


def _unwrap_model(unwrap_model: Callable[..., nn.Module], model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    return unwrap_model(model.module if isinstance(model, GossipDataParallel) else model, *args, **kwargs)


def _join_uneven_inputs(*_: Any, **__: Any) -> Any:
    raise GossipError(
        "accelerator.join_uneven_inputs joins all-reduces, of which gossip has none; write `with model.join():` "
        "instead, and pass dataloader_config=DataLoaderConfiguration(even_batches=False) to Accelerator"
    )


def _clip_grad_norm(
    clip: Callable[..., Any], models: list[GossipDataParallel], parameters: Any, max_norm: float, norm_type: float = 2
) -> Any:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    model = _fused(models, parameters)
    if model is None:
        return clip(parameters, max_norm, norm_type)
    wanted = model._arguments.clip_grad_norm
    if wanted != max_norm or norm_type != 2:
        raise GossipError(
            f"accelerator.clip_grad_norm_(..., {max_norm}, norm_type={norm_type}) finds no gradients, because the "
            "updates "
            f"were made inside backward, with clip_grad_norm={wanted}; pass clip_grad_norm={max_norm} to "
            "prepare(...), or "
            "step_in_backward=False to keep the usual order"
        )
    return torch.tensor(float("nan") if model.grad_norm is None else model.grad_norm, dtype=torch.float64)


def _clip_grad_value(
    clip: Callable[..., Any], models: list[GossipDataParallel], parameters: Any, clip_value: float
) -> None:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if _fused(models, parameters) is not None:
        raise GossipError(
            f"accelerator.clip_grad_value_(..., {clip_value}) finds no gradients, because the updates were made inside "
            "backward; pass step_in_backward=False to prepare(...) to keep the usual order"
        )
    clip(parameters, clip_value)


def _fused(models: list[GossipDataParallel], parameters: list[torch.Tensor]) -> GossipDataParallel | None:
    """Return the model that has updated one of these parameters in its backward pass, or None."""
    wanted = set(map(id, parameters))
    for model in models:
        if _steps_in_backward(model) and any(id(parameter) in wanted for parameter in model.parameters()):
            return model
    return None
