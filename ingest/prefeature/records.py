"""What training reads: records of the training manifest, the views on them, and their exact bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.errors import MetadataError, SelectionError
from ingest.prefeature import layout
from ingest.prefeature.config import DatasetConfig, read_config
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.manifest import key_of, read_manifest, referenced_files
from ingest.prefeature.reader import ALIGN
from ingest.prefeature.schema import case_schema, context_schema, step_schema, text_kv_schema
from ingest.prefeature.storefiles import FileKind, case_file, context_file, step_file, text_kv_file
from ingest.prefeature.tensorfile import TensorSpec

SHARED_STEP = ("action_labels", "target_viewmats", "target_Ks", "rope_temporal_size", "start_rope_start_idx")
CONTEXT_FIELDS = ("img_modulated", "context_valid_mask", "selected_frame_indices", "context_viewmats", "context_Ks")


class View(Enum):
    """What a training objective needs of a record.

    ``PREDICTOR`` reads everything; ``PREDICTOR_DISCA`` neither the previous hidden states nor the context features;
    ``ROLLOUT`` everything with the text K/V of all blocks.
    """

    PREDICTOR = "predictor"
    PREDICTOR_DISCA = "predictor_disca"
    ROLLOUT = "rollout"


class PreviousHidden(Enum):
    """Which hidden states of the previous chunk a pair i -> i+1 sees: those of step i+1, of step i, or both."""

    TARGET = "target"
    SOURCE = "source"
    BOTH = "both"

    def steps(self, steps: int) -> tuple[int, ...]:
        """Steps of the previous chunk that are read."""
        return {"target": tuple(range(1, steps)), "source": tuple(range(steps - 1)), "both": tuple(range(steps))}[self.value]


@dataclass(frozen=True, slots=True)
class FileRead:
    """Some tensors of one file.

    Attributes:
        role: ``step``, ``previous``, ``case``, ``text`` or ``context_BB``.
        path: relative path.
        names: tensors to read.
        solid: tensors in which zeros mean a hole.
        metadata: what the file must say about itself, so that a swapped or stale one is never trained on.
    """

    role: str
    path: str
    names: tuple[str, ...]
    solid: tuple[str, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RecordRequest:
    """Everything to read for one record.

    Attributes:
        key: primary key.
        reads: files and tensors.
        nbytes: buffer bytes that certainly suffice.
    """

    key: RecordKey
    reads: tuple[FileRead, ...]
    nbytes: int


def _payload(specs: Sequence[TensorSpec], names: tuple[str, ...]) -> int:
    chosen = set(names)
    return sum(spec.nbytes + ALIGN for spec in specs if spec.name in chosen)


class RecordIndex:
    """The training records of a dataset as arrays, with requests made on demand.

    Args:
        root: dataset root.
        view: what is read of a record.
        previous: which hidden states of the previous chunk.
        manifest: file name of the manifest.

    Raises:
        MetadataError: the manifest is unusable, or belongs to another build.
    """

    def __init__(
        self,
        root: Path,
        view: View = View.PREDICTOR,
        previous: PreviousHidden = PreviousHidden.TARGET,
        manifest: str = layout.TRAIN_MANIFEST,
    ) -> None:
        self.root = root
        self.view = view
        self.previous = previous
        self.config: DatasetConfig = read_config(root)
        self.records: list[dict[str, Any]] = read_manifest(root, manifest)
        keys = [key_of(record) for record in self.records]
        if not keys or len(set(keys)) != len(keys):
            raise MetadataError(f"{manifest}: {len(keys)} records with {len(set(keys))} different keys; merge the dataset again")
        for number, record in enumerate(self.records, 1):
            if record.get("build_fingerprint") != self.config.fingerprint:
                raise MetadataError(f"{manifest} line {number}: belongs to another build than {layout.CONFIG}")
            if view is not View.PREDICTOR_DISCA and "previous_step_tensor_file" not in record:
                raise MetadataError(f"{manifest} line {number}: {keys[number - 1]} has no previous chunk; view {view.value} needs one")
            referenced_files(record)
        self.keys: tuple[RecordKey, ...] = tuple(keys)
        # the history of a chunk, and with it the size of its context, is a matter of its action
        examples = {(key.action_id, key.chunk_id): number for number, key in enumerate(keys)}
        known = {kind: self._bytes(number) for kind, number in examples.items()}
        self.nbytes: NDArray[np.int64] = np.array([known[key.action_id, key.chunk_id] for key in keys], np.int64)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def pairs(self) -> int:
        """Supervised pairs of a record."""
        return self.config.sizes.steps - 1

    def _bytes(self, number: int) -> int:
        sizes, key = self.config.sizes, self.keys[number]
        frames = len(self.config.history(key.action_id)[key.chunk_id])
        schemas = {"step": step_schema(sizes), "previous": step_schema(sizes), "case": case_schema(sizes), "text": text_kv_schema(sizes)}
        return sum(_payload(schemas.get(read.role) or context_schema(sizes, frames), read.names) for read in self._reads(number))

    def _reads(self, number: int) -> tuple[FileRead, ...]:
        record, sizes, key = self.records[number], self.config.sizes, self.keys[number]
        steps = range(sizes.steps)
        targets = tuple(f"step_{step}_{name}" for step in steps for name in ("noisy_sample", "frame_condition", "final_hidden", "velocity"))
        times = tuple(f"step_{step}_timestep" for step in steps)
        reads = [FileRead("step", record["step_tensor_file"], (*SHARED_STEP, *times, *targets), targets, self._says(step_file, key))]
        if self.view is not View.PREDICTOR_DISCA:
            hidden = tuple(f"step_{step}_final_hidden" for step in self.previous.steps(sizes.steps))
            before = self._says(step_file, RecordKey(key.case_id, key.action_id, key.chunk_id - 1))
            reads.append(FileRead("previous", record["previous_step_tensor_file"], hidden, hidden, before))
            for block in sizes.blocks:
                path, says = record["context_prefeature_files"][f"{block:02d}"], self._says(context_file, key, block)
                reads.append(FileRead(f"context_{block:02d}", path, CONTEXT_FIELDS, ("img_modulated",), says))
        image, case = ("image_condition_latent",), self._says(case_file, key.case_id)
        if self.view is View.ROLLOUT:
            reads.append(FileRead("case", record["case_tensor_file"], image, image, case))
            every = tuple(spec.name for spec in text_kv_schema(sizes))
            reads.append(FileRead("text", record["text_kv_all54_file"], every, (), self._says(text_kv_file, key.case_id)))
        else:
            reads.append(FileRead("case", record["case_tensor_file"], tuple(spec.name for spec in case_schema(sizes)), image, case))
        return tuple(reads)

    def _says(self, kind_of: Callable[..., FileKind], *which: Any) -> dict[str, str]:
        kind = kind_of(self.config, *which)
        return self.config.metadata(kind.kind, kind.key)

    def request(self, number: int) -> RecordRequest:
        """What to read for record ``number``.

        Raises:
            SelectionError: there is no such record.
        """
        if not 0 <= number < len(self.records):
            raise SelectionError(f"record {number} is outside 0..{len(self.records) - 1}")
        return RecordRequest(self.keys[number], self._reads(number), int(self.nbytes[number]))

    def text_blocks(self) -> tuple[int, ...]:
        """Blocks whose text K/V the view reads."""
        return tuple(range(self.config.sizes.depth)) if self.view is View.ROLLOUT else self.config.sizes.blocks

    def summary(self) -> Mapping[str, Any]:
        """Counts and bytes for reports."""
        return {
            "records": len(self),
            "pairs": len(self) * self.pairs,
            "bytes": int(self.nbytes.sum()),
            "least_bytes": int(self.nbytes.min()),
            "most_bytes": int(self.nbytes.max()),
        }
