"""Every Python example of README.md and of the documentation's pages is run by a test; here by those of most pages."""

import ast
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from examples import BLOCK, code, defined
from omegaconf import OmegaConf
from repository import REPOSITORY
from running import run, run_folders, train, written

import gossip
from gossip.exchange.recording import Ended, Members, Recorder
from gossip.launching.rendezvous import Rendezvous, find_rendezvous

NAMES = "goodput", "modes", "module_state", "performance", "schedules", "simulation"
SESSIONS = [f"docs/{name}.md" for name in NAMES]
"""Pages whose examples are one session."""

CHECKPOINTS = "trained from step 60 to 100\nequal bit for bit: True"
PRINTED = {
    ("README.md", 0): "[[1. 1. 1. 1. 1. 1. 1. 1.]]\n",
    ("docs/checkpoints.md", 0): CHECKPOINTS,
    ("docs/larger_models.md", 0): "[2, 2, 2, 2]\n",
    ("docs/larger_models.md", 1): "",
    ("docs/logs.md", 0): "INFO gossip.step.building.construction: 1 rank that trains alone (gossip.launch, ",
    ("docs/uneven_ranks.md", 0): "(0, 1, 2, 3)\n" * 4,
    ("docs/virtual_workers.md", 0): "1024 replicas",
    ("docs/when_ranks_die.md", 0): "(0, 1, 2, 3)\n" * 4,
    ("docs/worse_loss.md", 0): "equal to 1e-12: True\n",
}
"""Scripts, and what they print; of the last of their models the members."""


@pytest.mark.slow
@pytest.mark.parametrize("page", SESSIONS)
def test_the_examples_of_a_page(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((REPOSITORY / page).read_text())
    done = run(written(tmp_path, "\n".join(block for block, _ in blocks)), tmp_path).succeeded()
    assert done.stdout == "".join(printed for _, printed in blocks)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), PRINTED)
def test_an_example_is_a_script(page: str, number: int, tmp_path: Path) -> None:
    text = code(page, number)
    if page in ("docs/when_ranks_die.md", "docs/uneven_ranks.md"):
        text = text.replace("model.close()", "os.write(1, f'{model.members}\\n'.encode())\n    model.close()")
    script = written(tmp_path, f"import os\n{text}")
    for _ in range(1 + (PRINTED[page, number] == CHECKPOINTS)):  # what the first run left must not disturb the second
        done = run(script, tmp_path).succeeded()
        assert PRINTED[page, number] in done.stdout


@pytest.mark.slow
def test_a_data_set_a_model_and_a_logger_of_a_users_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "my_module.py").write_text(code("docs/experiments.md", 0))
    (tmp_path / "my_logger.py").write_text(code("docs/extending/logger.md", 0))
    arguments = ["training.epochs=1", "launch.world_size=2"]
    for page, module in (("experiments.md", "my_module"), ("extending/logger.md", "my_logger")):
        commands = re.findall(
            r"^    PYTHONPATH=\. gossip train (.*)$", (REPOSITORY / "docs" / page).read_text(), re.MULTILINE
        )
        (command,) = (command for command in commands if module in command)
        arguments += shlex.split(command)
    done = train(tmp_path, *arguments, fresh=True).succeeded()
    (folder,) = run_folders(tmp_path)
    assert (folder / "model.safetensors").exists()
    config = OmegaConf.load(folder / "config.yaml")
    assert (config.data["_target_"], config.data.noise, config.model.width) == ("my_module.make", 0.2, 16)
    assert config.data.partition.scheme == "iid"
    assert {"my_module.make", "my_module.Net"} <= set(config.trusted_targets)
    steps = re.findall(r"^(\d+) \d\.\d+$", done.stdout, re.MULTILINE)
    assert len(steps) > 1
    assert steps == [str(step) for step in range(len(steps))]
    assert "ended: completed\n" in done.stdout


def test_datasets_of_other_libraries_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for both libraries, which have what the page uses of them."""
    transforms = SimpleNamespace(Compose=list, Resize=lambda size: size, ToTensor=lambda: None)
    torchvision, datasets = ModuleType("torchvision"), ModuleType("datasets")
    torchvision.__dict__.update(
        datasets=SimpleNamespace(ImageFolder=lambda folder, read: (folder, read[0])), transforms=transforms
    )
    rows = {split: [{"pixels": split, "label": number} for number in range(2)] for split in ("train", "test")}
    datasets.__dict__.update(load_from_disk=lambda _: SimpleNamespace(with_format=lambda _: rows))
    found = defined("docs/experiments.md", 1)
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    assert found["images"]() == (("images/train", (32, 32)), ("images/test", (32, 32)))
    assert found["on_disk"]() == ([("train", 0), ("train", 1)], [("test", 0), ("test", 1)])


def test_ray_train_reports_what_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for Ray, which has what the page uses of it, and one rank."""
    reported: dict[str, Any] = {}
    ray, ray_train, ray_torch = ModuleType("ray"), ModuleType("ray.train"), ModuleType("ray.train.torch")
    ray.__dict__.update(train=ray_train)
    context = SimpleNamespace(get_world_rank=lambda: 0)
    ray_train.__dict__.update(get_context=lambda: context, report=reported.update)
    ray_torch.__dict__.update(TorchConfig=None, TorchTrainer=None)
    for name, module in {"ray": ray, "ray.train": ray_train, "ray.train.torch": ray_torch}.items():
        monkeypatch.setitem(sys.modules, name, module)  # one by one: what is imported meanwhile stays imported
    defined("docs/several_nodes.md", 1)["train"]()
    assert reported["weights"] == [pytest.approx([1.0] * 8, abs=1e-3)]


def test_a_task_of_ray_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, int] = {}
    ray, my_training = ModuleType("ray"), ModuleType("my_training")
    ray.__dict__.update(remote=lambda **given: options.update(given) or (lambda function: function))
    my_training.__dict__.update(train=object())
    for name, module in {"ray": ray, "my_training": my_training}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("GOSSIP_STORE", "GOSSIP_GROUPS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(gossip, "launch", lambda function: [function, find_rendezvous()])
    function, found = defined("docs/gossip_store.md", 0)["rank"]()
    assert function is my_training.train
    assert found == Rendezvous("10.0.0.1:29400", "", 4, 3)
    assert options == {"max_retries": 3, "max_calls": 1}


ON_THEIR_OWN = gossip.Recording([gossip.Average(0, 2, 0, 1, 4, 4), gossip.Average(1, 4, 0, 0, 2, 6)], [5, 9, 9, 9])
LOST = gossip.Recording([Members(1, 0, 0, [0, 1, 2], "base", 1), Members(1, 4, 1, [1, 2], "base", 1)], [4, 6, 6])


@pytest.mark.parametrize(
    ("example", "recording"), [(("docs/uneven_ranks.md", 1), ON_THEIR_OWN), (("docs/when_ranks_die.md", 3), LOST)]
)
def test_a_recording_is_replayed(
    example: tuple[str, int], recording: gossip.Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for rank, steps in enumerate(recording.num_steps):
        recorder = Recorder("recording", rank)
        for event in [event for event in recording.events if event.rank == rank] + [Ended(rank, steps)]:
            recorder(event)
    drawn: set[tuple[int, int]] = set()

    def samples(rank: int, step: int) -> torch.Tensor:
        drawn.add((rank, step))
        return torch.ones(1, 8)

    names = {
        "gossip": gossip,
        "module": torch.nn.Linear(8, 1),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "samples": samples,
        "loss_of": lambda workers, batch: workers(torch.cat(batch)).square().mean(),
    }
    defined(*example, **names)
    assert min(recording.num_steps) > 1
    assert drawn == {(rank, step) for rank, steps in enumerate(recording.num_steps) for step in range(steps)}


def examples_of(page: Path) -> list[tuple[str, int]]:
    """All blocks of a page that are Python, however the fence says so."""
    fences = re.findall(r"^ *(?:```|~~~)[{\s]*(?:code[\w-]*\W+)?(\w*)", page.read_text(), re.MULTILINE)
    found = [fence for fence in fences if fence.lower() in ("py", "py3", "python", "python3", "pycon", "ipython3")]
    return [(str(page.relative_to(REPOSITORY)), number) for number in range(len(found))]


def claims_of(test: Path) -> list[tuple[str, int]]:
    """The blocks that a file of tests names: ``("docs/page.md", 0)``, by itself or as a call's first arguments."""
    nodes = ast.walk(ast.parse(test.read_text()))
    pairs = [
        node.args[:2] if isinstance(node, ast.Call) else node.elts
        for node in nodes
        if isinstance(node, ast.Call | ast.Tuple)
    ]
    constants = [tuple(each.value for each in pair if isinstance(each, ast.Constant)) for pair in pairs]
    return [pair for pair in constants if [type(value) for value in pair] == [str, int] and pair[0].endswith(".md")]


def test_every_example_is_run_by_a_test() -> None:
    pages = [*REPOSITORY.glob("*.md"), *sorted((REPOSITORY / "docs").rglob("*.md"))]
    examples = [example for page in pages if "_build" not in page.parts for example in examples_of(page)]
    claimed = {claim for test in (REPOSITORY / "tests").rglob("*.py") for claim in claims_of(test)}
    unclaimed = [(page, number) for page, number in examples if page not in SESSIONS and (page, number) not in claimed]
    assert unclaimed == [], "no test runs these blocks of code"
    assert claimed <= set(examples), "tests name blocks of code that are not there"
