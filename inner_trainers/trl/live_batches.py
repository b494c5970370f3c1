"""What trainers whose rows can change while they train have in common: `LiveBatches`, a mixin over TRL's trainers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..faults import is_out_of_memory
from ..messages import first_line
from .answer_scores import AnswerScores
from .live import StepNotPaidError
from .live_data import LiveRows, Row
from .memory import memory_in_use, peak_memory
from .metering import Meter
from .row_pools import ROW_NUMBER
from .snapshots import drop_completions

_PEAKS_AT_FIRST, _PEAKS_LATER = 3, 16
"""Steps at a new batch size whose memory is looked at, and every how many steps it is afterwards."""


class LiveBatches:
    """Mixin that gives an optimiser step other rows than the loader's, and does it again when memory runs out.

    The library asks `get_batch_samples` for the batches of each optimiser step. The loader is always asked, so a round
    whose data settings are the recipe's trains as it would without this mixin; only when they differ is its answer
    replaced by rows of `LiveRows`.

    Attributes:
        meter: what the trainer counts.
        scores: what each row's answer got in the passes; None for a trainer that samples.
        live_rows: the rows of the round; None for a trainer whose rows are fixed before it begins.
        examples: turns the rows of one batch into what the collator takes (for trainers that sample: prompts).
        rows_fixed: why the rows of this trainer cannot change, as a sentence; empty when they can.
    """

    meter: Meter
    live_rows: LiveRows | None = None
    scores: AnswerScores | None = None
    examples: Callable[[Sequence[Row]], list[dict[str, Any]]]
    rows_fixed = ""
    args: Any
    optimizer: Any
    data_collator: Any
    _metrics: dict[str, dict[str, list[float]]]
    _signature_columns: list[str] | None
    _tr_loss: torch.Tensor
    _step_batches: list[Any]
    _step_rows: list[Row] | None = None
    _pass_number = 0
    _rows_seconds = 0.0
    _recounted: Any = None
    _kept: _Kept | None = None
    _at_size = 0
    _size_seen = 0

    def follow(self, rows: LiveRows, examples: Callable[[Sequence[Row]], list[dict[str, Any]]]) -> None:
        """Let the trainer's rows change; called once, before it trains."""
        self.live_rows, self.examples = rows, examples
        self._on_cuda = self.args.device.type == "cuda"
        self._numbers: list[list[int] | None] = []
        self._counted: list[int] = []  # rows that the step is counted for
        self._noted: list[tuple[list[int], torch.Tensor, torch.Tensor | None]] = []

    def hold_settings(self) -> None:
        """Let the trainer hold the batch size and the number of completions per prompt that are in force."""
        assert self.live_rows is not None and self.live_rows.live is not None
        now = self.live_rows.live.now
        trainer: Any = self
        trainer.args.per_device_train_batch_size = now.batch_size
        if self.live_rows.grouped:
            trainer.num_generations = trainer.args.num_generations = now.num_generations

    # Batches ----------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the batches of one optimiser step, and how many of their tokens carry a loss."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        rows = self.live_rows
        if rows is None or rows.live is None:
            return batches, items
        began = time.perf_counter()
        if rows.memory.level is None:
            rows.memory.level = memory_in_use(device)
        self._step_rows = self._recounted = None
        self._pass_number = 0
        if rows.live.now.batch_size != self._size_seen:
            self._size_seen, self._at_size = rows.live.now.batch_size, 0
        if rows.live.now is not rows.live.asked:
            self.hold_settings()
        samples = self._samples_next()
        if not rows.active:
            rows.pause()
        elif samples is not False:
            batches = self._drawn_batches(rows)
            items = self._count_items(batches, device)
        self._step_batches = batches
        self._take_numbers(rows, batches, samples)
        self._kept = _Kept(self) if rows.grown else None
        self._rows_seconds = time.perf_counter() - began
        return batches, items

    def _samples_next(self) -> bool | None:
        """Return whether the next pass samples completions; None for a trainer that does not sample."""
        trainer: Any = self
        if not hasattr(self, "_buffered_inputs"):
            return None
        every = trainer.args.gradient_accumulation_steps * getattr(trainer, "num_iterations", 1)
        return trainer._buffered_inputs is None or trainer._step % every == 0

    def _drawn_batches(self, rows: LiveRows) -> list[Any]:
        """Return batches of rows drawn anew; a trainer that samples takes the prompts of the whole step each time."""
        assert rows.live is not None
        now = rows.live.now
        self._step_rows = drawn = rows.draw()
        if self._samples_next() is None:
            size = now.batch_size
            batches = (drawn[first : first + size] for first in range(0, len(drawn), size))
            return [self.data_collator(self.examples(batch)) for batch in batches]
        copies = now.num_generations if rows.grouped else 1
        # each completion has an example of its own, into which the library writes what became of it
        prompts = [dict(prompt) for prompt in self.examples(drawn) for _ in range(copies)]
        return [prompts] * now.gradient_accumulation

    def _count_items(self, batches: list[Any], device: torch.device) -> Any:
        return self._get_num_items_in_batch(batches, device)  # type: ignore[attr-defined]

    def _take_numbers(self, rows: LiveRows, batches: list[Any], samples: bool | None) -> None:
        """Note which rows the step trains on, and take their numbers out of what the loss sees."""
        self._numbers, self._counted = [], []
        if samples is None:
            taken = [batch.pop(ROW_NUMBER, None) for batch in batches]
            self._numbers = [None if numbers is None else numbers.tolist() for numbers in taken]
            self._counted = [number for numbers in self._numbers for number in numbers or ()]
        elif samples and batches and ROW_NUMBER in batches[0][0]:
            assert rows.live is not None
            copies = rows.live.now.num_generations if rows.grouped else 1
            self._counted = [prompt[ROW_NUMBER] for prompt in batches[0][::copies]]
        rows.trained_on(self._counted)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        if self._signature_columns is not None and ROW_NUMBER not in self._signature_columns:
            self._signature_columns.append(ROW_NUMBER)

    # Passes -----------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run one pass; where memory runs out at a grown batch, do the optimiser step again at one that fitted."""
        rows = self.live_rows
        if rows is None or rows.live is None:
            plain: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            return plain
        due, first = self._pass_number, self._pass_number
        run = super().training_step  # type: ignore[misc]
        items = num_items_in_batch if self._recounted is None else self._recounted
        while True:
            said, losses = "", []
            try:
                for number in range(first, due + 1):
                    self._pass_number = number
                    losses.append(run(model, self._step_batches[number], items))
            except Exception as error:
                if not rows.grown or not is_out_of_memory(error) or rows.size_that_fitted() is None:
                    raise
                said = first_line(error)
            if not said:
                break
            losses.clear()
            items, first = self._begin_step_again(rows, said), 0  # out of the handler, whose traceback holds the pass
        self._pass_number = due + 1
        if self._on_cuda:  # the exact peak, that of the backward pass too
            self._note_peak(rows)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute TRL's loss; while its activations are held, note the memory that they take."""
        if isinstance(inputs, dict):
            inputs.pop(ROW_NUMBER, None)  # there when a batch comes from the loader by hand
        loss = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        rows = self.live_rows
        if rows is not None and rows.live is not None and not self._on_cuda:
            self._note_peak(rows)
        return loss

    def _note_peak(self, rows: LiveRows) -> None:
        assert rows.live is not None
        if self._at_size < _PEAKS_AT_FIRST or self._at_size % _PEAKS_LATER == 0:
            peak = peak_memory(self.args.device)
            if peak is not None:
                rows.memory.observe(rows.live.now.batch_size, peak)

    def _begin_step_again(self, rows: LiveRows, said: str) -> Any:
        """Undo the passes of an optimiser step that ran out of memory and draw it anew, smaller; return its items."""
        live, size = rows.live, rows.size_that_fitted()
        assert live is not None and size is not None and self._kept is not None
        if live.pays is not None and not live.pays(replace(live.now, batch_size=size)):
            raise StepNotPaidError
        too_large, step = live.now.batch_size, live.step + 1
        self._kept.put_back(self)
        rows.too_large = too_large if rows.too_large is None else min(too_large, rows.too_large)
        live.change(batch_size=size)
        self._size_seen, self._at_size = size, 0
        self.hold_settings()
        drop_completions(self)
        if self._on_cuda:
            gc.collect()  # what the passes held may hang on a cycle
            torch.cuda.empty_cache()
        rows.trained_on(self._counted, times=-1)
        if self._step_rows is not None:
            rows.take_back()
        self._step_batches[:] = self._drawn_batches(rows)  # the list that the library goes through
        self._take_numbers(rows, self._step_batches, self._samples_next())
        device = self.args.device
        self._recounted = self._count_items(self._step_batches, device)
        self.meter.history.append(f"batch {too_large} to {size} in step {step}: out of memory")
        self.meter.flags.append(
            f"memory ran out at a batch of {too_large} in step {step} ({said}): the step was done again at {size}, "
            f"which had fitted, and the round went on with it; batches of {too_large} and more are refused since"
        )
        return self._recounted

    # What each row's loss was -----------------------------------------------------------------------------------

    def note_losses(self, losses: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Note the loss of each row of the pass that runs.

        Args:
            losses: (B,), summed over what ``weights`` counts.
            weights: (B,), supervised tokens of each row, at least 1; None for one each.
        """
        numbers = self._numbers[self._pass_number] if self._pass_number < len(self._numbers) else None
        if numbers is not None:
            self._noted.append((numbers, losses, weights))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log a step, with the mean loss of each source that it had rows of."""
        rows = self.live_rows
        if rows is not None and "loss" in logs:
            began = time.perf_counter()
            rows.step_fitted()
            self._at_size += 1
            if self._noted:
                self._read_losses(rows)
            spent = self._rows_seconds + time.perf_counter() - began
            if self.scores is not None:
                spent, self.scores.seconds = spent + self.scores.seconds, 0.0
            self.meter.own_seconds["rows"] = spent
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _read_losses(self, rows: LiveRows) -> None:
        noted, self._noted = self._noted, []
        numbers = [number for entry in noted for number in entry[0]]
        losses = [loss for entry in noted for loss in entry[1].tolist()]
        counts = ([1] * len(entry[0]) if entry[2] is None else entry[2].tolist() for entry in noted)
        weights = [weight for count in counts for weight in count]
        rows.grade(numbers, [loss / weight for loss, weight in zip(losses, weights, strict=True)])
        for name, mean in rows.pools.means(numbers, losses, weights).items():
            self.meter.extra[f"loss/{name}"] = mean


class _Kept:
    """What an optimiser step begins with, to begin it again."""

    def __init__(self, trainer: Any) -> None:
        meter = trainer.meter
        self._sequences, self._supervised = meter.sequences, meter.supervised_tokens
        self._loss = trainer._tr_loss.clone()
        self._pass = getattr(trainer, "_step", None)
        self._metrics = {name: len(values) for name, values in trainer._metrics["train"].items()}

    def put_back(self, trainer: Any) -> None:
        """Forget the gradients and figures of the passes since; what they cost stays counted."""
        trainer.meter.sequences, trainer.meter.supervised_tokens = self._sequences, self._supervised
        trainer.meter.losses.clear()
        trainer.meter.extra.clear()
        trainer._noted.clear()
        trainer._tr_loss = self._loss.clone()
        if self._pass is not None:
            trainer._step = self._pass
        metrics = trainer._metrics["train"]
        for name in list(metrics):
            if name in self._metrics:
                del metrics[name][self._metrics[name] :]
            else:
                del metrics[name]
        for group in trainer.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class NumberedCollator:
    """Collates examples as another collator does, and lets a batch say which rows it holds.

    Args:
        collate: the library's collator.
    """

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, examples: Sequence[dict[str, Any]]) -> Any:
        """Return the batch with `ROW_NUMBER`, (B,) int64, as an array that is never moved to a device."""
        batch = self.collate(examples)
        if ROW_NUMBER in examples[0]:
            batch[ROW_NUMBER] = np.array([example[ROW_NUMBER] for example in examples])
        return batch
