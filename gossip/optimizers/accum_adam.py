"""Adam with moments of gradients that are accumulated over several steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class AccumAdam(Optimizer):
    r"""Adam for decentralized training: an update in every step, new moments every s steps.

    A rank's batch is small, and the mean of squares of its noisy gradients is far larger than the square of the mean
    gradient, by which Adam divides under all-reduce. Moments of the mean over s steps are those of a batch s times as
    large. With g the gradient of step t, and :math:`k = \lceil t / s \rceil`:

    .. math::
        m' &= \beta_1 m + (1 - \beta_1)\, g, \qquad v' = \beta_2 v + (1 - \beta_2)\, g^2 \\
        x &\leftarrow x - \eta\, \frac{m' / (1 - \beta_1^k)}{\sqrt{v' / (1 - \beta_2^k)} + \epsilon} \\
        a &\leftarrow a + g / s; \qquad \text{every s steps } m \leftarrow \beta_1 m + (1 - \beta_1)\, a, \quad
            v \leftarrow \beta_2 v + (1 - \beta_2)\, a^2, \quad a \leftarrow 0

    With s = 1 this is ``torch.optim.Adam``. It keeps three tensors per parameter. The parameter times ``weight_decay``
    is added to the gradient. Raises ValueError: an argument is outside its range.

    Parameters
    ----------
    params : iterable of Tensor, of dict, or of (str, Tensor)
        The parameters, as for any optimizer.
    lr : float
        The learning rate, at least 0.
    betas : pair of float
        The decay rates of the moments, at least 0 and below 1.
    eps : float
        The term added to the denominator, at least 0.
    weight_decay : float, optional
        The weight decay, at least 0; by default 0, and 0.01 with :class:`AccumAdamW`.
    accum_iter : int
        s, the number of steps over which gradients are accumulated, at least 1.

    References
    ----------
    Wang et al., "From promise to practice: Realizing high-performance decentralized training", ICLR 2025, algorithm 4.
    """

    _decoupled = False
    _default_decay = 0.0

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        *,
        accum_iter: int = 4,
    ) -> None:
        weight_decay = self._default_decay if weight_decay is None else weight_decay
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, got {value!r}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers of at least 0 and below 1, got {betas!r}")
        if not isinstance(accum_iter, int) or isinstance(accum_iter, bool) or accum_iter < 1:
            raise ValueError(f"accum_iter must be a number of steps, at least 1, got {accum_iter!r}")
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "accum_iter": accum_iter}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; ``closure``, if given, is evaluated once, before that."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), lr = self.state[parameter], group["betas"], group["lr"]
        if gradient.is_sparse:
            raise ValueError(
                f"{type(self).__name__} does not support sparse gradients; build the embedding with sparse=False"
            )
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq", "accumulated"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        step, interval = int(state["step"]), group["accum_iter"]
        mean, square, accumulated = state["exp_avg"], state["exp_avg_sq"], state["accumulated"]
        if self._decoupled:
            parameter.mul_(1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        num_moments = -(-step // interval)
        new_mean = mean.lerp(gradient, 1 - beta1).div_(1 - beta1**num_moments)
        new_square = (square * beta2).addcmul_(gradient, gradient, value=1 - beta2).div_(1 - beta2**num_moments)
        parameter.sub_(new_mean.div_(new_square.sqrt_().add_(group["eps"])).mul_(lr))
        accumulated.add_(gradient, alpha=1 / interval)
        if step % interval == 0:
            mean.lerp_(accumulated, 1 - beta1)
            square.mul_(beta2).addcmul_(accumulated, accumulated, value=1 - beta2)
            accumulated.zero_()


class AccumAdamW(AccumAdam):
    r""":class:`AccumAdam` with decoupled weight decay: :math:`x \leftarrow (1 - \eta \lambda)\, x` before the update.

    With ``accum_iter=1`` it is ``torch.optim.AdamW``.
    """

    _decoupled = True
    _default_decay = 1e-2
