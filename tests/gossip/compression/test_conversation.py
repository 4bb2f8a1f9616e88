"""The order of an exchange is that of its construction, whoever carries it."""

import weakref

import pytest
import torch
from compressions import COMPRESSIONS

import topologies
from gossip import Arrival, BucketShape, Codec, Conversation, Delivery, GossipError, Turn, Turns
from gossip.compression.conversation import carry
from topologies import Round

PAIR = topologies.build("complete", 2).round(0)


class Counting(Codec):
    """Sends how often it has sent, as many times as it was told to."""

    def __init__(self, rank: int, num_turns: int = 3, numel: int = 4) -> None:
        self.peer = 1 - rank
        self.num_turns = num_turns
        self.numel = numel

    def turns(self, values: torch.Tensor, round_: Round, step: int) -> Turns:  # noqa: ARG002
        for number in range(self.num_turns):
            message = torch.full((self.numel,), float(number))
            yield Turn({self.peer: message}, lambda: {self.peer: torch.empty(4)})
        return Arrival.of(torch.zeros(4))


def conversations(*codecs: Codec) -> dict[int, Conversation]:
    return {rank: codec.exchange(torch.ones(4), PAIR, 0) for rank, codec in enumerate(codecs)}


def test_nothing_has_arrived_before_everything_is_delivered() -> None:
    conversation = Counting(0).exchange(torch.ones(4), PAIR, 0)
    with pytest.raises(GossipError, match=r"has not ended: deliver its messages, and run conversation.proceed"):
        conversation.arrival  # noqa: B018
    turns = conversation.proceed(Delivery(conversation.opening.sent, conversation.opening.receive_buffers))
    next(turns)
    with pytest.raises(GossipError, match="has not ended"):
        conversation.arrival  # noqa: B018


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Counting(1, num_turns=2), "rank 0 sends rank 1 a message that it does not expect: a codec's turns"),
        (Counting(1, numel=5), r"rank 1 sends rank 0 \(5,\) of torch.float32, which expects \(4,\) of torch.float32"),
    ],
)
def test_ends_of_an_edge_that_differ_are_named(other: Codec, text: str) -> None:
    with pytest.raises(GossipError, match=text):
        carry(conversations(Counting(0), other))


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_values_are_not_kept_while_their_message_is_under_way(name: str) -> None:
    values = torch.randn(300)
    codec = COMPRESSIONS[name].make(0).codec(BucketShape(0, values, COMPRESSIONS[name].views(300)), 0)
    gone = weakref.ref(values)
    conversation = codec.exchange(values, PAIR, 0)
    del values
    assert gone() is None
    assert conversation.opening.sent
