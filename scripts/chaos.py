"""Train digits while ranks are killed, frozen, cut off and told to leave, and come back; check that nothing is torn.

    python scripts/chaos.py outputs/chaos
    python scripts/chaos.py outputs/an_hour --seconds 3600 world_size=8 --compression int8
    python scripts/chaos.py outputs/planned --seconds 10 --restarts 1 --faults kill:1@200 kill:4@400 kill:6@600
    python scripts/chaos.py outputs/groups world_size=8 --local-size 2 --shard optimizer --min-ranks 1
    python scripts/chaos.py outputs/recorded --record outputs/recording

Faults follow from the seed, or are given by kind (kill, freeze, leave, cut, delay), number of the rank (those that come
back have new ones) and step. With ``--local-size`` shard groups of so many ranks train; each fault is that of one rank,
and ``--min-ranks`` counts groups. The folder gets the notes of all ranks, ``report.md``, ``results.json`` and
``course.svg``. The exit status is 1 if a message was mixed that nobody had sent, or if nobody trained to the end.
"""

import sys

from gossip.lab.benchmarks.harness import main
from gossip.lab.faults.chaos import Chaos

if __name__ == "__main__":
    sys.exit(main(Chaos, __doc__))
