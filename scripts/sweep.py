"""``gossip sweep``: run many experiments and report on all of them; see configs/sweep.yaml and --help.

python scripts/sweep.py experiment=topology_comparison
python scripts/sweep.py topology=ring,torus,base world_size=8,16 seed=0,1,2 engine=virtual
The same command again runs only what has not been run.
"""

import sys

from gossip.lab.gossip_command import run

if __name__ == "__main__":
    sys.exit(run("sweep"))
