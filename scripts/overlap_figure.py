"""Profile the same training with gossip and with DDP on a slow link, and draw when rank 0 computes and exchanges.

    sudo python scripts/overlap_figure.py outputs/overlap
    sudo python scripts/overlap_figure.py outputs/slow --rate 100mbit world_size=4

Every worker is a host of its own behind a shaped link (network namespaces: Linux, root, iproute2). A multilayer
perceptron, a bucket per layer; every bar comes from torch.profiler's trace. The folder gets ``overlap_RATE.svg``.
"""

import sys

from gossip.lab.benchmarks.harness import main
from gossip.lab.benchmarks.overlap import Overlap

if __name__ == "__main__":
    sys.exit(main(Overlap, __doc__))
