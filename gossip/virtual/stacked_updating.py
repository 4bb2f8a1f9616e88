"""The local update of all replicas: whose gradients there are, made each replica's own, clipped and applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from loguru import logger
from torch import nn
from torch.optim import Optimizer

from gossip.communication.world import accumulation_dtype
from gossip.compression.part_memory import all_finite
from gossip.errors import GossipError
from gossip.parameters.buckets import Bucket
from gossip.private_torch import multiply_
from gossip.step.engine import MAX_NON_FINITE_STEPS
from gossip.step.step_order import SkippedRows
from gossip.virtual.shards import Shard
from gossip.virtual.stacked_optimizers import (
    Stacks,
    check_stacks_held,
    left_alone,
    num_held,
    row_norms,
    stack_groups,
)


class StackedUpdater:
    """What :class:`gossip.step.updating.Updater` does for one rank, for all replicas at once.

    Parameters
    ----------
    shards : sequence of Shard
    buckets : sequence of Bucket
        By which the gradients of a replica are clipped and checked, unless all of them are clipped together.
    optimizers : sequence of Optimizer
        Over the stacks.
    stacks : mapping of int to sequence of Parameter
        See :data:`gossip.virtual.stacked_optimizers.Stacks`.
    clip_grad_norm : float or None
    clip : str
        "global" or "bucket".

    Attributes
    ----------
    scales : Tensor, [n], float64
        By what each rank's gradients are to be multiplied; 0 where it has none.
    num_bad_steps : Tensor, [n], int64
        How many steps in a row something of a rank was not finite.
    reached : dict of str to Tensor, [n], bool
        Of a parameter that only some ranks' backward passes have reached: which.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        buckets: Sequence[Bucket],
        optimizers: Sequence[Optimizer],
        stacks: Stacks,
        *,
        clip_grad_norm: float | None,
        clip: str,
    ) -> None:
        self._shards = shards
        self._optimizers = optimizers
        self._stacks = stacks
        self._num_held = num_held(optimizers)
        self._clip_grad_norm = clip_grad_norm
        self._clips_all = clip_grad_norm is not None and clip == "global"
        self._names = [list(shards[0].parameters)] if self._clips_all else []
        self._group_of_bucket: dict[int, int] = {}
        self.add(buckets)
        self.scales = torch.zeros(shards[-1].ranks.stop, dtype=torch.float64)
        self.num_bad_steps = torch.zeros(len(self.scales), dtype=torch.int64)
        self.reached: dict[str, torch.Tensor] = {}

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Update these parameters too."""
        for bucket in buckets if not self._clips_all else ():
            self._group_of_bucket[bucket.index] = len(self._names)
            self._names.append(list(bucket.names))

    def note_scale(self, ranks: range, scale: float) -> torch.Tensor | None:
        """Keep the scale for those ranks that have none yet; for the others return what makes up the difference."""
        scales = self.scales[ranks.start : ranks.stop]
        scales[scales == 0] = scale
        return None if bool((scales == scale).all()) else scale / scales

    def note_reached(self, name: str, rank: int) -> None:
        """Note that a backward pass has reached a parameter of one replica that was run by itself."""
        if name not in self.reached:
            has_gradient = any(shard.parameters[name].grad is not None for shard in self._shards)
            self.reached[name] = (self.scales != 0) if has_gradient else torch.zeros_like(self.scales, dtype=torch.bool)
        self.reached[name][rank] = True

    def note_all_reached(self, name: str, ranks: range) -> None:
        """Note that a backward pass has reached a parameter of several replicas that were run at once."""
        if name in self.reached:
            self.reached[name][ranks.start : ranks.stop] = True

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for shard in self._shards:
            for parameter in shard.parameters.values():
                parameter.grad = None
        self.scales = torch.zeros_like(self.scales)
        self.reached = {}

    def stack_new_groups(self) -> None:
        """Let groups that were added to the optimizers in mid-training hold stacks too."""
        if num_held(self._optimizers) != self._num_held:
            for optimizer in self._optimizers:
                stack_groups(optimizer, self._stacks)
            check_stacks_held(self._optimizers, self._stacks)
            self._num_held = num_held(self._optimizers)

    def apply(self, step: int, direct: Callable[[SkippedRows], None] | None = None) -> torch.Tensor:
        """Clip, and step the optimizers, but for rows that have no gradient or one that is not finite: those, [n].

        Parameters
        ----------
        step : int
        direct : callable, optional
            Called right before the optimizers step, with which rows of a bucket they leave alone: what puts other
            gradients in all gradients' place.
        """
        skipped, left = self.prepare(step)
        if direct is not None:
            direct(
                lambda index: [
                    rows.to(s.device) for rows, s in zip(left[self._group(index)], self._shards, strict=True)
                ]
            )
            self.reached = {}
        with left_alone(self._optimizers, self._rows_left_alone(left)):
            for optimizer in self._optimizers:
                optimizer.step()
        self.drop_gradients()
        return skipped

    def prepare(self, step: int) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """Make the gradients each replica's own, and clip them.

        Returns
        -------
        Tensor, [n], bool
            Whose gradients are not finite.
        list of list of Tensor
            By group of parameters and shard, the rows that are not to be updated.
        """
        skipped = torch.zeros_like(self.scales, dtype=torch.bool)
        self._complete_gradients()
        self._scale_gradients()
        left: list[list[torch.Tensor]] = []
        for names in self._names:
            left.append([])
            for shard in self._shards:
                own = slice(shard.ranks.start, shard.ranks.stop)
                parameters = [shard.parameters[name] for name in names if shard.parameters[name].grad is not None]
                spoilt = self._measure_and_clip(parameters)
                idle = self.scales[own] == 0
                left[-1].append(idle if spoilt is None else idle | spoilt.cpu())
                if spoilt is not None:
                    skipped[own] |= spoilt.cpu()
        if bool(skipped.any()):
            ranks = ", ".join(map(str, skipped.nonzero().flatten().tolist()))
            logger.warning("step {}: ranks {}: a gradient is not finite; the update is skipped", step, ranks)
        return skipped, left

    def _group(self, index: int) -> int:
        """Which of the groups of parameters that are clipped together a bucket belongs to."""
        return 0 if self._clips_all else self._group_of_bucket[index]

    def _rows_left_alone(self, left: Sequence[Sequence[torch.Tensor]]) -> dict[nn.Parameter, torch.Tensor]:
        alone: dict[nn.Parameter, torch.Tensor] = {}
        for names, by_shard in zip(self._names, left, strict=True):
            for shard, rows in zip(self._shards, by_shard, strict=True):
                own = slice(shard.ranks.start, shard.ranks.stop)
                for name in names:
                    own_rows = rows | ~self.reached[name][own] if name in self.reached else rows
                    if shard.parameters[name].grad is not None and bool(own_rows.any()):
                        alone[shard.parameters[name]] = own_rows.to(shard.device)
        return alone

    def _complete_gradients(self) -> None:
        """Give a parameter that has a gradient on some device one on all, as if it were one stack."""
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

    def _measure_and_clip(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor | None:
        """Rows whose gradients are not finite, [k]; None if all are."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self._clip_grad_norm is None and all(map(all_finite, gradients)):
            return None
        norms = row_norms(parameters)
        if norms is None:
            return None
        if self._clip_grad_norm is not None:
            factors = (self._clip_grad_norm / (norms + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(along_rows(factors, gradient))
        spoilt = torch.stack([~gradient.flatten(1).isfinite().all(1) for gradient in gradients]).any(0)
        return spoilt if bool(spoilt.any()) else None

    def count_bad_steps(self, is_bad: torch.Tensor, step: int) -> None:
        """Raise if a rank had gradients or messages that were not finite in too many steps in a row."""
        self.num_bad_steps = torch.where(is_bad, self.num_bad_steps + 1, 0)
        if int(self.num_bad_steps.max()) >= MAX_NON_FINITE_STEPS:
            raise GossipError(
                f"rank {int(self.num_bad_steps.argmax())}: step {step}: gradients or messages were not finite in "
                f"{MAX_NON_FINITE_STEPS} steps in a row; start again with a smaller learning rate"
            )


def along_rows(factors: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """One factor for each row, [k, 1 ...], in the dtype of accumulation."""
    wide = factors.to(gradient.device, accumulation_dtype(gradient.dtype))
    return wide.view(-1, *[1] * (gradient.dim() - 1))
