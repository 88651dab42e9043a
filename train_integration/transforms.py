"""Image transforms that give a sample the same augmentation in every topology, in every process, and after a resume.

A transform's randomness comes from the sample alone: from (seed, epoch, global frame index, camera). All pictures of one
camera's window get the same draw, so that an augmentation does not flicker.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ingest.engine.assemble import Sample, SampleKey, Transform, refuse_other_form
from ingest.errors import SettingsError


def seed_of(key: SampleKey) -> int:
    """A number in 0..2**63 - 1 that depends on everything in the key and on nothing else."""
    text = f"{key.seed}\0{key.epoch}\0{key.index}\0{key.camera}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def generator_of(key: SampleKey) -> np.random.Generator:
    """A NumPy generator for one sample and camera."""
    return np.random.default_rng(seed_of(key))


@dataclass(frozen=True, slots=True)
class SeededTransform:
    """Applies a function that draws from a generator of its own. Pickles where the function does.

    Attributes:
        function: ``(picture HWC uint8, numpy.random.Generator)`` → picture HWC; the same shape for every sample.
    """

    function: Callable[[NDArray[Any], np.random.Generator], NDArray[Any]]

    def __call__(self, picture: NDArray[Any], key: SampleKey) -> NDArray[Any]:
        """The transformed picture."""
        return self.function(picture, generator_of(key))


@dataclass(frozen=True, slots=True)
class TorchTransform:
    """Applies a callable in torchvision's style: uint8 tensor CHW in, tensor CHW out. Pickles where the callable does.

    Such callables draw from the global generators of torch, NumPy and Python. Those are seeded from the sample for the
    duration of the call and put back afterwards, so that the training loop's own randomness is not touched. Since another
    thread could draw in between, a stream makes these calls on the thread of the training loop.

    Attributes:
        function: for example a ``torchvision.transforms.v2.Compose``.
    """

    function: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, picture: NDArray[Any], key: SampleKey) -> NDArray[Any]:
        """The transformed picture, HWC.

        Raises:
            SettingsError: the callable returned no tensor of shape (C, H, W).
        """
        seed = seed_of(key)
        python, numpy = random.getstate(), np.random.get_state()
        # Only the CPU's generator: forking those of devices costs a synchronisation for each picture.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            try:
                shown: Any = self.function(torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1))
            finally:
                random.setstate(python)
                np.random.set_state(numpy)
        if not isinstance(shown, torch.Tensor) or shown.ndim != 3:
            found = tuple(shown.shape) if isinstance(shown, torch.Tensor) else type(shown).__name__
            raise SettingsError(f"image_transforms must return a tensor of shape (C, H, W), found {found}")
        return shown.permute(1, 2, 0).contiguous().numpy()


def as_transform(function: Callable[..., Any]) -> Transform:
    """A picture transform from whatever a user has.

    Args:
        function: a callable with exactly two positional parameters, ``(picture HWC, SampleKey)``, stays as it is;
            anything else, as modules and compositions of torchvision, is called with a uint8 tensor CHW.
    """
    if isinstance(function, SeededTransform | TorchTransform):
        return function
    if isinstance(function, torch.nn.Module):
        return TorchTransform(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return TorchTransform(function)
    plain = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty]
    return function if len(plain) == 2 else TorchTransform(function)


def transform_batch(
    batch: Sample, transform: Transform, keys: Sequence[str], index: NDArray[np.int64], *, seed: int, epoch: int, as_uint8: bool
) -> Sample:
    """A batch with its colour pictures transformed, equal to one that was assembled with the transform.

    Args:
        batch: uint8 pictures (B, C, H, W) or (B, T, C, H, W).
        transform: as given to the stream.
        keys: features with pictures.
        index: int64[B], global frame indices of the anchors.
        seed: order seed.
        epoch: epoch number.
        as_uint8: whether pictures stay uint8 instead of float32 in [0, 1].
    """
    out = dict(batch)
    for key in keys:
        pictures = batch[key]
        if not isinstance(pictures, np.ndarray) or pictures.ndim < 4 or pictures.dtype != np.uint8:
            continue
        if pictures.shape[-3] == 3:
            windowed = pictures if pictures.ndim == 5 else pictures[:, None]
            rows = [
                [transform(np.moveaxis(picture, 0, -1), SampleKey(seed, epoch, int(number), key)) for picture in moments]
                for moments, number in zip(windowed, index, strict=True)
            ]
            for picture in (picture for moments in rows for picture in moments):
                refuse_other_form(key, picture, rows[0][0].shape, rows[0][0].dtype)
            shown = np.moveaxis(np.array(rows), -1, -3)
            pictures = shown if pictures.ndim == 5 else shown[:, 0]
        if not as_uint8 and pictures.dtype == np.uint8:
            pictures = np.ascontiguousarray(pictures).astype(np.float32) / np.float32(255)
        out[key] = pictures
    return out
