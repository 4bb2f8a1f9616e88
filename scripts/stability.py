"""The largest stable learning rates of gossip and of integral correction, and how large its gain may be.

    python scripts/stability.py
    python scripts/stability.py --families ring base --sizes 2 4 8 --figure docs/gain.svg

Prints one line for each family and number of ranks: for a quadratic with eigenvalues from 0.01 to 1, shared by all
ranks, the largest rate up to 2 (where gradient descent ends) below which nothing diverges, for adapt while
communicating, adapt then combine, and each with an integral correction by its default gains. The figure shows against
the steps in which a schedule mixes the largest kappa, with gamma = 1 - kappa / 2, that is stable at nine tenths of the
largest rate of gossip, and the default ones.
"""

import sys

from gossip.lab.benchmarks.bench_script import main

if __name__ == "__main__":
    sys.exit(main("stability", __doc__))
