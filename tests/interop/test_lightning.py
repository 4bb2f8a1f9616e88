"""Lightning's Trainer by gossip: the same bits as the loop by hand, and the hooks in DDP's order."""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytorch_lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning_modules import NUM_BATCHES, Net, batches, batches_of, module_of, network, precision, trainer_of
from loops_by_hand import Case, collectives_counted, train_by_hand
from ranks import on_ranks
from replicas import SGD, flat, gathered
from torch import nn
from torch.nn.functional import mse_loss

from gossip import GossipDataParallel
from gossip.integrations import lightning
from gossip.integrations import pytorch_lightning as gossip_pytorch_lightning

NUM_EPOCHS = 2


class Collectives(pl.Callback):
    """Counts them from the first batch to the last one, epochs' ends included."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self._stack = contextlib.ExitStack()

    def on_train_start(self, *_: Any) -> None:
        self.called = self._stack.enter_context(collectives_counted([]))

    def on_train_end(self, *_: Any) -> None:
        self._stack.close()


@dataclass(frozen=True)
class TrainerCase(Case):
    interval: str = "step"

    @property
    def options(self) -> dict[str, Any]:
        return {"topology": "one_peer_exponential", "step_in_backward": self.step_in_backward}


FUSED = TrainerCase()
CASES = {
    "fused": FUSED,
    "fused, accumulated with a remainder": TrainerCase(accumulates=3),
    "plain, accumulated with a remainder": TrainerCase(step_in_backward=False, accumulates=3, clip=0.5),
    "fused, bfloat16": TrainerCase(half=torch.bfloat16),
    "fused, float16": TrainerCase(half=torch.float16, clip=0.5),
    "plain, float16": TrainerCase(half=torch.float16, clip=0.5, step_in_backward=False),
    "rates by epoch": TrainerCase(interval="epoch"),
}


def by_trainer(
    case: TrainerCase, strategy: Any, library: Any = pl
) -> tuple[torch.Tensor, int, list[str], torch.Tensor]:
    module = module_of(library)(network(case.dtype), SGD, case.interval)
    collectives = Collectives()
    if library is not pl:
        collectives = type("Other", (library.Callback,), dict(vars(Collectives)))()
    trainer = trainer_of(
        strategy,
        library,
        max_epochs=NUM_EPOCHS,
        gradient_clip_val=case.clip,
        accumulate_grad_batches=case.accumulates,
        callbacks=[collectives],
        **precision(case, MixedPrecision),
    )
    trainer.fit(module, batches(case.dtype))
    assert trainer.model is module
    assert case.half is not torch.float16 or trainer.scaler.get_scale() < case.scaler().get_scale(), (
        "nothing overflowed"
    )
    return module.trained[-1], module.num_steps, collectives.called, flat(module)


def by_hand(case: TrainerCase) -> tuple[torch.Tensor, int]:
    scaler = case.scaler()
    module = network(case.dtype)
    model = GossipDataParallel(module, SGD(module.parameters()), scaler=scaler, **case.options, **case.clipping)
    scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 2, gamma=0.7)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", case.half, enabled=case.half is not None, cache_enabled=False):
            return mse_loss(model(x), y)

    for epoch in range(NUM_EPOCHS):
        dealt = batches_of(dist.get_rank(), epoch, case.dtype)
        train_by_hand(case, model, dealt, loss_of, scaler, scheduler.step if case.interval == "step" else int)
        if case.interval == "epoch":
            scheduler.step()
    return flat(model), model.step


class InTurn(pl.LightningModule):  # type: ignore[misc]
    """Two networks, each with an optimizer of its own, that are trained in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.parts = nn.ModuleList([network(), network()])
        self.trained = torch.empty(0)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.parts[number](x) + self.parts[1 - number](x).detach()

    def training_step(self, batch: Any, _: int) -> None:
        x, y = batch
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(mse_loss(self(x, number), y))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [SGD(self.parts[0].parameters()), torch.optim.Adam(self.parts[1].parameters(), lr=0.01)]

    def on_train_end(self) -> None:
        self.trained = flat(self)
        self.num_steps = self.trainer.model.step


def in_turn_by_hand() -> tuple[torch.Tensor, int]:
    module = InTurn()
    model = GossipDataParallel(module, module.configure_optimizers())
    for x, y in batches_of(dist.get_rank(), 0):
        for number, optimizer in enumerate(model.optimizer):
            module.parts[1 - number].requires_grad_(False)
            optimizer.zero_grad()
            mse_loss(model(x, number), y).backward()
            optimizer.step()
            module.parts[1 - number].requires_grad_(True)
    return flat(model), model.step


class Events(pl.Callback):
    """Which hooks were called, and when the rates changed."""

    NAMES = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward")
    NAMES += ("on_before_optimizer_step", "on_train_batch_end")

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []
        for name in self.NAMES:
            setattr(self, name, functools.partial(self.note, name))

    def note(self, name: str, trainer: Any, *_: Any) -> None:
        self.seen.append((name, trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]))


def events(strategy: Any) -> list[tuple[str, int, float]]:
    seen = Events()
    trainer_of(strategy, accumulate_grad_batches=2, callbacks=[seen]).fit(Net(), batches())
    return seen.seen


def check(
    case: TrainerCase, found: tuple[torch.Tensor, int, list[str], torch.Tensor], expected: tuple[torch.Tensor, int]
) -> None:
    parameters, step, called, average = found
    assert torch.equal(parameters, expected[0])
    assert step == expected[1] == NUM_EPOCHS * case.num_steps(NUM_BATCHES), "one exchange for each step"
    assert called == [], "a step needs none of all ranks"
    replicas = gathered(parameters)
    assert not torch.equal(*replicas), "replicas of their own, until they are averaged"
    assert torch.equal(*gathered(average))
    torch.testing.assert_close(average, replicas.mean(0))


@on_ranks(2, anew=True)
def test_trainer_is_the_loop_by_hand() -> None:
    for name, case in CASES.items():
        print(name)
        check(case, by_trainer(case, lightning.GossipStrategy(**case.options)), by_hand(case))
    other = gossip_pytorch_lightning.GossipStrategy(**FUSED.options)
    check(FUSED, by_trainer(FUSED, other, pytorch_lightning), by_hand(FUSED))
    check(FUSED, by_trainer(FUSED, "gossip"), by_hand(FUSED))  # of two ranks all topologies are alike
    assert "broadcast" in by_trainer(FUSED, "ddp")[2]


@on_ranks(2, anew=True)
def test_manual_optimization_hooks_and_rates_are_those_of_the_loop_and_of_ddp() -> None:
    module, (expected, step) = InTurn(), in_turn_by_hand()
    trainer_of(lightning.GossipStrategy(), max_epochs=1).fit(module, batches())
    assert torch.equal(module.trained, expected)
    assert module.num_steps == step == 2 * NUM_BATCHES
    of_ddp = events("ddp")
    assert len(of_ddp) > 4 * NUM_EPOCHS * NUM_BATCHES
    for options in ({}, {"step_in_backward": False}):
        assert events(lightning.GossipStrategy(**options)) == of_ddp
