"""``gossip probe``: measure this cluster, and predict whether gossip helps on it; see --help.

python scripts/probe.py world_size=4
torchrun --nproc-per-node 8 scripts/probe.py
"""

import sys

from gossip.lab.gossip_command import run

if __name__ == "__main__":
    sys.exit(run("probe"))
