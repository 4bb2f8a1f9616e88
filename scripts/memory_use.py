"""What a rank holds between steps, by mode, algorithm and compression: ``model.memory()``, in bytes per parameter.

    python scripts/memory_use.py

Four ranks train an MLP in float32 by the first of AdamW and SGD with and without momentum that the algorithm takes. All
columns but the last are what ``memory()`` says right after wrapping, on the rank that is to hold most, in all with what
readers that are behind can add; measured is what it says after eight steps, on the ranks that hold least and most. A
shard's bytes are divided by the parameters of the whole model. Other machines: no memory is shared.
"""

import sys

from gossip.lab.benchmarks.bench_script import main

if __name__ == "__main__":
    sys.exit(main("memory_use", __doc__))
