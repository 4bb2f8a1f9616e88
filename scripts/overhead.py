"""What the wrapper costs against plain PyTorch: the time of a step at world size 1.

    python scripts/overhead.py --steps 60 --optimizer adamw
    python scripts/overhead.py outputs/overhead --models small_tensors --modes fused
    python scripts/overhead.py --device cuda --models transformer_100m --modes control fused --optimizer fused_adamw

Time: two replicas of one model make the same steps in one thread of one process, one plain (forward, backward,
``optimizer.step()``, ``zero_grad()``) and one wrapped, in turns, the first of a pair being the second of the next. The
table shows the median and the quartiles of the ratio within a pair; the row ``control`` is plain against plain.
"""

import sys

from gossip.lab.benchmarks.harness import main
from gossip.lab.benchmarks.overhead import Overhead

if __name__ == "__main__":
    sys.exit(main(Overhead, __doc__))
