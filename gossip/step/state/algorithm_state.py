"""The state of an algorithm in checkpoints, by parameter name, so that other buckets can load it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gossip.algorithms import Algorithm
from gossip.exchange.exchanges import Exchanges


def algorithm_state(exchanges: Exchanges[Any, Any], *, for_joining: bool = False) -> dict[str, Any]:
    """Return state, numbers and learning rates; for a joining rank without what all ranks will begin anew. Local.

    "name" is that of the algorithm's class; "kept" is by state and parameter a tensor of the parameter's shape (for
    virtual workers [n, *shape]), and of one rank no copy; "keeps" what a change of world size makes of each; "numbers"
    by name one value per bucket, [..., number of buckets]; "counts" the names of those that are counts; "rates" by
    parameter the newest step's learning rate, and the last one before it that was not 0; "weighs_by" the number that
    weights a mean, or None.
    """
    algorithm = exchanges.algorithm
    kept: dict[str, dict[str, torch.Tensor]] = {
        name: {} for name, how in algorithm.keeps.items() if not (for_joining and how.scope == "joint")
    }
    numbers: dict[str, list[torch.Tensor]] = {name: [] for name in (*algorithm.numbers, *algorithm.counts)}
    rates: dict[str, tuple[float, float]] = {}
    for index in _of_parameters(exchanges):
        names, views = exchanges.names(index), exchanges.views(index)
        for state, by_name in kept.items():
            slots = zip(*(view.slots(view.kept[state]) for view in views), strict=True)
            by_name |= {name: exchanges.joined(stacks) for name, stacks in zip(names, slots, strict=True)}
        for number, values in numbers.items():
            values.append(exchanges.joined([view.numbers[number] for view in views]))
        rates |= dict(zip(names, zip(views[0].rates, views[0].earlier_rates, strict=True), strict=False))
    return {
        "name": type(algorithm).__name__,
        "keeps": _resized(algorithm),
        "weighs_by": algorithm.weighs_by,
        "kept": kept,
        "numbers": {number: torch.cat(values, -1) for number, values in numbers.items() if values},
        "counts": algorithm.counts,
        "rates": rates,
    }


@torch.no_grad()
def load_algorithm_state(exchanges: Exchanges[Any, Any], saved: Mapping[str, Any] | None) -> list[str]:
    """Restore what :func:`algorithm_state` returned, or start anew from None or another algorithm's state. Local.

    Returns what was left out, in words.
    """
    algorithm, own = exchanges.algorithm, (type(exchanges.algorithm).__name__, _resized(exchanges.algorithm))
    for view in exchanges.parameter_views():
        view.rates = view.earlier_rates = ()
        exchanges.begin(view)
    names_of_numbers = {*algorithm.numbers, *algorithm.counts}
    if not algorithm.keeps and not names_of_numbers:
        return []
    is_own = saved is not None and (saved.get("name", own[0]), saved["keeps"]) == own
    if saved is None or not is_own or set(saved["numbers"]) != names_of_numbers:
        return [f"what algorithm {algorithm.describe()} keeps, which starts anew"]
    for place, index in enumerate(_of_parameters(exchanges)):
        names, views = exchanges.names(index), exchanges.views(index)
        for state, by_name in saved["kept"].items():
            for number, name in enumerate(names):
                for view, values in zip(views, exchanges.dealt(by_name[name]), strict=True):
                    view.slots(view.kept[state])[number].copy_(values)
        for number_name, values in saved["numbers"].items():
            one = values[..., min(place, values.shape[-1] - 1)][..., None]  # equal in all buckets
            for view, values_here in zip(views, exchanges.dealt(one), strict=True):
                view.numbers[number_name].copy_(values_here)
        if all(name in saved["rates"] for name in names):
            for view in views:
                view.rates, view.earlier_rates = zip(*(saved["rates"][name] for name in names), strict=True)
    return []


def regroup(exchanges: Exchanges[Any, Any]) -> None:
    """Begin anew what only means something together with the state of the ranks that trained until now. Local."""
    algorithm = exchanges.algorithm
    for view in exchanges.parameter_views():
        kept = {name: view.kept[name] for name, how in algorithm.keeps.items() if how.scope != "joint"}
        numbers = {name: view.numbers[name] for name in algorithm.kept_numbers}
        view.kept, view.numbers = {}, {}
        exchanges.begin(view)
        view.kept |= kept
        view.numbers |= numbers


def common_state(exchanges: Exchanges[Any, Any]) -> list[torch.Tensor]:
    """Return the tensors that are equal on all ranks by definition, in the same order on all ranks. Local."""
    names = exchanges.algorithm.common
    return [{**view.kept, **view.numbers}[name] for view in exchanges.parameter_views() for name in names]


def _resized(algorithm: Algorithm) -> dict[str, str]:
    return {name: how.resized for name, how in algorithm.keeps.items()}


def _of_parameters(exchanges: Exchanges[Any, Any]) -> Iterator[int]:
    return (index for index in range(len(exchanges.in_flight)) if exchanges.holds_parameters(index))


def for_new_world(saved: Mapping[str, Any], mean: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the state with which every rank starts when the number of ranks has changed.

    ``saved`` is the state of any old rank, and ``mean`` the mean over the old ranks, by state and parameter.
    """
    kept = {
        state: {
            name: values if saved["keeps"][state] == "mean" else torch.zeros_like(values)
            for name, values in by_name.items()
        }
        for state, by_name in mean.items()
    }
    numbers = {
        name: values if name in saved.get("counts", ()) else torch.ones_like(values)  # all ranks count equally
        for name, values in saved["numbers"].items()
    }
    return {**saved, "kept": kept, "numbers": numbers}


def weight_of(saved: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the weight of the values in a mean over the old ranks, [] or, for virtual workers, [n]; None if equal."""
    return None if saved["weighs_by"] is None else saved["numbers"][saved["weighs_by"]][..., 0]
