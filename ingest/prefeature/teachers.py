"""Which teacher to use, as plain data that travels to worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ingest.errors import ResourceUnavailableError, SettingsError
from ingest.prefeature.sizes import Sizes
from ingest.prefeature.teacher import Teacher


@dataclass(frozen=True, slots=True)
class TeacherChoice:
    """A teacher by name.

    Attributes:
        name: ``reference`` or ``hy_worldplay``.
        sizes: of the dataset, as JSON.
        seed: weights of the reference teacher.
        checkpoint: action-distilled weights of the real teacher.
        checkout: folder of the user's own copy of the model code.
        model_path: folder with the real teacher's other models.
        device: torch device of the transformer.
    """

    name: str
    sizes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seed: int = 0
    checkpoint: str = ""
    checkout: str = ""
    model_path: str = ""
    device: str = "cpu"

    def make(self) -> Teacher:
        """Loads the teacher; minutes for the real one.

        Raises:
            SettingsError: unknown name, or a setting that the teacher needs is empty.
            ResourceUnavailableError: this machine cannot run the teacher.
        """
        sizes = Sizes.from_json(dict(self.sizes))
        if self.name == "reference":
            from ingest.prefeature.reference import ReferenceTeacher

            try:
                torch.empty(1, device=self.device)
            except (RuntimeError, AssertionError) as error:
                raise ResourceUnavailableError(
                    f"this machine has no {self.device!r} ({str(error).splitlines()[0]}); the reference teacher runs on --device cpu too"
                ) from error
            return ReferenceTeacher(sizes, self.seed, self.device)
        if self.name == "hy_worldplay":
            from ingest.prefeature.hy_worldplay import open_teacher

            return open_teacher(self, sizes)
        raise SettingsError(f"unknown teacher {self.name!r}: use 'reference' or 'hy_worldplay'")
