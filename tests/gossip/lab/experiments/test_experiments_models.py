"""The models: shapes, the common loss, learning, causality, refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gossip.lab.experiments.models import MLP, CharTransformer, SmallCNN

MODELS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], int]] = {
    "mlp": (MLP, (1, 8, 8), 10),
    "cnn_cifar10": (lambda shape, classes: SmallCNN(shape, classes, channels=[4, 8, 8]), (3, 32, 32), 10),
    "transformer": (lambda shape, classes: CharTransformer(shape, classes, width=32, num_heads=2), (12,), 98),
    "transformer_tied": (lambda shape, classes: CharTransformer(shape, classes, width=32, tied_head=True), (12,), 98),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_fits_one_batch_with_the_common_loss(name: str) -> None:
    build, input_shape, num_classes = MODELS[name]
    torch.manual_seed(0)
    model = build(input_shape, num_classes)
    if len(input_shape) == 1:
        tokens = torch.randint(num_classes, (6, input_shape[0] + 1))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
    else:
        inputs, targets = torch.randn(6, *input_shape), torch.randint(num_classes, (6,))
    assert model(inputs).shape == (*targets.shape, num_classes)
    losses = []
    for _ in range(25):
        loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))  # an error if a parameter takes no part
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 1e-2 * gradient.sign()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_char_transformer_is_causal() -> None:
    position = 3
    torch.manual_seed(0)
    model = CharTransformer((8,), 20, width=16, num_heads=2).double()
    inputs = torch.randint(20, (3, 8))
    changed = inputs.clone()
    changed[:, position] = (changed[:, position] + 1) % 20
    difference = (model(inputs) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:position].eq(0).all()
    assert difference[position:].gt(0).all()


def test_char_transformer_reads_shorter_texts() -> None:
    model = CharTransformer((8,), 20, width=16).eval()
    inputs = torch.randint(20, (2, 8))
    torch.testing.assert_close(model(inputs[:, :5]), model(inputs)[:, :5])


@pytest.mark.parametrize(
    ("build", "arguments", "options", "message"),
    [
        (SmallCNN, ((128,), 98), {}, r"input_shape must be \(C, H, W\) for SmallCNN, got \(128,\)"),
        (SmallCNN, ((1, 8, 8), 10), {"channels": (2, 2, 2, 2)}, "each of them halves the image"),
        (CharTransformer, ((8,), 10), {"width": 30}, "width must be a multiple of num_heads=4, got 30"),
    ],
)
def test_model_refuses(
    build: Callable[..., nn.Module], arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(*arguments, **options)
