"""The examples of docs/how-to/trainers.md: what each logger has stored is PyTorch's own peak of that part."""

from __future__ import annotations

import csv
import json
import struct
from pathlib import Path
from typing import Dict, Iterator, List

import pytest
from conftest import PROGRAMS, Workplace, blocks, python

GIB = 1 << 30
Metrics = Dict[str, float]


def run_example(workplace: Workplace, name: str) -> List[Metrics]:
    """Runs an example. Returns the metrics of each part, which are compared with PyTorch's peaks here."""
    assert name in workplace.write(blocks("trainers.md", "python"))
    workplace.record(python(), PROGRAMS / "with_torch_peaks.py", name)
    parts = json.loads((workplace.folder / "peaks.json").read_text())
    for part in parts:
        metrics = part["metrics"]
        assert round(metrics["memory/peak_GiB"] * GIB) == part["torch"] > 0
        by_category = {name: value for name, value in metrics.items() if name.startswith("memory/peak/")}
        assert by_category["memory/peak/parameter_GiB"] > 0
        assert sum(by_category.values()) == metrics["memory/peak_GiB"]
        assert metrics["memory/reserved_GiB"] >= metrics["memory/peak_GiB"]
    return [part["metrics"] for part in parts]


def test_lightning(workplace: Workplace) -> None:
    parts = run_example(workplace, "lightning_example.py")
    assert len(parts) == 2, "an epoch each"
    (path,) = (workplace.folder / "logs").rglob("metrics.csv")
    rows = [row for row in csv.DictReader(path.open()) if row["memory/peak_GiB"]]
    logged = [{name: float(value) for name, value in row.items() if name.startswith("memory/") and value} for row in rows]
    assert logged == parts
    assert [int(row["step"]) for row in rows] == [4, 8]
    assert "epoch *" in label_names(workplace)


def test_lightning_by_steps(workplace: Workplace) -> None:
    name, text = "lightning_example.py", blocks("trainers.md", "python")[0]
    (workplace.folder / name).write_text(text.replace("MemoryCallback()", "MemoryCallback(every_n_steps=3)"))
    workplace.record(python(), PROGRAMS / "with_torch_peaks.py", name)
    parts = json.loads((workplace.folder / "peaks.json").read_text())
    assert len(parts) == 2, "8 steps"
    assert [round(part["metrics"]["memory/peak_GiB"] * GIB) for part in parts] == [part["torch"] for part in parts]


def test_transformers(workplace: Workplace) -> None:
    name = "transformers_example.py"
    text = next(block for block in blocks("trainers.md", "python") if name in block)
    parts = run_example(workplace, name)
    assert len(parts) == 2, "4 steps, and a log every 2"
    (events,) = (workplace.folder / "output").rglob("events.out.tfevents.*")
    assert scalars(events.parent, "train/") == in_float32(parts)
    # The log history has them too, and a program without memtrace none.
    (workplace.folder / name).write_text(text + "print([entry.get('memory/peak_GiB') for entry in trainer.state.log_history])\n")
    alone = workplace.run(python(), name)
    assert "[None, None, None]" in alone.stdout
    recorded = workplace.run(workplace.environment["MEMTRACE_BIN"], "-q", "-o", "again", "--", python(), name)
    assert str([*(part["memory/peak_GiB"] for part in parts), None]) in recorded.stdout


def test_trackers(workplace: Workplace) -> None:
    parts = run_example(workplace, "trackers_example.py")
    assert len(parts) == 2
    assert list(wandb_history(workplace.folder)) == parts
    assert mlflow_metrics(workplace.folder / "mlruns") == parts
    assert scalars(workplace.folder / "tensorboard", "") == in_float32(parts)


@pytest.mark.parametrize("name", ["lightning_example.py", "trackers_example.py"])
def test_without_memtrace(workplace: Workplace, name: str) -> None:
    workplace.write(blocks("trainers.md", "python"))
    workplace.run(python(), PROGRAMS / "with_torch_peaks.py", name)
    assert json.loads((workplace.folder / "peaks.json").read_text()) == []


def test_a_recording_that_cannot_be_read_ends_no_training(workplace: Workplace) -> None:
    workplace.write(blocks("trainers.md", "python"))
    result = workplace.record(python(), "trackers_example.py", MEMTRACE_BIN="/nonexistent")
    assert "RuntimeWarning: memtrace cannot read the peak of epoch 1" in result.stderr


def label_names(workplace: Workplace) -> List[str]:
    return [row["name"] for process in workplace.summary()["processes"] for d in process["devices"] for row in d["labels"]]


def in_float32(parts: List[Metrics]) -> List[Metrics]:
    """TensorBoard stores float32."""
    return [{name: struct.unpack("f", struct.pack("f", value))[0] for name, value in part.items()} for part in parts]


def scalars(folder: Path, prefix: str) -> List[Metrics]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    by_step: Dict[int, Metrics] = {}
    for tag in events.Tags()["scalars"]:
        if tag.startswith(prefix + "memory/"):
            for event in events.Scalars(tag):
                by_step.setdefault(event.step, {})[tag[len(prefix) :]] = event.value
    return [by_step[step] for step in sorted(by_step)]


def mlflow_metrics(folder: Path) -> List[Metrics]:
    """The file store has a file for each metric: a time, a value and a step in each line."""
    by_step: Dict[int, Metrics] = {}
    for path in folder.rglob("metrics/memory/**/*_GiB"):
        name = path.as_posix().split("/metrics/", 1)[1]
        for line in path.read_text().splitlines():
            _, value, step = line.split()[:3]
            by_step.setdefault(int(step), {})[name] = float(value)
    return [by_step[step] for step in sorted(by_step)]


def wandb_history(folder: Path) -> Iterator[Metrics]:
    """The logged rows of an offline run. Its file has a header of 7 bytes, and then the records of LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.rglob("*.wandb")
    data = path.read_bytes()
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        # 1: all of a record, 4: its last part
        if kind in (1, 4):
            parsed = wandb_internal_pb2.Record.FromString(record)
            record = b""
            if parsed.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in parsed.history.item}
                yield {name: json.loads(value) for name, value in items.items() if name.startswith("memory/")}
