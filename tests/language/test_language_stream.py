"""A recipe in the stream: the engine is the oracle for every topology, cut and resume, and exact coverage is what the recipe leaves."""

from __future__ import annotations

import json
import pickle
import shutil

import numpy as np
import pyarrow as pa
import pytest

from ingest.engine import ReadOptions, open_dataset
from ingest.engine.unit import pack_unit, unpack_unit
from ingest.errors import CursorError, LanguageError, RecipeError, RowsError, SelectionError, SettingsError
from ingest.language import MessagesToTask, RenderStage, load_recipe
from ingest.language.episode import read_language
from ingest.language.importing import Span, rows_from_spans, state_row
from ingest.language.write import write_annotations
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.source import open_source
from ingest.plan import PlanSettings
from ingest.storage.local import LocalStore
from train_integration.decoding import InlineDecoding
from train_integration.feed import LocalFeed
from train_integration.options import StreamConfig, open_stream
from train_integration.state import merged_state
from train_integration.stream import SampleStream

DROPPING = RenderStage(load_recipe("subtask_mem"), policy="drop")
LISTS = ("messages", "message_streams", "target_message_indices")
TOPOLOGIES = [
    {"strategy": "sequential", "batch_size": 5, "workers": 1},
    {"strategy": "remaining", "batch_size": 4, "workers": 2},
    {"strategy": "lanes", "batch_size": 3, "world_size": 2, "lanes": 4},
    {"strategy": "episode_sequential", "batch_size": 7, "world_size": 3},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Six short episodes; the first four have rows, but not from their first frame on."""
    made = make_dataset(tmp_path_factory.mktemp("stream") / "ds", MakeOptions(episodes=6, frames="9:13", cameras=1, size=(32, 64), gop=4))
    rows = {
        language.episode: [
            *rows_from_spans([Span(3, 6, f"reach {language.episode}"), Span(6, 9, "grasp")], language.timestamps),
            state_row("holding", float(language.timestamps[6]), style="memory"),
        ]
        for language in read_language(open_source(LocalStore.at(made.root)), range(4))
    }
    write_annotations(made.root, rows)
    return made.root


@pytest.fixture(scope="module")
def oracle(root):
    """What the dropping stage makes of every frame, from the annotations alone: the messages of the frames that stay."""
    found = {}
    for language in read_language(open_source(LocalStore.at(root))):
        for frame in range(len(language)):
            sample = DROPPING(language.sample(frame))
            if sample is not None:
                found[int(language.index[frame])] = tuple(sample[key] for key in LISTS)
    return found


def streams_of(root, topology, recipe=DROPPING, **config):
    plan = PlanSettings(**topology)
    config = StreamConfig(plan=plan, recipe=recipe, decode="inline", lane_frames=4, **config)
    description, dataset = open_stream(root, config)
    description = pickle.loads(pickle.dumps(description))

    def make(rank):
        return SampleStream(
            description,
            rank,
            plan.world_size,
            LocalFeed(description.job),
            lambda counters: InlineDecoding(1, "ds", counters),
            decoded_bytes=64 << 20,
            output="torch",
        )

    return dataset, [make(rank) for rank in range(plan.world_size)]


def take(streams, found, steps=None):
    """Delivers, and notes the messages of every real sample by its global index."""
    states = []
    for stream in streams:
        for number, batch in enumerate(stream, 1):
            assert all(isinstance(batch[key], list) and len(batch[key]) == len(batch["is_pad"]) for key in LISTS)
            assert not {"language_persistent", "language_events"} & set(batch)
            for place in np.flatnonzero(~batch["is_pad"].numpy()).tolist():
                index = int(batch["index"][place])
                found.setdefault(index, []).append(tuple(batch[key][place] for key in LISTS))
            if number == steps:
                break
        states.append(stream.state_dict())
        stream.close()
    return json.loads(json.dumps(merged_state(states)))


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology["strategy"])
def test_every_topology_delivers_exactly_what_the_recipe_leaves(root, oracle, topology):
    dataset, streams = streams_of(root, topology)
    assert dataset.num_frames == len(oracle) < sum(dataset.lengths)
    found = {}
    take(streams, found)
    assert found == {index: [messages] for index, messages in oracle.items()}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology["strategy"])
def test_after_a_resume_in_another_topology_too(root, oracle, topology):
    found = {}
    _, streams = streams_of(root, topology)
    state = take(streams, found, steps=2)
    _, streams = streams_of(root, topology | {"world_size": 3 - topology.get("world_size", 1) if topology.get("world_size", 1) < 3 else 1})
    for stream in streams:
        stream.load_state_dict(state)
    take(streams, found)
    assert found == {index: [messages] for index, messages in oracle.items()}


def test_the_engine_is_the_oracle_and_indexes_the_frames_that_stay(root, oracle):
    dataset = open_dataset(root, recipe=DROPPING, cameras=())
    samples = [dataset[position] for position in range(len(dataset))]
    assert {int(sample["index"]): tuple(sample[key] for key in LISTS) for sample in samples} == oracle
    leaving = dataset.language.leaving()
    episode, frames = next(iter(leaving.items()))
    with pytest.raises(SelectionError, match=f"episode {episode}, frame {frames[0]}"):
        dataset.sample(episode, int(frames[0]))
    assert len(dataset) + sum(map(len, leaving.values())) == dataset.language.frames


def test_units_carry_state_rows_once_and_any_cut_has_those_of_the_whole_episode(root):
    dataset = open_dataset(root, cameras=())
    whole = dataset.reader().read(_request(dataset, 1, 0, 9))
    for lo in range(8):
        header, parts = pack_unit(dataset.reader().read(_request(dataset, 1, lo, lo + 2)))
        cut = unpack_unit(header, b"".join(parts))
        assert len(cut.rows.language.states) == 1
        assert not set(cut.rows.others.column_names) & {"language_persistent", "language_events"}
        for frame in (lo, lo + 1):
            assert cut.rows.language.raw(frame - cut.rows.first) == whole.rows.language.raw(frame)
    header, _ = pack_unit(whole)
    assert header.count(b"reach 1") == 1


def _request(dataset, episode, lo, hi):
    from ingest.engine.fetch import UnitRequest

    return UnitRequest(0, episode, lo, hi)


def test_unannotated_units_carry_nothing(tmp_path):
    made = make_dataset(tmp_path / "ds", MakeOptions(episodes=2, frames="6", cameras=1, size=(32, 64), gop=4))
    dataset = open_dataset(made.root, cameras=())
    assert dataset.reader().read(_request(dataset, 0, 0, 6)).rows.language is None
    # With a recipe its task trains, and nothing leaves.
    with_recipe = open_dataset(made.root, cameras=(), recipe="subtask")
    assert len(with_recipe) == len(dataset)
    assert with_recipe[0]["message_streams"] == ["low_level"]


def test_raw_columns_pass_through_without_a_recipe(root):
    _, (stream,) = streams_of(root, {"batch_size": 6, "strategy": "sequential"}, recipe=None)
    source = open_source(LocalStore.at(root))
    expected = {
        int(language.index[frame]): language.rows.raw(frame) for language in read_language(source) for frame in range(len(language))
    }
    with stream:
        for batch in stream:
            for place, index in enumerate(batch["index"].tolist()):
                assert {key: batch[key][place] for key in ("language_persistent", "language_events")} == expected[index]
            assert "messages" not in batch


def test_only_the_columns_asked_for_still_render(root):
    with_columns = open_dataset(root, recipe=DROPPING, options=ReadOptions(cameras=(), columns=("action",)))
    everything = open_dataset(root, recipe=DROPPING, cameras=())
    assert [with_columns[n]["messages"] for n in range(5)] == [everything[n]["messages"] for n in range(5)]
    with pytest.raises(SettingsError, match="timestamp"):
        open_dataset(root, recipe=DROPPING, cameras=(), delta_timestamps={"timestamp": [0.0]})


def test_key_names_rephrasings_and_a_stage_behind_the_recipe(root):
    stage = RenderStage(load_recipe("subtask"), messages_key="chat", streams_key="chat_streams", targets_key="chat_targets")
    sample = open_dataset(root, recipe=stage, cameras=())[4]
    assert {"chat", "chat_streams", "chat_targets"} <= set(sample)
    assert "messages" not in sample
    with pytest.raises(LanguageError, match="three different names"):
        RenderStage(None, messages_key="message_streams")
    dataset = open_dataset(root, recipe="subtask", render=MessagesToTask(), cameras=())
    sample = dataset[4]
    assert sample["task"] == sample["messages"][0]["content"]
    _, (stream,) = streams_of(root, {"batch_size": 6, "strategy": "sequential"}, recipe="subtask", render=MessagesToTask())
    with stream:
        batch = next(iter(stream))
    assert batch["task"] == [chat[0]["content"] for chat in batch["messages"]]
    assert len(batch["base_task"]) == 6


def test_an_unplanned_drop_is_a_typed_error(root):
    dataset = open_dataset(root, render=DROPPING, cameras=())
    with pytest.raises(LanguageError, match=r"index 0.*recipe=") as caught:
        dataset.sample(0, 0)
    assert caught.value.kind == "unplanned_drop"


def test_a_state_goes_on_only_with_its_recipe(root):
    topology = {"batch_size": 4, "strategy": "sequential"}
    _, (stream,) = streams_of(root, topology)
    state = take([stream], {}, steps=2)
    assert state["recipe"]["policy"] == "drop"
    assert RenderStage.described(state["recipe"]) == DROPPING
    changed = DROPPING.recipe.to_dict()
    changed["blend"]["memory_update"]["weight"] = 0.5
    _, (other,) = streams_of(root, topology, recipe=RenderStage(load_recipe(changed), policy="drop"))
    with pytest.raises(CursorError, match=r"recipe\.blend\.memory_update\.weight: before 0\.15, now 0\.5"):
        other.load_state_dict(state)
    with pytest.raises(CursorError, match="policy"):
        streams_of(root, topology, recipe=RenderStage(DROPPING.recipe))[1][0].load_state_dict(state)
    with pytest.raises(CursorError, match="recipe"):
        streams_of(root, topology, recipe=None)[1][0].load_state_dict(state)
    other.load_state_dict(state, other_recipe=True)
    assert (other.epoch, other.step) == (0, 0)


def test_a_recipe_changes_the_plans_fingerprint(root):
    prints = {open_dataset(root, recipe=recipe, cameras=()).fingerprint() for recipe in (None, "subtask", "subtask_mem", DROPPING)}
    assert len(prints) == 4


def test_what_cannot_be_planned_stops_at_the_opening(root, tmp_path):
    with pytest.raises(LanguageError, match=r"episode 0, frame \d+"):
        open_dataset(root, recipe=RenderStage(load_recipe("subtask_mem"), policy="error"), cameras=())
    bad = tmp_path / "bad.yaml"
    bad.write_text('messages:\n  - { role: user, content: "${tsk}", stream: low_level }\n', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"line 2.*tsk"):
        open_dataset(root, recipe=bad, cameras=())


def test_lerobot_batches_render_frames_without_rows_by_the_recipe(root):
    recipe = {"messages": [{"role": "user", "content": "do ${subtask}", "stream": "low_level"}]}
    ours = open_dataset(root, recipe=RenderStage(load_recipe(recipe)), cameras=(), episodes=[5])
    parity = open_dataset(root, recipe=RenderStage(load_recipe(recipe), lerobot_batches=True), cameras=(), episodes=[5])
    assert ours[0]["messages"] == [{"role": "user", "content": ours[0]["task"]}]
    assert parity[0]["messages"] == [{"role": "user", "content": "do "}]
    assert ours.fingerprint() != parity.fingerprint()


def test_a_language_column_that_is_not_declared_is_refused_without_a_recipe_too(root, tmp_path):

    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    info = json.loads((copy / "meta/info.json").read_text(encoding="utf-8"))
    del info["features"]["language_events"]
    (copy / "meta/info.json").write_text(json.dumps(info), encoding="utf-8")
    with pytest.raises(LanguageError, match="language_events"):
        open_dataset(copy, cameras=())


def rewritten(root, copy, change):
    """A copy of the dataset whose data files are what ``change`` makes of their tables."""
    import pyarrow.parquet as pq

    shutil.copytree(root, copy)
    for number, path in enumerate(sorted(copy.glob("data/*/*.parquet"))):
        pq.write_table(change(number, pq.read_table(path)), path)
    return copy


def test_a_column_that_holds_no_rows_is_damage_with_its_episode(root, tmp_path):
    def numbers(_, table):
        place = table.schema.get_field_index("language_persistent")
        return table.set_column(place, "language_persistent", pa.array(range(table.num_rows), pa.int64()))

    copy = rewritten(root, tmp_path / "copy", numbers)
    with pytest.raises(RowsError, match=r"episode 2: .*language_persistent"):
        open_dataset(copy, cameras=()).sample(2, 0)
    with pytest.raises(LanguageError, match="episode 0"):
        open_dataset(copy, cameras=(), recipe="subtask")
    with pytest.raises(SelectionError, match="every selected episode is damaged"):
        open_dataset(copy, cameras=(), recipe="subtask", damage="skip_episode")


def test_physical_variants_of_the_files_give_the_same_samples(root, oracle, tmp_path):
    def variant(number, table):
        events, states = (table.schema.get_field_index(name) for name in ("language_events", "language_persistent"))
        table = table.set_column(events, "language_events", pa.nulls(table.num_rows))
        lists = [
            [{**row, "timestamp": float(row["timestamp"]), "tool_calls": None, "extra": 1} for row in rows]
            for rows in table.column(states).to_pylist()
        ]
        return table.set_column(states, "language_persistent", pa.array(lists)) if number == 0 else table

    copy = rewritten(root, tmp_path / "copy", variant)
    dataset = open_dataset(copy, recipe=DROPPING, cameras=())
    assert {int(sample["index"]): tuple(sample[key] for key in LISTS) for sample in map(dataset.__getitem__, range(len(dataset)))} == oracle


def test_an_episode_whose_files_disagree_is_normalised_before_they_are_joined(tmp_path):
    import pyarrow.parquet as pq

    made = make_dataset(tmp_path / "ds", MakeOptions(episodes=1, frames="10", cameras=1, size=(32, 64), gop=5))
    (language,) = read_language(open_source(LocalStore.at(made.root)))
    calls = [{"type": "function", "function": {"name": "say", "arguments": {"text": "yes"}}}]
    rows = [{"role": "assistant", "style": None, "content": None, "tool_calls": calls, "frame": frame} for frame in (2, 7)]
    write_annotations(made.root, {0: rows + rows_from_spans([Span(0, 10, "reach")], language.timestamps)})
    (path,) = sorted(made.root.glob("data/*/*.parquet"))
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 5), path)
    place = table.schema.get_field_index("language_events")
    told = [[{"role": "assistant", "content": None, "style": None, "tool_calls": calls}] if frame == 7 else [] for frame in range(5, 10)]
    pq.write_table(table.slice(5).set_column(place, "language_events", pa.array(told)), path.with_name("file-001.parquet"))
    dataset = open_dataset(made.root, recipe={"messages": [{"role": "user", "content": "${task}", "stream": "low_level"}]}, cameras=())
    unit = dataset.reader().read(_request(dataset, 0, 0, 10))
    assert [unit.rows.language.raw(frame)["language_events"][0]["tool_calls"] for frame in (2, 7)] == [calls, calls]


def test_what_is_questionable_is_told_at_the_opening_and_by_the_doctor(root, tmp_path, caplog, capsys):
    from reelray.cli import main

    def unknown(_, table):
        place = table.schema.get_field_index("language_persistent")
        lists = [
            [{**row, "style": "mood" if row["style"] == "memory" else row["style"]} for row in rows]
            for rows in table.column(place).to_pylist()
        ]
        return table.set_column(place, "language_persistent", pa.array(lists))

    copy = rewritten(root, tmp_path / "copy", unknown)
    with caplog.at_level("WARNING", "reelray.engine"):
        open_dataset(copy, recipe="subtask", cameras=())
    assert "episode 0: language_persistent" in caplog.text
    assert "'mood'" in caplog.text
    main(["doctor", str(copy), "--json"])
    codes = {(one["code"], one["episode"]) for one in json.loads(capsys.readouterr().out)["findings"]}
    assert ("language_unknown_style", 0) in codes
    main(["doctor", str(root), "--json"])
    assert not [one for one in json.loads(capsys.readouterr().out)["findings"] if one["code"].startswith("language")]
