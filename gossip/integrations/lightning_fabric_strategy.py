"""The part of a strategy for Fabric that makes a DDPStrategy train by gossip."""

import contextlib
import copy
import os
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

import gossip
from gossip import GossipDataParallel, GossipError
from gossip.integrations.common_checks import released_gradients
from gossip.integrations.lightning_base import KEY, BaseStrategy, folder_beside, unscaled_by_owner
from gossip.optimizers.bucket_optimizer import requires_closure
from topologies import Topology

_REMEDY = "pass clip_grad_norm to the strategy"


def replica(model: nn.Module) -> GossipDataParallel:
    """Return the GossipDataParallel inside what ``fabric.setup(module, optimizer)`` returned, else a TypeError. Local.

    It averages, counts steps and measures.

    Examples
    --------
    >>> model, optimizer = fabric.setup(module, optimizer)  # doctest: +SKIP
    >>> with replica(model).averaged():  # doctest: +SKIP
    ...     evaluate(model)
    >>> replica(model).global_avg()  # doctest: +SKIP
    """
    inner = getattr(model, "_orig_mod", model)
    inner = getattr(inner, "_forward_module", inner)
    inner = getattr(inner, "_orig_mod", inner)
    if not isinstance(inner, GossipDataParallel):
        raise TypeError(
            f"model must be what fabric.setup(module, optimizer) returned with a gossip strategy, got "
            f"{type(model).__name__}"
        )
    return inner


class FabricStrategy(BaseStrategy):
    """A mixin that precedes Fabric's DDPStrategy; see :class:`gossip.integrations.lightning.GossipFabricStrategy`."""

    precision_argument = "precision"

    def __init__(self, topology: str | Topology = "one_peer_exponential", **options: Any) -> None:
        super().__init__(topology, **options)
        self._backward_sync_control = BackwardSyncControl()
        self._owners: list[tuple[Optimizer, GossipDataParallel]] = []

    # ------------------------------------------------------------------ set-up and teardown

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Wrap the module around its optimizers. Collective."""
        if self._scaler is not None and self._owners:
            raise ValueError(
                'precision="16-mixed": one GradScaler cannot serve two modules, each of which makes its own steps; '
                'choose precision="bf16-mixed", or put both into one module'
            )
        model = self._wrap(module, optimizers)
        self._owners += [(optimizer, model) for optimizer in optimizers]
        return model, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Leave a module without optimizers as it is, if none of its parameters is trained. Local."""
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise GossipError(
                f"{type(module).__name__} has parameters to be trained, but no optimizer to make the steps; call "
                "fabric.setup(module, optimizer, ...), or module.requires_grad_(False) if it is not trained"
            )
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse an optimizer that is set up without its module. Local."""
        raise GossipError(
            f"{type(optimizer).__name__} was set up without the module it trains; call "
            "fabric.setup(module, optimizer, ...)"
        )

    def teardown(self) -> None:
        """Close the models. Local."""
        for _, model in self._owners:
            model.close()
        super().teardown()

    # ------------------------------------------------------------------ steps

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run the closure, then make the step if backward has not made it. Local.

        An optimizer whose ``step()`` requires a closure evaluates the closure itself.
        """
        if closure is not None and requires_closure(optimizer):
            return super().optimizer_step(optimizer, closure=closure, **kwargs)
        result = None if closure is None else closure()
        if self._steps_in_backward or self._scaler is None:
            optimizer.step(**kwargs)
        else:
            model = next(model for owned, model in self._owners if owned is optimizer)
            self._step_scaled(model, optimizer, **kwargs)
        return result

    def clip_gradients_norm(self, module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Clip this rank's gradients by their norm, unless they have been released. Local."""
        with self._gradients_to_clip(optimizer, "max_norm", _REMEDY):
            return super().clip_gradients_norm(module, optimizer, *args, **kwargs)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clip this rank's gradients by value, unless they have been released. Local."""
        with self._gradients_to_clip(optimizer, "clip_val", f"{_REMEDY}, which clips by the norm"):
            super().clip_gradients_value(module, optimizer, *args, **kwargs)

    def _gradients_to_clip(
        self, optimizer: Optimizer, argument: str, remedy: str
    ) -> contextlib.AbstractContextManager[None]:
        if self._steps_in_backward:
            raise released_gradients(f"fabric.clip_gradients({argument}=...)", remedy)
        return unscaled_by_owner(optimizer)

    # ------------------------------------------------------------------ checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of the average of all replicas. Collective."""
        if not isinstance(module, GossipDataParallel):
            return dict(super().get_module_state_dict(module))
        with module.averaged():
            return copy.deepcopy(dict(super().get_module_state_dict(module)))  # the module goes on

    def save_checkpoint(self, path: str | os.PathLike[str], state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Write Fabric's checkpoint, and next to it all ranks' replicas of every model in ``state``. Collective."""
        models = _models_in(state)
        path = self.broadcast(os.fspath(path))
        names = {key: gossip.save(model, folder_beside(path) / key, keep=2).name for key, model in models.items()}
        state = {**state, KEY: names} if names else state
        super().save_checkpoint(path, state, *args, **kwargs)
        for key, name in names.items():
            self._keep_only(folder_beside(path) / key, name)

    def load_checkpoint(
        self, path: str | os.PathLike[str], state: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Restore what is in ``state``, and every rank's replica of a model if it was saved next to it. Collective.

        If a model was saved without replicas, all ranks load the same weights.
        """
        rest = dict(super().load_checkpoint(path, state, *args, **kwargs))
        if not isinstance(state, dict):
            return rest
        names = rest.pop(KEY, {})
        for key, model in _models_in(state).items():
            if key in names:
                self._load_replicas(model, folder_beside(path) / key / names[key])
        return rest


class BackwardSyncControl:
    """The implementation of ``fabric.no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Let backward passes within the block only accumulate gradients, if it is enabled. Local."""
        return replica(module).no_sync() if enabled else contextlib.nullcontext()


def _models_in(state: dict[str, Any]) -> dict[str, GossipDataParallel]:
    return {key: value for key, value in state.items() if isinstance(value, GossipDataParallel)}
