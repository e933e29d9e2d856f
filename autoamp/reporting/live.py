"""What happens to the loss scale, said while it happens: in the log, and for TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..speech import speaks_for_the_job

if TYPE_CHECKING:
    from ..session import Session

SCALE, SKIPPED, OVERFLOW = (f"autoamp/{name}" for name in ("loss_scale", "skipped", "overflow"))
"""TensorBoard's tags: the scale, the steps skipped so far, and a 1 at each step that was."""


class Live:
    """Hears how each gated step ended, up to 64 steps later: the device is never waited for."""

    def __init__(self, session: Session, folder: str | None) -> None:
        self.session = session
        self._folder = folder
        self._writer: Any = None
        self._step = 0
        self._scale = session.loss_scale.rule.init
        self._skipped = 0

    def heard(self, step: int, before: float, scale: float, was_skipped: bool) -> None:
        """A step was taken or skipped, and the scale went from `before` to `scale`."""
        self._step, self._scale = step, scale
        if scale == before and not was_skipped:
            if self._folder and self._writer is None:
                self._write(step, scale, False)
            return
        change = f"loss scale {before:.10g} -> {scale:.10g}"
        if was_skipped:
            change = f"loss scale stays {scale:.10g}" if scale == before else change
            change = f"skipped, its gradients are not finite; {change}"
        self.session.speech.info(f"autoamp: step {step}: {change}")
        if self._folder:
            if scale != before:  # TensorBoard draws straight lines from point to point
                self._add(SCALE, before, step - 1)
            self._write(step, scale, was_skipped)

    def close(self) -> None:
        """The last point, and everything on disk."""
        if self._writer is not None:
            self._add(SCALE, self._scale, self._step)
            self._writer.close()
            self._writer, self._folder = None, None

    def _write(self, step: int, scale: float, was_skipped: bool) -> None:
        self._skipped += was_skipped
        self._add(SCALE, scale, step)
        self._add(SKIPPED, self._skipped, step)
        if was_skipped:
            self._add(OVERFLOW, 1, step)

    def _add(self, tag: str, value: float, step: int) -> None:
        if self._writer is None:
            self._open()
        if self._writer is not None:
            try:
                self._writer.add_scalar(tag, value, step)
            except Exception as error:  # noqa: BLE001 - a full disk is no reason to stop training
                self._give_up(f"{type(error).__name__}: {error}")

    def _open(self) -> None:
        """Nothing of TensorBoard is loaded before there is something to write."""
        if not self._folder or not speaks_for_the_job():
            self._folder = None
            return
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder, flush_secs=10)
        except ImportError:
            self._give_up("tensorboard is not installed (pip install tensorboard)")
        except Exception as error:  # noqa: BLE001 - whatever it is, the step that runs goes on
            self._give_up(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        asked = f"AUTO_MIXED_PRECISION_TENSORBOARD={self._folder}"
        self._writer, self._folder = None, None
        self.session.speech.notice(f"autoamp: {asked}: {why}; nothing more is written there")
