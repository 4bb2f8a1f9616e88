"""``gossip train``: train one experiment, or with -m a sweep over several; see configs/train.yaml and --help.

python scripts/train.py topology=ring world_size=8
python scripts/train.py -m topology=ring,one_peer_exponential,complete
torchrun --nproc-per-node 4 scripts/train.py
srun --ntasks 4 python scripts/train.py
"""

import sys

from gossip.lab.gossip_command import run

if __name__ == "__main__":
    sys.exit(run("train"))
