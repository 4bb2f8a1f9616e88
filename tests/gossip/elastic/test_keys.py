"""Whoever reaches the key-value store without the key learns no secret, writes nothing and joins nothing."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import unsupervised
from elastic_ranks import flat, joins, make_model, train_until

import gossip
from gossip import ExchangeError
from gossip.communication.authenticated_store import VARIABLE, AuthenticatedStore, NotGenuine, training_key, under
from gossip.elastic.consensus_store import ConsensusStore, Decision, Proposal

KEY, OTHER_KEY = "k" * 32, "o" * 32
NUMEL = 64


# ---------------------------------------------------------------------- the key


@pytest.mark.parametrize("as_file", [False, True])
def test_the_key_is_the_variable_or_in_the_file_that_it_names(
    as_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "key") if as_file else KEY)
    assert training_key() == KEY.encode()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("", "must hold at least 32 characters that nobody can guess, or name a file that does, got 0"),
        ("secret", "must hold at least 32 characters that nobody can guess, or name a file that does, got 6"),
        ("no/such/file/but/long/enough/for/a/key", r"names a file, .* cannot be read \(FileNotFoundError\)"),
    ],
)
def test_what_cannot_be_a_key_is_refused_and_not_shown(given: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ValueError, match=f"GOSSIP_KEY {text}") as refused:
        training_key()
    assert not given or given not in str(refused.value)


# ---------------------------------------------------------------------- values


def authenticated(kept: dist.Store, key: bytes = KEY.encode(), name: str = "training") -> AuthenticatedStore:
    return AuthenticatedStore(dist.PrefixStore(name, kept), key, name)


ALTERATIONS: dict[str, Callable[[dist.Store], None]] = {
    "a plain value": lambda kept: kept.set("training/decision", "null"),
    "a changed value": lambda kept: kept.set("training/decision", kept.get("training/decision")[:-1] + b"x"),
    "a changed code": lambda kept: kept.set(
        "training/decision", b"authenticated 0" + kept.get("training/decision")[15:]
    ),
    "a cut value": lambda kept: kept.set("training/decision", "authenticated "),
    "the value of another key": lambda kept: kept.set("training/decision", kept.get("training/proposal")),
    "the value of another training": lambda kept: kept.set("training/decision", kept.get("another/decision")),
    "the value of a longer key": lambda kept: kept.set("training/decision", kept.get("training/x/decision")),
    "another key's code": lambda kept: authenticated(kept, OTHER_KEY.encode()).set("decision", "null"),
}


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS)
@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.get("decision"),
        lambda store: store.multi_get(["proposal", "decision"]),
        lambda store: store.compare_set("decision", "", "mine"),
    ],
    ids=["get", "multi_get", "compare_set"],
)
def test_what_no_rank_has_written_is_not_read(
    alter: Callable[[dist.Store], None], read: Callable[[AuthenticatedStore], Any]
) -> None:
    kept = dist.HashStore()
    authenticated(kept).set("decision", "true")
    authenticated(kept).set("proposal", "true")
    authenticated(kept, name="another").set("decision", "true")
    under(authenticated(kept), "x").set("decision", "true")
    alter(kept)
    with pytest.raises(
        NotGenuine, match="the key-value store has a value of 'decision' that no rank with this GOSSIP_KEY"
    ):
        read(authenticated(kept))


def test_a_decision_that_no_rank_has_made_is_not_taken_for_a_store_that_does_not_reply() -> None:
    kept = dist.HashStore()
    consensus_store = ConsensusStore(authenticated(kept))
    assert consensus_store.propose(1, Proposal([0, 1])) == ([0, 1], [], [], [], False, [])
    kept.set("training/decision/1", "null")
    with pytest.raises(NotGenuine):
        consensus_store.decide(1, Decision())


# ---------------------------------------------------------------------- trainings


def train(key: str | None, joining_key: str | None) -> torch.Tensor | str:
    """Until a joining rank has come, and some steps more; what somebody without the key is told."""
    own_key = joining_key if joins() else key
    if own_key is not None:
        os.environ[VARIABLE] = own_key
    try:
        model = make_model(NUMEL, {"topology": "complete"})
    except ExchangeError as error:
        return str(error)
    train_until(model, lambda: len(model.members) > 2)
    model.global_avg()
    model.close()
    return flat(model.module)


def test_who_has_the_key_joins_and_nobody_else() -> None:
    with unsupervised.started(train, KEY, KEY, world_size=2) as ranks:
        for stranger in (None, OTHER_KEY):
            ranks.join(train, KEY, stranger)
        told = [ranks._receive(channel) for channel in ranks._channels[2:]]
        store = dist.TCPStore(*ranks.address, is_master=False)
        written = {key: store.get(key) for key in store.list_keys() if "gossip" in key and "num_joining" not in key}
        ranks.join(train, KEY, KEY)
        first, second, _, _, joining_rank = ranks.results(silent={2, 3})
    assert "the other ranks have a GOSSIP_KEY, and this one has none" in told[0]
    assert "'gossip/trainings/0' that no rank with this GOSSIP_KEY has written" in told[1]
    assert torch.equal(first, second)
    assert torch.equal(first, joining_rank)
    assert {key.rpartition("/")[2] for key in written} >= {"process0", "arrival1", "address0"}
    assert not [key for key, value in written.items() if not value.startswith(b"authenticated ")]
    assert not [key for key, value in written.items() if KEY.encode() in value]


def start_with(keys: list[str | None]) -> str:
    key = keys[dist.get_rank()]
    if key is not None:
        os.environ[VARIABLE] = key
    try:
        make_model(NUMEL, {"topology": "complete"}).close()
    except ExchangeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("keys", [[KEY, None], [KEY, OTHER_KEY]])
def test_ranks_that_do_not_have_the_same_key_do_not_begin(keys: list[str | None]) -> None:
    told = unsupervised.results_of(start_with, keys, world_size=2)
    for rank, key in enumerate(keys):
        text = "this one has none" if key is None else "that no rank with this GOSSIP_KEY has written"
        assert re.match(
            f"rank {rank}: constructing the model: the (key-value store has|other ranks).*{text}", told[rank]
        )


def key_here() -> str | None:
    return os.environ.get(VARIABLE)


def test_launched_workers_have_the_launchers_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    assert gossip.launch(key_here, world_size=1) == [KEY]
    monkeypatch.delenv(VARIABLE)
    assert gossip.launch(key_here, world_size=1) == [None]
