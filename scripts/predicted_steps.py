"""Step times measured in the lab, next to those that gossip.simulate_time predicts from a probe of the same hosts.

    sudo python scripts/predicted_steps.py
    sudo python scripts/predicted_steps.py outputs/steps --rates 200mbit --stragglers none --steps 10

Every worker is a host of its own behind a shaped link (network namespaces: Linux, root, iproute2). Before the methods
run, compute per step is measured without communication, latency and bandwidth between pairs, and what computing and
sending cost each other: nothing else goes into the predictions.
"""

import sys

from gossip.lab.benchmarks.bench_script import main

if __name__ == "__main__":
    sys.exit(main("predicted_steps", __doc__))
