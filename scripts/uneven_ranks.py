"""One rank that is slower than the others: how fast all of them are, and how good the model is, after equal samples.

    python scripts/uneven_ranks.py
    python scripts/uneven_ranks.py --compute-ms 2 --seeds 10

Ranks train digits. Before each step a rank sleeps, as if a device computed; rank 0 so much longer than the others. In
step, all make as many steps; where they are not, each makes as many as its speed allows, and together they make as many
as the others. Speed: of all ranks together, to the sum of what each makes with no exchange. Accuracy is that of the
averaged model on held-out images.
"""

import sys

from gossip.lab.benchmarks.bench_script import main

if __name__ == "__main__":
    sys.exit(main("uneven_ranks", __doc__))
