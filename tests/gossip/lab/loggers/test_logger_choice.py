"""Which loggers a command chooses, and what is refused before any rank is started."""

import importlib.util
from pathlib import Path

import pytest
from composing import composed, continued

from gossip.lab.experiments.run_folder import claim
from gossip.lab.experiments.validated_models import ConfigurationError
from gossip.lab.loggers.logger_choice import logging_settings, make_loggers


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        logging_settings(composed(*overrides))
    return str(caught.value)


def test_choice_without_the_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    library = "wandb"
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else find_spec(name))
    assert refused(f"logger={library}") == (
        f"logger={library} needs {library}, which cannot be imported; install it, pip install "
        f"'gossip-training[{library}]' (in a clone of the repository: pip install '.[{library}]'), or leave {library} "
        "out"
    )


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("logger=wandb", "logger.wandb.mode=shared"), "logger.wandb.mode must be 'offline' or 'online', got 'shared'"),
        (("+logger.wand={}",), "logger.wand: unknown logger 'wand'. Did you mean 'wandb'? Available: mlflow, "),
        (("logger=mlflow", "+logger.mlflow.uri=x"), "logger.mlflow.uri=x: MlflowLogger has no option uri"),
        (
            ("logger=tensorboard", "logging.model=true"),
            "no chosen logger keeps a model; add one, logger=[wandb,mlflow]",
        ),
    ],
)
def test_choice_that_cannot_be(overrides: tuple[str, ...], text: str) -> None:
    assert text in refused(*overrides)


def test_choice_of_wandb_online_needs_a_login_and_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HOME", str(tmp_path))
    online = ("logger=wandb", "logger.wandb.mode=online")
    assert refused(*online) == (
        "logger.wandb.mode=online needs a login, and there is none: set WANDB_API_KEY, or run wandb login, or set "
        "logger.wandb.mode=offline"
    )
    netrc.write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    netrc.chmod(0o600)
    assert make_loggers(composed(*online)).keys() == {"wandb"}
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert make_loggers(composed(*online)).keys() == {"wandb"}


@pytest.mark.parametrize(
    ("began", "asked", "chosen"),
    [
        ("logger=[jsonl,tensorboard,wandb,mlflow]", (), {"tensorboard", "wandb", "mlflow"}),
        ("logger=jsonl", ("logger=[tensorboard,mlflow]",), {"tensorboard", "mlflow"}),
    ],
)
def test_choice_of_a_run_that_goes_on(tmp_path: Path, began: str, asked: tuple[str, ...], chosen: set[str]) -> None:
    claim(tmp_path / "run", composed(began))
    assert make_loggers(continued(tmp_path / "run", *asked)).keys() == chosen
