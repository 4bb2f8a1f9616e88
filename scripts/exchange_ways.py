"""Which way a message takes over gloo, by its size and the number of ranks that exchange: the median time of each way.

    python scripts/exchange_ways.py
    python scripts/exchange_ways.py --network lab --rate 200mbit

Ways: one all-reduce of the values; an all-gather of them; every message point-to-point as a whole, receives posted
first; the same in pieces of 512 KiB, two at a time; and with sends posted first. In the lab every rank is a host of its
own behind a shaped link (Linux, root). gossip.DistributedTransport takes what this shows to be the fastest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from loguru import logger

from gossip.lab.benchmarks.exchange_ways import ExchangeWaysSettings
from gossip.lab.benchmarks.harness import run
from gossip.lab.benchmarks.network.shaped_hosts import LabUnavailable
from gossip.lab.experiments.validated_models import ConfigurationError, read


def main() -> int | str:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--network", choices=["loopback", "lab"], default="loopback")
    parser.add_argument("--rate", default="200mbit", dest="links", help="of every link of the lab, each way")
    parser.add_argument("--repetitions", type=int, default=5)
    logger.remove()
    try:
        settings = read(ExchangeWaysSettings, vars(parser.parse_args()))
        with tempfile.TemporaryDirectory() as folder:
            _, report = run("exchange_ways", settings, Path(folder))
    except ConfigurationError as error:
        parser.error(str(error))
    except LabUnavailable as error:
        return f"no lab: {error}"
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
