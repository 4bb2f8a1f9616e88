"""Work that all ranks do at once, and whose failure on one of them is everybody's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from gossip.checkpoints.checkpoint_files import reason
from gossip.checkpoints.replicas import Replicas
from gossip.errors import CheckpointError, ExchangeError, ManifestError
from gossip.parameters.manifest import first_difference


def together(replicas: Replicas, what: str, action: Callable[[], Any]) -> list[Any]:
    """Run ``action`` and return what it returned in every process, in their order. Collective.

    Nobody goes on before all have ended, well or not: so no rank is left waiting for one that has failed, and all are
    still in step.

    Parameters
    ----------
    replicas : Replicas
    what : str
        For errors: what is being done.
    action : callable
        Local; returns something that JSON can hold. Nothing but JSON travels.

    Raises
    ------
    CheckpointError
        It failed on some rank; raised on every one, with rank and reason. A rank whose own caller passed something
        wrong raises that ``TypeError`` or ``ValueError`` instead.
    ExchangeError
        A rank did not take part in time: the ranks are no longer in step.
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
            raise failure
        raise CheckpointError(f"{what}: {_by_rank(ranks_by_reason, len(messages))}") from failure
    return [message["answer"] for message in messages]


def compare(replicas: Replicas, entries: dict[str, str], what: str) -> None:
    """Raise on every rank if any two ranks' ``entries`` differ. Collective.

    Raises
    ------
    ManifestError
        Names the first entry that differs and what both sides have.
    """
    digests = together(replicas, what, lambda: hashlib.sha256(json.dumps(entries).encode()).hexdigest())
    if len(set(digests)) > 1:
        raise ManifestError(first_difference(together(replicas, what, lambda: entries)))


def _by_rank(ranks_by_reason: dict[str, list[int]], world_size: int) -> str:
    parts = []
    for text, ranks in ranks_by_reason.items():
        if len(ranks) == world_size:
            return text if world_size == 1 else f"on every rank: {text}"
        parts.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}")
    return "; ".join(parts)
