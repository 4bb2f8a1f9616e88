"""Small models for experiments on a CPU: an MLP, a convolutional network with batch norm, a character transformer.

All models take the shape of the data first, ``Model(data.input_shape, data.num_classes, ...)``, and return logits
[..., num_classes], so that one loss serves them all: ``cross_entropy(logits.flatten(0, -2), targets.flatten())``.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field, PositiveInt
from torch import nn
from torch.nn import functional


class MLP(nn.Module):
    """Fully connected layers with ReLU on flattened inputs.

    ``hidden`` are the widths of the hidden layers; an empty sequence gives a linear model.

    Examples
    --------
    >>> MLP((1, 8, 8), 10)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(self, input_shape: Sequence[int], num_classes: int, *, hidden: Sequence[PositiveInt] = (64,)) -> None:
        super().__init__()
        widths = [math.prod(input_shape), *hidden]
        layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], num_classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, num_classes] of inputs [N, *input_shape]."""
        logits: torch.Tensor = self.layers(inputs)
        return logits


class SmallCNN(nn.Module):
    """Stages of 3x3 convolution, batch norm, ReLU and 2x2 pooling, then global average pooling and a linear layer.

    Batch norm has buffers (running mean and variance), which gossip does not mix but a global average does.

    ``channels`` are the numbers of channels of the stages, each of which halves H and W of ``input_shape``, (C, H, W).

    Examples
    --------
    >>> SmallCNN((3, 32, 32), 10)(torch.zeros(5, 3, 32, 32)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, *, channels: Sequence[PositiveInt] = (32, 64)
    ) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise ValueError(f"input_shape must be (C, H, W) for SmallCNN, got {tuple(input_shape)}; use another model")
        if not channels or min(input_shape[1:]) < 2 ** len(channels):
            raise ValueError(
                f"channels={tuple(channels)} must be at least one stage, and each of them halves the image, got "
                f"input_shape={tuple(input_shape)}; use other channels"
            )
        stages: list[nn.Module] = []
        for num_in, num_out in itertools.pairwise([input_shape[0], *channels]):
            stages += [
                nn.Conv2d(num_in, num_out, kernel_size=3, padding=1, bias=False),
                nn.BatchNorm2d(num_out),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels[-1], num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, num_classes] of images [N, C, H, W]."""
        logits: torch.Tensor = self.head(self.stages(inputs).mean(dim=(2, 3)))
        return logits


class CharTransformer(nn.Module):
    """A decoder-only transformer: learned position embeddings, pre-norm blocks of causal attention and a GELU MLP.

    With the defaults and :func:`gossip.lab.experiments.datasets.stdlib_text` it has 0.44 million parameters.

    Parameters
    ----------
    input_shape : sequence of int
        (context_length,), the length of the longest input; ``num_classes`` is the size of the vocabulary.
    width, depth, num_heads : int
        The width of the residual stream, a multiple of ``num_heads``, and the number of blocks.
    dropout : float
        The dropout probability, applied to the embedding and to the output of each residual branch.
    tied_head : bool
        Whether the output layer shares the Parameter of the embedding (weight tying).
    vocabulary_size : int, optional
        The number of rows of the embedding and of the output layer; by default, and at least, that of the data. With a
        larger one the model has the size that it has with the vocabulary that it is known for; the logits are those of
        the data's.

    Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2: block and initial
    values).

    Examples
    --------
    >>> CharTransformer((128,), 98)(torch.zeros(5, 128, dtype=torch.int64)).shape
    torch.Size([5, 128, 98])
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        *,
        width: PositiveInt = 128,
        depth: PositiveInt = 2,
        num_heads: PositiveInt = 4,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
        tied_head: bool = False,
        vocabulary_size: int | None = None,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise ValueError(
                f"input_shape must be (context_length,) for CharTransformer, got {tuple(input_shape)}; use another"
            )
        if width % num_heads:
            raise ValueError(f"width must be a multiple of num_heads={num_heads}, got {width}")
        if vocabulary_size is not None and vocabulary_size < num_classes:
            raise ValueError(
                f"vocabulary_size must be at least {num_classes}, the vocabulary of the data, got {vocabulary_size}"
            )
        num_rows = vocabulary_size or num_classes
        self.num_classes = num_classes
        self.embedding = nn.Embedding(num_rows, width)
        self.positions = nn.Parameter(torch.empty(input_shape[0], width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*[_Block(width, num_heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_rows, bias=False)
        self._initialise(depth)
        if tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, T, num_classes] of the next character; inputs are int64 [N, T], T <= context_length."""
        hidden = self.dropout(self.embedding(inputs) + self.positions[: inputs.shape[-1]])
        logits: torch.Tensor = self.head(self.norm(self.blocks(hidden)))[..., : self.num_classes]
        return logits

    def _initialise(self, depth: int) -> None:
        nn.init.normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, _Block)
            for layer in (block.attention_out, block.contract):  # keeps the variance over 2 * depth residual additions
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * depth))


class _Block(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [N, T, width] to hidden states of the same shape."""
        heads = self.attention_in(self.attention_norm(hidden)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.attention_out(mixed.transpose(1, 2).flatten(2)))
        expanded = functional.gelu(self.expand(self.feed_forward_norm(hidden)))
        result: torch.Tensor = hidden + self.dropout(self.contract(expanded))
        return result
