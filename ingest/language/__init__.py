"""Language annotations beside the frames, and the recipes that turn them into chat messages."""

# Some signatures name pyarrow types, and pyarrow carries no type information.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from ingest.language.annotate import ambiguities, check_staging, column_row, row_order, vqa_answer_shape
from ingest.language.columns import (
    canonical_type,
    decode_rows,
    has_language_columns,
    language_features,
    normalise_column,
    normalise_table,
    read_language_columns,
    rows_array,
)
from ingest.language.draw import unit_draw
from ingest.language.expressions import Expression, parse_expression
from ingest.language.flatten import MessagesToTask
from ingest.language.recipe import DEFAULT_BINDINGS, MessageTurn, TrainingRecipe
from ingest.language.recipe_file import load_recipe, parse_recipe, read_recipe, shipped_recipes
from ingest.language.render import Rendered, render_sample, select_component, task_text
from ingest.language.resolve import active_at, emitted_at, nth_next, nth_prev, resolve, resolve_sequence
from ingest.language.rows import StateRows
from ingest.language.runtime import RenderRuntimeMessagesStep
from ingest.language.stage import Outcome, RenderStage
from ingest.language.step import RenderTrainingMessagesStep
from ingest.language.styles import (
    EVENT_COLUMN,
    LANGUAGE_COLUMNS,
    STATE_COLUMN,
    STYLES,
    Style,
    column_for_style,
    register,
    validate_camera_field,
)
from ingest.language.toolcalls import tool_catalogue, tools_for, with_say

__all__ = [
    "DEFAULT_BINDINGS",
    "EVENT_COLUMN",
    "LANGUAGE_COLUMNS",
    "STATE_COLUMN",
    "STYLES",
    "Expression",
    "MessageTurn",
    "MessagesToTask",
    "Outcome",
    "RenderRuntimeMessagesStep",
    "RenderStage",
    "RenderTrainingMessagesStep",
    "Rendered",
    "StateRows",
    "Style",
    "TrainingRecipe",
    "active_at",
    "ambiguities",
    "canonical_type",
    "check_staging",
    "column_for_style",
    "column_row",
    "decode_rows",
    "emitted_at",
    "has_language_columns",
    "language_features",
    "load_recipe",
    "normalise_column",
    "normalise_table",
    "nth_next",
    "nth_prev",
    "parse_expression",
    "parse_recipe",
    "read_language_columns",
    "read_recipe",
    "register",
    "render_sample",
    "resolve",
    "resolve_sequence",
    "row_order",
    "rows_array",
    "select_component",
    "shipped_recipes",
    "task_text",
    "tool_catalogue",
    "tools_for",
    "unit_draw",
    "validate_camera_field",
    "vqa_answer_shape",
    "with_say",
]
