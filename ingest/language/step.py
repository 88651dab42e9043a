"""The rendering step over LeRobot transitions: single samples and batches, with graceful absence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ingest.errors import LanguageError, LanguageKeyError
from ingest.language.recipe import TrainingRecipe
from ingest.language.render import Rendered, render_sample
from ingest.language.rows import unwrap_number, unwrap_scalar
from ingest.language.styles import EVENT_COLUMN, LANGUAGE_COLUMNS, STATE_COLUMN

MESSAGES_KEY = "messages"
READ_MESSAGES_KEYS = (MESSAGES_KEY, "messages_rendered")
"""Keys under which rendered messages are recognised when reading; newer LeRobot code writes the second."""

STREAMS_KEY = "message_streams"
TARGETS_KEY = "target_message_indices"

_FILTERED = ("observation", "action", "complementary_data", "reward", "done", "truncated")


@dataclass(frozen=True, slots=True)
class RenderTrainingMessagesStep:
    """Turns raw language columns of a transition into messages.

    A transition is a mapping with ``complementary_data`` (``language_persistent``, ``language_events``, ``timestamp``,
    ``index``, ``task`` …), ``action`` and ``observation``. The result is the same object when nothing is to be done,
    None when the sample has no supervision and must leave the epoch, or a copy without raw columns and with messages.

    Attributes:
        recipe: None makes the step a no-op.
        context: dataset context that may supply ``task``.
        messages_key: key that the messages are written under.
        streams_key: key that the stream of each message is written under.
        targets_key: key that the positions of the supervised messages are written under.
        rephrasings_win: lets ``task_aug`` rows replace the sample's task.
        lerobot_batches: renders a wholly unannotated item of an annotated batch by the recipe with no rows, as LeRobot
            does, instead of giving it the task fallback that it gets as a single sample.

    Raises:
        LanguageError: ambiguous or malformed rows, batch fields of different lengths, a batch in which nothing renders.
        LanguageKeyError: an annotated sample has no timestamp.
    """

    recipe: TrainingRecipe | None
    context: Any = None
    messages_key: str = MESSAGES_KEY
    rephrasings_win: bool = False
    lerobot_batches: bool = False
    streams_key: str = STREAMS_KEY
    targets_key: str = TARGETS_KEY

    def __call__(self, transition: Mapping[str, Any]) -> Mapping[str, Any] | None:
        data = cast("Mapping[str, Any]", transition.get("complementary_data") or {})
        raw = any(name in data for name in LANGUAGE_COLUMNS)
        if self.recipe is None or "query_kind" in data:
            return transition
        if not raw and (transition.get("action") is None or any(name in data for name in (self.messages_key, *READ_MESSAGES_KEYS))):
            return transition
        state, events = data.get(STATE_COLUMN), data.get(EVENT_COLUMN)
        if is_empty(state) and is_empty(events):
            fallback = task_fallback(data.get("task"))
            return transition if fallback is None else self._put(transition, {**data}, fallback)
        if _is_batch(state) or _is_batch(events):
            return self._batch(transition, data)
        rendered = self._item(state, events, data.get("task"), unwrap_number(sample_time(data), "timestamp"), _index(data))
        if rendered is None:
            return None
        return self._put(transition, without_columns(data), rendered)

    def _item(self, state: Any, events: Any, task: Any, t: float, index: int) -> Rendered | None:
        assert self.recipe is not None
        rendered = render_sample(
            self.recipe,
            state,
            events,
            t,
            index,
            task=task,
            context=self.context,
            rephrasings_win=self.rephrasings_win,
        )
        # The fallback reads the sample's own task only, never the context's.
        return rendered if rendered is not None else task_only(task)

    def _put(self, transition: Mapping[str, Any], data: dict[str, Any], rendered: Mapping[str, Any]) -> dict[str, Any]:
        keys = (self.messages_key, self.streams_key, self.targets_key)
        data.update(zip(keys, (rendered[name] for name in ("messages", STREAMS_KEY, TARGETS_KEY)), strict=True))
        return {**transition, "complementary_data": data}

    def _batch(self, transition: Mapping[str, Any], data: Mapping[str, Any]) -> Mapping[str, Any] | None:
        size = _batch_size(data)
        states = data.get(STATE_COLUMN) or [None] * size
        events = data.get(EVENT_COLUMN) or [None] * size
        times = _spread(sample_time(data), size, "timestamp")
        indices = _spread(data.get("index", 0), size, "index")
        tasks = _spread(data.get("task"), size, "task")
        if not self.lerobot_batches and all(is_empty(states[item]) and is_empty(events[item]) for item in range(size)):
            fallback = task_fallback(tasks)
            return transition if fallback is None else self._put(transition, without_columns(data), fallback)
        kept: list[int] = []
        rendered: list[Rendered] = []
        for item in range(size):
            if not self.lerobot_batches and is_empty(states[item]) and is_empty(events[item]):
                sample = task_only(tasks[item])
            else:
                t, index = unwrap_number(times[item], "timestamp"), int(unwrap_scalar(indices[item], "index"))
                sample = self._item(states[item], events[item], tasks[item], t, index)
            if sample is not None:
                kept.append(item)
                rendered.append(sample)
        if not kept:
            raise LanguageError(
                f"none of the {size} samples of this batch can be rendered and none has a task: "
                "check the recipe's coverage of this dataset",
                kind="empty_rendered_batch",
            )
        columns = {name: [sample[name] for sample in rendered] for name in ("messages", STREAMS_KEY, TARGETS_KEY)}
        whole = {**transition, "complementary_data": without_columns(data)}
        if len(kept) < size:
            whole = {name: keep_items(value, kept, size, name) if name in _FILTERED else value for name, value in whole.items()}
        return self._put(whole, dict(whole["complementary_data"]), columns)


def is_empty(rows: Any) -> bool:
    """Whether a raw column says that there is no annotation: absent, null or an empty list."""
    return rows is None or (isinstance(rows, Sequence) and not rows)


def without_columns(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the two raw language columns."""
    return {name: value for name, value in data.items() if name not in LANGUAGE_COLUMNS}


def task_only(task: Any) -> Rendered | None:
    """The sample that trains actions from the task text alone; None when the task is no text or empty."""
    if not isinstance(task, str) or not task:
        return None
    return Rendered(messages=[{"role": "user", "content": task}], message_streams=["low_level"], target_message_indices=[])


def task_fallback(task: Any) -> Mapping[str, Any] | None:
    """``task_only`` for one task or for a list of them.

    Raises:
        LanguageError: some items of a list have a task and others have none.
    """
    if not isinstance(task, list | tuple):
        return task_only(task)
    samples = [task_only(item) for item in cast("Sequence[Any]", task)]
    missing = [position for position, sample in enumerate(samples) if sample is None]
    if len(missing) == len(samples):
        return None
    if missing:
        raise LanguageError(
            f"items {missing} of this batch have neither annotations nor a task, the others have one", kind="partial_task_batch"
        )
    return {name: [sample[name] for sample in samples if sample is not None] for name in ("messages", STREAMS_KEY, TARGETS_KEY)}


def keep_items(value: Any, kept: list[int], size: int, name: str) -> Any:
    """``value`` reduced to some items of a batch.

    Mappings are reduced value by value, lists, arrays and tensors along their first dimension; scalars and text stay.

    Raises:
        LanguageError: a list, array or tensor has another length than the batch.
    """
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value)
        return {key: keep_items(entry, kept, size, f"{name}.{key}") for key, entry in entries.items()}
    listed = list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else None
    array = cast("Any", value)
    shape = getattr(array, "shape", None)
    length = len(listed) if listed is not None else int(shape[0]) if shape else None
    if length is None:
        return array
    if length != size:
        raise LanguageError(f"{name} has {length} items where the batch has {size}", kind="batch_field_misaligned")
    return [listed[item] for item in kept] if listed is not None else array[kept]


def sample_time(data: Mapping[str, Any]) -> Any:
    """The ``timestamp`` of an annotated sample, or of a batch of them.

    Raises:
        LanguageKeyError: there is none.
    """
    if data.get("timestamp") is None:
        raise LanguageKeyError(
            "an annotated sample needs its frame timestamp to be rendered; keep the timestamp column", kind="missing_timestamp"
        )
    return data["timestamp"]


def _index(data: Mapping[str, Any]) -> int:
    return int(unwrap_scalar(data.get("index", 0), "index"))


def _is_batch(rows: Any) -> bool:
    """Rows of one sample are mappings; a list inside the list is one sample of a batch."""
    first = next((entry for entry in cast("Sequence[Any]", rows) if entry is not None), None) if isinstance(rows, list | tuple) else None
    return isinstance(first, list | tuple)


def _batch_size(data: Mapping[str, Any]) -> int:
    sizes = {name: len(data[name]) for name in LANGUAGE_COLUMNS if not is_empty(data.get(name))}
    if len(set(sizes.values())) > 1:
        raise LanguageError(f"the language columns of one batch differ in length: {sizes}", kind="batch_length_mismatch")
    return next(iter(sizes.values()))


def _spread(value: Any, size: int, name: str) -> Sequence[Any]:
    """One value per item: lists, arrays and tensors must have the batch length, anything else is shared."""
    shape = getattr(value, "shape", None)
    if isinstance(value, list | tuple) or shape:
        items = cast("Sequence[Any]", value)
        if len(items) != size:
            raise LanguageError(f"{name} has {len(items)} items where the batch has {size}", kind="batch_length_mismatch")
        return items
    return [value] * size
