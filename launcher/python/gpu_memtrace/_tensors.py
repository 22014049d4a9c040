"""A table of all tensors, and of the allocated blocks that no tensor of Python uses.

The blocks come from PyTorch's allocator, so their sum is ``torch.cuda.memory_allocated()``. The tensors come from
Python's garbage collector. The recording says what the other blocks are: their category, and the line that allocated
them. No tensor is kept beyond the call.
"""

from __future__ import annotations

import bisect
import csv
import gc
import pickle
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from gpu_memtrace import _library, _recording
from gpu_memtrace._sizes import size_text

#: How often the blocks are read again because another thread has allocated or freed memory meanwhile.
_ATTEMPTS = 3
_WIDTH = 92


@dataclass(frozen=True)
class TensorRow:
    """A tensor, or a block that no tensor of Python uses."""

    name: str
    #: ``float32``; empty for a block without a tensor.
    dtype: str
    #: The shape; empty for a block without a tensor, and for a scalar.
    shape: Tuple[int, ...]
    #: The number of elements.
    numel: int
    #: The bytes of the tensor's block on a GPU, or of its storage on the CPU. 0 where another row has counted them.
    used_bytes: int
    #: The name of the row that has counted the memory. None for that row itself.
    shared_with: Optional[str] = None
    #: False for a block that no tensor of Python uses.
    is_tensor: bool = True
    #: The line of the program that allocated the memory, where the recording knows it: ``train.py:17``.
    allocated_at: Optional[str] = None
    #: Whether the model or the optimizer has given the name.
    has_name: bool = False
    #: The category of the memory, where the recording knows it: ``activation``.
    category: Optional[str] = None


@dataclass(frozen=True)
class DeviceTensors:
    """The rows of one device."""

    device: str
    rows: Sequence[TensorRow]
    #: ``torch.cuda.memory_allocated()`` of a GPU; the bytes of all storages for the CPU.
    allocated_bytes: int

    @property
    def used_bytes(self) -> int:
        """The sum of all rows. On a GPU it is ``allocated_bytes``."""
        return sum(row.used_bytes for row in self.rows)

    @property
    def numel(self) -> int:
        """The number of elements of all tensors."""
        return sum(row.numel for row in self.rows)


@dataclass(frozen=True)
class TensorReport:
    """The tensors of all devices. ``str()`` gives the table."""

    devices: Mapping[str, DeviceTensors]
    remarks: Sequence[str] = field(default_factory=tuple)

    def __getitem__(self, device: Any) -> DeviceTensors:
        return self.devices[str(device)]

    def __iter__(self) -> Iterator[DeviceTensors]:
        return iter(self.devices.values())

    def __str__(self) -> str:
        return self.text()

    def text(self, device: Optional[Any] = None, verbose: bool = True) -> str:
        """The table of one device or of all. ``verbose`` names the row that has counted shared memory."""
        lines = [_row("Element type", "Size", "Used MEM")]
        for listed in self:
            if device is not None and listed.device != str(device):
                continue
            lines += ["-" * _WIDTH, f"Storage on {listed.device}"]
            for row in listed.rows:
                shared = f"(->{row.shared_with})" if verbose and row.shared_with is not None else ""
                shape = str(row.shape or (1,)) if row.is_tensor else ""
                place = f" at {row.allocated_at}" if row.allocated_at and not row.has_name and not shared else ""
                lines.append(_row(row.name + shared + place, shape, size_text(row.used_bytes)))
            lines.append("-" * _WIDTH)
            lines.append(f"Total elements: {listed.numel:,}   Used memory: {size_text(listed.used_bytes)}")
            if listed.device != "cpu":
                allocated = size_text(listed.allocated_bytes)
                lines.append(f"torch.cuda.memory_allocated() of {listed.device}: {allocated}")
                if listed.used_bytes != listed.allocated_bytes:
                    lines.append("Another thread has allocated or freed memory meanwhile")
            lines.append("-" * _WIDTH)
        return "\n".join([*lines, *self.remarks]) + "\n"


def _row(name: str, size: str, memory: str) -> str:
    return f"{name:<53s}{size:>25s}{memory:>14s}".rstrip()


class _Block(NamedTuple):
    address: int
    size: int


class _Description(NamedTuple):
    """A block in the recording."""

    what: str
    category: Optional[str]
    allocated_at: Optional[str]


class _Seen(NamedTuple):
    """A tensor without a reference to it."""

    name: str
    rank: int
    device: str
    dtype: str
    shape: Tuple[int, ...]
    numel: int
    storage: int
    storage_bytes: int


def tensors(model: Any = None, optimizer: Any = None) -> TensorReport:
    """All tensors by device, and the allocated blocks that no tensor of Python uses.

    ``model`` (an ``nn.Module``) and ``optimizer`` give names to parameters, gradients, buffers and optimizer state. On
    a GPU, the rows add up to ``torch.cuda.memory_allocated()``. In a recorded process, each block without a tensor has
    its category and the line that allocated it.
    """
    names: Dict[int, str] = {}
    if model is not None:
        add_model(names, model)
    if optimizer is not None:
        add_optimizer(names, optimizer)
    return report_of(names)


def add_model(names: Dict[int, str], model: Any) -> None:
    """Names the parameters and buffers of a module. A tensor with several names has all of them, joined by ``+``."""
    found: Dict[int, List[str]] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            found.setdefault(id(tensor), []).append(name)
    names.update((key, "+".join(listed)) for key, listed in found.items())


def add_optimizer(names: Dict[int, str], optimizer: Any) -> None:
    """Names the tensors in an optimizer's state: ``Adam.weight.exp_avg``."""
    torch = sys.modules["torch"]
    kind = type(optimizer).__name__
    numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    for parameter, state in optimizer.state.items():
        owner = names.get(id(parameter)) or f"param{numbers.get(id(parameter), '')}"
        for key, value in state.items() if hasattr(state, "items") else ():
            if issubclass(type(value), torch.Tensor):
                names[id(value)] = f"{kind}.{owner}.{key}"


def report_of(names: Dict[int, str]) -> TensorReport:
    """The report. ``names`` are those of tensors by their ``id``."""
    torch = sys.modules.get("torch")
    if torch is None:
        return TensorReport({})
    is_initialized = bool(torch.cuda.is_available() and torch.cuda.is_initialized())
    count = torch.cuda.device_count() if is_initialized else 0
    for _ in range(_ATTEMPTS):
        blocks = _blocks(torch, count)
        seen = _seen(torch, names)
        allocated = [int(torch.cuda.memory_allocated(device)) for device in range(count)]
        if all(sum(block.size for block in blocks[device]) == allocated[device] for device in range(count)):
            break
    by_device: Dict[str, List[_Seen]] = {}
    for one in seen:
        by_device.setdefault(one.device, []).append(one)
    tables: Dict[str, List[TensorRow]] = {}
    descriptions, remarks = _descriptions(any(blocks))
    for device in range(count):
        described = {
            address: description
            for (of, address, size), description in descriptions.items()
            if of == device and _Block(address, size) in blocks[device]
        }
        rows, without_tensor = _gpu_rows(by_device.pop(f"cuda:{device}", []), blocks[device], described)
        for block in sorted(without_tensor, key=lambda block: -block.size):
            found = described.get(block.address, _Description("a block without a tensor", None, None))
            rows.append(
                TensorRow(found.what, "", (), 0, block.size, None, False, found.allocated_at, category=found.category)
            )
        if rows:
            tables[f"cuda:{device}"] = rows
    for name, listed in by_device.items():
        tables[name] = _storage_rows(listed)
    devices = {}
    for name in sorted(tables, key=lambda name: (name != "cpu", name)):
        rows = tables[name]
        is_gpu = name.startswith("cuda:")
        total = allocated[int(name[5:])] if is_gpu else sum(row.used_bytes for row in rows)
        devices[name] = DeviceTensors(name, tuple(rows), total)
    return TensorReport(devices, tuple(remarks))


def _blocks(torch: Any, count: int) -> List[List[_Block]]:
    """The allocated blocks of each device, by address."""
    found: List[List[_Block]] = [[] for _ in range(count)]
    if count:
        for segment in torch.cuda.memory_snapshot():
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    found[segment["device"]].append(_Block(address, block["size"]))
                address += block["size"]
    for listed in found:
        listed.sort()
    return found


def _seen(torch: Any, names: Dict[int, str]) -> List[_Seen]:
    """All tensors of the garbage collector with their gradients, named ones first."""
    found: List[_Seen] = []
    done: Set[int] = set()
    numbers: Dict[str, int] = {}

    def name_of(tensor: Any) -> Tuple[str, int]:
        name = names.get(id(tensor))
        if name is not None:
            return name, 0
        kind = type(tensor).__name__
        number = numbers.get(kind, 0)
        numbers[kind] = number + 1
        return f"{kind}{number}", 1

    def add(tensor: Any, name: str, rank: int) -> None:
        if id(tensor) in done:
            return
        done.add(id(tensor))
        for suffix, part in _parts(tensor):
            one = _facts(part, name + suffix, rank)
            if one is not None:
                found.append(one)

    objects = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    # Named tensors first, in the order of their names, so that their gradients have names.
    order = {key: index for index, key in enumerate(names)}
    objects.sort(key=lambda tensor: order.get(id(tensor), len(order)))
    for tensor in objects:
        # The gradient of another tensor may be known already under its own name.
        if id(tensor) in done:
            continue
        name, rank = name_of(tensor)
        add(tensor, name, rank)
        try:
            gradient = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
        except RuntimeError:
            gradient = None
        if gradient is not None and id(gradient) not in done:
            add(gradient, names.get(id(gradient), f"{name}.grad"), rank)
        gradient = None
    tensor = None
    objects.clear()
    return found


def _parts(tensor: Any) -> List[Tuple[str, Any]]:
    """The tensors that have the memory: of a sparse tensor, its indices and values."""
    layout = str(getattr(tensor, "layout", ""))
    try:
        if layout == "torch.sparse_coo":
            return [(".indices", tensor._indices()), (".values", tensor._values())]
        if layout in ("torch.sparse_csr", "torch.sparse_bsr"):
            names = (".crow_indices", ".col_indices", ".values")
            return list(zip(names, (tensor.crow_indices(), tensor.col_indices(), tensor.values())))
        if layout in ("torch.sparse_csc", "torch.sparse_bsc"):
            names = (".ccol_indices", ".row_indices", ".values")
            return list(zip(names, (tensor.ccol_indices(), tensor.row_indices(), tensor.values())))
    except (RuntimeError, NotImplementedError):
        return []
    return [("", tensor)]


def _facts(tensor: Any, name: str, rank: int) -> Optional[_Seen]:
    # Tensors without memory of their own have no storage: fake ones, and subclasses that hold other tensors.
    try:
        storage = tensor.untyped_storage()
        address, size = int(storage.data_ptr()), int(storage.nbytes())
        device = tensor.device
        if device.type == "meta" or size == 0 or address == 0:
            return None
        numel = int(tensor.numel())
        shape = tuple(int(length) for length in tensor.shape)
        dtype = str(tensor.dtype).replace("torch.", "")
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return None
    return _Seen(name, rank, str(device), dtype, shape, numel, address, size)


def _in_order(seen: List[_Seen]) -> List[_Seen]:
    return sorted(seen, key=lambda one: one.rank)


def _gpu_rows(
    seen: List[_Seen], blocks: List[_Block], described: Mapping[int, _Description]
) -> Tuple[List[TensorRow], List[_Block]]:
    """The rows of a GPU's tensors, and the blocks that none of them uses."""
    starts = [block.address for block in blocks]
    owners: Dict[int, str] = {}
    rows: List[TensorRow] = []
    for one in _in_order(seen):
        at = bisect.bisect_right(starts, one.storage) - 1
        block = blocks[at] if at >= 0 and one.storage < blocks[at].address + blocks[at].size else None
        # Memory that PyTorch's allocator does not count, such as that of another process or library.
        used, owner = (0, "memory outside PyTorch's allocator") if block is None else (block.size, None)
        if block is not None:
            owner = owners.get(at)
            if owner is not None:
                used = 0
            else:
                owners[at] = one.name
        found = None if block is None else described.get(block.address)
        rows.append(
            TensorRow(
                one.name,
                one.dtype,
                one.shape,
                one.numel,
                used,
                owner,
                allocated_at=found.allocated_at if found else None,
                has_name=one.rank == 0,
                category=found.category if found else None,
            )
        )
    return rows, [block for at, block in enumerate(blocks) if at not in owners]


def _storage_rows(seen: List[_Seen]) -> List[TensorRow]:
    """The rows of tensors on the CPU, by storage."""
    owners: Dict[int, str] = {}
    rows = []
    for one in _in_order(seen):
        owner = owners.setdefault(one.storage, one.name) if one.storage in owners else None
        owners.setdefault(one.storage, one.name)
        used = 0 if owner else one.storage_bytes
        rows.append(TensorRow(one.name, one.dtype, one.shape, one.numel, used, owner, has_name=one.rank == 0))
    return rows


def _descriptions(has_blocks: bool) -> Tuple[Dict[Tuple[int, int, int], _Description], List[str]]:
    """The allocated blocks in the recording, by device, address and size."""
    if not has_blocks:
        return {}, []
    if _library.library is None:
        help_text = (
            f"memtrace does not record this process: blocks without a tensor have no lines; {_library.LAUNCH_HELP}"
        )
        return {}, [help_text]
    try:
        trace = _recording.flushed_trace()
        if trace is None:
            return {}, []
        with tempfile.TemporaryDirectory(prefix="gpu_memtrace-") as folder:
            table, picture = Path(folder, "blocks.csv"), Path(folder, "blocks.pickle")
            _recording.run_binary("export", trace, "--to", "csv", "--output", table)
            _recording.run_binary("export", trace, "--to", "snapshot", "--output", picture)
            return _described(table, picture), []
    except (_library.RecordingError, OSError) as error:
        return {}, [f"the recording cannot be read: {error}"]


def _described(table: Path, picture: Path) -> Dict[Tuple[int, int, int], _Description]:
    lines: Dict[Tuple[int, int], str] = {}
    # memtrace has just written this file into a folder of our own.
    with picture.open("rb") as file:
        for segment in pickle.load(file)["segments"]:
            for block in segment["blocks"]:
                place = _own_line(block.get("frames") or [])
                if place:
                    lines[segment["device"], block["address"]] = place
    found: Dict[Tuple[int, int, int], _Description] = {}
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["free_ns"]:
                continue
            device, address, size = int(row["device"]), int(row["address"]), int(row["size"])
            what = row["name"] or _category(row["category"], row["node"])
            allocated_at = lines.get((device, address)) or row["frame"] or None
            found[device, address, size] = _Description(what, row["category"], allocated_at)
    return found


def _category(category: str, node: str) -> str:
    text = {
        "activation": "saved for backward",
        "autograd_detail": "autograd temporary",
        "optimizer_state": "optimizer state",
        "unknown": "a block without a tensor",
    }.get(category, category)
    return f"{text} ({node})" if node else text


def _own_line(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost line of the program itself, or of a library where there is none."""
    own = [frame for frame in frames if "site-packages" not in frame["filename"] and frame["filename"].endswith(".py")]
    for frame in own or [frame for frame in frames if frame["line"]]:
        return f"{Path(frame['filename']).name}:{frame['line']}"
    return ""
