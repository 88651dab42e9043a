"""Annotations in datasets: writing, importing, reading back once per episode, judging, reporting, and the commands."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from language_dataset import CAM0, CAM1, LENGTHS, make, say, source_of, times_of, vqa

from ingest.errors import LanguageError, ObjectNotFoundError, SelectionError
from ingest.language import (
    EVENT_COLUMN,
    STATE_COLUMN,
    Outcome,
    RenderStage,
    TrainingRecipe,
    canonical_type,
    check_staging,
    load_recipe,
    read_language_columns,
    tool_catalogue,
    with_say,
)
from ingest.language.annotate import STAGING_MODULES, ambiguities, column_row
from ingest.language.audit import audit_annotations
from ingest.language.columns import rows_array
from ingest.language.coverage import coverage_summary, plan_language
from ingest.language.coverage_report import CoverageReport
from ingest.language.episode import AnnotationRows, EpisodeLanguage, read_language
from ingest.language.importing import Span, read_span_file, rephrasings, rows_from_spans, spans_of, state_row, subtasks_from_index
from ingest.language.inventory import style_report
from ingest.language.preview import preview_frame
from ingest.language.write import place_rows, write_annotations
from ingest.lerobot.rows import read_rows
from reelray.commands.recipe import RecipeCheck, RecipeCoverage, RecipeRender, RecipeStyles


@pytest.fixture
def root(tmp_path):
    return make(tmp_path / "ds")


@pytest.fixture
def annotated(root):
    times = times_of(root)
    rows = {
        episode: [
            *rows_from_spans([Span(2, 6, "reach"), Span(6, 9, "grasp")], times[episode]),
            state_row("empty hand", 0.0, style="memory"),
            {"role": "user", "content": "careful", "style": "interjection", "frame": 5},
            say("sure", frame=5),
        ]
        for episode in (0, 1)
    }
    write_annotations(root, rows)
    return root


def test_written_shards_have_one_row_group_per_episode_and_the_canonical_types(annotated):
    file = pq.ParquetFile(annotated / "data/chunk-000/file-000.parquet")
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [12, 9]
    assert file.schema_arrow.names[-2:] == [STATE_COLUMN, EVENT_COLUMN]
    assert {column: file.schema_arrow.field(column).type for column in (STATE_COLUMN, EVENT_COLUMN)} == {
        column: canonical_type(column) for column in (STATE_COLUMN, EVENT_COLUMN)
    }
    assert b"huggingface" not in (file.schema_arrow.metadata or {})
    columns = read_language_columns(str(annotated / "data/chunk-000/file-000.parquet"))
    assert all(rows == columns[STATE_COLUMN][0] for rows in columns[STATE_COLUMN][:12])
    assert [row["style"] for row in columns[STATE_COLUMN][0]] == ["memory", "subtask", "subtask"]
    assert [row["style"] for row in columns[EVENT_COLUMN][5]] == [None, "interjection"]
    assert columns[EVENT_COLUMN][4] == []
    empty = read_language_columns(str(annotated / "data/chunk-000/file-001.parquet"))
    assert empty == {STATE_COLUMN: [[]] * 14, EVENT_COLUMN: [[]] * 14}
    info = json.loads((annotated / "meta/info.json").read_text(encoding="utf-8"))
    assert info["features"][STATE_COLUMN] == info["features"][EVENT_COLUMN] == {"dtype": "language", "shape": [1], "names": None}
    assert [tool["function"]["name"] for tool in info["tools"]] == ["say"]
    assert not list(annotated.rglob("*.tmp"))


def test_annotating_one_episode_leaves_the_others_and_other_shards_alone(annotated):
    other = annotated / "data/chunk-000/file-001.parquet"
    before = other.read_bytes()
    kept = read_language_columns(str(annotated / "data/chunk-000/file-000.parquet"))
    report = write_annotations(annotated, {1: [state_row("new", 0.0)]})
    assert report.files == ("data/chunk-000/file-000.parquet",)
    assert other.read_bytes() == before
    now = read_language_columns(str(annotated / "data/chunk-000/file-000.parquet"))
    assert now[STATE_COLUMN][:12] == kept[STATE_COLUMN][:12]
    assert now[EVENT_COLUMN][:12] == kept[EVENT_COLUMN][:12]
    assert [row["content"] for row in now[STATE_COLUMN][12]] == ["new"]
    assert now[EVENT_COLUMN][12:] == [[]] * 9


def test_annotating_the_third_of_several_shards_by_its_global_number(root):
    write_annotations(root, {2: [state_row("only here", 0.0)]})
    assert [language.rows.annotated for language in read_language(source_of(root))] == [False, False, True]


def test_other_columns_survive_and_legacy_ones_leave(tmp_path):
    legacy = {"subtask_index": {episode: [0] * LENGTHS[episode] for episode in range(3)}}
    root = make(tmp_path / "ds", {"subtask_index": {"dtype": "int64", "shape": [1], "names": None}}, **legacy)
    before = pq.read_table(root / "data/chunk-000/file-000.parquet")
    write_annotations(root, {0: [state_row("a", 0.0)]})
    after = pq.read_table(root / "data/chunk-000/file-000.parquet")
    assert "subtask_index" not in after.column_names
    for name in ("action", "timestamp", "index"):
        assert after.column(name).equals(before.column(name))
    assert "subtask_index" not in source_of(root).info.features


@pytest.mark.parametrize(
    ("rows", "kind", "text"),
    [
        (
            [{"role": "user", "content": "x", "style": "interjection", "timestamp": 0.3}],
            "event_off_frame",
            "nearest is frame 3 at 0.30000001192092896 s",
        ),
        ([{"role": "user", "content": "x", "style": "interjection", "frame": 12}], "event_off_frame", "the episode has 12"),
        ([{"role": "user", "content": "x", "style": "interjection"}], "event_without_timestamp", "frame"),
        ([state_row("a", 0.5), state_row("b", 0.5)], "ambiguous_rows", "2 subtask rows"),
        ([say("a", frame=1), say("b", frame=1)], "ambiguous_rows", "frame 1: 2 rows"),
        ([vqa("user", "q", CAM0, frame=2)] * 2, "ambiguous_rows", "2 vqa rows"),
        ([vqa("user", "q", "observation.images.left", frame=2)], "camera_unknown", "left"),
        ([state_row("a", float("nan"))], "bad_timestamp", "finite"),
        ([{"role": "assistant", "content": "x", "style": "grasp_hint", "timestamp": 0.0}], "unknown_style", "grasp_hint"),
    ],
)
def test_bad_rows_are_refused_before_any_file_changes(tmp_path, rows, kind, text):
    root = make(tmp_path / "ds", {CAM0: {"dtype": "image", "shape": [4, 4, 3], "names": None}})
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(LanguageError) as caught:
        write_annotations(root, {1: [], 0: rows})
    assert caught.value.kind == kind
    assert caught.value.episode == 0
    assert text in str(caught.value)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_unknown_episodes_and_missing_datasets(root, tmp_path):
    with pytest.raises(LanguageError, match="no episode 7"):
        write_annotations(root, {7: []})
    with pytest.raises(ObjectNotFoundError):
        write_annotations(tmp_path / "nowhere", {})


def test_frame_number_and_exact_float32_time_mean_the_same(root):
    times = times_of(root)[0].astype(np.float64)
    by_time = place_rows(0, [{"role": "user", "content": "x", "style": "interjection", "timestamp": times[3]}], times, None)
    by_frame = place_rows(0, [{"role": "user", "content": "x", "style": "interjection", "frame": 3}], times, None)
    assert by_time.events == by_frame.events == {3: by_time.events[3]}


def test_declared_tools_may_be_called_without_a_style(root):
    info = json.loads((root / "meta/info.json").read_text(encoding="utf-8"))
    beep = {"type": "function", "function": {"name": "beep", "parameters": {}}}
    info["tools"] = [beep]
    (root / "meta/info.json").write_text(json.dumps(info), encoding="utf-8")
    call = {"type": "function", "function": {"name": "beep", "arguments": {"n": 1}}}
    write_annotations(root, {0: [{"role": "assistant", "content": None, "style": None, "tool_calls": [call], "frame": 0}]})
    stored = json.loads((root / "meta/info.json").read_text(encoding="utf-8"))
    assert [tool["function"]["name"] for tool in stored["tools"]] == ["beep", "say"]
    with pytest.raises(LanguageError, match="function call of say"):
        column_row({"role": "assistant", "style": None, "tool_calls": [call]})


def test_tool_catalogue_defaults_to_say():
    assert [tool["function"]["name"] for tool in tool_catalogue({})] == ["say"]
    assert [tool["function"]["name"] for tool in with_say({})] == ["say"]
    assert tool_catalogue({"tools": []}) == []
    with pytest.raises(LanguageError, match="function schemas"):
        tool_catalogue({"tools": [{"name": "x"}]})


def test_episodes_are_read_once_and_pack_small(annotated):
    languages = list(read_language(source_of(annotated)))
    first = languages[0]
    assert first.rows.state(0) is first.rows.state(11)
    assert first.rows.raw(5)[EVENT_COLUMN][1]["content"] == "careful"
    assert [language.rows.annotated for language in languages] == [True, True, False]
    assert (first.task(0), languages[1].task(0), first.time(3)) == ("make tea", "wipe", float(np.float32(0.3)))
    for language in languages:
        twin = AnnotationRows.unpack(language.rows.pack())
        assert twin.pack() == language.rows.pack()
        assert twin.states == language.rows.states
        assert twin.events == language.rows.events
        assert twin.state_of.tolist() == language.rows.state_of.tolist()
    for blob in (b"", b"12345678", first.rows.pack()[:-1], b"\xff" * 40, b"{}"):
        with pytest.raises(LanguageError, match="not packed annotations"):
            AnnotationRows.unpack(blob)


def test_state_rows_cost_once_per_episode_not_per_frame(tmp_path):
    rows = [state_row(f"text number {number}", number / 10) for number in range(40)]
    lists = rows_array([rows], STATE_COLUMN).take(pa.array(np.zeros(2000, np.int64)))
    language = language_with(tmp_path, lists)
    assert lists.nbytes > 4_000_000
    assert len(language.rows.states) == 1
    assert len(language.rows.pack()) < 10_000


def language_with(tmp_path, state_column):
    """An episode of as many frames as ``state_column`` has, read from parquet."""
    root = make(tmp_path / "long", {STATE_COLUMN: {"dtype": "language", "shape": [1], "names": None}}, lengths=(len(state_column), 1, 1))
    path = root / "data/chunk-000/file-000.parquet"
    column = pa.chunked_array([state_column, rows_array([[]], STATE_COLUMN)])
    pq.write_table(pq.read_table(path).append_column(STATE_COLUMN, column), path)
    return next(iter(read_language(source_of(root), [0])))


def test_frames_may_carry_different_state_lists_in_odd_files(tmp_path):
    first, second = [state_row("a", 0.0)], [state_row("b", 0.0)]
    language = language_with(tmp_path, rows_array([first, None, first, [], second, second], STATE_COLUMN))
    assert [[row["content"] for row in language.rows.state(frame)] for frame in range(6)] == [["a"], [], ["a"], [], ["b"], ["b"]]
    same = language_with(tmp_path / "x", rows_array([None, first, None, first], STATE_COLUMN))
    assert len(same.rows.states) == 1
    assert same.rows.state_of.tolist() == [-1, 0, -1, 0]


def test_undeclared_columns_are_refused(annotated):
    info = json.loads((annotated / "meta/info.json").read_text(encoding="utf-8"))
    del info["features"][EVENT_COLUMN]
    (annotated / "meta/info.json").write_text(json.dumps(info), encoding="utf-8")
    with pytest.raises(LanguageError, match=r"stores language_events but meta/info\.json does not declare it"):
        list(read_language(source_of(annotated)))


def test_planning_removes_frames_without_supervision_and_keeps_the_rest(annotated):
    guarded = load_recipe(
        'messages:\n  - {role: assistant, content: "${subtask}", stream: high_level, target: true, if_present: subtask}\n'
    )
    languages = list(read_language(source_of(annotated)))
    dropping = plan_language(RenderStage(guarded, policy="drop"), languages)
    assert {episode: frames.tolist() for episode, frames in dropping.leaving().items()} == {0: [0, 1], 1: [0, 1]}
    assert [part.kept_runs() for part in dropping.episodes] == [[(2, 12)], [(2, 9)], [(0, 14)]]
    falling = plan_language(RenderStage(guarded), languages)
    assert falling.leaving() == {}
    assert {episode: frames.tolist() for episode, frames in falling.frames_of("").items()} == {0: list(range(2, 12)), 1: list(range(2, 9))}
    with pytest.raises(LanguageError, match="no branch 'x'"):
        falling.frames_of("x")
    assert (falling.count(Outcome.RENDERED), falling.count(Outcome.FALLBACK), falling.count(Outcome.UNANNOTATED)) == (17, 4, 14)
    assert falling.fingerprint() != dropping.fingerprint()
    assert falling.fingerprint() == plan_language(RenderStage(guarded), languages).fingerprint()
    stage = RenderStage(guarded, policy="drop")
    for part, language in zip(dropping.episodes, languages, strict=True):
        for frame in range(len(language)):
            assert (stage(language.sample(frame)) is not None) == part.kept[frame]
    with pytest.raises(LanguageError, match="episode 0, frame 0: the recipe does not apply") as caught:
        plan_language(RenderStage(guarded, policy="error"), languages)
    assert (caught.value.episode, caught.value.frame) == (0, 0)


def blank(tasks):
    frames = len(tasks)
    return EpisodeLanguage(
        0, np.zeros(frames, np.float32), np.arange(frames), tuple(tasks), np.arange(frames, dtype=np.int32), AnnotationRows.empty(frames)
    )


def test_frames_without_annotations_and_tasks(annotated):
    stage = RenderStage(load_recipe("subtask"))
    assert plan_language(stage, [blank(["tea", "", "tea"])]).leaving()[0].tolist() == [1]
    nothing = plan_language(stage, [blank(["", ""])])
    assert nothing.leaving() == {}
    assert nothing.count(Outcome.UNANNOTATED) == 2


def test_ambiguous_frames_are_listed_or_stop_the_plan(root):
    write_annotations(root, {})
    path = root / "data/chunk-000/file-001.parquet"
    table = pq.read_table(path)
    events = [[] for _ in range(14)]
    events[4] = [vqa("assistant", "{}", CAM0), vqa("assistant", "{}", CAM1)]
    table = table.set_column(table.schema.get_field_index(EVENT_COLUMN), EVENT_COLUMN, rows_array(events, EVENT_COLUMN))
    pq.write_table(table, path)
    recipe = load_recipe('messages:\n  - {role: assistant, content: "${vqa}", stream: high_level, target: true, if_present: vqa}\n')
    languages = list(read_language(source_of(root)))
    with pytest.raises(LanguageError, match="episode 2, frame 4: emitted_at"):
        plan_language(RenderStage(recipe), languages)
    report = CoverageReport(plan_language(RenderStage(recipe, on_ambiguous="drop"), languages))
    assert [(fault.episode, fault.frame, fault.style) for fault in report.plan.faults] == [(2, 4, "vqa")]
    assert report.to_json()["leaving"] == {"2": [[4, 5]]}
    assert "episode 2, frame 4" in report.to_text()
    assert RecipeCoverage(str(root), recipe=str(write(root / "r.yaml", recipe))).run() == 1


def write(path, recipe: TrainingRecipe):
    import yaml

    path.write_text(yaml.safe_dump(recipe.to_dict(), sort_keys=False), encoding="utf-8")
    return path


def test_coverage_counts_branches_outcomes_and_empty_targets(annotated):
    unguarded = load_recipe('messages:\n  - {role: assistant, content: "${subtask}", stream: high_level, target: true}\n')
    summary = coverage_summary(plan_language(RenderStage(unguarded), read_language(source_of(annotated))))
    assert summary["empty_targets"] == 4
    assert summary["branches"] == [{"branch": "messages", "chosen": 21, "rendered": 21, "chosen_share": 0.6, "rendered_share": 0.6}]
    assert summary["kept_frames"] == summary["frames"] == 35
    full = CoverageReport(plan_language(RenderStage(load_recipe("subtask_mem_vqa_speech")), read_language(source_of(annotated))))
    assert {"ask_vqa_top", "ask_vqa_wrist"} <= set(full.to_json()["never_rendered"])
    assert "Branch ask_vqa_top renders on no frame." in full.to_text()
    assert json.dumps(full.to_json())
    assert sum(entry["frames"] for entry in full.to_json()["outcomes"]) == 35


def test_span_import_and_export_are_inverse(root):
    times = times_of(root)
    spans = [Span(0, 4, "a"), Span(4, 5, "b"), Span(5, 12, "a")]
    write_annotations(root, {0: rows_from_spans(reversed(spans), times[0])})
    assert spans_of(next(read_language(source_of(root)))) == spans
    for wrong in ([Span(3, 3, "x")], [Span(0, 13, "x")], [Span(0, 5, "a"), Span(4, 8, "b")]):
        with pytest.raises(LanguageError):
            rows_from_spans(wrong, times[0])
    with pytest.raises(LanguageError, match="marks events"):
        rows_from_spans(spans, times[0], style="vqa")


def test_span_files_in_three_forms(tmp_path, root):
    times = times_of(root)
    records = [{"episode": 0, "start": 0.0, "end": 0.42, "text": "a"}, {"episode_index": 0, "start_frame": 4, "end_frame": 12, "text": "b"}]
    (tmp_path / "s.json").write_text(json.dumps(records), encoding="utf-8")
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    (tmp_path / "s.csv").write_text("episode,start,end,text\n0,0.0,0.42,a\n0,0.42,1.2,b\n", encoding="utf-8")
    for name in ("s.json", "s.jsonl", "s.csv"):
        assert read_span_file(tmp_path / name, times) == {0: [Span(0, 4, "a"), Span(4, 12, "b")]}
    for text in ('{"a": 1}', "[5]", "nonsense", '[{"episode": 0}]', '[{"episode": 9, "start": 0, "end": 1, "text": "x"}]'):
        (tmp_path / "bad.json").write_text(text, encoding="utf-8")
        with pytest.raises(LanguageError):
            read_span_file(tmp_path / "bad.json", times)


def test_older_subtask_indices_become_rows(tmp_path):
    index = {0: [0] * 5 + [2] * 7, 1: [-1] * 3 + [1] * 6, 2: [2] * 14}
    root = make(tmp_path / "ds", {"subtask_index": {"dtype": "int64", "shape": [1], "names": None}}, subtask_index=index)
    with pytest.raises(LanguageError, match=r"subtasks\.parquet"):
        subtasks_from_index(source_of(root))
    pq.write_table(pa.table({"subtask_index": [2, 0, 1], "subtask": ["lift", "reach", "grasp"]}), root / "meta/subtasks.parquet")
    rows = subtasks_from_index(source_of(root))
    assert {episode: [(row["content"], row["timestamp"]) for row in found] for episode, found in rows.items()} == {
        0: [("reach", 0.0), ("lift", 0.5)],
        1: [("grasp", float(np.float32(0.3)))],
        2: [("lift", 0.0)],
    }
    write_annotations(root, rows)
    assert spans_of(next(read_language(source_of(root)))) == [Span(0, 5, "reach"), Span(5, 12, "lift")]
    with pytest.raises(LanguageError, match="no subtask_index column"):
        subtasks_from_index(source_of(root))


def test_styles_list_texts_with_counts_and_spans(annotated):
    write_annotations(annotated, {2: [*rephrasings(["brew", "prepare"]), state_row("reach", 0.0)]})
    report = style_report(read_language(source_of(annotated)))
    entries = {(entry.style, entry.text): entry for entry in report.entries}
    assert (entries["subtask", "reach"].episodes, entries["subtask", "reach"].frames) == (3, 4 + 4 + 14)
    assert entries["subtask", "reach"].spans[0] == (0, 2, 6)
    assert entries["task_aug", "brew"].frames == entries["task_aug", "prepare"].frames == 14
    assert entries["interjection", "careful"].rows == 2
    assert report.annotated == report.episodes == 3
    assert "careful" in report.to_text()
    assert "<script" not in report.to_html()


def test_audit_names_every_questionable_row_with_its_place(tmp_path, capsys):
    root = make(tmp_path / "ds", {CAM0: {"dtype": "image", "shape": [4, 4, 3], "names": None}})
    write_annotations(root, {})
    path = root / "data/chunk-000/file-001.parquet"
    table = pq.read_table(path)
    rows = [
        state_row("a", 0.0),
        state_row("b", 0.0),
        state_row("c", 0.05),
        state_row("d", 0.0, style="nonsense"),
        {**state_row("e", 0.0, style="vqa"), "camera": "observation.images.left"},
    ]
    events = [[] for _ in range(14)]
    events[3] = [vqa("user", "q", None), {"role": "user", "style": "interjection", "content": None}]
    states = [rows] * 13 + [[]]
    for name, lists in ((STATE_COLUMN, states), (EVENT_COLUMN, events)):
        table = table.set_column(table.schema.get_field_index(name), name, rows_array(lists, name))
    pq.write_table(table, path)
    findings = list(audit_annotations(read_language(source_of(root)), [CAM0]))
    assert {(item.kind, item.severity, item.episode, item.frame, item.style) for item in findings} == {
        ("unknown_style", "error", 2, None, "nonsense"),
        ("style_column_mismatch", "error", 2, None, "vqa"),
        ("camera_unknown", "error", 2, None, "vqa"),
        ("camera_required", "error", 2, 3, "vqa"),
        ("row_without_payload", "warning", 2, 3, "interjection"),
        ("ambiguous_rows", "error", 2, None, "subtask"),
        ("state_not_broadcast", "warning", 2, 13, None),
        ("state_off_frame", "warning", 2, None, "subtask"),
    }
    assert RecipeStyles(str(root), json=True).run() == 1
    assert len(json.loads(capsys.readouterr().out)["findings"]) == len(findings)
    assert RecipeStyles(str(root)).run() == 1
    assert "error [camera_required] episode 2, frame 3" in capsys.readouterr().out


def test_clean_annotations_have_no_findings(annotated):
    assert list(audit_annotations(read_language(source_of(annotated)), [])) == []


def test_previews_escape_what_they_show(annotated):
    write_annotations(annotated, {0: [state_row("<script>alert(1)</script>", 0.0)]})
    language = next(read_language(source_of(annotated)))
    preview = preview_frame(RenderStage(load_recipe("subtask_joint")), language, 4, [CAM0])
    assert preview.to_json()["rendered"]["messages"][1]["content"] == "<script>alert(1)</script>"
    pages = preview.to_html(lambda episode, frame, camera: np.zeros((4, 6, 3), np.uint8))
    assert "<script" not in pages
    assert "data:image/png;base64," in pages
    assert "assistant (low_level) [target]: <script>" in preview.to_text()
    with pytest.raises(SelectionError, match=r"frames 0\.\.11"):
        preview_frame(RenderStage(load_recipe("subtask_joint")), language, 12)


def test_commands_print_and_write_pages(annotated, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert RecipeCheck("subtask_mem_vqa_speech", source=str(annotated), html=page).run() == 0
    assert RecipeCheck("subtask_mem_vqa_speech", source=str(annotated), strict=True).run() == 1
    assert "the dataset has no camera observation.images.top" in capsys.readouterr().out
    assert RecipeCoverage(str(annotated), recipe="subtask", json=True, html=page).run() == 0
    assert json.loads(capsys.readouterr().out)["frames"] == 35
    assert RecipeRender(str(annotated), recipe="subtask_joint", episode=0, frame=7, json=True).run() == 0
    assert json.loads(capsys.readouterr().out)["rendered"]["messages"][1]["content"] == "grasp"
    assert RecipeRender(str(annotated), recipe="subtask_joint", episode=0, frame=7, html=page).run() == 0
    assert "grasp" in page.read_text(encoding="utf-8")
    assert RecipeStyles(str(annotated), html=page).run() == 0
    assert "careful" in capsys.readouterr().out


def test_rows_of_one_episode_reach_samples_through_the_row_reader(annotated):
    rows = read_rows(source_of(annotated), 0)
    assert STATE_COLUMN in rows.others
    assert len(rows.others[STATE_COLUMN]) == 12


def test_staging_findings_have_names_and_places():
    grid = [0.0, float(np.float32(0.1))]
    staged = {
        "plan": [state_row("a", 0.0), state_row("m", 0.05, style="memory")],
        "interjections": [{"role": "user", "content": "x", "style": "interjection"}],
        "vqa": [
            vqa("assistant", None, CAM0, timestamp=0.0),
            vqa("assistant", "words", CAM0, timestamp=0.0),
            vqa("assistant", '{"a": 1}', CAM0, timestamp=0.05),
            vqa("user", "q", "observation.images.left", timestamp=0.0),
            vqa("user", "q", None, timestamp=0.0),
        ],
    }
    report = check_staging(staged, grid, [CAM0])
    assert set(report.errors) == {
        "event_without_timestamp",
        "interjection_without_speech",
        "interjection_without_plan_refresh",
        "vqa_answer_null",
        "vqa_answer_not_json",
        "vqa_answer_shape",
        "event_off_frame",
        "camera_unknown",
        "camera_required",
        "vqa_duplicate",
    }
    assert report.warnings == ["memory_off_boundary", "no_plan"]
    assert all(finding.message for finding in report.findings)
    assert check_staging({"vqa": [vqa("user", "q", CAM0, timestamp=0.1)]}, grid, tolerance_s=1e-6).errors == []
    assert set(STAGING_MODULES) == {"plan", "interjections", "vqa"}


def test_ambiguities_ignore_what_a_role_or_camera_tells_apart():
    assert ambiguities([state_row("a", 0.0), state_row("b", 0.0, role="user")], {0: [vqa("user", "q", CAM0), vqa("user", "q", CAM1)]}) == []
    assert ambiguities(rephrasings(["a", "b"]), {}) == []
    assert len(ambiguities([state_row("a", 0.0)] * 3, {4: [say("a"), say("b")]})) == 2
