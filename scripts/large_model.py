"""Ways to train a model of the size of GPT-2 small: whether they agree, how much memory and how long they take.

    python scripts/large_model.py
    python scripts/large_model.py --ways ddp exact int8 --steps 5
    python scripts/large_model.py --dtype float64 --width 64 --depth 2 --vocabulary 128

124 million parameters, two or four ranks on this machine (8 to 16 GB of memory), and an hour for all ways on two cores.
"""

import sys

from gossip.lab.benchmarks.harness import main
from gossip.lab.benchmarks.large_model import LargeModel

if __name__ == "__main__":
    sys.exit(main(LargeModel, __doc__))
