"""Physical variants of the language columns all become one canonical form."""

from __future__ import annotations

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.errors import LanguageError
from ingest.language import (
    EVENT_COLUMN,
    STATE_COLUMN,
    canonical_type,
    decode_rows,
    normalise_column,
    normalise_table,
    read_language_columns,
    rows_array,
)
from ingest.language.columns import row_fields
from ingest.language.write import unite_tables

SAY = {"type": "function", "function": {"name": "say", "arguments": {"text": "chào bạn"}}}
BEEP = {"type": "function", "function": {"name": "beep", "arguments": {"n": 2}}}


def row(column, **changes):
    full = {"role": "assistant", "content": "x", "style": None, "timestamp": 0.25, "camera": None, "tool_calls": None, **changes}
    return {name: full[name] for name in row_fields(column)}


texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)
rows_of = {
    column: st.builds(
        lambda content, style, time, camera, calls, column=column: row(
            column, content=content, style=style, timestamp=time, camera=camera, tool_calls=calls
        ),
        st.none() | texts,
        st.sampled_from(["subtask", "vqa", None]),
        st.floats(0, 1000, width=32),
        st.none() | st.just("observation.images.top"),
        st.none() | st.lists(st.sampled_from([SAY]), max_size=2),
    )
    for column in (STATE_COLUMN, EVENT_COLUMN)
}


def physical(lists, column, form):
    """The same rows as some writer would store them."""
    if form == "canonical":
        return rows_array(lists, column)
    if form == "inferred":
        return pa.array(lists)
    stored = [None if rows is None else [dict(item) for item in rows] for rows in lists]
    for rows in stored:
        for item in rows or ():
            if item["tool_calls"] is not None:
                item["tool_calls"] = [json.dumps(call) for call in item["tool_calls"]]
    time = pa.float64() if form == "json text, doubles" else pa.float32()
    string = pa.large_string() if form == "large" else pa.string()
    kinds = {"timestamp": time, "tool_calls": pa.list_(string)}
    fields = [pa.field(name, kinds.get(name, string)) for name in row_fields(column)]
    if form == "extra and shuffled":
        fields = [pa.field("confidence", pa.float64()), *reversed(fields)]
    item = pa.struct(fields)
    return pa.array(stored, pa.large_list(item) if form == "large" else pa.list_(item))


FORMS = ["canonical", "inferred", "json text", "json text, doubles", "large", "extra and shuffled"]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([STATE_COLUMN, EVENT_COLUMN]), st.sampled_from(FORMS))
def test_every_physical_form_gives_one_type_and_the_same_rows(data, column, form):
    lists = data.draw(st.lists(st.none() | st.lists(rows_of[column], max_size=3), max_size=5))
    array = physical(lists, column, form)
    normal = normalise_column(array, column)
    assert normal.type == canonical_type(column)
    assert decode_rows(array, column) == lists
    assert normalise_column(normal, column).equals(normal)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.lists(st.sampled_from(FORMS), min_size=2, max_size=4))
def test_shards_of_different_forms_unite_after_parquet(data, forms):
    tables = []
    for form in forms:
        lists = {column: data.draw(st.lists(st.lists(rows_of[column], max_size=2), min_size=3, max_size=3)) for column in rows_of}
        buffer = io.BytesIO()
        pq.write_table(pa.table({"index": [0, 1, 2], **{column: physical(rows, column, form) for column, rows in lists.items()}}), buffer)
        tables.append(normalise_table(pq.read_table(buffer)))
    united = unite_tables([*tables, pa.table({"index": [9]})])
    assert united.num_rows == 3 * len(forms) + 1
    assert {column: united.schema.field(column).type for column in rows_of} == {column: canonical_type(column) for column in rows_of}
    assert united.column(EVENT_COLUMN)[-1].as_py() == []


def test_timestamps_are_narrowed_once_and_for_all():
    array = pa.array([[row(STATE_COLUMN, timestamp=0.7)]])
    assert array.type.value_type.field("timestamp").type == pa.float64()
    assert decode_rows(array, STATE_COLUMN)[0][0]["timestamp"] == float(np.float32(0.7))


def test_sliced_and_chunked_columns_keep_their_rows():
    lists = [[row(STATE_COLUMN, content=str(number))] for number in range(6)]
    whole = rows_array(lists, STATE_COLUMN)
    chunked = pa.chunked_array([whole.slice(0, 2), whole.slice(2, 4)])
    assert decode_rows(whole.slice(3, 2), STATE_COLUMN) == lists[3:5]
    assert decode_rows(chunked, STATE_COLUMN) == lists
    assert decode_rows(pa.chunked_array([], canonical_type(STATE_COLUMN)), STATE_COLUMN) == []


def test_json_scalars_and_lists_decode_to_themselves():
    item = pa.struct([("role", pa.string()), ("tool_calls", pa.list_(pa.string()))])
    array = pa.array([[{"role": "assistant", "tool_calls": ['"x"', "5", "[1, 2]", "null"]}]], pa.list_(item))
    assert decode_rows(array, EVENT_COLUMN)[0][0]["tool_calls"] == ["x", 5, [1, 2], None]


def test_null_columns_and_null_rows():
    assert decode_rows(pa.nulls(3), STATE_COLUMN) == [None] * 3
    assert decode_rows(pa.array([[None], []], pa.list_(pa.null())), EVENT_COLUMN) == [[None], []]
    assert decode_rows(pa.array([[None, row(EVENT_COLUMN)]]), EVENT_COLUMN) == [[None, row(EVENT_COLUMN)]]


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (pa.array(["text"]), "bad_column_type"),
        (pa.array([[1, 2]]), "bad_column_type"),
        (pa.array([[{"role": None, "timestamp": 1.0}]]), "row_missing_role"),
        (pa.array([[{"role": "user"}]]), "row_missing_timestamp"),
        (pa.array([[{"role": "user", "timestamp": "soon"}]]), "bad_field_type"),
        (pa.array([[{"role": "user", "timestamp": 1.0, "tool_calls": 5}]]), "bad_field_type"),
        (pa.array([[{"role": "user", "timestamp": 1.0, "tool_calls": ["{broken"]}]]), "tool_call_not_json"),
    ],
)
def test_unreadable_columns_are_named(array, kind):
    with pytest.raises(LanguageError) as caught:
        decode_rows(array, STATE_COLUMN)
    assert caught.value.kind == kind


def test_two_tools_keep_their_arguments_apart():
    buffer = io.BytesIO()
    pq.write_table(
        pa.table({EVENT_COLUMN: rows_array([[row(EVENT_COLUMN, tool_calls=[SAY])], [row(EVENT_COLUMN, tool_calls=[BEEP])]], EVENT_COLUMN)}),
        buffer,
    )
    rows = read_language_columns(buffer)[EVENT_COLUMN]
    assert [frame[0]["tool_calls"] for frame in rows] == [[SAY], [BEEP]]
    assert STATE_COLUMN not in read_language_columns(buffer)


def test_other_columns_must_agree_when_uniting():
    with pytest.raises(LanguageError, match="united"):
        unite_tables([pa.table({"index": [1]}), pa.table({"frame": [1]})])
    with pytest.raises(LanguageError):
        unite_tables([])
