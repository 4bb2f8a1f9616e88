"""Which way a message takes over gloo, by its size and the number of ranks that exchange: the median time of each way.

    python scripts/exchange_ways.py
    python scripts/exchange_ways.py --network lab --rate 200mbit

Ways: one all-reduce of the values; an all-gather of them; every message point-to-point as a whole, receives posted
first; the same in pieces of 512 KiB, two at a time; and with sends posted first. In the lab every rank is a host of its
own behind a shaped link (Linux, root). gossip.DistributedTransport takes what this shows to be the fastest.
"""

import sys

from gossip.lab.benchmarks.bench_script import main

if __name__ == "__main__":
    sys.exit(main("exchange_ways", __doc__))
