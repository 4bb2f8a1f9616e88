"""How many samples an update counts, told to a model whose algorithm counts ranks by them."""

from collections.abc import Callable

from gossip import GossipDataParallel


class SampleCount:
    """The samples of the batches since the model's newest step."""

    def __init__(self) -> None:
        self._step, self._num_samples = -1, 0

    def add(self, model: GossipDataParallel, count: Callable[[], int]) -> None:
        """Add those of a batch that is about to be trained on, and tell the model. Local."""
        if model.algorithm.weighted:
            if self._step != model.step:
                self._step, self._num_samples = model.step, 0
            self._num_samples += count()
            model.weigh(self._num_samples)
