"""The base of algorithms with local steps between exchanges: an anchor from which the steps start."""

from __future__ import annotations

from gossip.algorithms.base import Algorithm
from gossip.algorithms.bucket_view import BucketView
from gossip.algorithms.forms import Form, check_form
from gossip.algorithms.outer_arguments import check_period
from topologies import Round, Topology

ANCHOR = "anchor"


class OuterSteps(Algorithm):
    """Ranks make ``period`` local steps from an anchor, which is kept, and then a joint outer step.

    Outer step s uses round s of the topology; a rank without a peer makes it alone. A global average sets the anchor to
    the mean.
    """

    def __init__(self, period: int, form: Form) -> None:
        self.period = check_period("period", period)
        self.form = check_form(form)
        self.before_forward = form == "atc"

    def schedule(self, topology: Topology) -> Topology:
        return topology.every(self.period)

    def steps_alone(self, step: int, round_: Round) -> bool:
        del round_
        return (step + 1) % self.period == 0

    def begin(self, bucket: BucketView) -> None:
        super().begin(bucket)
        self.averaged(bucket)

    def averaged(self, bucket: BucketView) -> None:
        bucket.kept[ANCHOR].copy_(bucket.values)
