"""The bases of algorithms with a period, and of those with an anchor from which local steps start."""

from gossip.algorithms.base import Form, WithForm
from gossip.algorithms.bucket_view import BucketView
from topologies import Round, Topology
from topologies.validation import check_integer

ANCHOR, VELOCITY = "anchor", "velocity"


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

    def schedule(self, topology: Topology) -> Topology:
        return topology.every(self.period)
