"""Update rules: what a rank does with its own values, what it sent and what it got."""

from __future__ import annotations

import torch


class AdaptWhileCommunicating:
    r"""The local update and the exchange run side by side (D-PSGD).

    With :math:`u_i(t)` the optimizer's update at rank i, computed from the gradient at :math:`x_i(t)`, and
    :math:`W_t` the mixing matrix of round t:

    .. math::
        x_i(1) &= x_i(0) + u_i(0) \\
        x_i(t+1) &= \sum_j W_{t-1}[i,j]\, x_j(t) + u_i(t), \qquad t \ge 1

    Round t is the exchange of x(t+1): it leaves in the backward pass of step t and is needed only where the same
    parameters are updated in the backward pass of step t+1, so that it has one whole iteration to arrive in.

    References
    ----------
    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, algorithm 1.
    """

    def combine_(self, values: torch.Tensor, message: torch.Tensor, mixed: torch.Tensor) -> None:
        r"""Mix what arrived into ``values``, in place: :math:`x_i \mathrel{+}= \sum_j W[i,j] m_j - m_i`.

        Written with the messages as they were sent, the mean over ranks is kept whatever the messages lost on the way,
        and an edit of the values since then (``load_state_dict``, a clamp) survives.

        Parameters
        ----------
        values : Tensor, [..., numel]
            The flat parameters x_i; changed in place. Leading dimensions are workers.
        message : Tensor, [..., numel]
            What this rank sent, m_i.
        mixed : Tensor, [..., numel]
            The weighted sum of the messages, in the dtype of accumulation; used up as scratch.
        """
        mixed.sub_(message)
        if values.dtype == mixed.dtype:
            values.add_(mixed)
        else:
            values.copy_(mixed.add_(values))
