"""The user's calls between backward passes that make the steps: ``optimizer.step()``, and torch's clipping."""

import itertools
import sys
import traceback
from collections.abc import Callable

from loguru import logger
from torch.optim import Optimizer

from gossip.errors import warn_user
from gossip.optimizers.bucket_optimizer import Closure

_CLIPPING = "torch.nn.utils.clip_grad"
_NUM_FRAMES = 4  # at most so many below a clip function are its loop over the parameters, and their iterators


class OptimizerStepCalls:
    """Says what the usual loop's calls do where backward passes make the steps.

    The first call of ``optimizer.step()`` is answered once, at level INFO: the updates have been made. Users who never
    call it see nothing. A warning, once each, follows where something is known to be lost, or not to be meant:

    - several backward passes came before the call, and each has made a step (``no_sync()`` was forgotten);
    - no backward pass has made a step, but there are gradients: they were written, or all passes were under
      ``no_sync()``;
    - at the first call there are gradients although a step was made: they were written after it;
    - a clip function of ``torch.nn.utils`` goes through ``model.parameters()`` when no parameter has a gradient.

    Other code that reads gradients between ``backward()`` and ``optimizer.step()`` finds None, and cannot be seen
    without replacing torch's own functions: clipping of ``net.parameters()``, of a list made before, or by hand.
    Only one rank ``tells``, as all of them run the same loop.
    """

    def __init__(self, where: str, usual_loop: str, *, tells: bool = True) -> None:
        self.explains = self._warns = tells
        self._where, self._usual_loop = where, usual_loop
        self._num_steps = 0  # made by backward passes since the last call
        self._steps_seen: dict[Optimizer, int] = {}  # by the newest call for each
        self._warned: set[str] = set()

    def count_step(self) -> None:
        """Count a step that a backward pass has made."""
        self._num_steps += 1

    def note_reading(self, step: int, has_gradients: Callable[[], bool]) -> None:
        """Note that the parameters are about to be read, by a clip function or another."""
        if "clipping" not in self._warned and _is_clipping() and not has_gradients():
            self._warn(
                "clipping",
                step,
                "a clip function found no gradients, and clipped nothing: updates are made inside backward, which "
                f"releases the gradients. Pass clip_grad_norm= to GossipDataParallel, or {self._usual_loop}",
            )

    def note(self, optimizer: Optimizer, closure: Closure | None, step: int, has_gradients: Callable[[], bool]) -> None:
        """Note that the user has called ``optimizer.step(closure)``, which is about to do nothing."""
        if closure is not None:
            raise ValueError(
                "optimizer.step(closure) cannot work here, because the update was made inside backward; call it "
                f"without closure, or {self._usual_loop}"
            )
        if optimizer.__dict__.pop("found_inf", None) is not None:
            optimizer.__dict__.pop("grad_scale", None)  # what the next backward pass would apply
            raise ValueError(
                "scaler.step() cannot work here, because the update was made inside backward; pass the scaler to "
                f"GossipDataParallel(scaler=...) and call only scaler.scale(loss).backward(), or {self._usual_loop}"
            )
        is_first, is_new = not self._steps_seen, step != self._steps_seen.get(optimizer, 0)
        self._steps_seen[optimizer] = step
        num_steps, self._num_steps = self._num_steps, 0
        if self.explains and is_first:
            logger.info(
                f"{self._where}optimizer.step() has nothing left to do: the updates were made inside backward(), and "
                "what stands between the two, such as clipping, has no effect. To clip, pass clip_grad_norm= where the "
                f"module is wrapped; to keep the usual loop, {self._usual_loop}"
            )
        if num_steps > 1:
            self._warn(
                "several",
                step,
                f"{num_steps} steps were made since the last optimizer.step(), one by each backward pass; to "
                "accumulate their gradients into one step, put all but the last backward pass under no_sync(), or "
                f"{self._usual_loop}",
            )
        if is_first and is_new and has_gradients():
            self._warn(
                "written",
                step,
                "there are gradients that were made after the step inside backward(), which they have not changed; "
                "they are added to those of the next step, unless they are zeroed. To change the gradients of a step, "
                f"{self._usual_loop}",
            )
        if not is_new and "nothing" not in self._warned and has_gradients():
            self._warn(
                "nothing",
                step,
                "optimizer.step() did nothing: there are gradients, but no backward pass has made a step of them. "
                "Steps are made by backward passes outside of no_sync(); have the last one of each step there. If "
                f"gradients are written to .grad (torch.autograd.grad, torch.func, gradient surgery), "
                f"{self._usual_loop}",
            )

    def _warn(self, kind: str, step: int, text: str) -> None:
        if kind not in self._warned and self._warns:
            self._warned.add(kind)
            warn_user(f"{self._where}step {step}: {text}")


def _is_clipping() -> bool:
    """Whether it is one of torch's clip functions that asks for the parameters."""
    frames = traceback.walk_stack(sys._getframe(4))  # from what called the model's named_parameters()
    return any(frame.f_globals.get("__name__") == _CLIPPING for frame, _ in itertools.islice(frames, _NUM_FRAMES))
