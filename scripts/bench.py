"""Measure gossip against all-reduce and Decent-DP: see configs/bench.yaml and --help.

python scripts/bench.py bench.model=transformer bench/methods=topologies
sudo python scripts/bench.py bench.network=lab bench.rate=200mbit
"""

import sys
from pathlib import Path


def main() -> int:
    """Run hydra's command line over configs/, wherever it is called from."""
    try:
        from gossip.lab.benchmarks import bench_command
        from topologies.standard_output import ends_quietly

        configs = Path(__file__).resolve().parent.parent / "configs"
        return ends_quietly(lambda: bench_command.main(configs, "bench"))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
