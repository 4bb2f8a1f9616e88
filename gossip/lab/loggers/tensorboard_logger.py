"""The TensorBoard logger, which writes event files."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from gossip.lab.experiments.records import without_non_finite
from gossip.lab.loggers.logger import MEAN, Beginning, Ending, flattened

NAME = "tensorboard"


class TensorBoardLogger:
    """Writes scalars to ``tensorboard/mean`` in the run folder; config and summary as text.

    A resumed run writes a new event file there, which tells TensorBoard from which step on to discard the values of
    earlier files (``purge_step``). The model is not logged.
    """

    libraries: tuple[str, ...] = (NAME,)

    def __init__(self) -> None:
        self._writer: Any = None

    def begin(self, beginning: Beginning) -> int:
        """Open an event file; values not known to be on disk are written again and supersede the earlier ones."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
        self._beginning = beginning
        self._next_step = min(int(beginning.read_state(NAME).get("next_step", 0)), beginning.step)
        folder = beginning.folder / NAME / MEAN
        is_new = not any(folder.glob("events.*"))
        self._writer = SummaryWriter(str(folder), purge_step=None if is_new else self._next_step)
        about = {"name": beginning.name, "group": beginning.group, "tags": list(beginning.tags)}
        self._writer.add_text("run", _code({**about, **beginning.config}), self._next_step)
        return self._next_step

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Add one scalar per number of the record."""
        for key, number in flattened(values).items():
            self._writer.add_scalar(key, number, global_step=step)
        self._next_step = step + 1

    def flush(self) -> None:
        """Flush the event file, and record the next step to be written."""
        self._writer.flush()
        self._beginning.write_state(NAME, {"next_step": self._next_step})

    def end(self, ending: Ending) -> None:
        """Add summary and figures, and close the event file."""
        self._writer.add_text("summary", _code(ending.summary), self._next_step)
        for path in ending.figures:
            from matplotlib.image import imread

            self._writer.add_image(f"figures/{path.stem}", imread(path)[..., :3], self._next_step, dataformats="HWC")
        self.flush()
        self._writer.close()


def _code(content: Mapping[str, Any]) -> str:
    """Return Markdown that shows the content as an indented code block of JSON."""
    text = json.dumps(without_non_finite(content), indent=2, default=str)
    return "\n".join(f"    {line}" for line in text.splitlines())
