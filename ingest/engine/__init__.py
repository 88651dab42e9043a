"""The single-process engine, and the parts it shares with the Ray stream.

```
UnitRequest ─▶ UnitReader ─▶ UnitData (rows + compressed pictures) ─▶ decode_run ─▶ slots ─▶ BatchAssembler ─▶ batch
```
"""

from __future__ import annotations

from ingest.engine.assemble import BatchAssembler, PlannedSamples, Sample, SampleKey, Transform
from ingest.engine.counters import COUNTERS, Counters
from ingest.engine.damage import DamagePolicy, DamageRecord, DamageReport
from ingest.engine.dataset import Dataset, iter_samples, open_dataset
from ingest.engine.rendering import RenderStage
from ingest.engine.spec import ReadOptions, SampleSpec

__all__ = [
    "COUNTERS",
    "BatchAssembler",
    "Counters",
    "DamagePolicy",
    "DamageRecord",
    "DamageReport",
    "Dataset",
    "PlannedSamples",
    "ReadOptions",
    "RenderStage",
    "Sample",
    "SampleKey",
    "SampleSpec",
    "Transform",
    "iter_samples",
    "open_dataset",
]
