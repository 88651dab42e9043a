"""Recipes on the command line: plan and stream agree on which frames stay, and say which leave and why."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from ingest.language.episode import read_language
from ingest.language.importing import Span, rows_from_spans, state_row
from ingest.language.write import write_annotations
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.source import open_source
from ingest.storage.local import LocalStore
from reelray.cli import main


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Four episodes, three of them annotated from their fourth frame on; the rows of episode 2 are ambiguous from frame 6 on."""
    made = make_dataset(tmp_path_factory.mktemp("cli") / "ds", MakeOptions(episodes=4, frames="10", cameras=1, size=(32, 64), gop=5))
    rows = {
        language.episode: rows_from_spans([Span(3, 6, "reach"), Span(6, 10, "grasp")], language.timestamps)
        for language in read_language(open_source(LocalStore.at(made.root)), range(3))
    }
    times = {language.episode: language.timestamps for language in read_language(open_source(LocalStore.at(made.root)))}
    # The writer cannot know that the recipe's binding names no role.
    twice = [state_row("goal", float(times[2][6]), style="plan", role=role) for role in ("user", "assistant")]
    write_annotations(made.root, {**rows, 2: [*rows[2], *twice]})
    return made.root


@pytest.fixture
def recipe(tmp_path):
    """Renders only where there is a subtask and one plan."""
    path = tmp_path / "own.yaml"
    path.write_text(
        "bindings: {goal: 'active_at(t, style=plan)'}\n"
        "messages:\n"
        "  - { role: user, content: '${subtask}', stream: low_level, if_present: subtask }\n",
        encoding="utf-8",
    )
    return path


def run(capsys, *arguments):
    capsys.readouterr()
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_ambiguous_frames_stop_the_opening_with_their_place(root, recipe, capsys):
    status, _, problem = run(capsys, "plan", root, "--recipe", recipe)
    assert status == 1
    assert "LanguageError: episode 2, frame 6" in problem
    assert "plan" in problem


def test_plan_and_stream_agree_and_report_what_leaves(root, recipe, capsys, tmp_path):
    options = ("--recipe", recipe, "--recipe-policy", "drop", "--on-ambiguous", "drop", "--batch-size", "4", "--seed", "7", "--json")
    planned, delivered = tmp_path / "planned.parquet", tmp_path / "delivered.parquet"
    status, text, _ = run(capsys, "plan", root, *options, "--order", planned)
    assert status == 0
    plan = json.loads(text)
    status, text, _ = run(capsys, "stream", root, *options, "--order", delivered, "--engine", "local")
    assert status == 0
    report = json.loads(text)
    # Unannotated frames of annotated episodes leave, and the ambiguous ones; episode 3 trains from its task.
    leaving = {"0": [[0, 3]], "1": [[0, 3]], "2": [[0, 3], [6, 10]]}
    assert report["language"] == plan["language"]
    assert report["language"]["leaving"] == leaving
    assert report["selected_frames"] == report["delivered"] == report["distinct"] == 40 - 3 * 3 - 4
    assert [(fault["episode"], fault["frame"]) for fault in report["language"]["faults"]] == [(2, frame) for frame in range(6, 10)]
    columns = ["rank", "step", "episode_index", "frame_index"]
    order = pq.read_table(delivered)
    assert order.select(columns).equals(pq.read_table(planned).select(columns))
    assert "digest:messages" in order.column_names
    # The chats are those of the four texts there are: two subtasks and two tasks at most.
    assert len(set(order.column("digest:messages").to_pylist())) <= 4


def test_people_read_the_same(root, recipe, capsys):
    options = ("--recipe", recipe, "--recipe-policy", "drop", "--on-ambiguous", "drop")
    for command in (("plan",), ("stream", "--engine", "local")):
        status, text, _ = run(capsys, command[0], root, *command[1:], *options)
        assert status == 0
        assert "recipe: 27 of 40 frames stay" in text
        assert "episode 2: frames 0..2, 6..9 leave the selection" in text
        assert "ambiguous: episode 2, frame 6" in text


def test_a_cursor_does_not_fit_another_recipe(root, capsys, tmp_path):
    cursor = tmp_path / "cursor.json"
    options = ("--engine", "local", "--batch-size", "4")
    assert run(capsys, "stream", root, *options, "--recipe", "subtask", "--max-steps", "2", "--cursor-out", cursor)[0] == 0
    status, _, problem = run(capsys, "stream", root, *options, "--recipe", "subtask_joint", "--cursor-in", cursor)
    assert status == 1
    assert "CursorError" in problem
    assert run(capsys, "stream", root, *options, "--recipe", "subtask", "--cursor-in", cursor)[0] == 0


def test_options_without_a_recipe_and_bad_recipes_are_refused(root, capsys, tmp_path):
    status, _, problem = run(capsys, "stream", root, "--engine", "local", "--recipe-policy", "drop")
    assert (status, "recipe_policy has no meaning without --recipe" in problem) == (1, True)
    assert run(capsys, "plan", root, "--recipe", "no_such_recipe")[0] == 1
    bad = tmp_path / "bad.yaml"
    bad.write_text("messages:\n  - { role: nobody, content: x, stream: low_level }\n", encoding="utf-8")
    status, _, problem = run(capsys, "stream", root, "--engine", "local", "--recipe", bad)
    assert status == 1
    assert "line 2" in problem


def test_the_recipe_commands_open_every_location(root, capsys):
    place = ("--root", root)
    status, text, _ = run(capsys, "recipe", "coverage", "someone/name", *place, "--recipe", "subtask", "--json")
    assert status == 0
    assert json.loads(text)["frames"] == 40
    assert run(capsys, "recipe", "styles", "someone/name", *place)[0] in (0, 1)
    status, text, _ = run(
        capsys, "recipe", "render", "someone/name", *place, "--recipe", "subtask", "--episode", "0", "--frame", "7", "--json"
    )
    assert status == 0
    assert json.loads(text)["rendered"]["messages"]
    assert run(capsys, "recipe", "check", "subtask", "--source", "someone/name", *place)[0] == 0
