"""The bases of algorithms with a period, and of those with an anchor from which local steps start."""

import inspect
from typing import Literal

from gossip.algorithms.base import Form, Kept, WithForm
from gossip.algorithms.bucket_view import BucketView
from gossip.algorithms.outer_optimizers import ANCHOR, OuterFactory, OuterOptimizer, TorchOuterOptimizer
from topologies import Round, Topology
from topologies.validation import check_integer, check_real


class Periodic(WithForm):
    """Algorithms in which every ``period``-th step is another one."""

    _constants: tuple[str, ...] = ("period",)

    def __init__(self, period: int, form: Form) -> None:
        self.period = check_integer("period", period, minimum=1)
        super().__init__(form)

    def _ends_period(self, step: int) -> bool:
        return (step + 1) % self.period == 0


class Anchored(Periodic):
    """Algorithms that keep an anchor, which moves in every ``period``-th step, also on a rank without a peer.

    A global average sets the anchor to the mean.
    """

    def steps_alone(self, step: int, round_: Round) -> bool:
        del round_
        return self._ends_period(step)

    def begin(self, bucket: BucketView) -> None:
        super().begin(bucket)
        self.averaged(bucket)

    def averaged(self, bucket: BucketView) -> None:
        bucket.kept[ANCHOR].copy_(bucket.values)


class OuterSteps(Anchored):
    """Ranks make ``period`` local steps from an anchor and then a joint outer step.

    Outer step s uses round s of the topology; a rank without a peer makes it alone.
    """

    _outer: OuterOptimizer

    def __init__(self, period: int, form: Form, outer_lr: float, outer_momentum: float = 0.0) -> None:
        super().__init__(period, form)
        self.outer_lr = check_real("outer_lr", outer_lr, "above 0 and finite", example=0.7)
        self.outer_momentum = check_real("outer_momentum", outer_momentum, "at least 0 and below 1", example=0.9)

    def _step_by(
        self, outer: OuterFactory | None, own: OuterOptimizer, scope: Literal["own", "common"], **constants: float
    ) -> None:
        """Make outer steps by the user's optimizer, or by ``own`` with its ``constants`` if there is none."""
        if outer is not None:
            self._outer = self.outer = TorchOuterOptimizer(outer)
            defaults = inspect.signature(type(self)).parameters
            for name, value in constants.items():
                if value != defaults[name].default:
                    raise ValueError(f"outer={self.outer} has constants of its own, got {name}={value} too; drop one")
            self._constants = (*(name for name in self._constants if name not in constants), "outer")
        else:
            self._outer = own
        self.counts = self._outer.counts
        self.keeps = {**self.keeps, **dict.fromkeys((ANCHOR, *self._outer.states), Kept("mean", scope))}

    def schedule(self, topology: Topology) -> Topology:
        return topology.every(self.period)
