"""Data sets without a download: scikit-learn's digits, Python's own source and other files as text."""

from __future__ import annotations

import fnmatch
import os
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, PositiveInt

Share = Annotated[float, Field(gt=0, lt=1)]
VOCABULARY = "\ufffd\t\n" + "".join(map(chr, range(32, 127)))
"""The vocabulary of :func:`stdlib_text`, in token order; token 0 stands for every character that is not in it."""

# Tests, generated tables rather than hand-written code, and packages missing from some supported Python versions.
_LEFT_OUT = ("test", "tests", "idlelib", "encodings", "pydoc_data", "distutils", "ensurepip", "lib2to3")
_NO_PART_OF_IT = ("__pycache__", "site-packages", "dist-packages", "lib-dynload")


@dataclass(frozen=True, eq=False)
class Data:
    """A data set in memory, split into a training and a test part.

    For images, inputs are float32 [N, C, H, W], standardised per channel with the training split's mean and standard
    deviation, and targets int64 [N]. For text, inputs and targets are int64 [N, context_length], the target at each
    position is the next character, and ``num_classes`` is the size of the vocabulary.

    ``train_labels``, int64 [N], are the labels by which :func:`gossip.lab.experiments.partition.partition` divides the
    samples: the class of an image, or the index of the source module that a piece of text was cut from. ``notes`` are
    further facts that a reader of the results needs, such as the Python version of the text.
    """

    name: str
    train_inputs: torch.Tensor
    train_targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor
    num_classes: int
    train_labels: torch.Tensor
    notes: str = ""

    def to(self, device: torch.device) -> Data:
        """Return the data with inputs and targets on a device."""
        names = ("train_inputs", "train_targets", "test_inputs", "test_targets")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input: (C, H, W) for images, (context_length,) for text."""
        return tuple(self.train_inputs.shape[1:])


def digits(test_fraction: Share = 0.2, split_seed: int = 0) -> Data:
    """Scikit-learn's handwritten digits: 1,797 images, inputs [N, 1, 8, 8], ten classes.

    ``test_fraction`` of them, between 0 and 1, are held out, stratified by class. ``split_seed``, which is independent
    of the training seed, selects them.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository,
    1998.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    train_images, test_images, train_targets, test_targets = train_test_split(
        bunch.images, bunch.target, test_size=test_fraction, random_state=split_seed, stratify=bunch.target
    )
    inputs, test_inputs = (torch.from_numpy(each[:, None].astype(np.float32)) for each in (train_images, test_images))
    std, mean = torch.std_mean(inputs, dim=(0, 2, 3), keepdim=True)
    for images in (inputs, test_inputs):
        images.sub_(mean).div_(std.clamp_min(1e-6))
    targets, test_targets = (torch.from_numpy(array.astype(np.int64)) for array in (train_targets, test_targets))
    return Data("digits", inputs, targets, test_inputs, test_targets, num_classes=10, train_labels=targets)


def stdlib_text(
    context_length: PositiveInt = 128,
    max_bytes: PositiveInt = 2_000_000,
    test_fraction: Share = 0.1,
    split_seed: int = 0,
) -> Data:
    """The source of Python's standard library as text for a character language model.

    The modules (files) are sorted by name, shuffled with ``split_seed``, and read until ``max_bytes`` are reached:
    first those of the test split, then those of the training split, so that no module is in both. Each module is cut
    into pieces of ``context_length + 1`` characters that overlap by one; a remainder that does not fill a piece is
    discarded. Tests, tables (encodings, pydoc_data) and packages that newer versions of Python dropped are excluded.

    ``max_bytes`` is the total size of both splits, of which ``test_fraction``, between 0 and 1, is held out; the
    default gives about 14,000 training samples. A ValueError says that a split would be empty.

    The vocabulary is :data:`VOCABULARY`, independent of the content of the files. ``train_labels`` numbers the modules
    of the training split in the order of their names, so that neighbouring labels belong to modules of the same
    package. The text depends on the Python version, which ``notes`` states.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # _sysconfigdata* and config-* depend on the machine on which Python was built.
        left_out = {*_LEFT_OUT, *_NO_PART_OF_IT, *fnmatch.filter(subfolders, "config-*")}
        subfolders[:] = [name for name in subfolders if name not in left_out]
        sources += [Path(folder, name) for name in fnmatch.filter(names, "*.py") if "_sysconfigdata" not in name]
    if not sources:
        raise FileNotFoundError(f"{root} has no source file: this Python was installed without them; use data=digits")
    notes = f"standard library of Python {platform.python_version()}"
    return _text_data("stdlib_text", sorted(sources), context_length, max_bytes, test_fraction, split_seed, notes)


def text_files(
    folder: str | Path,
    pattern: str = "**/*.txt",
    context_length: PositiveInt = 128,
    max_bytes: PositiveInt = 2_000_000,
    test_fraction: Share = 0.1,
    split_seed: int = 0,
) -> Data:
    """The user's own text files, read and split in the same way as the modules of :func:`stdlib_text`.

    If there is only one file, its end is held out.

    ``pattern`` is the glob pattern of the files in ``folder``, as for :meth:`pathlib.Path.glob`; ``**/`` matches
    sub-folders. A FileNotFoundError says that no file matches; all else is as for :func:`stdlib_text`.
    """
    found = Path(folder).expanduser()
    sources = sorted(path for path in found.glob(pattern) if path.is_file())
    if not sources:
        what = f"no file {pattern} is in it" if found.is_dir() else "it is not a folder"
        raise FileNotFoundError(
            f"text files: {found}: {what}; set data.folder=... and data.pattern=..., such as '**/*.md'"
        )
    size_bytes = sum(path.stat().st_size for path in sources)
    notes = f"{min(max_bytes, size_bytes):,} of {size_bytes:,} bytes in {len(sources)} files of {found}"
    return _text_data("text_files", sources, context_length, max_bytes, test_fraction, split_seed, notes)


def _text_data(
    name: str, paths: Sequence[Path], context_length: int, max_bytes: int, test_fraction: float, seed: int, notes: str
) -> Data:
    shuffled = [paths[i] for i in np.random.default_rng(seed).permutation(len(paths))]
    max_bytes = min(max_bytes, sum(path.stat().st_size for path in shuffled))
    test_bytes = int(max_bytes * test_fraction)
    if len(shuffled) == 1:
        ((path, content),) = _read_texts(shuffled, max_bytes)
        train_texts, test_texts = [(path, content[: max_bytes - test_bytes])], [(path, content[-test_bytes:])]
    else:
        test_texts = _read_texts(shuffled, test_bytes)
        train_texts = _read_texts(shuffled[len(test_texts) :], max_bytes - test_bytes)
    test_pieces, _ = _cut(test_texts, context_length)
    train_pieces, train_labels = _cut(sorted(train_texts), context_length)
    for split, pieces in (("test", test_pieces), ("training", train_pieces)):
        if len(pieces) == 0:
            raise ValueError(
                f"the {split} split would hold no sample of context_length={context_length}; "
                f"raise max_bytes (now {max_bytes}) or change test_fraction (now {test_fraction})"
            )
    inputs, targets = train_pieces[:, :-1].contiguous(), train_pieces[:, 1:].contiguous()
    test_inputs, test_targets = test_pieces[:, :-1].contiguous(), test_pieces[:, 1:].contiguous()
    return Data(name, inputs, targets, test_inputs, test_targets, len(VOCABULARY), train_labels, notes)


def as_data(made: Any, name: str) -> Data:
    """Convert the return value of a user's data function to :class:`Data`.

    That is a :class:`Data`, four torch tensors or numpy arrays ``(train_inputs, train_targets, test_inputs,
    test_targets)``, or two datasets, of which the second is held out: map-style, with a length and samples
    ``(input, target)``, like those of torchvision, and read into memory completely. Anything else is refused, as are
    targets that are not class indices from 0 on; ``name`` is that of the function.
    """
    if isinstance(made, Data):
        return made
    parts = list(made) if isinstance(made, tuple | list) else []
    if len(parts) == 2:
        parts = [*_stacked(parts[0]), *_stacked(parts[1])]
    if len(parts) != 4:
        raise TypeError(
            f"{name} must return a gossip.lab.experiments.datasets.Data, four arrays (train_inputs, train_targets, "
            f"test_inputs, test_targets), or two datasets of (input, target), got {type(made).__name__}"
        )
    train_inputs, train_targets, test_inputs, test_targets = map(torch.as_tensor, parts)
    for inputs, targets in ((train_inputs, train_targets), (test_inputs, test_targets)):
        if len(inputs) != len(targets) or len(inputs) == 0:
            raise ValueError(f"{name} returned {len(inputs)} inputs for {len(targets)} targets; each needs one")
        if targets.is_floating_point() or targets.min() < 0:
            raise ValueError(
                f"{name} returned targets of {targets.dtype} from {targets.min()} on; they must be classes from 0 on"
            )
    train_inputs, test_inputs = (
        inputs.float() if inputs.is_floating_point() else inputs for inputs in (train_inputs, test_inputs)
    )
    train_targets, test_targets = train_targets.long(), test_targets.long()
    num_classes = int(max(train_targets.max(), test_targets.max())) + 1
    labels = train_targets if train_targets.ndim == 1 else torch.arange(len(train_targets))
    return Data(name, train_inputs, train_targets, test_inputs, test_targets, num_classes, labels)


def _stacked(dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*(dataset[index] for index in range(len(dataset))), strict=True)
    return torch.stack([torch.as_tensor(each) for each in inputs]), torch.tensor([int(each) for each in targets])


def _read_texts(paths: Sequence[Path], max_bytes: int) -> list[tuple[Path, bytes]]:
    """Read the files up to ``max_bytes`` in total; the last one is truncated."""
    texts = []
    for path in paths:
        if max_bytes > 0:
            texts.append((path, path.read_bytes()[:max_bytes]))
            max_bytes -= len(texts[-1][1])
    return texts


def _cut(texts: Sequence[tuple[Path, bytes]], context_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pieces of all texts, int64 [N, context_length + 1], and the text index of each piece, int64 [N]."""
    pieces = [torch.empty(0, context_length + 1, dtype=torch.int64)]
    labels = [torch.empty(0, dtype=torch.int64)]
    num_used = 0
    for _, content in texts:
        tokens = _tokenize(content.decode("utf-8", errors="replace").replace("\r\n", "\n"))
        if len(tokens) > context_length:
            windows = torch.from_numpy(tokens).unfold(0, context_length + 1, context_length)
            pieces.append(windows)
            labels.append(torch.full((len(windows),), num_used))
            num_used += 1
    return torch.cat(pieces), torch.cat(labels)


def _tokenize(text: str) -> npt.NDArray[np.int64]:
    table = np.zeros(128, dtype=np.int64)
    table[list(map(ord, VOCABULARY[1:]))] = np.arange(1, len(VOCABULARY))
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    tokens: npt.NDArray[np.int64] = table[np.minimum(code_points, 127)]  # 127, a control character, maps to 0 as well
    return tokens
