"""What a configuration from elsewhere may have called, and by which ways more cannot be reached."""

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from composing import composed, continued

from gossip.lab.experiments.experiment_build import build, check, make_algorithm
from gossip.lab.experiments.run_folder import claim
from gossip.lab.experiments.targets import check_targets
from gossip.lab.experiments.validated_models import ConfigurationError


class Touches:
    """A pickle of this makes a file when it is loaded: what it stands for could do anything."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def pickled(tmp_path: Path) -> tuple[str, Path]:
    """A file, and what appears when it is unpickled."""
    file, appears = tmp_path / "weights.pt", tmp_path / "code_was_run"
    file.write_bytes(pickle.dumps(Touches(appears)))
    return str(file), appears


def load(file: str) -> dict[str, Any]:
    return {"_target_": "torch.load", "f": file, "weights_only": False}


def placed(file: str) -> dict[str, dict[str, Any]]:
    """Configurations that hide a ``torch.load`` somewhere, by the place that the error must name."""
    config = composed("training.epochs=1", "launch.world_size=1")
    deeper = {"_target_": "gossip.lab.experiments.models.MLP", "hidden": [64, load(file)]}
    changes: dict[str, tuple[str, dict[str, Any]]] = {
        "data._target_": ("data", load(file)),
        "model._args_[0].a.b[0][0]._target_": ("model", {"_args_": [{"a": {"b": [[load(file)]]}}]}),
        "model.hidden[0].hidden[1]._target_": ("model", {"hidden": [deeper]}),
        "optimizer.lr._target_": ("optimizer", {"lr": {**load(file), "_partial_": True}}),
        "algorithm.gamma._target_": ("algorithm", {"gamma": load(file)}),
    }
    return {place: {**config, key: {**config[key], **change}} for place, (key, change) in changes.items()}


def test_targets_that_run_code_are_refused_wherever_they_stand(pickled: tuple[str, Path]) -> None:
    file, appears = pickled
    for place, config in placed(file).items():
        with pytest.raises(ConfigurationError) as caught:
            build(config)
        section = place.partition(".")[0]
        text = str(caught.value)
        assert text.startswith(
            f"{place}=torch.load is not among the targets that a configuration may name: below {section}"
        )
        assert text.endswith("add trusted_targets=[torch.load]")
    assert not appears.exists()
    pickle.loads(Path(file).read_bytes())
    assert appears.exists()


def refuse(section: str, name: object, match: str, trusted: tuple[str, ...] = ()) -> None:
    with pytest.raises(ConfigurationError, match=match):
        check_targets(section, {"_target_": name}, trusted)


OTHERS = "is not among the targets that a configuration may name: below"
NOTHING_TO_CALL = "is no class or function, but"
NO_NAME = "is no name of a class or function"


@pytest.mark.parametrize(
    ("place", "name", "why"),
    [
        ("model", "os.system", OTHERS),
        ("model", "torch.nn.init.torch.load", OTHERS),
        ("model", "torch.nn.Module.load_state_dict", OTHERS),
        ("scheduler", "gossip.lab.experiments.lr_schedules.math.exp", OTHERS),
        ("data", "gossip.lab.experiments.datasets._read_texts", OTHERS),
        ("data", "gossip.lab.experiments.models.MLP", OTHERS),
        ("model", "gossip.launch", OTHERS),
        ("optimizer", "torch.optim.sgd.cast.__code__", NOTHING_TO_CALL),
        ("optimizer", "torch.optim.adam", NOTHING_TO_CALL),
        *(("optimizer", name, NO_NAME) for name in ("torch.optim.SGD()", "", 5, ["torch.load"], "${oc.env:HOME}")),
    ],
)
def test_targets_that_may_not_be_named(place: str, name: object, why: str) -> None:
    shown = name if why is not NO_NAME else repr(name)
    refuse(place, name, rf"^{place}._target_={re.escape(str(shown))}.* {why}")


def test_an_outer_optimizer_is_made_from_a_configuration_as_a_factory() -> None:
    config = composed("algorithm=diloco", "+algorithm.outer._target_=torch.optim.AdamW", "++algorithm.outer.lr=0.1")
    with pytest.raises(ConfigurationError, match=r"missing.*'params'; if algorithm\.outer is .* add _partial_: true"):
        make_algorithm(config)
    config["algorithm"]["outer"]["_partial_"] = True
    assert make_algorithm(config).describe().startswith("DiLoCo(atc: period=50 outer=AdamW(lr=0.1 ")


def test_targets_of_untrusted_packages_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_another.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("module_of_another.Model", "module_of_another"):
        refuse("model", name, "is not among the targets")
    assert "module_of_another" not in sys.modules


MODELS = """
from functools import partial

import torch
from torch import load
from torch.nn import Flatten

class Net(torch.nn.Sequential):
    def __init__(self, input_shape, num_classes, *, last=torch.nn.Linear):
        super().__init__(torch.nn.Flatten(), last(64, num_classes))

    @classmethod
    def made(cls, *args, **options):
        return cls(*args, **options)

made_in_part = partial(Net)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of the user's own."""
    name = "models_of_the_user"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_trusted_packages_may_be_named_and_no_more_through_them(models: str) -> None:
    load, trusted = f"{models}.load", (models,)
    for name in ("Net", "Net.made", "Flatten"):
        check_targets("model", {"_target_": f"{models}.{name}"}, trusted)
    refuse("model", load, rf"{load} is torch.serialization.load, which is not among", trusted)
    refuse("model", f"{models}.made_in_part", r"is no class or function, but functools.partial", trusted)
    check_targets("model", {"_target_": load}, (models, "torch.serialization.load"))
    check_targets("model", {"_target_": load}, (load,))
    refuse("model", f"{models}.Net", "is not among the targets", (models[:-1],))


def test_trusted_targets_of_a_folder_do_not_count(models: str, tmp_path: Path) -> None:
    config = composed("model._target_=" + models + ".Net", "~model.hidden", f"trusted_targets=[{models}]")
    claim(tmp_path / "run", config)
    with pytest.raises(ConfigurationError, match=rf"model._target_={models}.Net is not among the targets"):
        check(continued(tmp_path / "run"))
    check(continued(tmp_path / "run", f"trusted_targets=[{models}]"))


def test_imports_of_a_folder_do_not_count(models: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    claim(folder, composed(f"imports=[{models}]"))
    with pytest.raises(ConfigurationError) as caught:
        continued(folder)
    assert str(caught.value) == (
        f"{folder}/config.yaml has imports=[{models}], which would be run here; if you trust that code, add "
        f"trusted_targets=[{models}]"
    )
    for option in ("imports", "trusted_targets"):
        assert continued(folder, f"{option}=[{models}]")["imports"] == [models]


def test_interpolations_of_a_folder_are_not_resolved(tmp_path: Path) -> None:
    value = "${oc.create:{_target_: torch.load}}"
    config = composed()
    config["optimizer"] = {**config["optimizer"], "lr": value}
    claim(tmp_path / "run", config)
    config = continued(tmp_path / "run")
    assert config["optimizer"]["lr"] == value
    with pytest.raises(ConfigurationError, match=r"^optimizer.lr=\$\{.*a run's configuration has no"):
        check(config)
