"""A user's own data set and model, by where they are defined."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from repository import CONFIGS
from running import train

from gossip.lab.experiments import config_store
from gossip.lab.experiments.datasets import as_data
from gossip.lab.experiments.validated_models import ConfigurationError

MODULE = """def make(noise: float = 0.1): ...

def lacking(key: str = 'a'):
    return {}['images']
"""
SAMPLES = [(torch.full((2,), float(number)), number % 3) for number in range(6)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_module.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_what_is_named_is_trusted_besides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    given = ["seed=1", "trusted_targets=[mine]", "data=my_module:make,digits"]
    assert config_store.offer(given, CONFIGS) == ["seed=1", "trusted_targets=[mine,my_module.make]", given[2]]
    assert config_store.offer(["data=digits", "topology=a:b"], CONFIGS) == ["data=digits", "topology=a:b"]
    with pytest.raises(ConfigurationError, match=r"data=my_module\.maker cannot be imported: module"):
        config_store.offer(["data=my_module:maker"], CONFIGS)
    with pytest.raises(ConfigurationError, match=r"model=nowhere\.Net cannot be imported.*PYTHONPATH=folder"):
        config_store.offer(["model=nowhere:Net"], CONFIGS)


def test_what_a_function_of_the_user_raises_is_said_with_its_place(folder: Path) -> None:
    done = train(folder, "data=my_module:lacking", fresh=True)
    assert done.stderr.splitlines() == [f"error: data.key=a: KeyError: 'images' ({folder}/my_module.py, line 4)"]


def test_arrays_and_datasets_are_data_sets() -> None:
    inputs, targets = np.ones((4, 3)), np.array([0, 1, 2, 1])
    data = as_data((inputs, targets, inputs[:2], targets[:2]), "mine")
    assert (data.name, data.num_classes, data.input_shape) == ("mine", 3, (3,))
    assert (data.train_inputs.dtype, data.test_targets.dtype) == (torch.float32, torch.int64)
    assert as_data(data, "another") is data
    data = as_data((SAMPLES[:4], SAMPLES[4:]), "mine")
    assert data.train_inputs[:, 0].tolist() == [0, 1, 2, 3]
    assert data.test_targets.tolist() == [1, 2]
    text = torch.arange(12).view(3, 4)
    assert as_data((text, text, text, text), "mine").train_labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("made", "error", "text"),
    [
        (None, TypeError, "mine must return .*four arrays.*or two datasets.*, got NoneType"),
        ((np.ones((2, 1)), np.zeros(3, int)) * 2, ValueError, "2 inputs for 3 targets"),
        ((np.ones((2, 1)), np.ones(2)) * 2, ValueError, r"targets of torch\.float64 from 1\.0 on"),
        ((np.ones((2, 1)), np.array([-1, 0])) * 2, ValueError, r"targets of torch\.int64 from -1 on"),
    ],
)
def test_what_is_no_data_set_is_refused(made: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        as_data(made, "mine")
