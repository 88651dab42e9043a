"""Training ingestion: exact coverage, elastic resume, padding with masks, budgets, and damage found while reading."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinydata import KEY, SHORT, STEP, prepare, rewrite

from ingest.errors import BudgetError, CursorError, DamagedDataError, MetadataError, SelectionError, SettingsError, StreamClosedError
from ingest.prefeature import layout, prefetch, reader
from ingest.prefeature.build import build_local
from ingest.prefeature.collate import collate
from ingest.prefeature.config import read_config
from ingest.prefeature.durable import write_tensors
from ingest.prefeature.kvmath import compare, input65
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.merge import merge
from ingest.prefeature.prefetch import BufferRing, RecordPrefetcher
from ingest.prefeature.reader import HeaderCache, first_hollow, network_warning, read_tensors
from ingest.prefeature.records import PreviousHidden, RecordIndex, View
from ingest.prefeature.sizes import Sizes, resized
from ingest.prefeature.storefiles import load_frozen
from ingest.prefeature.tensorfile import read_header
from train_integration.prefeature_predictor import SmallPredictor, record_loss
from train_integration.prefeature_stream import PrefeatureStream, PrefeatureStreamConfig, plan_records, record_units


def config(root: Path, **options: object) -> PrefeatureStreamConfig:
    """Stream settings for a root."""
    return PrefeatureStreamConfig(str(root), **options)  # type: ignore[arg-type]


def keys_of(stream: PrefeatureStream, stop: int | None = None) -> list[RecordKey]:
    """Delivered keys, padding left out."""
    found: list[RecordKey] = []
    for item in stream:
        if stop is not None and item.step >= stop:
            break
        found += [key for key, pad in zip(item.batch.keys, item.batch.is_pad.tolist(), strict=True) if not pad]
    return found


@pytest.mark.parametrize(("world", "batch"), [(1, 1), (2, 1), (3, 2), (4, 1), (5, 2)])
def test_every_record_exactly_once(short_built: Path, world: int, batch: int) -> None:
    streams = [PrefeatureStream(config(short_built, batch_size=batch), rank=rank, world_size=world) for rank in range(world)]
    assert len({stream.steps for stream in streams}) == 1
    found = Counter(key for stream in streams for key in keys_of(stream))
    assert found == Counter(streams[0].index.keys)
    assert len(found) == 16


def test_orders_differ_by_epoch_and_repeat_by_seed(short_built: Path) -> None:
    first = keys_of(PrefeatureStream(config(short_built), epoch=0))
    assert keys_of(PrefeatureStream(config(short_built), epoch=0)) == first
    assert keys_of(PrefeatureStream(config(short_built), epoch=1)) != first
    assert keys_of(PrefeatureStream(config(short_built, seed=1), epoch=0)) != first


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (2, 3), (4, 2)])
def test_resume_with_another_world_keeps_coverage_exact(short_built: Path, before: int, after: int) -> None:
    streams = [PrefeatureStream(config(short_built), rank=rank, world_size=before) for rank in range(before)]
    stop = streams[0].steps // 2
    delivered = Counter(key for stream in streams for key in keys_of(stream, stop))
    for stream in streams:
        stream.commit(stop - 1)
    states = {stream.state_dict()["cursor"] for stream in streams}
    assert len(states) == 1
    cursor = states.pop()
    rest = [PrefeatureStream(config(short_built), rank=rank, world_size=after, cursor=cursor) for rank in range(after)]
    delivered.update(key for stream in rest for key in keys_of(stream))
    assert delivered == Counter(streams[0].index.keys)
    if before == after:
        whole = [keys_of(PrefeatureStream(config(short_built), rank=rank, world_size=before)) for rank in range(before)]
        assert [keys_of(stream) for stream in rest] == [keys[stop:] for keys in whole]


def test_a_cursor_of_another_dataset_is_refused(short_built: Path, dataset: Path) -> None:
    state = PrefeatureStream(config(short_built)).state_dict()["cursor"]
    with pytest.raises(CursorError):
        PrefeatureStream(config(short_built, seed=9), cursor=state)


def test_ranks_are_balanced_by_bytes() -> None:
    class Index:
        """2,800 records of the real sizes without any file."""

        config = type("Config", (), {"fingerprint": "x"})()

        def __init__(self) -> None:
            sizes = Sizes()
            frames = [4, 8, 12, 16, 20, 20, 20]
            step, hidden = 105_496_840, 3 * 25_559_040
            context = [4 * n * sizes.frame_tokens * (sizes.hidden * 2 + 1) for n in frames]
            self.nbytes = np.array([step + hidden + context[i % 7] for i in range(2800)], np.int64)

        def __len__(self) -> int:
            return len(self.nbytes)

    index = Index()
    assert round(index.nbytes.sum() / 1e12, 2) == 1.53
    plan = plan_records(index, config(Path(".")), 8)  # type: ignore[arg-type]
    loads = []
    for rank in range(8):
        table = plan.rank(rank).table(0, plan.steps)
        loads.append(index.nbytes[table.unit[~table.is_pad]].sum())
    assert max(loads) / min(loads) < 1.02
    assert plan.steps <= 2800 / 8 * 1.3
    assert len(record_units(index)) == 2800  # type: ignore[arg-type]


def test_one_record_is_delivered_as_it_lies_on_disk(short_built: Path) -> None:
    stream = PrefeatureStream(config(short_built, previous=PreviousHidden.BOTH))
    for item in stream:
        batch = item.batch
        key = batch.keys[0]
        step = read_tensors(short_built, layout.step_path(key))
        before = read_tensors(short_built, layout.step_path(RecordKey(key.case_id, key.action_id, key.chunk_id - 1)))
        for number in range(4):
            assert torch.equal(batch.final_hidden[number], step[f"step_{number}_final_hidden"])
            assert torch.equal(batch.noisy[number], step[f"step_{number}_noisy_sample"])
            assert torch.equal(batch.previous_hidden[number], before[f"step_{number}_final_hidden"])
        for block in SHORT.blocks:
            stored = read_tensors(short_built, layout.context_path(key, block))
            assert torch.equal(batch.context[block], stored["img_modulated"])
        case = read_tensors(short_built, layout.case_path(key.case_id))
        count = int(case["text_valid_mask"].sum())
        assert count < SHORT.text_pad_tokens
        assert torch.equal(batch.text_k[1], case["block_01_k_txt"][:, :, :count])
        assert batch.text_mask.shape == (1, count)
        assert batch.pairs == ((0, 1), (1, 2), (2, 3))


def test_batches_pad_context_and_text_and_mask_the_padding(short_built: Path) -> None:
    index = RecordIndex(short_built)
    by_chunk = [index.keys.index(RecordKey(0, 1, 1)), index.keys.index(RecordKey(1, 2, 2))]
    with RecordPrefetcher(short_built, [index.request(n) for n in by_chunk], budget=1 << 22) as prefetcher:
        leases = list(prefetcher)
        batch = collate(leases, SHORT, index.text_blocks())
    tokens = SHORT.frame_tokens
    lengths = [len(index.config.history(index.keys[n].action_id)[index.keys[n].chunk_id]) for n in by_chunk]
    assert batch.context_frames.tolist() == lengths
    assert batch.context[0].shape == (2, max(lengths) * tokens, SHORT.hidden)
    assert batch.context_mask.sum(1).tolist() == [length * tokens for length in lengths]
    assert not batch.context[0][~batch.context_mask].any()
    frozen = load_frozen(short_built, index.config)
    rebuilt = batch.rebuild_kv(frozen)
    for row, number in enumerate(by_chunk):
        key = index.keys[number]
        for block in SHORT.blocks:
            stored = read_tensors(short_built, layout.context_path(key, block))
            alone = frozen.rebuild_kv(block, stored["img_modulated"], stored["context_viewmats"], stored["context_Ks"])
            for name in alone._fields:
                got = getattr(rebuilt[block], name)
                assert torch.isfinite(got).all()
                assert compare(got[row : row + 1, :, : lengths[row] * tokens], getattr(alone, name)).accepted


def test_chunk_zero_and_later_chunks_share_a_batch(short_built: Path) -> None:
    index = RecordIndex(short_built, View.PREDICTOR_DISCA, manifest=layout.MANIFEST)
    full = RecordIndex(short_built)
    first = next(n for n, key in enumerate(index.keys) if key.chunk_id == 0)
    requests = [index.request(first), index.request(first + 1)]
    with RecordPrefetcher(short_built, requests, budget=1 << 22) as prefetcher:
        batch = collate(list(prefetcher), SHORT, full.text_blocks())
    assert batch.context == {}
    image = read_tensors(short_built, layout.case_path(index.keys[first].case_id))["image_condition_latent"]
    rebuilt = batch.input65(2)
    assert torch.equal(rebuilt[:1], input65(batch.noisy[2][:1], image, 0))
    assert rebuilt[0, SHORT.latent_channels :].any()
    assert not rebuilt[1, SHORT.latent_channels :].any()


def test_a_record_with_zero_context_is_padded_like_any_other(short_built: Path) -> None:
    index = RecordIndex(short_built)
    chosen = index.request(0)
    reads = tuple(
        replace(read, path=read.path.replace("chunk_01", "chunk_00"), solid=(), metadata={}) if read.role.startswith("context") else read
        for read in chosen.reads
    )
    empty = type(chosen)(chosen.key, reads, chosen.nbytes)
    with RecordPrefetcher(short_built, [empty, index.request(0)], budget=1 << 22) as prefetcher:
        batch = collate(list(prefetcher), SHORT, index.text_blocks())
    assert batch.context_frames.tolist() == [0, 4]
    assert not batch.context_mask[0].any()
    for kv in batch.rebuild_kv(load_frozen(short_built, index.config)).values():
        assert all(torch.isfinite(tensor).all() for tensor in kv)


@pytest.mark.parametrize("view", list(View))
def test_views_read_what_they_need(short_built: Path, view: View) -> None:
    index = RecordIndex(short_built, view)
    roles = {read.role for read in index.request(0).reads}
    context = {f"context_{block:02d}" for block in SHORT.blocks}
    expected = {
        View.PREDICTOR: {"step", "previous", "case"} | context,
        View.PREDICTOR_DISCA: {"step", "case"},
        View.ROLLOUT: {"step", "previous", "case", "text"} | context,
    }[view]
    assert roles == expected
    assert len(index.text_blocks()) == (SHORT.depth if view is View.ROLLOUT else 4)
    batch = next(iter(PrefeatureStream(config(short_built, view=view)))).batch
    assert set(batch.text_k) == set(index.text_blocks())
    assert bool(batch.context) == (view is not View.PREDICTOR_DISCA)


def test_memory_stays_inside_the_budget(short_built: Path) -> None:
    index = RecordIndex(short_built)
    budget = 2 * int(index.nbytes.max()) + 100
    stream = PrefeatureStream(config(short_built, byte_budget=budget, threads=4))
    assert len(keys_of(stream)) == 16
    assert 0 < stream.peak_bytes <= budget
    with pytest.raises(SettingsError, match="cannot hold one batch"):
        PrefeatureStream(config(short_built, byte_budget=1000))


@pytest.mark.parametrize(
    ("wanted", "cuda", "pinned"), [(None, True, True), (None, False, False), (False, True, False), (True, False, True)]
)
def test_buffers_are_page_locked_where_there_is_a_gpu(
    short_built: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool | None, cuda: bool, pinned: bool
) -> None:
    asked: list[bool] = []

    class Ring(BufferRing):
        def __init__(self, budget: int, *, pinned: bool = False) -> None:
            asked.append(pinned)
            super().__init__(budget)

    monkeypatch.setattr(prefetch, "BufferRing", Ring)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert len(keys_of(PrefeatureStream(config(short_built, pinned=wanted)))) == 16
    assert asked == [pinned]


def test_ring_reuses_waits_and_refuses() -> None:
    ring = BufferRing(1000)
    with pytest.raises(BudgetError, match="raise the prefetch byte budget"):
        ring.acquire(1001)
    first = ring.acquire(600)
    ring.release(first)
    assert ring.acquire(500) is first
    ring.release(first)
    ring.acquire(700)  # the free buffer is too small and makes room
    assert (ring.held, ring.peak) == (700, 700)
    ring.close()
    with pytest.raises(StreamClosedError):
        ring.acquire(900)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=30), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_ring_never_exceeds_its_budget(sizes: list[int], keep: int) -> None:
    ring = BufferRing(2500)
    held: list[torch.Tensor] = []
    for size in sizes:
        while len(held) > keep:
            ring.release(held.pop(0))
        buffer = ring.acquire(size)
        assert buffer.numel() >= size
        assert all(buffer is not other for other in held)
        held.append(buffer)
        assert ring.held <= 2500


def test_a_damaged_record_raises_when_its_turn_comes(dataset: Path) -> None:
    size = (dataset / STEP).stat().st_size
    os.truncate(dataset / STEP, size // 2)
    os.truncate(dataset / STEP, size)
    with pytest.raises(DamagedDataError, match=r"chunk_02.*zero at byte"):
        keys_of(PrefeatureStream(config(dataset)))
    os.truncate(dataset / STEP, size - 10)
    with pytest.raises(DamagedDataError, match="truncated"):
        keys_of(PrefeatureStream(config(dataset)))
    (dataset / STEP).unlink()
    with pytest.raises(DamagedDataError, match="No such file"):
        keys_of(PrefeatureStream(config(dataset)))


@pytest.mark.parametrize("view", [View.PREDICTOR, View.ROLLOUT])
@pytest.mark.parametrize("kind", ["step", "context", "case"])
def test_swapped_and_stale_files_are_never_trained_on(dataset: Path, view: View, kind: str) -> None:
    first, second = {
        "step": (STEP, STEP.replace("action_02", "action_03")),
        "context": (layout.context_path(KEY, 0), layout.context_path(KEY, 1)),
        "case": (layout.case_path(0), layout.case_path(1)),
    }[kind]
    a, b = (dataset / first).read_bytes(), (dataset / second).read_bytes()
    (dataset / first).write_bytes(b)
    (dataset / second).write_bytes(a)
    with pytest.raises(DamagedDataError, match="belongs to another record or build"):
        keys_of(PrefeatureStream(config(dataset, view=view)))


def test_a_case_without_its_image_latent_is_named(dataset: Path) -> None:
    path = layout.case_path(1)
    header = read_header(dataset, path)
    tensors = {name: tensor.clone() for name, tensor in read_tensors(dataset, path).items() if name != "image_condition_latent"}
    write_tensors(dataset / path, [e.spec for n, e in header.entries.items() if n in tensors], tensors, dict(header.metadata))
    with pytest.raises(DamagedDataError, match="image_condition_latent"):
        keys_of(PrefeatureStream(config(dataset)))


def test_a_manifest_with_chunk_zero_or_duplicates_is_refused(dataset: Path) -> None:
    with pytest.raises(MetadataError, match="no previous chunk"):
        RecordIndex(dataset, manifest=layout.MANIFEST)
    train = dataset / layout.TRAIN_MANIFEST
    text = train.read_text(encoding="utf-8")
    train.write_text(text + text.splitlines(keepends=True)[0], encoding="utf-8")
    with pytest.raises(MetadataError, match="different keys"):
        RecordIndex(dataset)
    train.write_text(text.replace("steps/case_0000", "../steps/case_0000", 1), encoding="utf-8")
    with pytest.raises(ValueError, match="below the dataset root"):
        RecordIndex(dataset)


def test_actions_whose_histories_differ_in_length(tmp_path: Path) -> None:
    sizes = resized(SHORT, cases=1, latent_frames=16, chunk_frames=2, memory_frames=10, recent_frames=2)
    root, teacher = prepare(tmp_path, sizes)
    dataset = read_config(root)
    assert len({len(dataset.history(action)[6]) for action in range(4)}) > 1
    build_local(root, teacher)
    merge(root)
    index = RecordIndex(root)
    assert len({int(size) for key, size in zip(index.keys, index.nbytes, strict=True) if key.chunk_id == 6}) > 1
    for batch_size in (1, 3):
        assert Counter(keys_of(PrefeatureStream(config(root, batch_size=batch_size)))) == Counter(index.keys)


def test_request_outside_the_index(short_built: Path) -> None:
    with pytest.raises(SelectionError):
        RecordIndex(short_built).request(99)


def test_headers_are_read_again_when_a_file_is_replaced(dataset: Path) -> None:
    cache = HeaderCache(limit=3)
    read_tensors(dataset, STEP, ["step_0_timestep"], cache=cache)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["step_0_timestep"][0] = 5.0

    rewrite(dataset, STEP, change)
    assert read_tensors(dataset, STEP, ["step_0_timestep"], cache=cache)["step_0_timestep"].tolist() == [5.0]


def test_hollow_probes() -> None:
    solid = torch.ones(1 << 20, dtype=torch.uint8).numpy()
    assert first_hollow(solid) is None
    solid[-64:] = 0
    assert first_hollow(solid) == (1 << 20) - 64
    assert first_hollow(solid[:0]) is None


def test_network_disks_are_warned_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert network_warning(tmp_path) is None
    monkeypatch.setattr(reader, "filesystem_kind", lambda path: "fuse.mountpoint-s3")
    assert "ensure" in (network_warning(tmp_path) or "")


@pytest.mark.parametrize("view", [View.PREDICTOR, View.PREDICTOR_DISCA])
def test_the_small_predictor_learns(short_built: Path, view: View) -> None:
    torch.manual_seed(0)
    frozen = load_frozen(short_built, RecordIndex(short_built).config)
    model = SmallPredictor(SHORT, with_context=view is View.PREDICTOR)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    means: list[float] = []
    for epoch in range(3):
        losses: list[float] = []
        for item in PrefeatureStream(config(short_built, view=view, batch_size=2), epoch=epoch):
            context = item.batch.rebuild_kv(frozen)
            optimizer.zero_grad()
            for pair in item.batch.pairs:
                loss = record_loss(model(item.batch, pair, context), item.batch, pair[1]) / 3
                loss.backward()
                losses.append(3 * float(loss.detach()))
            optimizer.step()
        means.append(sum(losses) / len(losses))
    assert means[-1] < 0.7 * means[0], means


def test_padding_does_not_change_the_prediction(short_built: Path) -> None:
    torch.manual_seed(0)
    index = RecordIndex(short_built)
    frozen = load_frozen(short_built, index.config)
    model = SmallPredictor(SHORT)
    torch.nn.init.normal_(model.out.weight, std=0.2)
    numbers = [0, 9]
    with RecordPrefetcher(short_built, [index.request(n) for n in (*numbers, *numbers)], budget=1 << 23) as prefetcher:
        leases = list(prefetcher)
        together = collate(leases[:2], SHORT, index.text_blocks())
        both = model(together, (1, 2), together.rebuild_kv(frozen))
        for row, lease in enumerate(leases[2:]):
            single = collate([lease], SHORT, index.text_blocks())
            alone = model(single, (1, 2), single.rebuild_kv(frozen))
            assert torch.allclose(both[row : row + 1], alone, atol=2e-2, rtol=2e-2)
