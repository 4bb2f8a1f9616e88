"""Gossip that mixes the optimizer's momentum like the values."""

from torch.optim import SGD, Muon, Optimizer

from gossip.algorithms.desloc import DESLOC


class MomentumExchange(DESLOC):
    r"""Adapt while communicating, applied to the values and to the momentum of SGD or Muon.

    With :math:`v_i` the momentum buffers of ``torch.optim.SGD``, and likewise for ``torch.optim.Muon``:

    .. math::
        v_i &\leftarrow \mu \sum_j W_{ij}\, v_j + g_i(t) \\
        x_i &\leftarrow \sum_j W_{ij}\, x_j + u_i(v_i)

    Local momentum carries each rank's own data along for :math:`1 / (1 - \mu)` steps; mixed momentum is an average, as
    the values are.

    Sends two messages per step and keeps nothing besides the optimizer's own state. Works with any doubly stochastic W.
    Use it for SGD with momentum where ranks hold different data, if two messages per step are affordable.

    References
    ----------
    Yu, Jin and Yang, "On the linear speedup analysis of communication efficient momentum SGD for distributed non-convex
    optimization", ICML 2019, algorithm 2.
    """

    def __init__(self) -> None:
        super().__init__(period=1, moments={"momentum_buffer": 1}, form="awc")

    def check_optimizers(self, optimizers: tuple[Optimizer, ...]) -> None:
        for optimizer in optimizers:
            has_buffer = isinstance(optimizer, SGD | Muon)
            if not has_buffer or any(group["momentum"] == 0 for group in optimizer.param_groups):
                raise ValueError(
                    "algorithm MomentumExchange mixes the momentum of torch.optim.SGD or Muon, but the optimizer is "
                    f"{type(optimizer).__name__}{' without momentum' * has_buffer}; take SGD with a momentum for what "
                    'Muon does not take, or choose algorithm="adapt_while_communicating"'
                )

    def describe(self) -> str:
        return type(self).__name__
