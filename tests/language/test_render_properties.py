"""What holds for every recipe and every sample: purity, locality, determinism, and the stage against the step."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.errors import LanguageError, LanguageKeyError, LanguageTypeError
from ingest.language import (
    MessagesToTask,
    Outcome,
    RenderStage,
    RenderTrainingMessagesStep,
    StateRows,
    active_at,
    emitted_at,
    load_recipe,
    nth_next,
    nth_prev,
    render_sample,
    resolve,
    select_component,
    task_text,
    tool_catalogue,
    tools_for,
    unit_draw,
)
from ingest.language.collate import add_batch_dimension, collate_language
from ingest.language.draw import weighted_choice
from ingest.language.step import keep_items

TOP, WRIST = "observation.images.top", "observation.images.wrist"
SAY = [{"type": "function", "function": {"name": "say", "arguments": {"text": "ok"}}}]
RECIPES = {name: load_recipe(name) for name in ("subtask", "subtask_joint", "subtask_mem", "subtask_mem_vqa_speech")}


def state(style, time, content="x", role="assistant"):
    return {"role": role, "content": content, "style": style, "timestamp": time, "camera": None, "tool_calls": None}


def event(style, role, content=None, camera=None, calls=None):
    return {"role": role, "content": content, "style": style, "camera": camera, "tool_calls": calls}


@st.composite
def samples(draw):
    rows = []
    for style in ("subtask", "memory", "plan"):
        times = draw(st.lists(st.integers(0, 40), max_size=4, unique=True))
        rows += [state(style, float(np.float32(time / 10)), draw(st.text(max_size=5))) for time in times]
    events = []
    for camera in (TOP, WRIST):
        if draw(st.booleans()):
            events += [event("vqa", "user", "what?", camera), event("vqa", "assistant", "{}", camera)]
    if draw(st.booleans()):
        events += [event("interjection", "user", "stop"), event(None, "assistant", calls=SAY)]
    return {
        "language_persistent": draw(st.permutations(rows)),
        "language_events": events,
        "timestamp": float(np.float32(draw(st.integers(0, 50)) / 10)),
        "index": draw(st.integers(0, 10**9)),
        "task": draw(st.sampled_from(["make tea", ""])),
    }


def render(recipe, sample):
    return render_sample(
        recipe, sample["language_persistent"], sample["language_events"], sample["timestamp"], sample["index"], task=sample["task"]
    )


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(RECIPES)), samples())
def test_rendering_is_pure_and_shares_nothing_with_its_input(name, sample):
    recipe, before = RECIPES[name], json.dumps(sample)
    first = render(recipe, sample)
    again = render(pickle.loads(pickle.dumps(recipe)), copy.deepcopy(sample))
    assert first == again
    if first is not None:
        for message in first["messages"]:
            message.setdefault("tool_calls", []).append("changed")
    assert json.dumps(sample) == before
    assert render(recipe, sample) == again


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(RECIPES)), samples(), st.data())
def test_unrelated_rows_and_row_order_change_nothing(name, sample, data):
    recipe = RECIPES[name]
    extra = [state("motion", 0.0), state("motion", 0.0), state("subtask", 1000.0, "much later"), None]
    crowded = {**sample, "language_persistent": data.draw(st.permutations([*sample["language_persistent"], *extra]))}
    crowded["language_events"] = [*sample["language_events"], event("trace", "assistant", "[]", TOP), None]
    assert render(recipe, crowded) == render(recipe, sample)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(RECIPES)), st.lists(samples(), min_size=1, max_size=6))
def test_batches_equal_single_samples(name, group):
    step = RenderTrainingMessagesStep(RECIPES[name])
    singles = [step({"complementary_data": sample, "action": np.zeros(2)}) for sample in group]
    kept = [single["complementary_data"] for single in singles if single is not None and "messages" in single["complementary_data"]]
    data = {key: [sample[key] for sample in group] for key in group[0]}
    data["index"] = np.asarray(data["index"])
    transition = {
        "complementary_data": data,
        "action": np.arange(len(group)),
        "observation": {"names": list("abcdef"[: len(group)]), "n": 3},
    }
    unannotated = not any(sample["language_persistent"] or sample["language_events"] for sample in group)
    if (kept and unannotated and len(kept) < len(group)) or (not kept and not unannotated):
        with pytest.raises(LanguageError, match=r"have neither annotations nor a task|can be rendered"):
            step(transition)
        return
    batch = step(transition)
    if batch is transition:
        assert not kept
        return
    for key in ("messages", "message_streams", "target_message_indices", "task"):
        assert batch["complementary_data"][key] == [single[key] for single in kept]
    assert len(batch["action"]) == len(batch["observation"]["names"]) == len(batch["complementary_data"]["index"]) == len(kept)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(RECIPES)), samples())
def test_the_streams_stage_equals_the_step(name, sample):
    stepped = RenderTrainingMessagesStep(RECIPES[name])({"complementary_data": sample, "action": 1})
    staged = RenderStage(RECIPES[name])(sample)
    if stepped is None:
        assert staged is None
    else:
        expected = {key: value for key, value in stepped["complementary_data"].items() if not key.startswith("language_")}
        assert staged == expected


def test_messages_key_is_configurable_and_both_names_are_recognised():
    sample = {"language_persistent": [state("subtask", 0.0)], "timestamp": 0.5, "index": 3, "task": "tea"}
    staged = RenderStage(RECIPES["subtask_joint"], messages_key="messages_rendered")(sample)
    assert staged["messages_rendered"][1]["content"] == "x"
    assert "messages" not in staged
    for key in ("messages", "messages_rendered"):
        ready = {"task": "tea", key: [{"role": "user", "content": "ready"}]}
        assert RenderStage(RECIPES["subtask"])(ready) == ready
        transition = {"complementary_data": ready, "action": 1}
        assert RenderTrainingMessagesStep(RECIPES["subtask"])(transition) is transition


def test_without_a_recipe_the_raw_columns_pass_through():
    sample = {"language_persistent": [state("subtask", 0.0)], "language_events": [], "timestamp": 0.5}
    assert RenderStage(None)(sample) == sample
    transition = {"complementary_data": sample}
    assert RenderTrainingMessagesStep(None)(transition) is transition


def test_policies_decide_about_frames_that_the_recipe_does_not_render():
    recipe = RECIPES["subtask"]
    missed = {"language_persistent": [state("plan", 0.0)], "timestamp": 0.5, "index": 0, "task": "tea"}
    task_only = {"messages": [{"role": "user", "content": "tea"}], "message_streams": ["low_level"], "target_message_indices": []}
    assert task_only.items() <= RenderStage(recipe)(missed).items()
    assert RenderStage(recipe, policy="drop")(missed) is None
    assert RenderStage(recipe)({**missed, "task": ""}) is None
    with pytest.raises(LanguageError, match="does not apply to sample 0"):
        RenderStage(recipe, policy="error")(missed)
    with pytest.raises(LanguageError, match="policy must be one of"):
        RenderStage(recipe, policy="skip")


def test_ambiguity_stops_unless_told_otherwise():
    twice = {"language_persistent": [state("subtask", 0.0, "a"), state("subtask", 0.0, "b")], "timestamp": 0.5, "index": 0, "task": "tea"}
    with pytest.raises(LanguageError, match=r"active_at\(t, style=subtask\) at t=0.500000 s matches 2 rows \('a', 'b'\)"):
        RenderStage(RECIPES["subtask"])(twice)
    assert RenderStage(RECIPES["subtask"], on_ambiguous="fallback")(twice)["messages"] == [{"role": "user", "content": "tea"}]
    assert RenderStage(RECIPES["subtask"], on_ambiguous="drop")(twice) is None
    verdict = RenderStage(RECIPES["subtask"], on_ambiguous="drop").judge(StateRows(twice["language_persistent"]), [], 0.5, 0, "tea")
    assert (verdict.outcome, verdict.error.style) == (Outcome.AMBIGUOUS, "subtask")


def test_unannotated_samples_keep_their_task_and_samples_without_one_stay_as_they_are():
    stage = RenderStage(RECIPES["subtask"], policy="drop")
    assert stage({"task": "tea", "x": 1})["messages"] == [{"role": "user", "content": "tea"}]
    assert stage({"task": " ", "language_persistent": []})["message_streams"] == ["low_level"]
    assert stage({"x": 1, "language_events": None}) == {"x": 1}


def test_rephrasings_win_only_when_asked():
    rows = [state("task_aug", 0.0, text, "user") for text in ("brew", "prepare", "tea, now")]
    for rows_without_times in (rows, [{key: value for key, value in row.items() if key != "timestamp"} for row in rows]):
        assert task_text(5, rows_without_times, "make tea") == "make tea"
        assert task_text(5, rows_without_times, "make tea", rephrasings_win=True) in {"brew", "prepare", "tea, now"}
    assert task_text(5, [], "make tea", rephrasings_win=True) == "make tea"
    assert task_text(5, [state("task_aug", 0.0, "", "user")], None, {"task": "context"}) == "context"

    class Context:
        task = "from an object"

    assert task_text(5, [], None, Context()) == "from an object"
    sample = {"language_persistent": rows, "timestamp": 0.0, "index": 5, "task": "make tea"}
    told = RenderStage(RECIPES["subtask_joint"], rephrasings_win=True)(sample)
    assert told["messages"][0]["content"] != "make tea"


def test_shared_state_rows_are_indexed_once_and_survive_pickling():
    rows = StateRows([state("subtask", 0.0, "a"), None, state("subtask", 1.0, "b"), state("memory", 0.5, "m")])
    line = rows.timeline("subtask")
    assert (line.times, [row["content"] for row in line.rows]) == ([0.0, 1.0], ["a", "b"])
    assert rows.timeline("subtask") is line
    assert rows.timeline("subtask", role="user").rows == []
    twin = pickle.loads(pickle.dumps(rows))
    assert type(twin) is StateRows
    assert twin == rows
    assert copy.deepcopy(rows).timeline("memory").times == [0.5]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, 0.2, 0.30000001192092896, 1.0, float("nan")]), st.sampled_from(["user", "assistant"])),
        max_size=6,
    ),
    st.sampled_from([-1.0, 0.0, 0.1, 0.2, 0.3, 0.30000001192092896, 0.4, 5.0, float("nan")]),
    st.integers(-3, 3).filter(bool),
)
def test_resolvers_agree_with_their_definition(pairs, t, offset):
    rows = [state("memory", time, str(number), role) for number, (time, role) in enumerate(pairs)]
    past = [row for row in rows if row["timestamp"] <= t]
    latest = [row for row in past if row["timestamp"] == max(other["timestamp"] for other in past)]
    near = [row for row in rows if abs(row["timestamp"] - t) <= 0.1]
    for expression, expected in (("active_at(t, style=memory)", latest), ("emitted_at(t, style=memory)", near)):
        if len(expected) > 1:
            with pytest.raises(LanguageError, match="matches"):
                resolve(expression, rows, [], t)
        else:
            assert resolve(expression, rows, [], t) is (expected[0] if expected else None)
    line = sorted((row for row in rows if row["timestamp"] == row["timestamp"]), key=lambda row: (row["timestamp"], row["role"]))
    anchor = sum(row["timestamp"] <= t for row in line) - 1
    for name, position in (("nth_next", anchor + offset), ("nth_prev", anchor - offset)):
        expected = line[position] if 0 <= position < len(line) and not (name == "nth_prev" and anchor < 0) else None
        assert resolve(f"{name}(t, style=memory, offset={offset})", rows, [], t) is expected


def test_named_resolvers():
    rows = [state("subtask", 0.0, "a"), state("subtask", 1.0, "b"), state("subtask", 2.0, "c")]
    assert active_at(1.5, rows, style="subtask")["content"] == "b"
    assert nth_prev(1.5, rows, style="subtask", offset=1)["content"] == "a"
    assert nth_next(1.5, rows, style="subtask", offset=1)["content"] == "c"
    assert emitted_at(0.0, rows, [event("interjection", "user", "stop")], style="interjection")["content"] == "stop"


def test_times_are_compared_as_doubles_whatever_type_they_come_in():
    row = state("subtask", 0.7)
    for t in (np.float32(0.7), np.asarray(np.float32(0.7)), [np.float32(0.7)]):
        assert resolve("active_at(t, style=subtask)", [row], [], t) is None
        assert render_sample(RECIPES["subtask_joint"], [row], [], t, 0, task="x")["target_message_indices"] == []
    assert resolve("active_at(t, style=subtask)", [{**row, "timestamp": np.float32(0.7)}], [], np.float32(0.7)) is not None
    assert resolve("active_at(t, style=subtask)", [{**row, "timestamp": [0.7]}], [], 0.7) is not None


def test_malformed_rows_have_typed_errors():
    with pytest.raises(LanguageTypeError, match="row 0 must be a mapping"):
        resolve("emitted_at(t, role=user)", [], ["text"], 0.0)
    with pytest.raises(LanguageKeyError, match="without timestamp"):
        resolve("active_at(t, style=plan)", [{"role": "user", "style": "plan"}], [], 0.0)
    with pytest.raises(KeyError):
        resolve("active_at(t, style=plan)", [{"role": "user", "style": "plan"}], [], 0.0)
    with pytest.raises(TypeError, match="must be a number"):
        resolve("active_at(t, style=plan)", [{"role": "user", "style": "plan", "timestamp": None}], [], 0.0)
    with pytest.raises(LanguageTypeError, match="must be a number"):
        resolve("active_at(t, style=plan)", [{"role": "user", "style": "plan", "timestamp": "soon"}], [], 0.0)
    step = RenderTrainingMessagesStep(RECIPES["subtask"])
    rows = [state("subtask", 0.0)]
    with pytest.raises(LanguageError, match="single value"):
        step({"complementary_data": {"language_persistent": rows, "timestamp": [0.0, 1.0], "task": "x"}})
    with pytest.raises(LanguageError, match="single value"):
        step({"complementary_data": {"language_persistent": rows, "timestamp": 0.0, "index": np.zeros(2), "task": "x"}})


def test_draws_do_not_depend_on_the_process_or_on_scale():
    assert unit_draw(0) == 0.516288615126363
    assert [unit_draw(index, "vqa:") for index in range(3)] != [unit_draw(index) for index in range(3)]
    base = [("a", 5.0), ("b", 3.0), ("c", 2.0)]
    for index in range(200):
        draw = unit_draw(index)
        assert weighted_choice(base, draw) == weighted_choice([(name, weight * 0.125) for name, weight in base], draw)
    assert weighted_choice([], 0.5) is None
    assert weighted_choice([("a", 0.0)], 0.5) is None
    assert weighted_choice([("a", 0.1), ("b", 0.2)], 1.0) == "b"


def test_the_branch_shares_follow_the_weights():
    recipe = RECIPES["subtask_mem"]
    names = [select_component(recipe, index) for index in range(20_000)]
    for name, part in recipe.blend.items():
        assert names.count(name) / len(names) == pytest.approx(part.weight, abs=0.01)


def test_collation_keeps_language_as_lists_and_refuses_mixtures():
    rendered = RenderStage(RECIPES["subtask_joint"])
    samples = [rendered({"task": "tea", "index": 3, "action": np.arange(2, dtype=np.float32)}) for _ in range(3)]
    batch = collate_language([samples[0], None, samples[1]])
    assert batch["action"].shape == (2, 2)
    assert batch["action"].dtype == np.float32
    assert batch["messages"] == [[{"role": "user", "content": "tea"}]] * 2
    assert batch["target_message_indices"] == [[], []]
    assert batch["task"] == ["tea", "tea"]
    assert collate_language([None]) is None
    with pytest.raises(LanguageError, match=r"'messages' is in 1 of 2"):
        collate_language([samples[0], {key: value for key, value in samples[1].items() if key != "messages"}])
    raw = {"language_persistent": [state("subtask", 0.0)], "language_events": []}
    assert collate_language([raw, raw])["language_persistent"] == [raw["language_persistent"]] * 2
    plain = [{"action": np.zeros(2), "task": "a"}, {"action": np.ones(2), "task": "b"}]
    assert collate_language(plain, stack=lambda group: {"n": len(group)}) == {"n": 2}


def test_adding_a_batch_dimension_wraps_single_samples_only():
    single = {"messages": [{"role": "user"}], "message_streams": ["low_level"], "target_message_indices": [], "x": 1}
    wrapped = add_batch_dimension(single)
    assert wrapped == {"messages": [[{"role": "user"}]], "message_streams": [["low_level"]], "target_message_indices": [[]], "x": 1}
    assert add_batch_dimension(wrapped) == wrapped
    assert add_batch_dimension({"x": 1}) == {"x": 1}


def test_chats_flatten_to_tasks_for_text_only_policies():
    chat = [
        {"role": "user", "content": "make tea"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": [{"type": "image", "feature": TOP}, {"type": "text", "text": "which cup?"}]},
        {"role": "user"},
    ]
    flatten = MessagesToTask()
    assert flatten({"messages": chat, "task": "tea"}) == {"messages": chat, "task": "make tea\nwhich cup?", "base_task": "tea"}
    assert flatten({"messages": [chat, chat[:1]], "task": ["a", "b"]})["task"] == ["make tea\nwhich cup?", "make tea"]
    assert flatten({"task": "tea"}) == {"task": "tea"}


def test_tools_belong_to_prompts_that_use_them():
    catalogue = tool_catalogue({})
    assert tools_for([{"role": "assistant", "tool_calls": SAY}], catalogue) == catalogue
    assert tools_for([{"role": "assistant", "content": "x"}], catalogue) == []


def test_items_leave_lists_arrays_and_nested_mappings_alike():
    kept = keep_items(
        {"a": [1, 2, 3], "b": np.arange(6).reshape(3, 2), "c": {"d": (4, 5, 6)}, "e": "abc", "f": 7, "g": np.float32(1)}, [0, 2], 3, "x"
    )
    assert kept["a"] == [1, 3]
    assert kept["b"].tolist() == [[0, 1], [4, 5]]
    assert list(kept["c"]["d"]) == [4, 6]
    assert (kept["e"], kept["f"], kept["g"]) == ("abc", 7, np.float32(1))
    with pytest.raises(LanguageError, match=r"x\.b has 2 items where the batch has 3"):
        keep_items({"b": np.zeros(2)}, [0], 3, "x")
