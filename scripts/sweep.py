"""Run many experiments and report on all of them: see configs/sweep.yaml, configs/experiment/ and --help.

python scripts/sweep.py experiment=topology_comparison
python scripts/sweep.py topology=ring,torus,base launch.world_size=8,16 seed=0,1,2 engine=virtual
The same command again runs only what has not been run.
"""

import sys
from pathlib import Path


def main() -> int:
    """Run hydra's command line over configs/, wherever it is called from."""
    try:
        from gossip.lab.experiments import train_command
        from topologies.standard_output import ends_quietly

        configs = Path(__file__).resolve().parent.parent / "configs"
        return ends_quietly(lambda: train_command.main(configs, "sweep"))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
