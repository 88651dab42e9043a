"""A language recipe through Ray: the messages of the single-process engine, frame by frame, also in training and after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from actors.manager import PoolSettings
from ingest.errors import CursorError, SettingsError
from ingest.language import RenderStage, load_recipe
from ingest.language.episode import AnnotationRows, read_language
from ingest.language.importing import Span, rows_from_spans, state_row
from ingest.language.write import write_annotations
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.source import open_source
from ingest.plan import PlanSettings, plan_epoch
from ingest.storage.local import LocalStore
from reelray.commands.common import RecipeArguments
from reelray.commands.train import DatasetArguments, PolicyArguments, Train
from reelray.commands.train_options import LoaderArguments
from train_integration.delivery import deliver_locally, deliver_through_ray
from train_integration.options import StreamConfig, open_stream

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280), pytest.mark.usefixtures("ray_cluster")]

DROPPING = RenderStage(load_recipe("subtask_mem"), policy="drop")


@pytest.fixture(scope="module")
def annotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six episodes, of which the first four have rows from their fourth frame on."""
    made = make_dataset(
        tmp_path_factory.mktemp("annotated") / "ds", MakeOptions(episodes=6, frames="9:13", cameras=1, size=(48, 64), gop=4)
    )
    rows = {
        language.episode: [
            *rows_from_spans([Span(3, 6, f"reach {language.episode}"), Span(6, 9, "grasp")], language.timestamps),
            state_row("holding", float(language.timestamps[6]), style="memory"),
        ]
        for language in read_language(open_source(LocalStore.at(made.root)), range(4))
    }
    write_annotations(made.root, rows)
    return made.root


def test_ray_delivers_the_messages_of_one_process(annotated: Path) -> None:
    config = StreamConfig(
        plan=PlanSettings(strategy="lanes", batch_size=5, clamp_workers=True), recipe=DROPPING, decoded_budget_gb=0.1, lane_frames=4
    )
    description, dataset = open_stream(annotated, config)
    first = deliver_through_ray(description, world_size=2, cursor=None, epoch=0, max_steps=2, digests=True, pool=PoolSettings(actors=2))
    rest = deliver_through_ray(
        description, world_size=3, cursor=first.cursor, epoch=0, max_steps=None, digests=True, pool=PoolSettings(actors=2)
    )
    found: dict[tuple[int, int], int] = {}
    for summary in (first, rest):
        real = summary.rows["committed"] & ~summary.rows["is_pad"]
        for episode, frame, digest in zip(
            *(summary.rows[name][real].tolist() for name in ("episode_index", "frame_index", "digest:messages")), strict=True
        ):
            assert (episode, frame) not in found, "a frame came twice"
            found[episode, frame] = digest
    plan = plan_epoch(description.units, description.with_topology(world_size=1))
    oracle = deliver_locally(dataset, description, plan, ranks=[0], max_steps=None, digests=True).rows
    expected = zip(*(oracle[name].tolist() for name in ("episode_index", "frame_index", "digest:messages")), strict=True)
    assert found == {(episode, frame): digest for episode, frame, digest in expected}
    leaving = dataset.language.leaving()
    assert len(found) == dataset.language.frames - sum(map(len, leaving.values())) == dataset.num_frames
    assert leaving
    assert not any(frame in leaving.get(episode, ()) for episode, frame in found)


@pytest.mark.slow
def test_training_carries_its_recipe_and_goes_on_with_no_other(annotated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run"
    copy = tmp_path / "own.yaml"
    copy.write_text(yaml.safe_dump(DROPPING.recipe.to_dict(), sort_keys=False), encoding="utf-8")

    def train(steps: int, **options: object) -> dict[str, object]:
        language = RecipeArguments(recipe=options.pop("recipe", None), recipe_policy=options.pop("policy", "fallback"))
        command = Train(
            dataset=DatasetArguments(root=str(annotated), streaming_sampling_strategy="lanes"),
            policy=PolicyArguments(chunk=2),
            language=language,
            output_dir=output,
            batch_size=4,
            loader=LoaderArguments(num_workers=1),
            steps=steps,
            save_freq=2,
            log_freq=1,
            world_size=2,
            decode_actors=1,
            decoded_budget_gb=0.1,
            json=True,
            **options,
        )
        capsys.readouterr()
        assert command.run() == 0
        return json.loads(capsys.readouterr().out)

    report = train(3, recipe=str(copy), policy="drop")
    assert report["frames_selected"] == report["language"]["kept_frames"] < report["language"]["frames"]
    (saved,) = {path.parent for path in Path(str(report["checkpoint"])).glob("recipe.yaml")}
    assert load_recipe(saved / "recipe.yaml") == DROPPING.recipe
    # The file of the recipe is gone: the run has it.
    copy.unlink()
    resumed = train(6, resume=True)
    assert resumed["steps"] == 6
    assert resumed["frames_selected"] == report["frames_selected"]
    with pytest.raises(SettingsError, match=r"another recipe.*policy: before \"drop\", now \"fallback\""):
        train(8, resume=True, recipe="subtask_mem")
    # A cluster job that knows nothing of the command's folder is refused by the checkpoint itself.
    config = StreamConfig(plan=PlanSettings(batch_size=4), recipe="subtask", decode="inline")
    description, _ = open_stream(annotated, config)
    with pytest.raises(CursorError, match=r"recipe\.blend"):
        _state_into(description, saved)
    other = train(8, resume=True, recipe="subtask", other_recipe=True)
    assert other["steps"] == 8
    assert load_recipe(Path(str(other["checkpoint"])) / "recipe.yaml") == load_recipe("subtask")


def _state_into(description, folder: Path) -> None:
    from train_integration.decoding import InlineDecoding
    from train_integration.feed import LocalFeed
    from train_integration.stream import SampleStream

    state = json.loads((folder / "stream-00000.json").read_text(encoding="utf-8"))
    stream = SampleStream(
        description, 0, 2, LocalFeed(description.job), lambda counters: InlineDecoding(1, "ds", counters), decoded_bytes=1 << 24
    )
    assert np.all(description.units.frames > 0)
    stream.load_state_dict(state)


def test_plain_ray_data_holds_state_rows_once_per_episode(annotated: Path) -> None:
    from ingest.datasource import read_episodes

    expected = {language.episode: language.rows for language in read_language(open_source(LocalStore.at(annotated)))}
    rows = read_episodes(annotated, cameras=()).take_all()
    assert not {"language_persistent", "language_events"} & set(rows[0])
    for row in rows:
        found = AnnotationRows.unpack(row["language"])
        assert [found.raw(frame) for frame in range(row["length"])] == [
            expected[row["episode"]].raw(frame) for frame in range(row["length"])
        ]
        assert row["language"].count(b"grasp") == (row["episode"] < 4)
    with pytest.raises(SettingsError, match="as stored"):
        read_episodes(annotated, recipe="subtask")
