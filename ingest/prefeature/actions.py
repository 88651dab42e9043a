"""The four trajectories as data, the pose grammar, and the cameras and action labels that follow from it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.errors import SettingsError

STEP_UNITS = 0.08
"""Distance moved in one latent frame."""

STEP_DEGREES = 3.0
"""Rotation in one latent frame."""

FOCAL_X = 969.6969696969696 / 1920.0
FOCAL_Y = 969.6969696969696 / 1080.0
"""Focal lengths over image width and height; the principal point is the centre."""

GRAMMAR = "comma-separated 'MOTION-COUNT' with MOTION one of w, s, a, d, up, down, left, right and COUNT a whole number, e.g. 'w-15,s-16'"

_COMMAND = re.compile(r"(w|s|a|d|up|down|left|right)-([0-9]{1,4})")
_MOVE = {"w": (0.0, 0.0, 1.0), "s": (0.0, 0.0, -1.0), "a": (-1.0, 0.0, 0.0), "d": (1.0, 0.0, 0.0)}
_TURN = {"up": ("pitch", 1.0), "down": ("pitch", -1.0), "left": ("yaw", -1.0), "right": ("yaw", 1.0)}
_PAIR = {(0, 0): 0, (1, 0): 1, (-1, 0): 2, (0, 1): 3, (0, -1): 4, (1, 1): 5, (1, -1): 6, (-1, 1): 7, (-1, -1): 8}
"""Label of (first axis, second axis): forward/back and right/left for moves, right/left and up/down for turns."""


@dataclass(frozen=True, slots=True)
class Action:
    """One trajectory of the dataset."""

    action_id: int
    name: str
    pose: str

    def to_json(self) -> dict[str, str | int]:
        """Plain JSON values."""
        return {"action_id": self.action_id, "name": self.name, "pose": self.pose}


@dataclass(frozen=True, slots=True)
class Cameras:
    """Cameras of a trajectory.

    Attributes:
        viewmats: float64 ``[T, 4, 4]`` world-to-camera.
        intrinsics: float64 ``[T, 3, 3]``, over image width and height.
        labels: int64 ``[T]``, 9 * move label + turn label.
    """

    viewmats: NDArray[np.float64]
    intrinsics: NDArray[np.float64]
    labels: NDArray[np.int64]


def actions_for(latent_frames: int) -> tuple[Action, ...]:
    """The four trajectories, each half one way and half back; for 32 latent frames exactly those of the dataset.

    Raises:
        SettingsError: fewer than three latent frames leave no motion either way.
    """
    there, back = (latent_frames - 1) // 2, latent_frames - 1 - (latent_frames - 1) // 2
    if there < 1:
        raise SettingsError(f"{latent_frames} latent frames are too few for a way there and back")
    pairs = (("w", "s"), ("a", "d"), ("up", "down"), ("left", "right"))
    return tuple(Action(number, f"{a}_{b}", f"{a}-{there},{b}-{back}") for number, (a, b) in enumerate(pairs))


def parse_pose(pose: str) -> list[str]:
    """One motion name per latent frame after the first.

    Raises:
        SettingsError: anything outside the grammar; the message gives it.
    """
    motions: list[str] = []
    for part in pose.split(","):
        match = _COMMAND.fullmatch(part.strip())
        if match is None or int(match[2]) == 0:
            raise SettingsError(f"pose {pose!r}: cannot read {part.strip()!r}; expected {GRAMMAR}")
        motions += [match[1]] * int(match[2])
    return motions


def _rotation(axis: str, angle: float) -> NDArray[np.float64]:
    cosine, sine = np.cos(angle), np.sin(angle)
    if axis == "yaw":
        return np.array([[cosine, 0.0, sine], [0.0, 1.0, 0.0], [-sine, 0.0, cosine]])
    return np.array([[1.0, 0.0, 0.0], [0.0, cosine, -sine], [0.0, sine, cosine]])


def _camera_to_world(motions: list[str]) -> NDArray[np.float64]:
    pose = np.eye(4)
    poses = [pose.copy()]
    for motion in motions:
        if motion in _TURN:
            axis, sign = _TURN[motion]
            pose[:3, :3] = pose[:3, :3] @ _rotation(axis, sign * np.deg2rad(STEP_DEGREES))
        else:
            pose[:3, 3] += pose[:3, :3] @ (STEP_UNITS * np.array(_MOVE[motion]))
        poses.append(pose.copy())
    return np.stack(poses)


def _cone(cosine: float) -> int:
    """1 within 60 degrees of an axis, -1 within 60 degrees of its opposite, else 0."""
    degrees = np.degrees(np.arccos(np.clip(cosine, -1.0, 1.0)))
    return 1 if degrees < 60 else (-1 if degrees > 120 else 0)


def _sign(degrees: float) -> int:
    return 1 if degrees > 0.05 else (-1 if degrees < -0.05 else 0)


def label_motion(relative: NDArray[np.float64]) -> int:
    """Action label of one relative camera-to-world pose ``[4, 4]``."""
    move = relative[:3, 3]
    length = float(np.linalg.norm(move))
    forward = right = 0
    if length > 1e-4:
        forward, right = _cone(move[2] / length), _cone(move[0] / length)
    rotation = relative[:3, :3]
    # Extrinsic x-y-z Euler angles of the relative rotation: pitch about x, yaw about y.
    pitch = float(np.degrees(np.arctan2(rotation[2, 1], rotation[2, 2])))
    yaw = float(np.degrees(np.arcsin(np.clip(-rotation[2, 0], -1.0, 1.0))))
    return 9 * _PAIR[(forward, right)] + _PAIR[(_sign(yaw), _sign(pitch))]


def cameras_of(pose: str, latent_frames: int) -> Cameras:
    """Cameras and labels of a pose string.

    Raises:
        SettingsError: the string is malformed, or stands for another number of latent frames.
    """
    motions = parse_pose(pose)
    if len(motions) + 1 != latent_frames:
        raise SettingsError(
            f"pose {pose!r} stands for {len(motions) + 1} latent frames ({4 * len(motions) + 1} pictures), expected {latent_frames}"
        )
    to_world = _camera_to_world(motions)
    viewmats = np.asarray(np.linalg.inv(to_world), np.float64)
    labels = np.zeros(latent_frames, np.int64)
    for frame in range(1, latent_frames):
        labels[frame] = label_motion(viewmats[frame - 1] @ to_world[frame])
    intrinsics = np.broadcast_to(np.array([[FOCAL_X, 0.0, 0.5], [0.0, FOCAL_Y, 0.5], [0.0, 0.0, 1.0]]), (latent_frames, 3, 3)).copy()
    return Cameras(viewmats, intrinsics, labels)
