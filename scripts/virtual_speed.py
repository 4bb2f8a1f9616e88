"""A step of all virtual workers, next to the same step by a loop over as many modules.

    python scripts/virtual_speed.py
    python scripts/virtual_speed.py --world-sizes 64 1024 10000 --topology base --device cuda

Both train the digits' MLP (64-64-10) by SGD with momentum and mix after every step. The loop's modules live in rows of
one tensor, so that its mixing is one sparse product too; its small operations run on one thread, which is faster than
several. Each way has a process of its own, and they take turns; printed are medians over all steps.
"""

import sys

from gossip.lab.benchmarks.bench_script import main

if __name__ == "__main__":
    sys.exit(main("virtual_speed", __doc__))
