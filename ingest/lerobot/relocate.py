"""Episodes whose rows are not, or not all, in the data file that the metadata names."""

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false, reportMissingTypeStubs=false

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ingest.errors import RowsError
from ingest.lerobot.episodes import group_files
from ingest.lerobot.findings import Finding
from ingest.lerobot.footercache import FooterCache
from ingest.lerobot.parquet import ParquetSource, check_read_size, integer_column, read_columns
from ingest.lerobot.source import Source


def data_paths(source: Source) -> list[str]:
    """Every parquet file below the folder of the data template, sorted."""
    folder = source.info.data_path.split("{", 1)[0].rpartition("/")[0]
    return sorted(
        entry.path for entry in source.store.list(folder) if entry.path.endswith(".parquet") and not entry.path.startswith("meta/")
    )


def find_rows(source: Source, episode: int, footers: FooterCache) -> tuple[str, ...] | None:
    """Looks for an episode in every data file, nearest first.

    Args:
        source: the dataset.
        episode: an episode that its listed file does not hold completely.
        footers: where footers are kept.

    Returns:
        The files that together hold every frame exactly once, in frame order; None when the rows are not there.
    """
    row = source.episodes.row(episode)
    length = int(source.episodes.length[row])
    found: list[tuple[int, str]] = []
    total = 0
    for path in _nearest_first(data_paths(source), source.listed_data_file(episode)):
        frames = _frames_in(source, path, episode, footers)
        if frames.size:
            found.append((int(frames[0]), path))
            total += len(frames)
        if total >= length:
            break
    if total != length:
        return None
    return tuple(path for _, path in sorted(found))


def _nearest_first(paths: Sequence[str], listed: str) -> list[str]:
    centre = int(np.searchsorted(np.array(paths, dtype=object), listed)) if paths else 0
    return [paths[number] for number in sorted(range(len(paths)), key=lambda number: (abs(number - centre), number < centre))]


def _frames_in(source: Source, path: str, episode: int, footers: FooterCache) -> NDArray[np.int64]:
    """``frame_index`` of the rows of ``episode`` in one file; unreadable files hold none that can be used."""
    file = ParquetSource(source.store, path)
    try:
        footer = footers.get(path)
    except RowsError:
        return np.empty(0, dtype=np.int64)
    groups = footer.groups.candidates(episode)
    if not groups:
        return np.empty(0, dtype=np.int64)
    names = ["episode_index", "frame_index"]
    with file.opened(footer) as opened:
        file.check_columns(file.column_names(opened), names)
        check_read_size(footer, groups, names, file.where)
        with file.faults():
            table = opened.read_row_groups(groups, columns=names, use_threads=False)
    return integer_column(table, "frame_index", file)[integer_column(table, "episode_index", file) == episode]


def moved_findings(source: Source, moved: Mapping[int, tuple[str, ...]]) -> list[Finding]:
    """What to say about episodes that were found elsewhere.

    Args:
        source: the dataset.
        moved: the files that hold each episode's rows, in frame order.

    Returns:
        One finding per episode. An episode spread over files is legal. So is one behind it in the same split: a data file
        was cut in pieces below the metadata. Anything else is a stale column.
    """
    listed = {episode: source.listed_data_file(episode) for episode in moved}
    cuts = {(listed[episode], path) for episode, paths in moved.items() if listed[episode] in paths for path in paths}
    return [
        _moved_finding(source, episode, paths, cut=all((listed[episode], path) in cuts for path in paths))
        for episode, paths in moved.items()
    ]


def _moved_finding(source: Source, episode: int, paths: tuple[str, ...], *, cut: bool) -> Finding:
    row = source.episodes.row(episode)
    meta = source.episodes.meta_paths[int(source.episodes.meta_file[row])]
    listed = source.listed_data_file(episode)
    if listed in paths:
        return Finding(
            code="episode_spans_files",
            severity="info",
            message=f"{meta}: episode {episode}: its rows are spread over {', '.join(paths)}, column data/file_index names {listed}",
            file=meta,
            episode=episode,
            column="data/file_index",
            found=listed,
            expected=", ".join(paths),
            repairable=True,
        )
    column, found, expected = "data/file_index", str(int(source.episodes.data_file[row])), paths[0]
    numbers = _numbers_of(source.info.data_path, paths[0])
    if numbers is not None:
        chunk, file = numbers
        expected = str(file)
        if file == int(source.episodes.data_file[row]):
            column, found, expected = "data/chunk_index", str(int(source.episodes.data_chunk[row])), str(chunk)
    return Finding(
        code="stale_data_file_index",
        severity="warning" if cut else "error",
        message=(
            f"{meta}: episode {episode}: column {column} is {found} ({listed}), but its rows are in {', '.join(paths)}, "
            f"so expected {expected}; the rows are read from there"
        ),
        file=meta,
        episode=episode,
        column=column,
        found=found,
        expected=expected,
        repairable=True,
    )


def _numbers_of(template: str, path: str) -> tuple[int, int] | None:
    """(chunk, file) that ``template`` expands to ``path`` with, or None."""
    pattern = re.escape(template)
    for name in ("chunk_index", "file_index"):
        pattern, count = re.subn(rf"\\\{{{name}(?::0?\d+d)?\\\}}", f"(?P<{name}>[0-9]{{1,12}})", pattern, count=1)
        if not count:
            return None
    match = re.fullmatch(pattern, path)
    return (int(match["chunk_index"]), int(match["file_index"])) if match else None


def verify_data_files(source: Source, episodes: NDArray[np.int64] | None = None, *, problems: list[RowsError] | None = None) -> Source:
    """Checks from footers alone that the listed data files hold the rows that the metadata promises.

    Rows are counted per file; only where counts differ are ``episode_index`` columns read and episodes looked for in
    other files. Called while a plan is built, so that faults surface before the first batch.

    Args:
        source: the dataset.
        episodes: episodes that matter; None means all.
        problems: when given, faults are added to it instead of raised; each names its episodes in ``episodes``.

    Returns:
        The source with corrected data files and one more warning for each repaired episode.

    Raises:
        RowsError: rows that are nowhere, or a file that cannot be read; names file and episode.
    """
    footers = FooterCache(source.store)
    table = source.episodes
    chosen = np.zeros(len(table), dtype=bool)
    chosen[table.rows(table.episode_index if episodes is None else np.asarray(episodes, dtype=np.int64))] = True
    chosen &= table.length > 0
    pairs, number = group_files(table.data_chunk, table.data_file)
    by_file = np.argsort(number, kind="stable")
    borders = np.searchsorted(number[by_file], np.arange(len(pairs) + 1))
    moved: dict[int, tuple[str, ...]] = {}
    for file, (chunk, index) in enumerate(pairs):
        members = by_file[borders[file] : borders[file + 1]]
        wanted = members[chosen[members]]
        if not wanted.size:
            continue
        path = source.info.data_file(int(chunk), int(index))
        try:
            counts = _rows_per_episode(source, path, int(table.length[members].sum()), footers)
        except RowsError as error:
            error.episodes = tuple(table.episode_index[wanted].tolist())
            _raise_or_keep(error, problems)
            continue
        if counts is None:
            continue
        for row in wanted:
            episode, length = int(table.episode_index[row]), int(table.length[row])
            if counts.get(episode, 0) == length or episode in source.moved:
                continue
            found = find_rows(source, episode, footers)
            if found is None:
                _raise_or_keep(missing_rows(source, episode, (path,), counts.get(episode, 0)), problems)
            else:
                moved[episode] = found
    return source.with_moved(moved, moved_findings(source, moved)) if moved else source


def _raise_or_keep(error: RowsError, problems: list[RowsError] | None) -> None:
    if problems is None:
        raise error
    problems.append(error)


def _rows_per_episode(source: Source, path: str, expected: int, footers: FooterCache) -> dict[int, int] | None:
    """Rows of each episode in a file; None when the file's total is as expected and its footer tells no more."""
    footer = footers.get(path)
    counts = footer.groups.rows_by_episode()
    if counts is not None or footer.num_rows == expected:
        return counts

    def fail(message: str) -> RowsError:
        return RowsError(message, dataset=source.store.url, file=path)

    file = ParquetSource(source.store, path, fail)
    episodes, rows = np.unique(integer_column(read_columns(file, ["episode_index"]), "episode_index", file), return_counts=True)
    return dict(zip(episodes.tolist(), rows.tolist(), strict=True))


def missing_rows(source: Source, episode: int, paths: Sequence[str], found: int) -> RowsError:
    """The error of an episode whose rows are nowhere complete."""
    length = int(source.episodes.length[source.episodes.row(episode)])
    return RowsError(
        f"{source.store.url}: episode {episode}: expected {length} rows (column length of meta/episodes), found {found} in "
        f"{', '.join(paths)}, and no other data file completes them; the recording was interrupted or the metadata is stale",
        dataset=source.store.url,
        episode=episode,
        file=paths[0],
    )
