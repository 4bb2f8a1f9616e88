"""Train one experiment, or with -m a sweep over several: see configs/train.yaml and --help.

python scripts/train.py topology=ring launch.world_size=8
python scripts/train.py -m topology=ring,one_peer_exponential,complete
torchrun --nproc-per-node 4 scripts/train.py
srun --ntasks 4 python scripts/train.py
"""

import sys
from pathlib import Path


def main() -> int:
    """Run hydra's command line over configs/, wherever it is called from."""
    try:
        from gossip.lab.experiments import train_command
        from topologies.standard_output import ends_quietly

        configs = Path(__file__).resolve().parent.parent / "configs"
        return ends_quietly(lambda: train_command.main(configs, "train"))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
