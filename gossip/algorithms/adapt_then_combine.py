"""Adapt then combine (ATC, diffusion): the exchange is awaited before the next forward pass."""

from __future__ import annotations

from gossip.algorithms.mixing_factor import WithMixingFactor


class AdaptThenCombine(WithMixingFactor):
    r"""Update first, then average the updated values before they are used again: ATC, or diffusion.

    .. math:: x_i(t+1) = \sum_j W_t[i,j]\, \bigl(x_j(t) + u_j(t)\bigr)

    Round t is sent in the backward pass of step t and awaited in the next forward pass, where each bucket is awaited
    only by the first module that reads it. With W = J/n and plain SGD this is all-reduce of the gradients, step by
    step.

    References
    ----------
    Chen and Sayed, "Diffusion adaptation strategies for distributed optimization and learning over networks", IEEE
    Transactions on Signal Processing 60 (8), 2012, equation (20).
    """

    before_forward = True
