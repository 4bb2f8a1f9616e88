"""All ranks of a run in one process, with the same data, initial values and steps as with one process per rank."""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import asdict
from typing import Any

import torch
from loguru import logger

from gossip import VirtualWorkers, World
from gossip.lab.experiments.evaluation import Evaluation, evaluate_replicas
from gossip.lab.experiments.experiment_build import Experiment
from gossip.lab.experiments.records import TOGETHER_FILE
from gossip.lab.experiments.run_settings import ALL_REDUCE_OPTIONS, options_of_virtual_workers
from gossip.lab.experiments.training_methods import Method, bytes_of_all_reduce, without_exchange


class VirtualMethod(Method):
    """Training with :class:`gossip.VirtualWorkers`; with method=ddp their gradients are averaged, and nothing else.

    Until ``until_the_end`` is closed, torch has the configured number of threads, and does not warn of its performance.
    """

    model: VirtualWorkers

    def __init__(self, experiment: Experiment, until_the_end: contextlib.ExitStack) -> None:
        settings = experiment.settings
        until_the_end.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="There is a performance drop")  # torch.func's, of attention
        until_the_end.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(settings.launch.num_threads or torch.get_num_threads())
        torch.manual_seed(settings.seed)
        self._is_all_reduced = settings.method == "ddp"
        options = options_of_virtual_workers(experiment.wrapper_options)
        if self._is_all_reduced:
            options = {name: options[name] for name in ALL_REDUCE_OPTIONS}
        self.model = VirtualWorkers(
            experiment.make_module,
            settings.launch.world_size,
            experiment.make_optimizer,
            experiment.topology or without_exchange(settings.launch.world_size),
            algorithm=experiment.algorithm,
            compression=experiment.compression if settings.method == "gossip" else None,
            devices=["cpu"],  # the device of the data
            **options,
        )
        self.module = self.model.module
        self.optimizer = self.model.optimizer
        self.world = self.groups = World(settings.timeout)
        self.name, self.ranks = TOGETHER_FILE.removesuffix(".jsonl"), range(settings.launch.world_size)
        if self._is_all_reduced:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.register_post_accumulate_grad_hook(_average_gradients)
        logger.info("{} replicas in one process, {} steps", settings.launch.world_size, experiment.total_steps)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.model.algorithm.weighted:
            parts = inputs.tensor_split(self.model.world_size)
            self.model.weigh([max(1, len(part)) for part in parts])  # one without samples has no update
        return super().forward(inputs)

    def backward(self, loss: torch.Tensor) -> dict[str, Any]:
        """Make one step.

        Returns the time of the backward pass, the bytes that one rank of a cluster would send in this step, and the
        numbers of skipped updates and refused messages.
        """
        start = time.perf_counter()
        loss.backward()
        backward_s = time.perf_counter() - start
        stats = self.model.stats()
        assert stats is not None
        costs: dict[str, Any] = {"backward_s": backward_s, **asdict(stats)}
        if self._is_all_reduced:
            costs["bytes_sent"] = bytes_of_all_reduce(self.module.parameters(), len(self.ranks))
        del costs["step"]
        return costs

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[Evaluation]:
        """Evaluate all replicas in one batched forward pass per batch of samples."""
        return evaluate_replicas(self.model, inputs, targets)


def _average_gradients(parameter: torch.Tensor) -> None:
    """Replace stacked gradients [n, ...] by their mean, as an all-reduce would."""
    assert parameter.grad is not None
    parameter.grad.copy_(parameter.grad.mean(0, keepdim=True).expand_as(parameter.grad))
