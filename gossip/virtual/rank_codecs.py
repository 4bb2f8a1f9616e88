"""One codec per replica in a process, for several devices, or for compressions without a stacked codec."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gossip.compression.codec import Codec
from gossip.compression.conversation import accumulation_dtype, carry
from gossip.compression.stacked_codec import StackedArrival, StackedCodec
from topologies import Round


class RankCodecs(StackedCodec):
    """A codec for each rank, on the device of its rank's values, with messages copied between them.

    ``decodes_all`` says whether what a rank without a peer would send is what the codec makes of it, or the values
    themselves.
    """

    def __init__(self, codecs: Sequence[Codec], *, decodes_all: bool = False) -> None:
        self.codecs, self._decodes_all = codecs, decodes_all

    def exchange(self, stacks: Sequence[torch.Tensor], round_: Round, step: int) -> StackedArrival:
        values = _rows(stacks)
        active = [rank for rank in range(len(values)) if round_.peers(rank)]
        conversations = {rank: self.codecs[rank].exchange(values[rank], round_, step) for rank in active}
        num_bytes = carry(conversations)
        sent = [stack.clone() for stack in stacks]
        differences = [torch.zeros_like(stack, dtype=accumulation_dtype(stack.dtype)) for stack in stacks]
        messages, rows = _rows(sent), _rows(differences)
        for rank in range(len(values)) if self._decodes_all else conversations:
            if rank not in conversations:
                self.codecs[rank].exchange(values[rank], round_, step)
            if (message := self.codecs[rank].sent) is not None:
                messages[rank].copy_(message)
        for rank, conversation in conversations.items():
            arrival = conversation.arrival
            for place, part in arrival.parts:
                rows[rank][place] = part
            if not arrival.is_finite:
                rows[rank].fill_(torch.nan)
        return StackedArrival(differences, sent, num_bytes)

    def state_dict(self, rank: int) -> dict[str, Any]:
        return self.codecs[rank].state_dict()

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        for codec, state in zip(self.codecs, states, strict=True):
            codec.load_state_dict(state)


def _rows(stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of the rows, one per rank."""
    return [row for stack in stacks for row in stack]
