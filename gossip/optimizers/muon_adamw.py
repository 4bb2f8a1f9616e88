"""Muon on hidden matrices and AdamW on the rest, as one optimizer."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from gossip.optimizers.bucket_optimizer import step_of
from topologies.validation import check_real


class MuonAdamW(Optimizer):
    r"""``torch.optim.Muon`` on the hidden matrices of a module and ``torch.optim.AdamW`` on the rest, as one optimizer.

    For what takes a single one: configured runs, schedulers, Trainers. The results are those of the two in a tuple.
    Muon steps along the polar factor of a matrix's momentum; embeddings, output layers, biases and norms are no linear
    maps from one hidden layer to the next, and are left to AdamW. It keeps one tensor for a matrix, and two for the
    rest. Groups that are added later are AdamW's.

    Parameters
    ----------
    params : iterable of (str, Parameter)
        Those of the module, with their names.
    lr, momentum, weight_decay : float
        Of Muon, at least 0. The step is scaled as ``torch.optim.Muon`` does by default: by the square root of the ratio
        of a matrix's rows to its columns where this is above 1.
    adamw_lr, adamw_betas, adamw_weight_decay
        Of AdamW.
    adamw_on : sequence of str
        Matrices are left to AdamW, too, if a word of their names, between dots and underscores, begins with one of
        these. Name the output layer here if it is called otherwise.

    Raises
    ------
    TypeError
        A parameter has no name.
    ValueError
        A number is outside its range, or no matrix is left for Muon.

    References
    ----------
    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.

    Examples
    --------
    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    >>> muon, adamw = MuonAdamW(layers.named_parameters(), adamw_on=["1"]).param_groups
    >>> [list(parameter.shape) for parameter in muon["params"]], len(adamw["params"])
    ([[8, 4]], 3)
    """

    def __init__(
        self,
        params: Iterable[tuple[str, nn.Parameter]],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        *,
        adamw_lr: float = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_weight_decay: float = 0.1,
        adamw_on: Sequence[str] = ("emb", "wte", "wpe", "head"),
    ) -> None:
        for name, value in {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "adamw_lr": adamw_lr}.items():
            check_real(name, value, "at least 0 and finite", example=0.1)
        if isinstance(adamw_on, str) or len(adamw_betas) != 2:
            raise ValueError(
                f'adamw_on must be a list of beginnings of words such as ["emb", "head"], got {adamw_on!r}, and '
                f"adamw_betas two numbers, got {adamw_betas!r}"
            )
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for each in params:
            if not isinstance(each, tuple) or not isinstance(each[0], str):
                raise TypeError(
                    f"MuonAdamW chooses by name which matrices Muon gets, but was given a {type(each).__name__}; pass "
                    "module.named_parameters(), or to a wrapper a factory such as functools.partial(MuonAdamW, lr=0.02)"
                )
            name, parameter = each
            words = re.split(r"[._]", name)
            is_hidden = parameter.ndim == 2 and not any(word.startswith(tuple(adamw_on)) for word in words)
            (matrices if is_hidden else rest).append(parameter)
        if not matrices:
            raise ValueError(
                f"MuonAdamW: no parameter is a matrix without a word in its name that begins with one of adamw_on, "
                f"{list(adamw_on)}; choose AdamW, or shorten adamw_on"
            )
        first, second = adamw_betas
        muon = Muon(matrices, lr, weight_decay, momentum)
        adamw = AdamW(rest or [nn.Parameter()], adamw_lr, (first, second), weight_decay=adamw_weight_decay)
        super().__init__([*muon.param_groups, *(adamw.param_groups if rest else ())], {})
        self.defaults = adamw.defaults

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; ``closure``, if given, is evaluated once, before that."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            part: Any = object.__new__(Muon if "ns_steps" in group else AdamW)
            part.__dict__.update(self.__dict__)
            part.param_groups = [group]
            step_of(part)(part)
        return loss
