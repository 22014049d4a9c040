"""The magics ``%memtrace`` and ``%%memtrace`` of notebooks, and the source of cells for the reports.

IPython is not imported: its shell comes with the call of :func:`load_ipython_extension`.
"""

from __future__ import annotations

import ast
import getopt
import importlib
import importlib.util
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Sequence, Set, Tuple, cast

from gpu_memtrace import _library, _recording
from gpu_memtrace._figures import code_of
from gpu_memtrace._line_profiler import DEFAULT_COLUMNS, LineProfiler, LineTables, check_columns

KERNEL_HELP = (
    "run `memtrace kernel install` once in the environment of this notebook, and choose the kernel that it installs, "
    "or record a part of it: with gpu_memtrace.Recorder():"
)
TERMINAL_HELP = "start it with memtrace: memtrace -- ipython"
#: How many functions a page has without -f.
_TOP = 20
#: The heights of the frames in a notebook, in pixels. That of a line table depends on its rows.
_REPORT_HEIGHT, _LINES_HEIGHTS, _ROW_HEIGHT = 720, (240, 560), 26

_SHORT = "f:c:Drg:qT:td"
_LONG = (
    "function=",
    "column=",
    "no_default_columns",
    "return-profiler",
    "gpu=",
    "quiet",
    "dump-profile=",
    "timeline",
    "dry-run",
)

#: The text of `%memtrace?`.
_HELP = """Shows what each line of a statement or of a cell does to GPU memory.

    %memtrace [OPTIONS] STATEMENT
    %%memtrace [OPTIONS]

Without -f, the lines of all functions that allocate or free memory are shown, except those of installed packages.
`%memtrace` alone shows the report of the recording so far.

    -f, --function FUNC       Show this function. May be repeated. FUNC may be defined by the cell itself
    -c, --column COLUMN       Add a column: a name of torch.cuda.memory_stats, or `diff`. May be repeated
    -D, --no_default_columns  Show only the columns of -c
    -g, --gpu GPU             Show this GPU; -1 is the CPU. The default shows each device with figures
    -d, --dry-run             Run the cell as a program of its own over a simulated GPU; -g NAME selects it, such as
                              a100-40gb. The cell imports and defines all that it uses
    -t, --timeline            Show the report of the recording too; its timeline shows this cell first
    -r, --return-profiler     Return the LineProfiler instead of its result
    -q, --quiet               Show nothing
    -T, --dump-profile FILE   Write the table as text into this file

The options come before the statement. `%mlrun` and `%%mlrun` are the same magics.
"""


class MagicUsageError(Exception):
    """The line of a magic is not valid."""


@dataclass
class _Options:
    functions: List[str] = field(default_factory=list)
    columns: List[str] = field(default_factory=list)
    default_columns: bool = True
    return_profiler: bool = False
    gpu: Optional[int] = None
    quiet: bool = False
    timeline: bool = False
    dry_run: bool = False
    #: The name of the simulated GPU.
    simulated: Optional[str] = None
    dump: Optional[str] = None
    statement: str = ""

    @property
    def all_columns(self) -> Tuple[str, ...]:
        return (*(DEFAULT_COLUMNS if self.default_columns else ()), *self.columns)

    @property
    def has_columns(self) -> bool:
        """Whether the user chose columns."""
        return bool(self.columns) or not self.default_columns


def _parse(line: str) -> _Options:
    """The options, and the rest of the line as it is."""
    words = list(re.finditer(r"(?:\"[^\"]*\"|'[^']*'|\S)+", line))
    try:
        found, rest = getopt.getopt([word.group() for word in words], _SHORT, _LONG)
    except getopt.GetoptError as error:
        raise MagicUsageError(f"{error}; %memtrace? lists the options") from None
    options = _Options()
    if rest:
        options.statement = line[words[-len(rest)].start() :].strip()
    options.dry_run = any(name in ("-d", "--dry-run") for name, _ in found)
    for name, value in found:
        if value[:1] in ("'", '"') and value[-1:] == value[:1]:
            value = value[1:-1]
        if name in ("-f", "--function"):
            options.functions.append(value)
        elif name in ("-c", "--column"):
            options.columns.append(value)
        elif name in ("-D", "--no_default_columns"):
            options.default_columns = False
        elif name in ("-r", "--return-profiler"):
            options.return_profiler = True
        elif name in ("-d", "--dry-run"):
            continue
        elif name in ("-g", "--gpu") and options.dry_run:
            options.simulated = value
        elif name in ("-g", "--gpu"):
            if not re.fullmatch(r"-1|\d+", value):
                raise MagicUsageError(f"{value} is no number of a GPU")
            options.gpu = int(value)
        elif name in ("-q", "--quiet"):
            options.quiet = True
        elif name in ("-t", "--timeline"):
            options.timeline = True
        else:
            options.dump = value
    try:
        check_columns(options.columns)
    except ValueError as error:
        raise MagicUsageError(str(error)) from None
    if options.dry_run and any(name not in ("-d", "--dry-run", "-g", "--gpu", "-q", "--quiet") for name, _ in found):
        raise MagicUsageError("--dry-run shows the report of the cell; of the other options, it has only -g and -q")
    if options.has_columns and not options.functions:
        raise MagicUsageError("-c and -D need a function: -f FUNC")
    return options


@dataclass(frozen=True)
class Page:
    """An interactive page of memtrace, as one HTML document that loads nothing."""

    title: str
    html: str
    height: int
    is_open: bool = True

    def frame(self) -> str:
        """The page inside another page. Its scripts cannot reach the notebook."""
        frame = (
            f'<iframe class="memtrace" title="{escape(self.title)}" sandbox="allow-scripts" '
            f'srcdoc="{escape(self.html)}" '
            f'style="width: 100%; height: {self.height}px; border: 0; resize: vertical; overflow: auto"></iframe>'
        )
        if self.is_open:
            return frame
        return f"<details><summary>{escape(self.title)}</summary>{frame}</details>"


@dataclass(frozen=True, repr=False)
class CellReport:
    """The output of a magic: pages in a notebook, text elsewhere (``str()``)."""

    text: str
    pages: Sequence[Page] = ()
    #: The JSON of `memtrace lines` by device.
    lines: Dict[int, Any] = field(default_factory=dict)
    #: The columns that were asked for; the pages have columns of their own.
    tables: Optional[LineTables] = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text.rstrip("\n")

    def _repr_html_(self) -> str:
        if not self.pages:
            return f"<pre>{escape(self.text)}</pre>"
        tables = [] if self.tables is None else [self.tables._repr_html_()]
        return "\n".join([*tables, *(page.frame() for page in self.pages)])


class Magics:
    """``%memtrace`` and ``%%memtrace`` of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._range_names: Set[str] = set()

    def run(self, line: str, cell: Optional[str] = None, local_ns: Optional[Dict[str, Any]] = None) -> Any:
        # IPython leaves this frame out of tracebacks.
        __tracebackhide__ = True
        try:
            options = _parse(line)
            if cell is None and not options.statement:
                if line.strip():
                    raise MagicUsageError("the statement is missing: %memtrace [OPTIONS] STATEMENT")
                return self._report()
            if cell is not None and options.statement:
                raise MagicUsageError(f"unexpected {options.statement}: the code of %%memtrace begins in the next line")
            if options.dry_run:
                return self._dry_run(options, options.statement if cell is None else cell)
            return self._run(options, line, cell, local_ns)
        except MagicUsageError as error:
            raise _ipython("IPython.core.error").UsageError(str(error)) from None

    def _run(self, options: _Options, line: str, cell: Optional[str], local_ns: Optional[Dict[str, Any]]) -> Any:
        __tracebackhide__ = True
        shell = self._shell
        # A comment keeps the numbers of the lines as they are in the cell.
        source = options.statement if cell is None else f"#%%memtrace {line}\n{cell}"
        code, defined = self._compiled(source)
        names = {**shell.user_ns, **(local_ns or {})}
        # Names that the cell defines are looked up when the cell has defined them.
        functions = {name: _lookup(name, names) for name in options.functions if name.split(".")[0] not in defined}
        profiler = LineProfiler(target_gpu=options.gpu)
        profiler.name_range(self._range_name())
        for function in functions.values():
            profiler.add_function(function)
        callers = _callers()
        try:
            with profiler:
                if local_ns is None or local_ns is shell.user_ns:
                    exec(code, shell.user_ns)
                else:
                    exec(code, shell.user_ns, local_ns)
        except BaseException:
            # An out-of-memory error, or Ctrl+C: the figures up to then say why.
            if not options.quiet:
                self._show_failed(profiler, options, callers)
            raise
        names = {**shell.user_ns, **(local_ns or {})}
        for name in options.functions:
            if name not in functions:
                profiler.add_function(_lookup(name, names))
        if options.quiet and options.dump is None:
            return profiler if options.return_profiler else None
        report = self._cell_report(profiler, options, callers)
        if options.dump is not None:
            Path(options.dump).write_text(str(report), encoding="utf-8")
        if options.return_profiler:
            return profiler
        return None if options.quiet else report

    def _dry_run(self, options: _Options, source: str) -> Optional[CellReport]:
        """Runs code as a program over a simulated GPU."""
        with tempfile.TemporaryDirectory() as folder:
            run, program = Path(folder, "run"), Path(folder, "cell.py")
            program.write_text(self._shell.transform_cell(source), encoding="utf-8")
            gpu = [] if options.simulated is None else ["--gpu", options.simulated]
            command = [_recording.binary(), "dry-run", "--quiet", "--output", str(run), *gpu, "--", sys.executable]
            # The program may print more than a pipe holds.
            with open(Path(folder, "output"), "w+b") as output:
                environment = {**_recording.outside_environment(), "PYTHONUNBUFFERED": "1"}
                # An interrupt reaches this process, which ends all of the program.
                dry_run = subprocess.Popen(
                    [*command, str(program)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    status = dry_run.wait()
                except BaseException:
                    os.killpg(dry_run.pid, signal.SIGKILL)
                    dry_run.wait()
                    raise
                output.seek(0)
                printed = output.read().decode(errors="replace")
            if not Path(run, "summary.json").exists():
                error, _, help = printed.strip().partition("\nhelp: ")
                raise MagicUsageError(f"{error.rpartition('error: ')[2]}; {help}" if help else error)
            (sys.stderr if status else sys.stdout).write(printed)
            return None if options.quiet else report_of_run(run)

    def _show_failed(self, profiler: LineProfiler, options: _Options, callers: FrozenSet[Tuple[str, str]]) -> None:
        try:
            report = self._cell_report(profiler, options, callers)
        except (_library.RecordingError, OSError) as error:
            # The error of the cell is of more interest.
            report = CellReport(f"memtrace cannot show the figures: {error}")
        _ipython("IPython.display").display(report)

    def _compiled(self, source: str) -> Tuple[types.CodeType, Set[str]]:
        """The code of a cell, under the name that tracebacks know, and the names that it defines."""
        shell = self._shell
        text = shell.transform_cell(source)
        name = shell.compile.cache(text, shell.execution_count, raw_code=source)
        save_source(name, text)
        tree = shell.transform_ast(shell.compile.ast_parse(text, name))
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        defined = {node.name for node in ast.walk(tree) if isinstance(node, definitions)}
        stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        return shell.compile(tree, name, "exec"), defined | {node.id for node in stored}

    def _range_name(self) -> str:
        """A name for the range of this cell, which the report shows too."""
        cell = f"In [{self._shell.execution_count}]"
        name, number = cell, 1
        while name in self._range_names:
            number += 1
            name = f"{cell} {number}"
        self._range_names.add(name)
        return name

    def _not_recorded(self) -> str:
        is_kernel = getattr(self._shell, "kernel", None) is not None
        who = "kernel" if is_kernel else "process"
        return f"No figures: memtrace does not record this {who}; {KERNEL_HELP if is_kernel else TERMINAL_HELP}"

    def _report(self) -> CellReport:
        """The report of the recording so far."""
        if _library.library is None:
            return CellReport(self._not_recorded())
        trace = _recording.flushed_trace()
        if trace is None:
            return CellReport(f"memtrace records this process. No GPU memory has been allocated yet{_without_torch()}")
        text = _recording.run_binary("report", trace, "--so-far").decode(errors="replace")
        return CellReport(text, [Page("Report", _report_page(trace), _REPORT_HEIGHT)])

    def _cell_report(
        self, profiler: LineProfiler, options: _Options, callers: FrozenSet[Tuple[str, str]]
    ) -> CellReport:
        if _library.library is None:
            return CellReport(self._not_recorded())
        trace = _recording.flushed_trace()
        if trace is None:
            return CellReport(f"No GPU memory has been allocated yet{_without_torch()}")
        range_name = cast(str, profiler.range_name)
        found = _lines(trace, range_name, options.gpu, profiler.codes, callers)
        if not found:
            what = " or ".join(profiler.codes.values()) or "this cell"
            return CellReport(f"No memory was allocated or freed in {what}{_without_torch()}")
        pages = []
        texts = []
        for device, (report, selection) in found.items():
            title = f"Lines on {'the CPU' if device < 0 else f'GPU {device}'}"
            page = _recording.run_binary(*selection, "--html", "--output", "/dev/stdout").decode()
            rows = sum(len(function["lines"]) + 2 for function in report["functions"])
            lowest, highest = _LINES_HEIGHTS
            pages.append(Page(title, page, max(lowest, min(highest, lowest + (rows - 4) * _ROW_HEIGHT))))
            texts.append(_recording.run_binary(*selection).decode(errors="replace"))
        tables = None
        if profiler.codes:
            tables = profiler.display(columns=options.all_columns)
            texts = [str(tables)]
        if options.timeline:
            page = _report_page(trace, "--range", range_name)
            pages.append(Page("Timeline of this cell, and the report so far", page, _REPORT_HEIGHT, is_open=False))
        lines = {device: report for device, (report, _) in found.items()}
        return CellReport("\n".join(texts), pages, lines, tables if options.has_columns else None)


def _lookup(name: str, names: Dict[str, Any]) -> Any:
    try:
        function = eval(name, names)
        code_of(function)
    except Exception as error:
        raise MagicUsageError(f"cannot find the function {name}: {type(error).__name__}: {error}") from None
    return function


def _callers() -> FrozenSet[Tuple[str, str]]:
    """The file and the name of each function that is running: the kernel, IPython, and this package."""
    found = set()
    frame: Optional[types.FrameType] = sys._getframe()
    while frame is not None:
        found.add((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    return frozenset(found)


def _without_torch() -> str:
    """A likely reason for a recording without memory."""
    if "torch" in sys.modules or importlib.util.find_spec("torch") is not None:
        return ""
    return f"; PyTorch is not installed in {sys.prefix}"


#: The report of `memtrace lines --json`, and the arguments that select the same lines.
_Selected = Tuple[Dict[str, Any], List[object]]


def _lines(
    trace: Path,
    range_name: str,
    device: Optional[int],
    codes: Dict[types.CodeType, str],
    callers: FrozenSet[Tuple[str, str]],
) -> Dict[int, _Selected]:
    """The line tables of a range by device: of these functions, or of all functions without those of libraries."""
    # The sources are those of this process, on this machine.
    base: List[object] = ["lines", trace, "--range", range_name, "--sources"]

    def report(*options: object) -> Optional[Dict[str, Any]]:
        try:
            return cast("Dict[str, Any]", _recording.run_binary_json(*base, *options, "--json"))
        except _library.RecordingError as error:
            if "no memory was allocated or freed" in str(error):
                return None
            raise

    def selection(places: Sequence[Tuple[str, str]]) -> List[object]:
        names = dict.fromkeys(name for _, name in places)
        files = dict.fromkeys(file for file, _ in places)
        return [
            *(option for name in names for option in ("--function", name)),
            *(option for file in files for option in ("--file", file)),
        ]

    if codes:
        selected = selection([(code.co_filename, getattr(code, "co_qualname", code.co_name)) for code in codes])
        places: Optional[List[object]] = [*selected, "--top", 1 << 20]
    else:
        places = None
    on_device = [] if device is None else ["--device", device]
    first = report(*(places or ("--top", 1 << 20)), *on_device)
    if first is None:
        return {}
    devices = [first["device"], *(other["device"] for other in first["other_devices"] if device is None)]
    found: Dict[int, _Selected] = {}
    for number in devices:
        chosen = places
        if chosen is None:
            every = first if number == first["device"] else report("--top", 1 << 20, "--device", number)
            listed = every["functions"] if every is not None else []
            own = [(one["filename"], one["function"]) for one in listed]
            own = [(file, name) for file, name in own if (file, name.rpartition(".")[2]) not in callers]
            if not own:
                continue
            chosen = [*selection(own), "--top", _TOP]
        options = [*chosen, "--device", number]
        last = report(*options)
        if last is not None:
            found[number] = (last, [*base, *options])
    return dict(sorted(found.items()))


def report_of_run(folder: Path) -> CellReport:
    """The report of a run that has ended."""
    text = _recording.run_binary("report", folder).decode(errors="replace")
    return CellReport(text, [Page("Report", _report_page(folder), _REPORT_HEIGHT)])


def _report_page(trace: Path, *options: object) -> str:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        so_far = [] if trace.is_dir() else ["--so-far"]
        _recording.run_binary("export", trace, "--to", "html", *so_far, *options, "--output", page)
        return page.read_text(encoding="utf-8")


def _ipython(module: str) -> Any:
    return importlib.import_module(module)


def save_source(name: str, text: str) -> None:
    """Writes the source of a cell into the file that its stack frames name, as ipykernel's debugger does.

    Reports quote it from there. Only this user can read the file.
    """
    folder = os.path.join(tempfile.gettempdir(), f"ipykernel_{os.getpid()}")
    if os.path.dirname(name) != folder:
        return
    try:
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            status = os.lstat(folder)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                return
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        # The name has the hash of the text, so a file that exists has it. Without a file, reports have no source.
        return


def load_ipython_extension(shell: Any) -> None:
    """Gives a shell of IPython the magics. ``%load_ext gpu_memtrace`` calls this."""
    magics = Magics(shell)

    def memtrace(line: str, cell: Optional[str] = None, local_ns: Optional[Dict[str, Any]] = None) -> Any:
        __tracebackhide__ = True
        return magics.run(line, cell, local_ns)

    memtrace.__doc__ = _HELP
    memtrace.needs_local_scope = True  # type: ignore[attr-defined]
    # A statement stays as it is: {} and $ are not variables to insert.
    _ipython("IPython.core.magic").no_var_expand(memtrace)
    for name in ("memtrace", "mlrun"):
        shell.register_magic_function(memtrace, magic_kind="line_cell", magic_name=name)
    if _library.library is None:
        return

    save_cells(shell)


def save_cells(shell: Any) -> Callable[[], None]:
    """Writes the source of each cell before it runs, until the returned function is called."""

    def before_cell(info: Any) -> None:
        if info.raw_cell:
            text = shell.transform_cell(info.raw_cell)
            save_source(shell.compile.get_code_name(info.raw_cell, text, shell.execution_count), text)

    shell.events.register("pre_run_cell", before_cell)
    return lambda: shell.events.unregister("pre_run_cell", before_cell)
