"""``meta/info.json``: parsed strictly, so that a hand-made file fails here with a reason and not later without one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ingest.errors import MetadataError, ObjectNotFoundError, SelectionError, UnsafeInputError, UnsupportedVersionError
from ingest.storage.base import Store
from ingest.storage.paths import expand_template

INFO_PATH = "meta/info.json"
DEFAULT_DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DEFAULT_VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
SUPPORTED_VERSION = "v3.0"

_MAX_JSON_BYTES = 64 << 20
_MAX_DIMENSIONS = 6
_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:\.\d{1,6})?")
_FLOATS = frozenset({"float16", "float32", "float64"})
_INTEGERS = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})
_V2_PLACEHOLDERS = ("{episode_index", "{episode_chunk")


@dataclass(frozen=True, slots=True)
class Feature:
    """One declared feature.

    Attributes:
        key: name, for example ``observation.state``.
        dtype: as declared, for example ``float32``, ``video``, ``image``, ``string``, ``language``.
        shape: as declared; pictures may be channel-first or channel-last.
        names: axis names or element names where they are a plain list of text, else ().
        is_depth: the picture is a depth map, one channel of 16 bits.
        details: ``info`` or ``video_info`` of a picture feature, as parsed from JSON.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    is_depth: bool
    details: Mapping[str, Any]

    @property
    def is_video(self) -> bool:
        return self.dtype == "video"

    @property
    def is_image(self) -> bool:
        return self.dtype == "image"

    @property
    def is_numeric(self) -> bool:
        """Bool, integer or float values of a fixed shape."""
        return self.dtype == "bool" or self.dtype in _FLOATS or self.dtype in _INTEGERS

    @property
    def item_dtype(self) -> str | None:
        """Dtype of the delivered values: ``float32``, ``int64`` or ``bool``; None when not numeric."""
        if self.dtype in _FLOATS:
            return "float32"
        if self.dtype in _INTEGERS:
            return "int64"
        return "bool" if self.dtype == "bool" else None

    @property
    def is_scalar(self) -> bool:
        """One value per row: declared with shape [] or [1]."""
        return self.shape in ((), (1,))

    @property
    def picture_shape(self) -> tuple[int, int, int]:
        """(height, width, channels), whichever order was declared.

        Raises:
            MetadataError: the declared shape is not that of a picture.
        """
        if len(self.shape) == 2:
            return self.shape[0], self.shape[1], 1
        if len(self.shape) != 3:
            raise MetadataError(
                f"{INFO_PATH}: feature {self.key!r} is declared as {self.dtype} with shape {list(self.shape)}; "
                "a picture needs [height, width, channels] or [channels, height, width]"
            )
        first, second, third = self.shape
        return (second, third, first) if self._channel_first() else (first, second, third)

    def _channel_first(self) -> bool:
        for position, name in enumerate(self.names):
            if name in ("channel", "channels", "c"):
                # Converters declare the shape in one order and copy the names in another: sizes decide when they can.
                if self.shape[position] in (1, 3, 4):
                    return position == 0
                break
        return self.shape[0] in (1, 3, 4) and self.shape[2] not in (1, 3, 4)


@dataclass(frozen=True, slots=True)
class Info:
    """``meta/info.json``.

    Attributes:
        version: ``codebase_version`` as written; empty when absent and allowed.
        fps: frames per second, exactly as written (may be fractional).
        robot_type: as written, or None.
        total_episodes, total_frames, total_tasks: counts as written, or None; never used for reading.
        chunks_size: files per chunk folder.
        data_path, video_path: path templates.
        features: by key, in the order written.
        splits: as written.
    """

    version: str
    fps: float
    robot_type: str | None
    total_episodes: int | None
    total_frames: int | None
    total_tasks: int | None
    chunks_size: int
    data_path: str
    video_path: str
    features: Mapping[str, Feature]
    splits: Mapping[str, str]

    @property
    def cameras(self) -> tuple[str, ...]:
        """Video features in the order written."""
        return tuple(key for key, feature in self.features.items() if feature.is_video)

    @property
    def images(self) -> tuple[str, ...]:
        """Features whose pictures are stored inside the parquet files."""
        return tuple(key for key, feature in self.features.items() if feature.is_image)

    def feature(self, key: str) -> Feature:
        """The feature named ``key``.

        Raises:
            SelectionError: there is none; the message lists what exists.
        """
        try:
            return self.features[key]
        except KeyError:
            raise SelectionError(f"{INFO_PATH} declares no feature {key!r}; it declares {', '.join(self.features)}") from None

    def data_file(self, chunk: int, file: int) -> str:
        """Path of a data file relative to the root."""
        return expand_template(self.data_path, {"chunk_index": chunk, "file_index": file})

    def video_file(self, camera: str, chunk: int, file: int) -> str:
        """Path of a video file relative to the root."""
        return expand_template(self.video_path, {"video_key": camera, "chunk_index": chunk, "file_index": file})


def read_json(store: Store, path: str) -> object:
    """Parses a JSON object of bounded size.

    Raises:
        ObjectNotFoundError: there is no such file.
        MetadataError: not JSON.
        StorageError: a Git LFS pointer instead of the file, or a fault of the transport.
        UnsafeInputError: larger than any real metadata file.
    """
    size = store.size(path)
    if size > _MAX_JSON_BYTES:
        raise UnsafeInputError(f"{store.url}: {path} has {size} bytes; metadata above {_MAX_JSON_BYTES} bytes is not read")
    try:
        return json.loads(store.read_all(path))
    except (ValueError, RecursionError) as error:
        raise MetadataError(f"{store.url}: {path} is not valid JSON ({error}); the recording or the copy was interrupted") from error


def read_info(store: Store, *, allow_unknown_version: bool = False) -> Info:
    """Reads and checks ``meta/info.json``.

    Args:
        store: the dataset.
        allow_unknown_version: also read a missing, unreadable or newer version; older ones are always refused.

    Raises:
        UnsupportedVersionError: another codebase version; the message says how to convert.
        MetadataError: missing, not JSON, or a field without a usable value.
    """
    try:
        raw = read_json(store, INFO_PATH)
    except ObjectNotFoundError as error:
        raise MetadataError(
            f"{store.url}: {INFO_PATH} is missing, so this is not a LeRobotDataset; give the folder that holds meta/, data/ and videos/"
        ) from error
    if not isinstance(raw, dict):
        raise MetadataError(f"{store.url}: {INFO_PATH} holds a {type(raw).__name__}, expected an object")
    fields = cast("dict[str, Any]", raw)
    version = check_version(fields.get("codebase_version"), store.url, allow_unknown_version)
    return _Parser(fields, f"{store.url}: {INFO_PATH}").parse(version)


def check_version(version: object, where: str, allow_unknown: bool) -> str:
    """Returns ``version`` as text when it may be read.

    Raises:
        UnsupportedVersionError: names the root, the version found, the version needed and how to convert.
    """
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    major = int(match[1]) if match else 0
    if major == 3:
        return cast("str", version)
    if major in (1, 2):
        raise UnsupportedVersionError(
            f"{where}: codebase_version is {version}, this reader needs {SUPPORTED_VERSION}. {_conversion(cast('str', version))}"
        )
    if allow_unknown:
        return version if isinstance(version, str) else ""
    if major > 3:
        raise UnsupportedVersionError(
            f"{where}: codebase_version is {version}, a format newer than the {SUPPORTED_VERSION} that this reader knows. "
            "Update reelray, or allow unknown versions explicitly if you know that the layout did not change"
        )
    found = "missing" if version is None else f"unreadable ({version!r})"
    raise UnsupportedVersionError(
        f"{where}: codebase_version in {INFO_PATH} is {found}, this reader needs {SUPPORTED_VERSION}. If the dataset has the v3 layout "
        f'(meta/episodes/*/*.parquet), write "codebase_version": "{SUPPORTED_VERSION}" there or allow unknown versions explicitly; '
        f"otherwise convert it. {_conversion('v2.1')}"
    )


def _conversion(version: str) -> str:
    last = (
        "`python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=OWNER/NAME` (with --root=FOLDER for a local copy; "
        "in lerobot 0.4 the module is lerobot.datasets.v30.convert_dataset_v21_to_v30)"
    )
    number = version.removeprefix("v")
    if number.startswith("1."):
        return (
            "Convert it to v2.0 with lerobot's convert_dataset_v1_to_v2.py (a release of early 2025), to v2.1 with "
            f"convert_dataset_v20_to_v21.py, then to v3.0 with {last}"
        )
    if number.startswith("2.0"):
        return f"Convert it to v2.1 with lerobot's convert_dataset_v20_to_v21.py (lerobot 0.1 to 0.3), then to v3.0 with {last}"
    return f"Convert it with {last}"


@dataclass(frozen=True, slots=True)
class _Parser:
    fields: Mapping[str, Any]
    where: str

    def parse(self, version: str) -> Info:
        features = self._features()
        splits: object = self.fields.get("splits") or {}
        if not isinstance(splits, dict):
            raise self._bad("splits", splits, "an object such as {'train': '0:10'}")
        robot = self.fields.get("robot_type")
        info = Info(
            version=version,
            fps=self._fps(),
            robot_type=None if robot is None else str(robot),
            total_episodes=self._count("total_episodes"),
            total_frames=self._count("total_frames"),
            total_tasks=self._count("total_tasks"),
            chunks_size=self._count("chunks_size") or 1000,
            data_path=self._template("data_path", DEFAULT_DATA_PATH),
            video_path=self._template("video_path", DEFAULT_VIDEO_PATH),
            features=features,
            splits={str(key): str(value) for key, value in cast("dict[Any, Any]", splits).items()},
        )
        if len(info.cameras) > 1 and "{video_key" not in info.video_path:
            raise self._bad("video_path", info.video_path, "a template with {video_key}, since there are several cameras")
        return info

    def _bad(self, name: str, found: object, expected: str) -> MetadataError:
        shown = repr(found)
        return MetadataError(f"{self.where}: {name} is {shown if len(shown) < 200 else shown[:200] + '…'}, expected {expected}")

    def _fps(self) -> float:
        fps = self.fields.get("fps")
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 1e6:
            raise self._bad("fps", fps, "a positive number of frames per second")
        return float(fps)

    def _count(self, name: str) -> int | None:
        value = self.fields.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise self._bad(name, value, "a whole number of 0 or more")
        return int(value)

    def _template(self, name: str, default: str) -> str:
        template = self.fields.get(name)
        if template is None:
            return default
        if not isinstance(template, str):
            raise self._bad(name, template, f"a path template such as {default!r}")
        if any(old in template for old in _V2_PLACEHOLDERS):
            raise self._bad(
                name, template, f"a v3 template such as {default!r}; this one has the placeholders of v2. {_conversion('v2.1')}"
            )
        fields: dict[str, str | int] = {"chunk_index": 0, "file_index": 0}
        if name == "video_path":
            fields["video_key"] = "camera"
        try:
            expand_template(template, fields)
        except UnsafeInputError as error:
            raise UnsafeInputError(f"{self.where}: {name}: {error}; expected something like {default!r}") from error
        return template

    def _features(self) -> dict[str, Feature]:
        declared: object = self.fields.get("features")
        if not isinstance(declared, dict) or not declared:
            raise self._bad("features", cast("object", declared), "an object that declares every column and camera")
        return {key: self._feature(str(key), value) for key, value in cast("dict[str, Any]", declared).items()}

    def _feature(self, key: str, value: object) -> Feature:
        name = f"features[{key!r}]"
        if not isinstance(value, dict):
            raise self._bad(name, value, "an object with dtype and shape")
        fields = cast("dict[str, Any]", value)
        dtype = fields.get("dtype")
        if not isinstance(dtype, str):
            raise self._bad(f"{name}.dtype", dtype, "the name of a type such as 'float32' or 'video'")
        details: object = fields.get("info") or fields.get("video_info") or {}
        if not isinstance(details, dict):
            raise self._bad(f"{name}.info", details, "an object")
        names = fields.get("names")
        labels = cast("list[Any]", names) if isinstance(names, list) else []
        settings = cast("dict[str, Any]", details)
        feature = Feature(
            key=key,
            dtype=dtype,
            shape=self._shape(name, fields.get("shape")),
            names=tuple(label for label in labels if isinstance(label, str)) if all(isinstance(label, str) for label in labels) else (),
            is_depth=any(settings.get(flag) is True or fields.get(flag) is True for flag in ("is_depth_map", "video.is_depth_map")),
            details=settings,
        )
        if feature.is_video:
            # Camera keys become folder names: one that leaves the root is refused before anything is opened.
            if "/" in key:
                raise UnsafeInputError(f"{self.where}: {name}: a camera key may not contain '/'")
            expand_template("videos/{video_key}", {"video_key": key})
        if feature.is_video or feature.is_image:
            try:
                _ = feature.picture_shape
            except MetadataError as error:
                raise MetadataError(f"{self.where.removesuffix(INFO_PATH)}{error}") from None
        return feature

    def _shape(self, name: str, shape: object) -> tuple[int, ...]:
        expected = "a list of sizes such as [6]"
        if not isinstance(shape, list):
            raise self._bad(f"{name}.shape", shape, expected)
        sizes = cast("list[Any]", shape)
        if len(sizes) > _MAX_DIMENSIONS or any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
            raise self._bad(f"{name}.shape", sizes, expected)
        return tuple(sizes)
