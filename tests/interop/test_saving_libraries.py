"""accelerate, transformers and peft save every weight of a model, wrapped, bare and after close."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import accelerate
import peft
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from torch import nn

from gossip import GossipDataParallel, launch

SGD = functools.partial(torch.optim.SGD, lr=0.1)
TOKENS = torch.arange(12).view(2, 6)


class Tied(nn.Module):
    """Several small tensors, of which two are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 12)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(input_ids)))


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def gpt() -> transformers.GPT2LMHeadModel:
    """Its head is its embedding."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=12, n_positions=6, n_embd=8, n_layer=2, n_head=2)
    )


def adapted() -> peft.PeftModel:
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    return peft.get_peft_model(gpt(), config)


def train(model: nn.Module) -> None:
    output = model(input_ids=TOKENS)
    getattr(output, "logits", output).square().mean().backward()


def stages(make: Callable[[], nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """A model as it is saved: wrapped, bare while it is wrapped, after close."""
    model = GossipDataParallel(make(), SGD, "complete")
    train(model)
    yield "wrapped", model
    train(model)
    yield "bare", model.module
    model.close()
    yield "closed", model.module


def is_first() -> bool:
    """accelerate and transformers write on rank 0 alone."""
    return not dist.is_initialized() or dist.get_rank() == 0


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name


def distinct(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a file has: a tied tensor once."""
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return {name: values for name, values in module.state_dict().items() if name in names}


def save_with_accelerate(folder: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == (dist.get_world_size() if dist.is_initialized() else 1)
    for name, model in stages(tied):
        path = folder / name
        accelerator.save_model(model, path / "model")
        accelerator.prepare_model(model, evaluation_mode=True)  # makes it one of those that save_state saves
        accelerator.save_state(str(path / "state"))
        accelerator.free_memory()
        if is_first():
            wanted = distinct(model)
            assert len(wanted) == 6
            for each in ("model", "state"):
                assert_same(safetensors.torch.load_file(path / each / "model.safetensors"), wanted)


def save_with_transformers(folder: Path) -> None:
    for name, model in stages(gpt):
        path = folder / name
        model.save_pretrained(path)
        if is_first():
            assert_same(safetensors.torch.load_file(path / "model.safetensors"), distinct(model))
            found = transformers.GPT2LMHeadModel.from_pretrained(path)
            assert_same(found.state_dict(), model.state_dict())


def save_with_peft(folder: Path) -> None:
    for name, model in stages(adapted):
        path = folder / name / str(dist.get_rank() if dist.is_initialized() else 0)  # every rank writes
        model.save_pretrained(path)
        adapters = {key: each for key, each in model.state_dict().items() if "lora" in key}
        assert len(adapters) == 4
        saved = safetensors.torch.load_file(path / "adapter_model.safetensors")
        assert_same(saved, {key.replace(".default", ""): each for key, each in adapters.items()})
        found = peft.PeftModel.from_pretrained(gpt(), str(path))
        assert_same(found.state_dict(), model.state_dict())


@pytest.fixture
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A progress bar's stays, and transformers does not wait for the end of those that read weights."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


LIBRARIES = [save_with_accelerate, save_with_transformers, save_with_peft]


@pytest.mark.usefixtures("_no_threads")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's, of transformers
@pytest.mark.parametrize("save", LIBRARIES)
def test_library_saves_every_weight_in_one_process(save: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path)


def save_with_each(folder: Path) -> None:
    for save in LIBRARIES:
        save(folder / save.__name__)


def test_libraries_save_every_weight_at_two_ranks(tmp_path: Path) -> None:
    launch(save_with_each, tmp_path, world_size=2)
