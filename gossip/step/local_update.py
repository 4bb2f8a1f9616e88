"""The local update: gradients checked and clipped, and the optimizers' steps, by bucket or all at once."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from gossip.compression.conversation import accumulation_dtype
from gossip.errors import GossipError
from gossip.exchange.rank_exchanges import AnyBucket
from gossip.measuring.step_stats import Meter
from gossip.optimizers.bucket_optimizer import (
    BucketOptimizer,
    Closure,
    EvaluatedClosure,
    check_parameters_held,
    held_by,
)
from gossip.optimizers.loss_scale import SharedScaler
from gossip.private_torch import fast_range, flatten_tensors, norms_of
from gossip.sharding.local_group import LocalGroup

Direct = Callable[[], None]
"""Called right before the optimizers step with gradients that are complete, clipped and finite."""

_SMALL_NUMEL = 4096
_CHUNK = 256  # tensors copied at once


class Updater:
    """Applies the optimizers to the parameters of one model.

    Gradients that are not finite are not applied: the bucket, or with all gradients at hand the whole step, is skipped
    and counted, so that one bad batch does not corrupt the replica and, through it, its peers.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        buckets: Sequence[AnyBucket],
        parameters: Sequence[nn.Parameter],
        *,
        clip_grad_norm: float | None,
        clip: str,
        scaler: SharedScaler | None,
        rank: int,
        group: LocalGroup,
    ) -> None:
        self.group = group
        self.optimizers = tuple(optimizers)
        self.scaler = scaler
        self._buckets: list[AnyBucket] = []
        self._parameters = parameters
        self._clip_grad_norm = clip_grad_norm
        self._clips_buckets = clip == "bucket"
        self.rank = rank
        self._num_held = len(held_by(self.optimizers))
        self._has_overflowed = False
        self._by_bucket: list[list[BucketOptimizer]] = []
        self._empty: set[int] = set()  # the ids of parameters that another rank of the group has whole
        self.add(buckets)

    def add(self, buckets: Sequence[AnyBucket]) -> None:
        """Update these buckets too. Local."""
        self._buckets += buckets
        self._by_bucket += [
            [BucketOptimizer(optimizer, bucket.parameters) for optimizer in self.optimizers] for bucket in buckets
        ]
        self._empty |= {id(each) for bucket in buckets for each in bucket.parameters if not each.numel()}

    def check_held(self) -> None:
        """Refuse a parameter that was added to an optimizer during training, but that the module does not have."""
        num_held = len(held_by(self.optimizers))
        if num_held != self._num_held:
            check_parameters_held(
                self.optimizers, {str(number): parameter for number, parameter in enumerate(self._parameters)}
            )
            self._num_held = num_held

    def measure_bucket(self, bucket: AnyBucket, step: int, meter: Meter) -> torch.Tensor | None:
        """Return the norm of one bucket's gradients, without communication; None if there is nothing to apply."""
        gradients = _gradients(bucket.parameters)
        if not gradients:
            return None
        with _timed(meter):
            norm = self.group.norm(_norm(gradients, bucket))
            return norm if self._is_finite(norm, gradients, f"step {step}, bucket {bucket.index}", meter) else None

    def update_bucket(self, bucket: AnyBucket, norm: torch.Tensor | None, meter: Meter, direct: Direct) -> None:
        """Apply the optimizers to one bucket's gradients with this norm (None: skip them), and drop the gradients."""
        with fast_range("gossip::update"), _timed(meter):
            if norm is not None:
                if self._clip_grad_norm is not None:
                    _clip_(bucket.parameters, self._clip_grad_norm, norm)
                direct()
                self._leave_out_empty(bucket.parameters)
                for optimizer in self._by_bucket[bucket.index]:
                    optimizer.step()
            for parameter in bucket.parameters:
                parameter.grad = None

    def _leave_out_empty(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take their gradients from parameters of which this rank has nothing: not every optimizer can step them."""
        for parameter in parameters if self._empty else ():
            if id(parameter) in self._empty:
                parameter.grad = None

    def update_all(self, step: int, meter: Meter, direct: Direct) -> None:
        """Apply the optimizers to all gradients, and drop the gradients."""
        with fast_range("gossip::update"), _timed(meter):
            overflowed = self.scaler is not None and self.group.any(
                self.scaler.unscale_(self.optimizers, self._not_held())
            )
            gradients = _gradients(self._parameters)
            if not overflowed and (not gradients or self._clip_all_if_finite_(gradients, step, meter)):
                if gradients:
                    direct()
                self._leave_out_empty(self._parameters)
                for optimizer in self.optimizers:
                    optimizer.step()
            for parameter in self._parameters:
                parameter.grad = None
            if self.scaler is not None:
                self.scaler.settle(self.optimizers, overflowed)
                self.scaler.update()

    def _not_held(self) -> list[torch.Tensor]:
        """Return the gradients of parameters that no optimizer holds."""
        held = set(map(id, held_by(self.optimizers)))
        return _gradients(parameter for parameter in self._parameters if id(parameter) not in held)

    def update_by(self, optimizer: Optimizer, closure: Closure | None, step: int, meter: Meter, direct: Direct) -> Any:
        """Let one optimizer make its own step, as the user asked, and return its result; gradients are kept."""
        with fast_range("gossip::update"), _timed(meter):
            make_step: Callable[..., Any] = type(optimizer).step
            evaluated = closure if isinstance(closure, EvaluatedClosure) else None
            if closure is not None and evaluated is None:
                return make_step(optimizer, closure)
            if self._overflowed_(optimizer) or not self._look_at_gradients(optimizer, step, meter):
                return None if evaluated is None else evaluated.loss
            direct()
            self._leave_out_empty(held_by([optimizer]))
            if evaluated is None:
                return make_step(optimizer)
            evaluated.hand_over(f"rank {self.rank}: step {step}")
            return make_step(optimizer, evaluated)

    def _look_at_gradients(self, optimizer: Optimizer, step: int, meter: Meter) -> bool:
        """Return whether the gradients that the optimizer is about to apply are finite; measures their norm."""
        held = set(map(id, held_by([optimizer]))) if len(self.optimizers) > 1 else None
        for bucket in self._buckets:
            if gradients := _gradients(p for p in bucket.parameters if held is None or id(p) in held):
                norm = self.group.norm(_norm(gradients, bucket))
                if not self._is_finite(norm, gradients, f"step {step}, bucket {bucket.index}", meter):
                    return False
        return True

    def idle(self) -> None:
        """Do for the scaler what the user leaves out for an optimizer that is not stepped in this step."""
        if self.scaler is not None:
            self.scaler.unscale_(())
            self.settle_scale()
            self.scaler.update()

    def settle_scale(self) -> None:
        """Agree with the other ranks, once all optimizers were stepped, on what the scaler's update() will do."""
        if self.scaler is not None:
            self.scaler.settle(self.optimizers, self._has_overflowed)
            self._has_overflowed = False

    def _overflowed_(self, optimizer: Any) -> bool:
        """Unscale, as an optimizer that handles scales must; return whether the gradients overflowed."""
        scale, found = optimizer.__dict__.get("grad_scale"), optimizer.__dict__.get("found_inf")
        if (found is None) != (self.scaler is None):
            raise GossipError(
                f"rank {self.rank}: the optimizer is stepped "
                + (
                    "without the scaler, with gradients that are still scaled; call scaler.step(model.optimizer)"
                    if found is None
                    else "by a GradScaler that the model does not know, so the ranks' scales would drift apart; pass "
                    "scaler=... to GossipDataParallel"
                )
            )
        if found is None:
            return False
        optimizer.grad_scale = optimizer.found_inf = None  # a fused optimizer would divide again
        if self.group.any(bool(found)):
            self._has_overflowed = True
            return True
        if scale is not None:
            for gradient in _gradients(held_by([optimizer])):
                gradient.mul_(1.0 / float(scale))
        return False

    def _clip_all_if_finite_(self, gradients: Sequence[torch.Tensor], step: int, meter: Meter) -> bool:
        norm = self.group.norm(_total_norm([_values(gradient) for gradient in gradients]))
        if not self._is_finite(norm, gradients, f"step {step}", meter):
            return False
        if self._clip_grad_norm is None:
            return True
        if self._clips_buckets:
            for bucket in self._buckets:
                if gradients := _gradients(bucket.parameters):
                    _clip_(bucket.parameters, self._clip_grad_norm, self.group.norm(_norm(gradients, bucket)))
        else:
            _clip_(self._parameters, self._clip_grad_norm, norm)
        return True

    def clip_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip all gradients to this norm; the norm before."""
        norm = self.group.norm(get_total_norm(_gradients(self._parameters), norm_type), norm_type)
        _clip_(self._parameters, max_norm, norm)
        return norm

    def _is_finite(self, norm: torch.Tensor, gradients: Sequence[torch.Tensor], where: str, meter: Meter) -> bool:
        if not norm.is_cpu:  # reading it would block the host until the device is done
            meter.gradient_norms.append(norm)
            return True
        value = float(norm)
        meter.gradient_norms.append(value)
        if value - value == 0.0 or (
            not self.group.is_shared and all(bool(_values(gradient).isfinite().all()) for gradient in gradients)
        ):
            return True
        meter.num_skipped += 1
        logger.warning("rank {}: {}: a gradient is not finite; the update is skipped", self.rank, where)
        return False


@contextmanager
def _timed(meter: Meter) -> Iterator[None]:
    start = time.perf_counter()
    yield
    meter.update_s += time.perf_counter() - start


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def _norm(gradients: list[torch.Tensor], bucket: AnyBucket) -> torch.Tensor:
    """Return the Euclidean norm of one bucket's gradients."""
    try:
        dtype = accumulation_dtype(gradients[0].dtype)
        if not bucket.block.is_cpu:
            of_device: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms_of(gradients, dtype)))
            return of_device
        if bucket.block.numel() > _SMALL_NUMEL * len(bucket.parameters):
            return _total_norm(gradients)
        # With many small tensors, the calls are expensive, not the copies.
        chunks = [gradients[start : start + _CHUNK] for start in range(0, len(gradients), _CHUNK)]
        norms = [torch.linalg.vector_norm(flatten_tensors(chunk), dtype=dtype) for chunk in chunks]
    except RuntimeError:
        if not any(gradient.is_sparse for gradient in gradients):
            raise
        return _total_norm([_values(gradient) for gradient in gradients])
    norm: torch.Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm like torch, but in float32 for half precision, where float16 would overflow."""
    if all(accumulation_dtype(gradient.dtype) == gradient.dtype for gradient in gradients):
        return get_total_norm(gradients)
    wide = [torch.linalg.vector_norm(gradient, dtype=accumulation_dtype(gradient.dtype)) for gradient in gradients]
    return get_total_norm(wide)


def _clip_(parameters: Sequence[nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    clip_grads_with_norm_([parameter for parameter in parameters if parameter.grad is not None], max_norm, norm)
