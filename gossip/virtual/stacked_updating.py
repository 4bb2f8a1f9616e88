"""The local update of all replicas: their gradients are rescaled to each replica's own, clipped and applied."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from loguru import logger
from torch import nn
from torch.optim import Optimizer

from gossip.compression.conversation import accumulation_dtype, all_finite
from gossip.errors import GossipError
from gossip.optimizers.bucket_optimizer import held_by
from gossip.optimizers.scopes import COUNTER
from gossip.parameters.buckets import Bucket
from gossip.parameters.buffers import BufferBucket
from gossip.private_torch import multiply_
from gossip.step.engine import MAX_NON_FINITE_STEPS
from gossip.virtual.shards import Shard
from gossip.virtual.stacked_optimizers import (
    Stacks,
    check_stacks_held,
    left_alone,
    stack_groups,
    step_all,
    step_counters,
)

RowsByName = Mapping[str, Sequence[torch.Tensor]]
"""By parameter and shard, some rows of its stack, [k], bool."""


class StackedModel(NamedTuple):
    """What all replicas are made of: their stacks, and what updates these."""

    shards: Sequence[Shard]
    buckets: Sequence[Bucket]
    buffer_buckets: Sequence[BufferBucket]
    """What a rank would have in place of the blocks that are float buffers, which are never compressed."""
    optimizers: Sequence[Optimizer]


class StackedUpdater:
    """The counterpart of :class:`gossip.step.local_update.Updater` for all replicas at once.

    The gradients of a replica are clipped and checked by ``buckets``, unless all are clipped together.

    Attributes
    ----------
    scales : Tensor, [n], float64
        The factor for each rank's gradients; 0 for a rank without gradients.
    num_bad_steps : Tensor, [n], int64
        The number of consecutive steps in which something on a rank was not finite.
    reached : dict of str to Tensor, [n], bool
        Which ranks' backward passes have reached a parameter, for parameters that only some have reached.
    counts_each : bool
        Whether the optimizers' counters are those of each rank; otherwise all share them.
    lags : dict of str to Tensor, [n], int64
        If so, by parameter, how many updates fewer each rank has made than the optimizers have counted.
    """

    def __init__(self, model: StackedModel, stacks: Stacks, *, clip_grad_norm: float | None, clip: str) -> None:
        self._shards, self._optimizers, self._stacks = model.shards, model.optimizers, stacks
        self._num_held = len(held_by(model.optimizers))
        self._clip_grad_norm = clip_grad_norm
        self._clips_all = clip_grad_norm is not None and clip == "global"
        self._groups: list[Sequence[str]] = [list(model.shards[0].parameters)] if self._clips_all else []
        self._buckets: list[Bucket] = []
        self.add(model.buckets)
        self.scales = torch.zeros(model.shards[-1].ranks.stop, dtype=torch.float64)
        self.num_bad_steps = torch.zeros(len(self.scales), dtype=torch.int64)
        self.reached: dict[str, torch.Tensor] = {}
        self.counts_each = False
        self.lags: dict[str, torch.Tensor] = defaultdict(partial(torch.zeros_like, self.num_bad_steps))

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Update these parameters too."""
        self._buckets += buckets
        self._groups += [bucket.names for bucket in buckets if not self._clips_all]

    def note_scale(self, ranks: range, scale: float) -> torch.Tensor | None:
        """Set the scale of ranks that have none yet; return the factors that make up the difference for the others."""
        scales = self.scales[ranks.start : ranks.stop]
        scales[scales == 0] = scale
        return None if bool((scales == scale).all()) else scale / scales

    def note_reached(self, name: str, rank: int) -> None:
        """Note that a backward pass has reached a parameter of a replica that ran by itself."""
        if name not in self.reached:
            self.reached[name] = (self.scales != 0) & self._gradient_of(name)
        self.reached[name][rank] = True

    def note_all_reached(self, name: str, ranks: range) -> None:
        """Note that a backward pass has reached a parameter of several replicas that ran at once."""
        if name in self.reached:
            self.reached[name][ranks.start : ranks.stop] = True

    def has_gradients(self) -> bool:
        """Return whether there are gradients that no step has applied."""
        return any(parameter.grad is not None for shard in self._shards for parameter in shard.parameters.values())

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        for shard in self._shards:
            for parameter in shard.parameters.values():
                parameter.grad = None
        self.scales = torch.zeros_like(self.scales)
        self.reached = {}

    def stack_new_groups(self) -> None:
        """Put stacks into groups that were added to the optimizers during training."""
        if len(held_by(self._optimizers)) != self._num_held:
            for optimizer in self._optimizers:
                stack_groups(optimizer, self._stacks)
            check_stacks_held(self._optimizers, self._stacks)
            self._num_held = len(held_by(self._optimizers))

    def apply(self, step: int, direct: Callable[[RowsByName], None] | None = None) -> torch.Tensor:
        """Clip and step, except for rows without gradients or with ones that are not finite; return the latter, [n].

        ``direct`` is called right before the optimizers step, with the rows that are left unchanged, and replaces the
        gradients.
        """
        skipped, left = self.prepare(step)
        if direct is not None:
            direct(left)
            self.reached = {}
        self._step(left)
        self.drop_gradients()
        return skipped

    def _step(self, left: RowsByName) -> None:
        """Let the optimizers step, once for all ranks that have made equally many updates if these are counted."""
        alone = {name: torch.cat(list(by_shard)) for name, by_shard in left.items() if self._gradient_of(name)}
        for name in alone.keys() & self.reached.keys():
            alone[name] |= ~self.reached[name]
        lags = {0}
        if self.counts_each:
            lags = {lag for name, rows in alone.items() for lag in self.lags[name][~rows].tolist()} or {0}
        if lags == {0}:
            with left_alone(self._optimizers, self._rows_of(alone)):
                step_all(self._optimizers)
        else:
            self._step_by_lag(alone, sorted(lags))
        for name, rows in alone.items() if self.counts_each else ():
            self.lags[name] += rows

    def _step_by_lag(self, alone: Mapping[str, torch.Tensor], lags: Sequence[int]) -> None:
        stacks = {shard.parameters[name]: name for shard in self._shards for name in alone}
        gradients = {stack: stack.grad for stack in stacks if stack.grad is not None}
        entries = list(step_counters(self._optimizers, gradients))
        counts = [entry[COUNTER] for entry in entries]
        for lag in lags:
            rows = {name: own | (self.lags[name] != lag) for name, own in alone.items()}
            for stack, gradient in gradients.items():  # a step sets those of rows that it leaves alone to zero
                stack.grad = None if bool(rows[stacks[stack]].all()) else gradient.clone()
            for entry, count in zip(entries, counts, strict=True):
                entry[COUNTER] = count - lag
            with left_alone(self._optimizers, self._rows_of(rows)):
                step_all(self._optimizers)
        for entry, count in zip(entries, counts, strict=True):
            entry[COUNTER] = count + 1

    def _gradient_of(self, name: str) -> bool:
        return any(shard.parameters[name].grad is not None for shard in self._shards)

    def prepare(self, step: int) -> tuple[torch.Tensor, RowsByName]:
        """Rescale the gradients to each replica's own, and clip them.

        Returns the ranks whose gradients are not finite, [n], bool, and the rows that are not to be updated, in host
        memory.
        """
        skipped = torch.zeros_like(self.scales, dtype=torch.bool)
        self._complete_gradients()
        self._scale_gradients()
        left: dict[str, Sequence[torch.Tensor]] = {}
        for names in self._groups:
            by_shard = []
            for shard in self._shards:
                own = slice(shard.ranks.start, shard.ranks.stop)
                not_finite = self._clip(shard, names).cpu()
                skipped[own] |= not_finite
                by_shard.append((self.scales[own] == 0) | not_finite)
            left |= dict.fromkeys(names, by_shard)
        for bucket in self._buckets:  # which a rank without a gradient in it does not update
            names = list(filter(self._gradient_of, bucket.names))
            if all(name in self.reached for name in names):
                unreached = ~torch.stack([skipped & False, *(self.reached[name] for name in names)]).any(0)
                parts = zip(left[bucket.names[0]], self._shards, strict=True)
                rows = [part | unreached[shard.ranks.start : shard.ranks.stop] for part, shard in parts]
                left |= dict.fromkeys(bucket.names, rows)
        if bool(skipped.any()):
            ranks = ", ".join(map(str, skipped.nonzero().flatten().tolist()))
            logger.warning("step {}: ranks {}: a gradient is not finite; the update is skipped", step, ranks)
        return skipped, left

    def _rows_of(self, alone: Mapping[str, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
        """Return by stack its rows of these, if there are any."""
        found = {}
        for name, rows in alone.items() if any(bool(rows.any()) for rows in alone.values()) else ():
            for shard in self._shards:
                own = rows[shard.ranks.start : shard.ranks.stop]
                if shard.parameters[name].grad is not None and bool(own.any()):
                    found[shard.parameters[name]] = own.to(shard.device)
        return found

    def _complete_gradients(self) -> None:
        """Give a parameter that has a gradient on some device one on all devices, as if it were a single stack."""
        for name in self._shards[0].parameters if len(self._shards) > 1 else ():
            stacks = [shard.parameters[name] for shard in self._shards]
            if any(stack.grad is not None for stack in stacks):
                for stack in stacks:
                    stack.grad = torch.zeros_like(stack) if stack.grad is None else stack.grad

    def _scale_gradients(self) -> None:
        for shard in self._shards:
            scales = self.scales[shard.ranks.start : shard.ranks.stop]
            gradients = [parameter.grad for parameter in shard.parameters.values() if parameter.grad is not None]
            if gradients and bool((scales == scales[0]).all()):
                multiply_(gradients, float(scales[0]))
                continue
            for gradient in gradients:
                gradient.mul_(along_rows(scales, gradient))

    def _clip(self, shard: Shard, names: Sequence[str]) -> torch.Tensor:
        """Clip the gradients of these parameters together, and return the rows in which some are not finite, [k]."""
        gradients = [gradient for name in names if (gradient := shard.parameters[name].grad) is not None]
        if not gradients or (self._clip_grad_norm is None and all(map(all_finite, gradients))):
            return torch.zeros(len(shard.ranks), dtype=torch.bool)
        if self._clip_grad_norm is not None:
            norms = [
                torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=accumulation_dtype(gradient.dtype))
                for gradient in gradients
            ]
            norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
            factors = (self._clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(along_rows(factors, gradient))
        return torch.stack([~gradient.flatten(1).isfinite().all(1) for gradient in gradients]).any(0)

    def count_bad_steps(self, skipped: torch.Tensor, refused: torch.Tensor, step: int) -> None:
        """Raise if a rank had gradients or messages that were not finite in too many consecutive steps."""
        if bool(refused.any()):
            ranks = ", ".join(map(str, refused.nonzero().flatten().tolist()))
            logger.warning("a message to each of the ranks {} is not finite and is refused", ranks)
        self.num_bad_steps = torch.where(skipped | refused, self.num_bad_steps + 1, 0)
        if int(self.num_bad_steps.max()) >= MAX_NON_FINITE_STEPS:
            raise GossipError(
                f"rank {int(self.num_bad_steps.argmax())}: step {step}: gradients or messages were not finite in "
                f"{MAX_NON_FINITE_STEPS} consecutive steps; start again with a smaller learning rate"
            )


def along_rows(factors: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return one factor per row, [k, 1 ...], in the accumulation dtype."""
    wide = factors.to(gradient.device, accumulation_dtype(gradient.dtype))
    return wide.view(-1, *[1] * (gradient.dim() - 1))
