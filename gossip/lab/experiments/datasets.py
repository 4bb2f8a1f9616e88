"""Data sets without a download: scikit-learn's digits, Python's own source as text, CIFAR-10 from a local folder."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

VOCABULARY = "\ufffd\t\n" + "".join(map(chr, range(32, 127)))
"""The vocabulary of :func:`stdlib_text`, in token order; token 0 stands for every character that is not in it."""

_CIFAR10_RECORD_BYTES = 1 + 3 * 32 * 32
_CIFAR10_TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
_CIFAR10_TEST_FILE = "test_batch.bin"

# Tests, generated tables rather than hand-written code, and packages missing from some supported Python versions.
_LEFT_OUT_FOLDERS = frozenset(
    (
        *("test", "tests", "idlelib", "encodings", "pydoc_data", "distutils", "ensurepip", "lib2to3"),
        *("__pycache__", "site-packages", "dist-packages", "lib-dynload"),
    )
)


@dataclass(frozen=True, eq=False)
class Data:
    """A data set in memory, split into a training and a test part.

    For images, inputs are float32 [N, C, H, W], standardised per channel with the training split's mean and standard
    deviation, and targets int64 [N]. For text, inputs and targets are int64 [N, context_length], the target at each
    position is the next character, and ``num_classes`` is the size of the vocabulary.

    Attributes
    ----------
    name : str
        The name of the data set.
    train_inputs, train_targets : Tensor, [N, ...]
        The training split.
    test_inputs, test_targets : Tensor, [M, ...]
        The test split.
    num_classes : int
        The number of classes, or the size of the vocabulary.
    train_labels : Tensor, int64 [N]
        The labels by which :func:`gossip.lab.experiments.partition.partition` divides the samples: the class of an
        image, or the index of the source module that a piece of text was cut from.
    notes : str
        Further facts that a reader of the results needs, such as the Python version of the text.
    """

    name: str
    train_inputs: torch.Tensor
    train_targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor
    num_classes: int
    train_labels: torch.Tensor
    notes: str = ""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input: (C, H, W) for images, (context_length,) for text."""
        return tuple(self.train_inputs.shape[1:])


def digits(test_fraction: float = 0.2, split_seed: int = 0) -> Data:
    """Scikit-learn's handwritten digits: 1,797 images, inputs [N, 1, 8, 8], ten classes.

    Parameters
    ----------
    test_fraction : float
        The fraction that is held out, between 0 and 1, stratified by class.
    split_seed : int
        The seed that selects the held-out images; independent of the training seed.

    Raises
    ------
    ModuleNotFoundError
        scikit-learn is not installed.
    ValueError
        ``test_fraction`` is not between 0 and 1.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository,
    1998.
    """
    _check_test_fraction(test_fraction)
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the digits need scikit-learn ({error}); install it in a clone of the repository: pip install '.[lab]'",
            name=error.name,
        ) from error
    bunch = load_digits()
    train_images, test_images, train_targets, test_targets = train_test_split(
        bunch.images, bunch.target, test_size=test_fraction, random_state=split_seed, stratify=bunch.target
    )
    return _image_data("digits", train_images[:, None], train_targets, test_images[:, None], test_targets)


def stdlib_text(
    context_length: int = 128, max_bytes: int = 2_000_000, test_fraction: float = 0.1, split_seed: int = 0
) -> Data:
    """The source of Python's standard library as text for a character language model.

    The modules (files) are sorted by name, shuffled with ``split_seed``, and read until ``max_bytes`` are reached:
    first those of the test split, then those of the training split, so that no module is in both. Each module is cut
    into pieces of ``context_length + 1`` characters that overlap by one; a remainder that does not fill a piece is
    discarded. Tests, tables (encodings, pydoc_data) and packages that newer versions of Python dropped are excluded.

    Parameters
    ----------
    context_length : int
        The number of characters per sample.
    max_bytes : int
        The total size of both splits; the default gives about 14,000 training samples.
    test_fraction : float
        The fraction of the bytes that is held out, between 0 and 1.
    split_seed : int
        The seed that selects the modules to read and those to hold out.

    Returns
    -------
    Data
        The vocabulary is :data:`VOCABULARY`, independent of the content of the files. ``train_labels`` numbers the
        modules of the training split in the order of their names, so that neighbouring labels belong to modules of the
        same package. The text depends on the Python version, which ``notes`` states.

    Raises
    ------
    ValueError
        An argument is out of range, or a split would be empty.
    FileNotFoundError
        This Python was installed without its source files.
    """
    notes = f"standard library of Python {platform.python_version()}"
    return _text_data("stdlib_text", _stdlib_sources(), context_length, max_bytes, test_fraction, split_seed, notes)


def text_files(
    folder: str | Path,
    pattern: str = "**/*.txt",
    context_length: int = 128,
    max_bytes: int = 2_000_000,
    test_fraction: float = 0.1,
    split_seed: int = 0,
) -> Data:
    """The user's own text files, read and split in the same way as the modules of :func:`stdlib_text`.

    If there is only one file, its end is held out.

    Parameters
    ----------
    folder : str or Path
        The folder that is searched for files.
    pattern : str
        The glob pattern of the files, as for :meth:`pathlib.Path.glob`; ``**/`` matches sub-folders.
    context_length, max_bytes, test_fraction, split_seed
        As for :func:`stdlib_text`.

    Raises
    ------
    ValueError
        An argument is out of range, or a split would be empty.
    FileNotFoundError
        No file matches the pattern.
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
    name: str,
    sources: Sequence[Path],
    context_length: int,
    max_bytes: int,
    test_fraction: float,
    split_seed: int,
    notes: str,
) -> Data:
    if context_length < 1:
        raise ValueError(f"context_length must be at least 1, got {context_length}")
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    _check_test_fraction(test_fraction)
    shuffled = [sources[i] for i in np.random.default_rng(split_seed).permutation(len(sources))]
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
    return Data(
        name=name,
        train_inputs=train_pieces[:, :-1].contiguous(),
        train_targets=train_pieces[:, 1:].contiguous(),
        test_inputs=test_pieces[:, :-1].contiguous(),
        test_targets=test_pieces[:, 1:].contiguous(),
        num_classes=len(VOCABULARY),
        train_labels=train_labels,
        notes=notes,
    )


def cifar10(folder: str | Path) -> Data:
    """CIFAR-10 in its published binary format, read from ``folder``: inputs [N, 3, 32, 32], ten classes.

    Parameters
    ----------
    folder : str or Path
        The folder that holds data_batch_1.bin to data_batch_5.bin and test_batch.bin, either directly or in a
        sub-folder cifar-10-batches-bin. A record is one byte for the class and 3,072 bytes for the pixels: the red,
        green and blue channels, each in row-major order.

    Raises
    ------
    FileNotFoundError
        The folder or one of the files is missing.
    ValueError
        A file does not consist of such records.

    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    found = _cifar10_folder(Path(folder).expanduser())
    batches = [_read_cifar10_batch(found / name) for name in _CIFAR10_TRAIN_FILES]
    train_images = np.concatenate([images for images, _ in batches])
    train_targets = np.concatenate([targets for _, targets in batches])
    return _image_data("cifar10", train_images, train_targets, *_read_cifar10_batch(found / _CIFAR10_TEST_FILE))


def as_data(made: Any, name: str) -> Data:
    """Convert the return value of a user's data function to :class:`Data`.

    Parameters
    ----------
    made : Data, four arrays, or two datasets
        The arrays are ``(train_inputs, train_targets, test_inputs, test_targets)``, as torch tensors or numpy arrays.
        The two datasets, of which the second is held out, are map-style: they have a length and samples
        ``(input, target)``, like those of torchvision. They are read into memory completely.
    name : str
        The name of the function, for the error message.

    Raises
    ------
    TypeError, ValueError
        The value is none of these, or the targets are not class indices from 0 on.
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
    targets = train_targets.long()
    return Data(
        name=name,
        train_inputs=train_inputs.float() if train_inputs.is_floating_point() else train_inputs,
        train_targets=targets,
        test_inputs=test_inputs.float() if test_inputs.is_floating_point() else test_inputs,
        test_targets=test_targets.long(),
        num_classes=int(max(train_targets.max(), test_targets.max())) + 1,
        train_labels=targets if targets.ndim == 1 else torch.arange(len(targets)),
    )


def _stacked(dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*(dataset[index] for index in range(len(dataset))), strict=True)
    return torch.stack([torch.as_tensor(each) for each in inputs]), torch.tensor([int(each) for each in targets])


def _check_test_fraction(test_fraction: float) -> None:
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must be between 0 and 1, both excluded, got {test_fraction}")


def _image_data(
    name: str,
    train_images: npt.NDArray[np.generic],
    train_targets: npt.NDArray[np.generic],
    test_images: npt.NDArray[np.generic],
    test_targets: npt.NDArray[np.generic],
) -> Data:
    """Standardise images [N, C, H, W] per channel and convert everything to tensors."""
    train_inputs = torch.from_numpy(train_images.astype(np.float32))
    test_inputs = torch.from_numpy(test_images.astype(np.float32))
    std, mean = torch.std_mean(train_inputs, dim=(0, 2, 3), keepdim=True)
    for inputs in (train_inputs, test_inputs):
        inputs.sub_(mean).div_(std.clamp_min(1e-6))
    targets = torch.from_numpy(train_targets.astype(np.int64))
    return Data(
        name=name,
        train_inputs=train_inputs,
        train_targets=targets,
        test_inputs=test_inputs,
        test_targets=torch.from_numpy(test_targets.astype(np.int64)),
        num_classes=10,
        train_labels=targets,
    )


def _stdlib_sources() -> list[Path]:
    """Return the source files of the standard library, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    sources: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # _sysconfigdata* and config-* depend on the machine on which Python was built.
        subfolders[:] = [
            name for name in subfolders if name not in _LEFT_OUT_FOLDERS and not name.startswith("config-")
        ]
        sources += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    sources.sort()
    if not sources:
        raise FileNotFoundError(
            f"no source file of the standard library in {root}: this Python was installed without them; "
            "use another Python or other data (data=digits)"
        )
    return sources


def _read_texts(paths: Sequence[Path], max_bytes: int) -> list[tuple[Path, bytes]]:
    """Read the files up to ``max_bytes`` in total; the last one is truncated."""
    texts = []
    for path in paths:
        if max_bytes <= 0:
            break
        content = path.read_bytes()[:max_bytes]
        max_bytes -= len(content)
        texts.append((path, content))
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
    for token, character in enumerate(VOCABULARY[1:], start=1):
        table[ord(character)] = token
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    tokens: npt.NDArray[np.int64] = table[np.minimum(code_points, 127)]  # 127, a control character, maps to 0 as well
    return tokens


def _cifar10_folder(folder: Path) -> Path:
    """Return ``folder`` or its sub-folder that holds the CIFAR-10 files."""
    names = (*_CIFAR10_TRAIN_FILES, _CIFAR10_TEST_FILE)
    nested = folder / "cifar-10-batches-bin"
    found = nested if nested.is_dir() else folder
    missing = [name for name in names if not (found / name).is_file()]
    if missing:
        what = f"has no {', '.join(missing)}" if found.is_dir() else "is not a folder"
        raise FileNotFoundError(
            f"CIFAR-10: {found} {what}. Put the binary version's files ({names[0]} to {names[-2]} and {names[-1]}) "
            "there, or set data.folder=... to the folder that holds them; nothing is downloaded"
        )
    return found


def _read_cifar10_batch(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Read the images [N, 3, 32, 32] and the classes [N] of one file."""
    content = np.fromfile(path, dtype=np.uint8)
    if content.size == 0 or content.size % _CIFAR10_RECORD_BYTES:
        raise ValueError(
            f"CIFAR-10: {path} has {content.size} bytes, which is not a positive multiple of {_CIFAR10_RECORD_BYTES} "
            "(1 byte of class and 3,072 of pixels); it must be the binary version (not the Python or Matlab one) and "
            "complete: copy it anew to the folder that data.folder=... names"
        )
    records = content.reshape(-1, _CIFAR10_RECORD_BYTES)
    targets = records[:, 0]
    if targets.max() > 9:
        raise ValueError(
            f"CIFAR-10: {path} holds the class {targets.max()}, allowed are 0 to 9; is it CIFAR-100 or a damaged file? "
            "Copy CIFAR-10's binary version to the folder that data.folder=... names"
        )
    return records[:, 1:].reshape(-1, 3, 32, 32), targets
