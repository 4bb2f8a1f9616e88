"""What topologies of thousands of ranks, and rounds of a million, cost: time, memory and analysis, family by family.

    OPENBLAS_NUM_THREADS=1 python scripts/topology_scale.py
    python scripts/topology_scale.py world_size=1024 --families ring base --large-world-size 100000

The first table has a row for every variant of a family at the served size nearest to ``--world-size``, each measured in
a process of its own; times are the least of three runs, except that of the analysis.

build       ``topologies.build`` with the variant's options
first       ``round(0)`` and the row of one rank, the first time
row         ``round(t).neighbours(rank)`` of every rank, per row; the making of the rounds is included
one rank    the same for one rank alone, per round: what a worker pays that reads its own row only
B/edge      most bytes in use at once while all that is done, per edge of the rounds, own weights included
describe    ``topology.describe()``, everything that can be measured, of a topology that has made no round yet
MiB         the most memory that the process needed for all this, above what it had before

Times are processor time of one thread, which other programs on the machine disturb less.

Rounds are those of one period, the first 16 at most. The second table is about ``round(t).neighbours(rank)`` for random
t and rank, rounds that are used for the first time included; n is ``--large-world-size``, or the nearest power of two.
"""

import sys

from gossip.lab.benchmarks.bench_script import main

if __name__ == "__main__":
    sys.exit(main("topology_scale", __doc__))
