"""The data sets: shapes, splits, standardisation, vocabulary; partitions: properties of every scheme, and refusals."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from gossip.lab.experiments.datasets import VOCABULARY, digits, stdlib_text, text_files
from gossip.lab.experiments.partition import OPTIONS, partition


def text_of(tokens: torch.Tensor) -> str:
    return "".join(VOCABULARY[token] for token in tokens.tolist())


def test_digits_shapes_and_standardisation() -> None:
    data = digits()
    assert (data.input_shape, data.num_classes) == ((1, 8, 8), 10)
    assert (len(data.train_inputs), len(data.test_inputs)) == (len(data.train_targets), len(data.test_targets))
    assert len(data.test_inputs) == 360
    assert torch.equal(data.train_labels, data.train_targets)
    assert not torch.equal(data.test_targets, digits(split_seed=1).test_targets)
    std, mean = torch.std_mean(data.train_inputs, dim=(0, 2, 3))
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-4, rtol=0)
    torch.testing.assert_close(std, torch.ones_like(std), atol=1e-4, rtol=0)


def test_digits_test_split_is_stratified_and_uses_the_training_statistics() -> None:
    data = digits()
    share = torch.bincount(data.test_targets) / torch.bincount(torch.cat([data.train_targets, data.test_targets]))
    assert (share - 0.2).abs().max() < 0.01
    # Pixel 0 is blank in every image: one value on both splits only if both were scaled alike.
    assert load_digits().images[:, 0, 0].max() == 0
    assert data.test_inputs[:, 0, 0, 0].unique().tolist() == data.train_inputs[:, 0, 0, 0].unique().tolist()


def test_stdlib_text_targets_are_the_next_characters() -> None:
    data = stdlib_text(context_length=32, max_bytes=100_000)
    assert (data.input_shape, data.num_classes) == ((32,), len(VOCABULARY))
    assert sys.version.split()[0] in data.notes
    assert data.train_inputs.dtype == data.train_targets.dtype == torch.int64
    assert data.train_inputs.shape == data.train_targets.shape
    assert torch.equal(data.train_inputs[:, 1:], data.train_targets[:, :-1])
    # Pieces of one module follow each other: the last target of one is the first input of the next.
    same_module = data.train_labels[1:] == data.train_labels[:-1]
    assert torch.equal(data.train_targets[:-1, -1][same_module], data.train_inputs[1:, 0][same_module])


def test_stdlib_text_replaces_what_is_not_in_the_vocabulary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_bytes("x\té\r\n😀\x7f\x00~ ".encode() + b"\xff" + b"yyyy")
    monkeypatch.setattr("sysconfig.get_path", lambda name: {"stdlib": str(tmp_path)}[name])
    data = stdlib_text(context_length=10, test_fraction=0.5)
    assert text_of(data.train_inputs[0]) == "x\t\ufffd\n\ufffd\ufffd\ufffd~ \ufffd"


def test_stdlib_text_leaves_out_tests_and_installed_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = {"a.py": "a", "package/b.py": "b", "package/deep/c.py": "c"}
    left_out = {"test/d.py": "d", "package/test/e.py": "e", "site-packages/f.py": "f", "_sysconfigdata_x.py": "g"}
    for name, letter in {**kept, **left_out, "config-3.11-x/h.py": "h", "notes.txt": "i"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(letter * 50)
    monkeypatch.setattr("sysconfig.get_path", lambda name: {"stdlib": str(tmp_path)}[name])
    data = stdlib_text(context_length=4, test_fraction=0.2)
    assert set(text_of(torch.cat([data.train_inputs, data.test_inputs]).flatten())) == set("abc")


def test_stdlib_text_refuses_an_empty_split() -> None:
    with pytest.raises(ValueError, match=r"test split would hold no sample of context_length=128; raise max_bytes"):
        stdlib_text(max_bytes=500)


def test_text_files_are_read_like_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for number, path in enumerate([tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "below" / "c.txt"]):
        path.write_text(chr(97 + number) * 100)
    (tmp_path / "other.md").write_text("z" * 100)
    data = text_files(tmp_path, context_length=9, test_fraction=0.3)
    shown = {VOCABULARY[token] for token in torch.cat([data.train_inputs, data.test_inputs]).unique()}
    assert shown == {"a", "b", "c"}
    assert data.train_labels.unique().tolist() == [0, 1], "whole files are held out"
    assert not set(data.train_inputs.unique().tolist()) & set(data.test_inputs.unique().tolist())
    assert text_files(tmp_path, "*.md", context_length=4).num_classes == len(VOCABULARY)


def test_of_one_text_file_the_end_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_text("a" * 150 + "b" * 50)
    data = text_files(tmp_path, context_length=4, test_fraction=0.25)
    assert VOCABULARY[data.train_inputs.unique().item()] == "a"
    assert VOCABULARY[data.test_inputs.unique().item()] == "b"


def test_without_text_files_the_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file \*\*/\*\.txt is in it; set data\.folder"):
        text_files(tmp_path)
    with pytest.raises(FileNotFoundError, match="absent: it is not a folder"):
        text_files(tmp_path / "absent")


SCHEMES = ("iid", *OPTIONS)
LABELS = np.random.default_rng(7).integers(0, 10, 1000)


@pytest.mark.parametrize("world_size", [1, 7, 64])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_partition_gives_every_sample_to_one_rank(scheme: str, world_size: int) -> None:
    parts = partition(LABELS, world_size, scheme)
    assert len(parts) == world_size
    assert all(part.dtype == np.int64 and len(part) > 0 for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_partition_depends_on_the_seed_alone(scheme: str) -> None:
    def tolist(seed: int, labels: Any = LABELS) -> list[list[int]]:
        return [part.tolist() for part in partition(labels, 5, scheme, seed=seed)]

    np.random.seed(1)  # noqa: NPY002 - the global generator must not matter
    first = tolist(0)
    np.random.seed(2)  # noqa: NPY002
    assert tolist(0) == first
    assert tolist(0, torch.from_numpy(LABELS)) == first
    assert tolist(1) != first


def test_partition_iid_sizes_differ_by_at_most_one_and_all_see_all_classes() -> None:
    parts = partition(LABELS, 7)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert [len(np.unique(LABELS[part])) for part in parts] == [10] * 7


def test_partition_by_class_ranks_see_few_classes() -> None:
    labels = np.repeat(np.arange(10), 40)
    one, two = (partition(labels, 10, "by_class", shards_per_rank=shards) for shards in (1, 2))
    assert [len(np.unique(labels[part])) for part in one] == [1] * 10
    assert max(len(np.unique(labels[part])) for part in two) == 2
    assert {len(part) for part in two} == {40}


def test_partition_dirichlet_alpha_orders_the_skew() -> None:
    def skew(alpha: float) -> float:
        """Mean share of a class that the rank with most of it has; 1/8 if equal, 1 if the class lies on one rank."""
        parts = partition(LABELS, 8, "dirichlet", alpha=alpha)
        counts = np.array([np.bincount(LABELS[part], minlength=10) for part in parts])
        return float((counts.max(axis=0) / counts.sum(axis=0)).mean())

    assert skew(0.01) > 0.9
    assert skew(0.01) > skew(0.5) > skew(100.0)
    assert skew(1e6) < 1 / 8 + 0.02


def test_partition_dirichlet_leaves_no_rank_without_samples() -> None:
    labels = np.repeat([0, 1, 2], 10)
    for seed in range(5):
        for world_size in (7, 30):
            parts = partition(labels, world_size, "dirichlet", alpha=1e-3, seed=seed)
            assert min(len(part) for part in parts) >= 1
            assert sorted(np.concatenate(parts).tolist()) == list(range(30))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "iid", "alpha": 0.5}, r"alpha=0\.5 means nothing for scheme 'iid'"),
        ({"scheme": "by_class", "world_size": 501}, r"1000 samples do not fill .* 2 \* 501 = 1002 shards"),
        ({"world_size": 1001}, "1000 samples cannot be dealt to world_size=1001"),
        ({"labels": LABELS.reshape(2, -1)}, r"labels must be one integer per sample, \[N\], got int64 with the shape"),
    ],
)
def test_partition_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(**{"labels": LABELS, "world_size": 4, **arguments})
