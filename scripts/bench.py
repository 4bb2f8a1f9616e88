"""``gossip bench``: measure gossip against all-reduce and Decent-DP; see configs/bench.yaml and --help.

python scripts/bench.py bench.model=transformer bench/methods=topologies
sudo python scripts/bench.py bench.network=lab bench.rate=200mbit
"""

import sys

from gossip.lab.gossip_command import run

if __name__ == "__main__":
    sys.exit(run("bench"))
