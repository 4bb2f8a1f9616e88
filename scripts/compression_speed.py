"""How fast compressions encode and decode one bucket, next to a copy of it.

    python scripts/compression_speed.py
    python scripts/compression_speed.py --device cuda --numel 67108864

A rank exchanges with itself in one thread, and copies its values in between. GB/s are of the values (4 bytes each), by
the thread's own time on a CPU, by the device's elsewhere: medians over the exchanges. Check is all between the arrival
of a message and the first part of what is decoded; decode and mix makes the parts, takes their norms and adds them to
the values, as training does.
"""

import sys

from gossip.lab.benchmarks.compression_speed import CompressionSpeed
from gossip.lab.benchmarks.harness import main

if __name__ == "__main__":
    sys.exit(main(CompressionSpeed, __doc__))
