"""Recipes: grammar, where faults are reported, hostile YAML, serialisation, lint, and the shipped files."""

from __future__ import annotations

import contextlib
import json
import pickle
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.errors import ObjectNotFoundError, RecipeError, RecipeTypeError
from ingest.language import (
    MessageTurn,
    TrainingRecipe,
    load_recipe,
    parse_expression,
    parse_recipe,
    read_recipe,
    register,
    render_sample,
    select_component,
    shipped_recipes,
)
from ingest.language.lint import check_recipe
from ingest.language.recipe_file import MAX_BYTES, RECIPE_FOLDER

GOOD = "{role: assistant, content: fine, stream: high_level, target: true}"


def fault(text, **options):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, source="r.yaml", **options)
    return caught.value


@pytest.mark.parametrize(
    ("text", "line", "kind", "path"),
    [
        (f"messages:\n  - {GOOD}\n  - role: user\n    content: x\n    stream: mid\n", 5, "bad_stream", ("messages", 1, "stream")),
        ("messages:\n  - role: user\n    content: '${nope}'\n    stream: low_level\n", 3, "unknown_binding", ("messages", 0, "content")),
        (
            "messages:\n  - role: user\n    content: x\n    stream: low_level\n    if_present: nope\n",
            5,
            "unknown_binding",
            ("messages", 0, "if_present"),
        ),
        (f"blend:\n  a:\n    weight: 0\n    messages: [{GOOD}]\n", 3, "non_positive_weight", ("blend", "a", "weight")),
        (f"blend:\n  a:\n    messages: [{GOOD}]\n", 2, "missing_weight", ("blend", "a", "weight")),
        (f"bindings:\n  b: 'oops'\nmessages: [{GOOD}]\n", 2, "bad_expression", ("bindings", "b")),
        (f"bindings:\n  b: 'active_at(t, style=nope)'\nmessages: [{GOOD}]\n", 2, "unknown_style", ("bindings", "b")),
        (f"messages: [{GOOD}]\nweigth: 3\n", 2, "unknown_field", ("weigth",)),
        ("messages:\n  - {content: x, stream: low_level}\n", 2, "missing_required_field", ("messages", 0)),
        ("messages:\n  - {role: user, content: [{text: x}], stream: low_level}\n", 2, "bad_content_block", ("messages", 0, "content", 0)),
    ],
)
def test_faults_name_line_and_place(text, line, kind, path):
    error = fault(text)
    assert (error.line, error.kind, error.path) == (line, kind, path)
    assert str(error).startswith(f"r.yaml, line {line}: ")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("weight", "kind", "cls"),
    [
        (".nan", "non_finite_weight", ValueError),
        (".inf", "non_finite_weight", ValueError),
        ("-.inf", "non_positive_weight", ValueError),
        ("true", "uncomparable", TypeError),
        ("'1'", "uncomparable", TypeError),
        ("1e6", "uncomparable", TypeError),
        ("[1]", "uncomparable", TypeError),
        ("1" + "0" * 400, "non_finite_weight", ValueError),
        ("null", "missing_weight", ValueError),
    ],
)
def test_weights_are_positive_finite_numbers(weight, kind, cls):
    error = fault(f"blend: {{a: {{weight: {weight}, messages: [{GOOD}]}}}}")
    assert error.kind == kind
    assert isinstance(error, cls)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "yaml_not_mapping"),
        ("- 1\n", "yaml_not_mapping"),
        ("just text", "yaml_not_mapping"),
        ("messages: [\n", "bad_yaml"),
        ("a: !!python/object/apply:os.system [true]\n", "bad_yaml"),
        ("a: &a [*a]\n", "bad_yaml"),
        ("a: 2001-99-99\n", "bad_yaml"),
        ("? [a, b]\n: 1\n", "bad_yaml"),
        (b"\xff\xfe\x00", "bad_yaml"),
        ('messages: [{role: user, content: "\\ud83d", stream: low_level, target: true}]\n', "bad_text"),
        ("a: \ud83d\n", "bad_yaml"),
        ("a: \x07\n", "bad_yaml"),
        ("[" * 100 + "]" * 100, "too_deep"),
        ("a: [" + "1," * 20_000 + "]\n", "too_large"),
        ("x" * (MAX_BYTES + 1), "too_large"),
    ],
)
def test_hostile_or_broken_yaml_is_refused(text, kind):
    assert fault(text).kind == kind


def test_alias_bombs_are_refused_before_they_grow():
    levels = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"] + [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 12)]
    started = time.perf_counter()
    assert fault("\n".join(levels)).kind == "too_large"
    assert time.perf_counter() - started < 2


def test_wrong_shapes_are_type_errors_never_crashes():
    for text in (
        "messages: {a: 1}",
        "messages: 5",
        "messages: [5]",
        "blend: [1]",
        "blend: {1: {weight: 1}}",
        f"bindings: [a]\nmessages: [{GOOD}]",
        f"bindings: {{a: 5}}\nmessages: [{GOOD}]",
        f"bindings: {{a: null}}\nmessages: [{GOOD}]",
        "messages: [{role: user, content: x, stream: low_level, if_present: [a]}]",
        "messages: [{role: user, content: x, stream: low_level, target: 'false'}]",
        "messages: [{role: user, content: x, stream: low_level, dropout: true}]",
        "messages: [{role: user, content: {a: 1}, stream: low_level}]",
        f"requires: subtask\nmessages: [{GOOD}]",
        f"select_from_applicable: 1\nblend: {{a: {{weight: 1, messages: [{GOOD}]}}}}",
    ):
        assert isinstance(fault(text), RecipeTypeError), text


scalars = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=4)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=8
)
fields = (
    "messages",
    "bindings",
    "blend",
    "weight",
    "route",
    "requires",
    "select_from_applicable",
    "role",
    "content",
    "stream",
    "target",
    "if_present",
)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.dictionaries(st.sampled_from(fields), anything, max_size=4),
        lambda inner: st.dictionaries(st.sampled_from(fields), inner | st.lists(inner, max_size=2), max_size=4),
    )
)
def test_any_mapping_loads_or_is_a_recipe_error(data):
    with contextlib.suppress(RecipeError):
        TrainingRecipe.from_dict(data)


def test_recipes_travel_as_dicts_and_fall_back_to_the_inline_copy(tmp_path):
    recipe = load_recipe("subtask_mem_vqa_speech")
    inline = json.loads(json.dumps(recipe.to_dict()))
    assert TrainingRecipe.from_dict(inline) == recipe
    assert list(TrainingRecipe.from_dict(inline).blend) == list(recipe.blend)
    assert TrainingRecipe.from_dict(inline).fingerprint() == recipe.fingerprint()
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    missing = tmp_path / "gone.yaml"
    assert load_recipe(missing, inline=inline) == recipe
    with pytest.raises(ObjectNotFoundError, match=r"subtask_mem"):
        load_recipe(missing)
    missing.write_text("messages: 5\n", encoding="utf-8")
    with pytest.raises(RecipeTypeError):
        load_recipe(missing, inline=inline)


def test_fingerprint_knows_the_order_of_components():
    first = load_recipe(f"blend:\n  a: {{weight: 1, messages: [{GOOD}]}}\n  b: {{weight: 1, messages: [{GOOD}]}}\n")
    second = load_recipe(f"blend:\n  b: {{weight: 1, messages: [{GOOD}]}}\n  a: {{weight: 1, messages: [{GOOD}]}}\n")
    assert first.fingerprint() != second.fingerprint()


def test_a_recipe_made_in_python_is_checked_like_one_from_a_file():
    turn = MessageTurn("user", "${task}", "low_level")
    assert TrainingRecipe([turn]).references() == ["task"]
    with pytest.raises(RecipeError, match="unknown binding"):
        TrainingRecipe([MessageTurn("user", "${x}", "low_level")])
    with pytest.raises(RecipeError, match="both"):
        TrainingRecipe([turn], blend={"a": TrainingRecipe([turn], weight=1.0)})
    with pytest.raises(RecipeError, match="greater than 0"):
        TrainingRecipe(blend={"a": TrainingRecipe([turn], weight=0.0)})


def test_bindings_of_a_blend_are_not_inherited():
    error = fault(
        "bindings: {b: 'active_at(t, style=plan)'}\n"
        f"blend: {{a: {{weight: 1, messages: [{GOOD}, {{role: user, content: '${{b}}', stream: low_level}}]}}}}"
    )
    assert error.kind == "unknown_binding"


def test_registered_styles_may_be_used_by_recipes_loaded_later():
    with pytest.raises(RecipeError, match="unknown style"):
        parse_expression("active_at(t, style=ecot_test)")
    register("ecot_test", "language_persistent")
    recipe = load_recipe(
        "bindings: {e: 'active_at(t, style=ecot_test)'}\n"
        "messages: [{role: assistant, content: '${e}', stream: high_level, target: true, if_present: e}]\n"
    )
    rows = [{"role": "assistant", "content": "think", "style": "ecot_test", "timestamp": 0.0}]
    assert render_sample(recipe, rows, [], 1.0, 0)["messages"] == [{"role": "assistant", "content": "think"}]


def test_shipped_recipes_load_and_use_the_cameras_of_the_page():
    assert shipped_recipes() == ["subtask", "subtask_joint", "subtask_mem", "subtask_mem_vqa_speech"]
    text = (RECIPE_FOLDER / "subtask_mem_vqa_speech.yaml").read_text(encoding="utf-8")
    assert "observation.images.top" in text
    assert "observation.images.front" not in text
    full = load_recipe("subtask_mem_vqa_speech")
    assert sum(part.weight for part in full.blend.values()) == pytest.approx(1.0)
    assert [name for name, part in full.blend.items() if part.route] == ["ask_vqa_top", "ask_vqa_wrist"]
    assert select_component(load_recipe("subtask_mem"), 1) == "memory_update"
    for name in shipped_recipes():
        assert not check_recipe(read_recipe(name)).warnings, name
        assert parse_recipe((RECIPE_FOLDER / f"{name}.yaml").read_bytes(), rules="lerobot").recipe == load_recipe(name)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["subtask", "subtask_joint", "subtask_mem", "subtask_mem_vqa_speech"])
def test_shipped_recipes_equal_the_references(name, shared_dir):
    cases = json.loads((shared_dir / "data" / "language" / "cases.json").read_text(encoding="utf-8"))
    reference = json.dumps(cases["recipes"][f"shipped/{name}"]["dict"]).replace("observation.images.front", "observation.images.top")
    assert load_recipe(name) == TrainingRecipe.from_dict(json.loads(reference))


def codes(text, **options):
    report = check_recipe(parse_recipe(text), **options)
    assert report.to_json()["findings"] or not report.findings
    assert report.to_text()
    assert "<html" in report.to_html()
    return {item.code: item for item in report.findings}


def test_lint_finds_what_trains_something_else_than_meant():
    text = """
messages:
  - {role: user, content: "${subtask} {subtask}", stream: low_level}
  - {role: assistant, content: "${subtask}", stream: low_level, target: true}
bindings:
  spare: "emitted_at(t, style=memory)"
weight: 2
"""
    found = codes(text)
    assert set(found) == {"unguarded_target", "unused_binding", "emitted_state", "meaningless_field", "literal_placeholder"}
    assert found["unguarded_target"].line == 4
    assert found["unused_binding"].line == 6


def test_lint_finds_copied_targets_dead_branches_and_greedy_routes():
    text = """
blend:
  copy:
    weight: 1
    messages:
      - {role: user, content: "${subtask}", stream: high_level, if_present: subtask}
      - {role: assistant, content: "${subtask}", stream: high_level, target: true, if_present: subtask}
  dead:
    weight: 1
    bindings: {s: "active_at(t, style=subtask, camera=observation.images.top)"}
    messages:
      - {role: assistant, content: "${s}", stream: high_level, target: true, if_present: s}
  greedy:
    weight: 1
    weight: 2
    route: vqa
    messages:
      - {role: user, content: [{type: image, feature: observation.images.left}], stream: low_level, dropout: 0.5}
"""
    found = codes(text, cameras=["observation.images.top"])
    assert {
        "target_copies_user",
        "never_renders",
        "impossible_binding",
        "route_catches_all",
        "repeated_key",
        "unknown_camera",
        "not_portable",
    } <= set(found)
    assert found["never_renders"].where == "blend.dead"
    assert found["repeated_key"].line == 15
