"""Actions of all ranks whose failure on one rank is raised on all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, NoReturn

from gossip.checkpoints.replicas import Replicas
from gossip.errors import CheckpointError, ExchangeError, ManifestError, reason
from gossip.parameters.manifest import first_difference


def run_on_all_ranks(replicas: Replicas, what: str, action: Callable[[], Any]) -> list[Any]:
    """Run ``action`` in every process and return the results in the order of the processes. Collective.

    No process continues before all have finished or failed. So no rank is left waiting for one that has failed, and all
    remain in step.

    Raises CheckpointError: the action failed on some rank; raised on every rank, with rank and reason. A rank whose own
    caller passed an invalid argument raises that ``TypeError`` or ``ValueError`` instead; ExchangeError: a rank did not
    take part in time, and the ranks are no longer in step.

    Parameters
    ----------
    action : callable
        Local; returns something that JSON can represent, since only JSON is sent.
    """
    answer, failure = None, None
    try:
        answer = action()
    except ExchangeError:
        raise
    except Exception as error:
        failure = error
    message = {"answer": answer, "error": None if failure is None else reason(failure)}
    payloads = replicas.gather(json.dumps(message).encode(), what)
    messages = [json.loads(payload) for payload in payloads]
    ranks_by_reason: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        if message["error"] is not None:
            ranks_by_reason.setdefault(message["error"], []).append(rank)
    if ranks_by_reason:
        if isinstance(failure, TypeError | ValueError):
            raise_on_all_ranks(replicas, failure)
        raise_on_all_ranks(replicas, CheckpointError(f"{what}: {_by_rank(ranks_by_reason, len(messages))}"), failure)
    return [message["answer"] for message in messages]


def compare(replicas: Replicas, entries: dict[str, str], what: str, advice: str = "") -> None:
    """Raise ManifestError on every rank if any two ranks' ``entries`` differ, with the first that does. Collective."""
    digests = run_on_all_ranks(replicas, what, lambda: hashlib.sha256(json.dumps(entries).encode()).hexdigest())
    if len(set(digests)) > 1:
        found = first_difference(run_on_all_ranks(replicas, what, lambda: entries))
        raise_on_all_ranks(replicas, ManifestError(f"{what}: {found}{advice}"))


def raise_on_all_ranks(replicas: Replicas, error: Exception, cause: Exception | None = None) -> NoReturn:
    """Raise an error, where all processes raise one: see :attr:`Replicas.failure`."""
    replicas.failure = error
    raise error from cause


def _by_rank(ranks_by_reason: dict[str, list[int]], world_size: int) -> str:
    parts = []
    for text, ranks in ranks_by_reason.items():
        if len(ranks) == world_size:
            return text if world_size == 1 else f"on every rank: {text}"
        parts.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}")
    return "; ".join(parts)
