"""The tests of `memtrace mcp` and `--otlp`: see tests/mcp/run. Each compares an answer with `memtrace report --json` and its relatives."""

import asyncio
import contextlib
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from mcp import Client, ClientSession, MCPError, StdioServerParameters, stdio_client

HERE = pathlib.Path(__file__).resolve().parent
MEMTRACE = pathlib.Path(os.environ["MEMTRACE_BIN"])
TRAIN = HERE / "train.py"
# The promised bound of an answer in bytes.
MAX_ANSWER = 16 << 10
READING = ["runs", "summary", "peak", "out_of_memory", "diagnostics", "lines", "diff"]
# The number of functions of the large run.
FUNCTIONS = 150
# How long something may take that needs no time. It only detects a hang.
HANG = 120


def unique_seconds(number):
    """A number of seconds for `sleep`, whose processes are then no others of this machine: not those of another run of these tests."""
    return f"{number}.{os.getpid():07}"


def line_of(program, marker):
    """The number of the only line of a program that contains a text."""
    (number,) = [number for number, line in enumerate(program.read_text().splitlines(), 1) if marker in line]
    return number


def memtrace(*arguments):
    return json.loads(subprocess.run([MEMTRACE, *arguments], check=True, capture_output=True, text=True).stdout)


class Runs:
    """The recordings that all tests share."""

    def __init__(self, folder):
        self.folder = folder
        self.leak = self.record("leak", "python", TRAIN)
        self.larger = self.record("larger", "python", TRAIN, "--hidden", "4096")
        self.oom = self.record("oom", "python", TRAIN, "--oom", exit_status=1)
        ranks = HERE.parent / "programs/distributed/train.py"
        self.ranks = self.record("ranks", "python", ranks, "ddp", "--spawn", "2", SIMCUDA_DEVICES="2")
        generated = folder / "generated"
        generated.mkdir()
        self.wide = self.record("wide", "python", HERE / "wide.py", generated, str(FUNCTIONS))
        # Below another folder, so that the tool `runs` does not list it.
        self.many = folder / "large" / "many"
        shutil.copytree(self.wide, self.many)
        (trace,) = self.many.glob("*.mtr")
        for number in range(60):
            shutil.copy(trace, self.many / f"{number + 100000}.mtr")
        (folder / "text.txt").write_text("no run\n")
        (folder / "empty").mkdir()

    def record(self, name, *command, exit_status=0, **environment):
        path = self.folder / name
        environment = os.environ | environment
        arguments = [MEMTRACE, "-q", "-o", path, "--", *command]
        recorded = subprocess.run(arguments, env=environment, capture_output=True, text=True)
        assert recorded.returncode == exit_status, f"{command}: {recorded.returncode}\n{recorded.stderr}"
        return path


class Server:
    """A session of the official client."""

    def __init__(self, session):
        self.session = session

    async def result(self, tool, **arguments):
        result = await self.session.call_tool(tool, arguments)
        assert len(result.content) == 1 and result.content[0].type == "text", result
        size = len(result.content[0].text.encode())
        assert size <= MAX_ANSWER, f"{tool} {arguments}: {size} bytes"
        return result

    async def answer(self, tool, **arguments):
        result = await self.result(tool, **arguments)
        assert not result.is_error, result.content[0].text
        # The client has checked it against the tool's output schema.
        assert json.loads(result.content[0].text) == result.structured_content
        return result.structured_content

    async def error(self, tool, **arguments):
        """The two lines of an error of a tool."""
        result = await self.result(tool, **arguments)
        assert result.is_error, f"{tool} {arguments}: {result.content[0].text[:200]}"
        error, help_line = result.content[0].text.split("\n")
        assert error.startswith("error: ") and help_line.startswith("help: "), result.content[0].text
        return error.removeprefix("error: "), help_line.removeprefix("help: ")


@contextlib.asynccontextmanager
async def server(folder, *options):
    parameters = StdioServerParameters(command=str(MEMTRACE), args=["mcp", *options], cwd=folder, env=dict(os.environ))
    async with stdio_client(parameters) as (read, write), ClientSession(read, write) as session:
        session.initialized = await session.initialize()
        yield Server(session)


class Raw:
    """A server without a client library, for what such a library never does."""

    def __init__(self, folder, *options):
        self.process = subprocess.Popen(
            [MEMTRACE, "mcp", *options], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def send(self, message):
        self.process.stdin.write(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def initialize(self):
        information = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
        self.send({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": information})
        answer = self.answer(1)
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return answer

    def call(self, number, tool, **arguments):
        self.send({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": {"name": tool, "arguments": arguments}})

    def answer(self, number):
        for line in self.process.stdout:
            message = json.loads(line)
            if message.get("id") == number:
                return message
        raise AssertionError(f"no answer to {number}: {self.process.stderr.read()}")


def processes_with(text):
    """The processes whose command lines contain a text."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and text.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def sleepers(seconds):
    """The processes `sleep SECONDS`. The command line of memtrace, which ends with these words too, does not count."""
    exact = f"sleep\0{seconds}\0".encode()
    found = []
    for pid in processes_with(seconds):
        with contextlib.suppress(OSError):
            if pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() == exact:
                found.append(pid)
    return found


def wait_for(condition, what):
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end, f"waited too long for {what}"
        time.sleep(0.02)


def only_device(summary):
    (process,) = summary["processes"]
    (device,) = process["devices"]
    return process, device


# ---- reading


async def a_session_begins(runs):
    async with server(runs.folder) as s:
        version = subprocess.run([MEMTRACE, "--version"], capture_output=True, text=True).stdout.split()[1]
        info = s.session.initialized.server_info
        assert (info.name, info.version) == ("memtrace", version), info
        assert "summary" in s.session.initialized.instructions
        tools = (await s.session.list_tools()).tools
        assert [tool.name for tool in tools] == READING
        for tool in tools:
            assert tool.annotations.read_only_hint and tool.description and tool.output_schema, tool
            undocumented = [name for name, value in tool.input_schema["properties"].items() if not value.get("description")]
            assert not undocumented, (tool.name, undocumented)


async def both_protocols_give_the_same_answers(runs):
    parameters = StdioServerParameters(command=str(MEMTRACE), args=["mcp"], cwd=runs.folder, env=dict(os.environ))
    async with server(runs.folder) as s, Client(stdio_client(parameters)) as stateless:
        # The session protocol begins with `initialize`. The later one has no sessions.
        versions = (s.session.initialized.protocol_version, stateless.protocol_version)
        assert versions[0] < "2026" <= versions[1], versions
        assert [tool.name for tool in (await stateless.list_tools()).tools] == READING
        for tool, arguments in [("summary", {"run": "leak"}), ("peak", {"run": "ranks", "rank": 1})]:
            result = await stateless.call_tool(tool, arguments)
            assert result.structured_content == await s.answer(tool, **arguments)
        assert (await stateless.call_tool("peak", {"run": "nowhere"})).is_error


async def runs_are_listed_newest_first(runs):
    async with server(runs.folder) as s:
        answer = await s.answer("runs")
        # A run begins when its manifest is written first, and that file's last change is the end of the run.
        assert [run["run"] for run in answer["runs"]] == ["wide", "ranks", "oom", "larger", "leak"], answer
        oom = answer["runs"][2]
        summary = json.loads((runs.oom / "summary.json").read_text())
        _, device = only_device(summary)
        assert oom["highest_peak"]["bytes"] == device["peak"]["totals"]["allocated_bytes"]
        assert oom["out_of_memory_errors"] == 1 and oom["outcome"] == summary["run"]["outcome"]
        page = await s.answer("runs", folder=str(runs.folder), limit=2, offset=2)
        assert [pathlib.Path(run["run"]).name for run in page["runs"]] == ["oom", "larger"]
        assert any("offset=4" in text for text in page["left_out"]), page["left_out"]
        assert (await s.answer("runs", folder="empty"))["runs"] == []
        assert (await s.answer("runs", folder="leak"))["runs"][0]["run"] == "leak"
        error, _ = await s.error("runs", folder="nowhere")
        assert error == "cannot read the folder nowhere: No such file or directory", error


async def the_summary_is_that_of_the_report(runs):
    async with server(runs.folder) as s:
        for run in (runs.leak, runs.oom):
            answer, report = await s.answer("summary", run=run.name), memtrace("report", "--json", run)
            process, device = only_device(report)
            (row,) = answer["devices"]
            assert row["peak"]["bytes"] == device["peak"]["totals"]["allocated_bytes"]
            assert row["reserved_peak"]["bytes"] == device["highest"]["reserved_bytes"]
            assert (row["pid"], row["steps"]) == (process["pid"], device["steps"])
            assert row["out_of_memory_errors"] == device["oom_count"] == (run == runs.oom)
            assert answer["issues"] == len(process["issues"]) and answer["suggestions"] == len(device["suggestions"])
            # On a busy machine a short program may end before memtrace could check whether it can be recorded.
            lacking = [f"{gap['label']}: {gap['text']}" for gap in report["gaps"]]
            statements = report["verdict"]["statements"]
            sentences = [text for one in statements for text in [one["text"], *one["details"]]]
            assert answer["verdict"] == report["verdict"]["remarks"] + sentences
            assert "left_out" not in answer and answer.get("incomplete", []) == lacking, (answer, lacking)
        text = subprocess.run([MEMTRACE, "report", runs.leak], capture_output=True, text=True).stdout
        assert (await s.answer("summary", run="leak"))["devices"][0]["peak"]["text"] in text


async def the_peak_is_that_of_the_report(runs):
    async with server(runs.folder) as s:
        _, device = only_device(memtrace("report", "--json", runs.leak))
        answer = await s.answer("peak", run="leak", limit=100)
        peak, expected = answer["peak"], device["peak"]
        assert peak["allocated"]["bytes"] == expected["totals"]["allocated_bytes"]
        assert {row["name"]: row["size"]["bytes"] for row in peak["by_category"]} == {
            row["category"]: row["bytes"] for row in expected["by_category"]
        }
        sizes = [row["size"]["bytes"] for row in peak["by_category"]]
        assert sizes == sorted(sizes, reverse=True)
        assert [row["size"]["bytes"] for row in peak["largest"]] == [row["bytes"] for row in expected["largest_allocations"]]
        kept = f"{TRAIN}:{line_of(TRAIN, '# The leak.')} step"
        assert any(row["at"] == kept and "stack" not in row for row in peak["largest"]), peak["largest"]
        stacks = await s.answer("peak", run="leak", frames=2, limit=100)
        kept_rows = [row for row in stacks["peak"]["largest"] if row["at"] == kept]
        assert all(row["stack"][0] == kept and len(row["stack"]) == 2 for row in kept_rows), kept_rows
        shown = {row["at"]: row["stack"] for row in (await s.answer("peak", run="leak", frames=1, limit=100))["peak"]["largest"]}
        assert shown[kept] == [kept, "... 1 more"], shown[kept]


async def lists_can_be_paged_through(runs):
    async with server(runs.folder) as s:
        whole = [row["size"] for row in (await s.answer("peak", run="leak", limit=100))["peak"]["largest"]]
        paged, offset = [], 0
        while offset is not None:
            answer = await s.answer("peak", run="leak", limit=3, offset=offset)
            paged += [row["size"] for row in answer["peak"]["largest"]]
            following = re.search(r"`largest` .*offset=(\d+)", "\n".join(answer.get("left_out", [])))
            offset = int(following[1]) if following and " has " in following[0] else None
        assert paged == whole and len(whole) > 3
        assert answer["everything"] == "memtrace report leak --json"


async def an_out_of_memory_error_is_explained(runs):
    async with server(runs.folder) as s:
        _, device = only_device(memtrace("report", "--json", runs.oom))
        expected = device["ooms"][0]
        answer = await s.answer("out_of_memory", run="oom")
        error = answer["error"]
        assert answer["out_of_memory_errors"] == 1
        assert error["requested"]["bytes"] == expected["requested_bytes"] == 1 << 40
        assert error["requested_at"]["at"] == f"{TRAIN}:{line_of(TRAIN, '# The request.')} <module>", error["requested_at"]
        assert error["requested_at"]["stack"], error["requested_at"]
        assert error["device_free"]["bytes"] == expected["device_free_bytes"]
        assert error["in_use"]["allocated"]["bytes"] == expected["in_use"]["totals"]["allocated_bytes"]
        assert error["fatal"] is True
        error, help_line = await s.error("out_of_memory", run="oom", error=7)
        assert (error, help_line) == ("oom has no out-of-memory error 7", "its recorded errors are 0 to 0")
        none = await s.answer("out_of_memory", run="leak")
        assert none["out_of_memory_errors"] == 0 and "error" not in none


async def issues_cite_the_line(runs):
    async with server(runs.folder) as s:
        process, device = only_device(memtrace("report", "--json", runs.leak))
        answer = await s.answer("diagnostics", run="leak")
        assert [issue["rule"] for issue in answer["issues"]] == [issue["rule"] for issue in process["issues"]] == ["leak"]
        (leak,) = answer["issues"]
        assert leak["place"]["at"] == f"{TRAIN}:{line_of(TRAIN, '# The leak.')} step", leak
        assert leak["fix"] == process["issues"][0]["fix"] and leak["evidence"] == process["issues"][0]["evidence"]
        assert leak["cost"]["bytes"] == process["issues"][0]["bytes"]
        shown = [(row["rule"], row["peak_after"]["bytes"]) for row in answer["suggestions"]]
        expected = [(row["rule"], row["peak_after_bytes"]) for row in device["suggestions"]]
        assert shown == expected[: len(shown)] and shown, (shown, expected)


async def lines_have_the_figures_of_the_table(runs):
    async with server(runs.folder) as s:
        answer = await s.answer("lines", run="leak", function="step", file=str(TRAIN), limit=50)
        (function,) = answer["functions"]
        (expected,) = memtrace("lines", "--json", "--function", "step", "--file", TRAIN, runs.leak)["functions"]
        lines = {f"{TRAIN}:{row['line']}": row for row in expected["lines"] if row.get("figures")}
        assert [row["at"] for row in function["lines"]] == list(lines)
        for row in function["lines"]:
            line = lines[row["at"]]
            assert row["allocated"]["bytes"] == line["figures"]["allocated_bytes"]
            assert row["net"]["bytes"] == line["figures"]["net_bytes"] and row["text"] == line["text"].strip()
        error, _ = await s.error("lines", run="leak", function="--json")
        assert "no memory was allocated or freed in the function --json" in error, error
        error, _ = await s.error("lines", run="leak", rank=0, pid=1)
        assert "rank and pid" in error, error


async def a_difference_is_explained(runs):
    async with server(runs.folder) as s:
        expected = memtrace("diff", "--json", runs.leak, runs.larger)["pairs"][0]
        answer = await s.answer("diff", a="leak", b="larger", limit=50)
        (pair,) = answer["devices"]
        assert pair["difference"]["bytes"] == expected["difference_bytes"] > 0 and pair["result"] == "grew"
        assert pair["difference"]["text"].startswith("+")
        assert sum(row["difference"]["bytes"] for row in pair["by_category"]) == expected["difference_bytes"]
        sizes = [abs(row["difference"]["bytes"]) for row in pair["by_line"]]
        assert sizes == sorted(sizes, reverse=True) and 0 not in sizes
        assert any(row["name"].startswith(f"{TRAIN}:") for row in pair["by_line"]), pair["by_line"]
        steps = await s.answer("diff", a="leak", step_a=1, step_b=3)
        leaked = steps["devices"][0]["difference"]["bytes"]
        assert leaked == 2 * 512 * 256 * 4, leaked
        assert (await s.error("diff", a="leak", step_a=1, step_b=99))[1] == "its steps are 0 to 7"
        assert "step_b" in (await s.error("diff", a="leak", b="larger", step_a=1))[1]
        assert "pass b" in (await s.error("diff", a="leak"))[1]


async def ranks_are_selected(runs):
    async with server(runs.folder) as s:
        summary = memtrace("report", "--json", runs.ranks)
        pids = {process["rank"]: process["pid"] for process in summary["processes"]}
        for rank in (0, 1):
            for tool in ("peak", "lines"):
                answer = await s.answer(tool, run="ranks", rank=rank)
                assert (answer["rank"], answer["pid"]) == (rank, pids[rank])
            assert {row["rank"] for row in (await s.answer("summary", run="ranks", rank=rank))["devices"]} == {rank}
        assert len((await s.answer("summary", run="ranks"))["devices"]) == 2
        assert {row["rank"] for row in (await s.answer("diagnostics", run="ranks", limit=50))["issues"]} <= {0, 1}
        for tool in ("summary", "peak", "out_of_memory", "diagnostics", "lines"):
            error, help_line = await s.error(tool, run="ranks", rank=9)
            assert error == "ranks has no process of rank 9", error
            assert help_line.startswith("its processes are ") and str(pids[1]) in help_line, help_line
        error, help_line = await s.error("peak", run="ranks", device=5)
        assert error == "ranks has no events of device 5" and help_line == "its devices are 0, 1", (error, help_line)
        assert "rank 9" in (await s.error("diff", a="ranks", b="ranks", rank=9))[0]


async def bad_input_is_an_error_with_help(runs):
    async with server(runs.folder) as s:
        for tool in READING[1:]:
            name = "a" if tool == "diff" else "run"
            more = {"b": "leak"} if tool == "diff" else {}
            for path, expected in [
                ("nowhere", "cannot read nowhere: No such file or directory"),
                ("text.txt", "cannot read text.txt"),
                ("empty", "empty"),
                ("--help", "cannot read --help: No such file or directory"),
            ]:
                error, _ = await s.error(tool, **{name: path}, **more)
                assert expected in error, (tool, path, error)
            error, _ = await s.error(tool, **{name: "leak"}, **more, colour="red")
            assert "unknown field `colour`" in error, error
            error, _ = await s.error(tool, **{name: 7}, **more)
            assert "invalid type" in error, error
            error, _ = await s.error(tool)
            assert "missing field" in error, error
        try:
            await s.session.call_tool("format_disk", {})
        except MCPError as e:
            assert "format_disk" in str(e), e
        else:
            raise AssertionError("there is a tool format_disk")


async def answers_about_large_runs_are_small(runs):
    async with server(runs.folder) as s:
        # `answer` checks the bound.
        for run in ("wide", "large/many"):
            for tool in ("summary", "peak", "diagnostics", "lines"):
                answer = await s.answer(tool, run=run, limit=200, **({"frames": 50} if tool == "peak" else {}))
                if tool in ("peak", "lines"):
                    assert answer["left_out"] and answer["everything"].startswith("memtrace "), (run, tool)
        rows = (await s.answer("summary", run="large/many", limit=1))["left_out"]
        assert any("of 61" in text for text in rows), rows
        await s.answer("diff", a="leak", b="wide", limit=200)
        await s.answer("out_of_memory", run="large/many", limit=200)
        # All functions can be reached: those of the program, its modules and `wide.py` itself.
        found, offset = set(), 0
        while True:
            answer = await s.answer("lines", run="wide", limit=40, offset=offset)
            found |= {row["at"].split()[-1] for row in answer["functions"]}
            following = re.findall(r"functions.*call again with offset=(\d+)", "\n".join(answer.get("left_out", [])))
            if not following:
                break
            offset = min(map(int, following))
        assert len([name for name in found if name.startswith("function_")]) == FUNCTIONS, len(found)


async def calls_at_the_same_time_get_the_same_answers(runs):
    calls = [
        (tool, {"run": run}) for run in ("leak", "oom", "ranks") for tool in ("summary", "peak", "diagnostics", "lines")
    ] + [("diff", {"a": "leak", "b": "larger"}), ("runs", {"folder": "empty"})]
    async with server(runs.folder) as s:
        one_by_one = [await s.answer(tool, **arguments) for tool, arguments in calls]
    async with server(runs.folder) as s:
        at_once = await asyncio.gather(*(s.answer(tool, **arguments) for tool, arguments in calls * 2))
    assert at_once == one_by_one * 2


async def a_run_that_changes_is_read_again(runs):
    folder = runs.folder / "changing"
    shutil.copytree(runs.leak, folder)
    async with server(runs.folder) as s:
        before = await s.answer("summary", run="changing")
        for file in folder.iterdir():
            file.unlink()
        shutil.copytree(runs.oom, folder, dirs_exist_ok=True)
        after = await s.answer("summary", run="changing")
        assert (before["devices"][0]["out_of_memory_errors"], after["devices"][0]["out_of_memory_errors"]) == (0, 1)


# ---- the protocol


async def garbage_on_stdin_is_survived(runs):
    raw = Raw(runs.folder)
    raw.send(b"\x00\xff\xfe garbage\n{]\n\n" + b"[" * 100_000 + b"\n")
    raw.send(b"x" * (20 << 20) + b"\n")
    raw.initialize()
    raw.send(b"{\"jsonrpc\": \"2.0\", \"id\": 2, \"method\": \"tools/call\"\n")
    raw.send({"jsonrpc": "2.0", "id": 3, "method": "no/such/method"})
    assert "error" in raw.answer(3)
    raw.call(4, "summary", run="leak")
    assert raw.answer(4)["result"]["isError"] is False
    raw.process.stdin.close()
    assert raw.process.wait(HANG) == 0
    # Without any message, and with garbage only.
    for text in (b"", b"garbage\n"):
        raw = Raw(runs.folder)
        raw.send(text)
        raw.process.stdin.close()
        assert raw.process.wait(HANG) == 0, raw.process.stderr.read()
        assert raw.process.stdout.read() == b""


async def a_client_that_leaves_ends_the_server(runs):
    raw = Raw(runs.folder)
    raw.initialize()
    path = str(runs.many)
    for number in range(8):
        raw.call(number + 2, "lines", run=path, function=f"function_{number}")
    wait_for(lambda: len(processes_with(path)) > 0, "an analysis")
    start = time.monotonic()
    raw.process.stdin.close()
    raw.process.stdout.close()
    raw.process.wait(HANG)
    assert time.monotonic() - start < 20
    wait_for(lambda: not processes_with(path), "the end of the analysis")


# ---- running


async def a_reading_server_runs_nothing(runs):
    async with server(runs.folder) as s:
        for tool in ("run", "dry_run"):
            error, help_line = await s.error(tool, command=["touch", "proof"])
            assert error == "this server only reads runs" and "--allow-run" in help_line
    assert not (runs.folder / "proof").exists()


async def a_command_is_recorded(runs):
    async with server(runs.folder, "--allow-run") as s:
        tools = {tool.name: tool for tool in (await s.session.list_tools()).tools}
        assert list(tools) == [*READING, "run", "dry_run"]
        assert tools["run"].annotations.destructive_hint and tools["dry_run"].annotations.destructive_hint
        answer = await s.answer("run", command=["python", str(TRAIN), "--oom"], folder="new/by-agent")
        assert answer["exit"] == "exit status 1" and not answer["timed_out"], answer
        assert answer["stdout_tail"] == "trained\n" and "out of memory" in answer["stderr_tail"], answer
        assert answer["run"]["out_of_memory_errors"] == 1 and answer["run"]["run"] == "new/by-agent", answer
        diagnostics = await s.answer("diagnostics", run=answer["run"]["run"])
        assert diagnostics["issues"][0]["rule"] == "leak"
        # The folder is not empty any more.
        error, _ = await s.error("run", command=["true"], folder="new/by-agent")
        assert "it is not empty" in error, error
        default = await s.answer("run", command=["python", "-c", "print('x')"])
        assert default["run"]["run"].startswith("memtrace-python-"), default


async def a_dry_run_is_recorded(runs):
    async with server(runs.folder, "--allow-run") as s:
        answer = await s.answer("dry_run", command=["python", str(TRAIN)], gpu="t4", folder="dry")
        assert answer["exit"] == "finished" and answer["run"]["simulated_gpu"] == "Tesla T4", answer
        summary = await s.answer("summary", run="dry")
        assert summary["simulated_gpu"] == "Tesla T4" and summary["devices"][0]["steps"] == 8, summary
        assert "simulated_gpu" not in await s.answer("summary", run="leak")
        answer = await s.answer("dry_run", command=["python", str(TRAIN)], memory="1GiB", gpus=2, folder="small")
        assert answer["exit"] == "finished", answer
        error, help_line = await s.error("dry_run", command=["true"], gpu="t5")
        assert "t5" in error and "t4" in error + help_line, (error, help_line)


async def commands_that_cannot_run_are_errors(runs):
    async with server(runs.folder, "--allow-run") as s:
        error, _ = await s.error("run", command=[])
        assert error == "the command is empty"
        error, _ = await s.error("run", command=["no-such-program"])
        assert "no-such-program" in error, error
        outside = runs.folder.parent / "outside"
        (runs.folder / "link").symlink_to(runs.folder.parent)
        for folder in (str(outside), "../outside", "link/outside", "."):
            error, _ = await s.error("run", command=["touch", "proof"], folder=folder)
            assert "not below the working folder" in error, error
        assert not outside.exists() and not (runs.folder / "proof").exists()


async def output_is_bounded(runs):
    async with server(runs.folder, "--allow-run") as s:
        program = "import sys\nfor i in range(300000): print('line', i)\nsys.stderr.write('\\x1b' * 100000)"
        answer = await s.answer("run", command=["python", "-c", program])
        assert answer["stdout_tail"].endswith("line 299999\n"), answer["stdout_tail"][-100:]
        assert any(text.startswith("`stdout_tail` has the last ") for text in answer["left_out"]), answer["left_out"]


async def a_command_ends_at_the_time_limit(runs):
    async with server(runs.folder, "--allow-run") as s:
        program = "import sys, time, torch\nx = torch.empty(1 << 20, device='cuda')\nprint('ready', flush=True)\ntime.sleep(600)"
        answer = await s.answer("run", command=["python", "-c", program], timeout_seconds=30, folder="limited")
        assert answer["timed_out"] and answer["exit"] in ("killed by SIGTERM", "exit status 143"), answer
        assert answer["stdout_tail"] == "ready\n" and answer["run"]["highest_peak"]["bytes"] == 4 << 20, answer
        # A command that ignores SIGTERM, and its child.
        first, second = unique_seconds(654321), unique_seconds(654322)
        program = f"trap '' TERM; echo ready; sleep {first} & sleep {second}; wait"
        answer = await s.answer("run", command=["bash", "-c", program], timeout_seconds=5, folder="ignoring")
        assert answer["timed_out"] and answer["stdout_tail"] == "ready\n", answer
        assert not processes_with(first) and not processes_with(second), "a process outlives its command"


# Leaves its session and its parents, as a daemon does, and ends with nothing.
DAEMON = """
import os, signal, subprocess, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if sys.argv[2] == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[3], "w").close()
        subprocess.run(["sleep", sys.argv[1]])
    os._exit(0)
os.wait()
"""

def daemon(seconds, kind, began):
    return f"python3 -c '{DAEMON}' {seconds} {kind} {began}; while [ ! -e {began} ]; do sleep 0.02; done"


async def no_background_process_outlives_a_run(runs):
    async with server(runs.folder, "--allow-run") as s:
        # At the time limit, and where the command ends before.
        for name, end, timeout in [("at-the-limit", "sleep 1000", 5), ("at-the-end", "exit 3", 100)]:
            first, second = unique_seconds(543210), unique_seconds(543211)
            command = f"{daemon(first, 'willing', name + '-1')}; {daemon(second, 'stubborn', name + '-2')}; echo ready; {end}"
            answer = await s.answer("run", command=["bash", "-c", command], timeout_seconds=timeout, folder=name)
            assert answer["stdout_tail"] == "ready\n", answer
            assert answer["timed_out"] == (end != "exit 3"), answer
            assert end != "exit 3" or answer["exit"] == "exit status 3", answer
            assert not processes_with(first) and not processes_with(second), "a process outlives its run"
            assert re.search(r"memtrace: note: ended \d+ processes? that the command had left", answer["stderr_tail"]), answer
        # A run without such processes has no note.
        answer = await s.answer("run", command=["true"], folder="alone")
        assert "background" not in answer["stderr_tail"], answer


async def no_background_process_outlives_a_killed_server(runs):
    for number, kind in enumerate(["willing", "stubborn"]):
        seconds = unique_seconds(432100 + number)
        raw = Raw(runs.folder, "--allow-run")
        raw.initialize()
        began = f"killed-{kind}-began"
        raw.call(2, "run", command=["bash", "-c", f"{daemon(seconds, kind, began)}; sleep 1000"], folder=f"killed-{kind}")
        wait_for(lambda: sleepers(seconds), "the daemon")
        raw.process.send_signal(signal.SIGKILL)
        raw.process.wait(HANG)
        wait_for(lambda: not processes_with(seconds), "the end of the daemon")


async def texts_are_printable(runs):
    hostile = "\x1b]0;owned\x07\x9b31m\u202e\r\n::error::owned ##[group]x ##vso[task.z]y\x7f"

    def texts(value):
        if isinstance(value, str):
            yield value
        elif isinstance(value, (list, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                yield from texts(item)

    def check(text):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text), repr(text)
        for line in text.split("\n"):
            assert not line.lstrip().startswith("::") and "##[" not in line and "##vso[" not in line, repr(text)

    folder = runs.folder / "hostile"
    folder.mkdir()
    path = folder / hostile
    path.mkdir()
    generated = path / f"{hostile}.py"
    generated.write_text(
        "import sys, torch\n"
        "x = torch.empty(1 << 20, device='cuda')\n"
        f"print({ascii(hostile)})\nprint({ascii(hostile)}, file=sys.stderr)\n"
        f"torch.empty(1 << 50, device='cuda')\n"
    )
    async with server(folder, "--allow-run") as s:
        command = ["python", str(generated), hostile]
        answer = await s.answer("run", command=command, folder=f"{hostile}/run")
        assert "owned" in answer["stdout_tail"] and "owned" in answer["run"]["command"], answer
        run = {"run": f"{hostile}/run"}
        answers = [answer]
        for tool in ["summary", "peak", "out_of_memory", "diagnostics", "lines"]:
            answers.append(await s.answer(tool, **run))
        answers.append(await s.answer("diff", a=run["run"], b=run["run"]))
        answers.append(await s.answer("runs", folder=hostile))
        for answer in answers:
            assert any("owned" in text for text in texts(answer)) or answer.get("issues") == [], answer
        for answer in answers:
            for text in texts(answer):
                check(text)
        for tool in ["summary", "peak", "out_of_memory", "diagnostics", "lines"]:
            error, help_line = await s.error(tool, run=f"missing {hostile}")
            check(error), check(help_line)
        for tool, arguments in [("runs", {"folder": f"missing {hostile}"}), ("run", {"command": [f"missing {hostile}"]})]:
            error, help_line = await s.error(tool, **arguments)
            check(error), check(help_line)
        error, help_line = await s.error("summary", run=run["run"], **{hostile: 1})
        check(error), check(help_line)


async def one_run_at_a_time(runs):
    async with server(runs.folder, "--allow-run") as s:
        first = asyncio.create_task(s.answer("run", command=["bash", "-c", "touch began; while [ ! -e go ]; do sleep 0.05; done"]))
        while not (runs.folder / "began").exists():
            await asyncio.sleep(0.02)
        error, _ = await s.error("run", command=["true"])
        assert error == "another run is in progress"
        # Reading goes on.
        assert (await s.answer("summary", run="leak"))["issues"] == 1
        (runs.folder / "go").touch()
        assert (await first)["exit"] == "finished"


async def progress_is_reported(runs):
    async with server(runs.folder, "--allow-run") as s:
        reported = []

        async def progress(progress, total, message):
            reported.append((progress, message))

        await s.session.call_tool("run", {"command": ["sleep", "12"]}, progress_callback=progress)
        assert len(reported) >= 2 and reported[0][0] < reported[1][0] and "running" in reported[0][1], reported


async def a_cancelled_run_ends(runs):
    seconds = unique_seconds(765432)
    raw = Raw(runs.folder, "--allow-run")
    raw.initialize()
    raw.call(2, "run", command=["sleep", seconds], folder="cancelled")
    wait_for(lambda: sleepers(seconds), "the command")
    raw.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}})
    wait_for(lambda: not processes_with(seconds), "the end of the command")
    raw.call(3, "run", command=["true"], folder="after")
    answer = raw.answer(3)["result"]
    # The cancelled run may still write its report.
    while answer["isError"]:
        assert "in progress" in answer["content"][0]["text"], answer
        raw.call(3, "run", command=["true"], folder="after")
        answer = raw.answer(3)["result"]
    raw.process.stdin.close()
    assert raw.process.wait(HANG) == 0


async def a_run_does_not_outlive_its_client(runs):
    def state(folder):
        return json.loads((runs.folder / folder / "run.json").read_text())["state"]

    seconds = unique_seconds(876543)
    stubborn = ["bash", "-c", f"trap '' TERM; while :; do sleep {seconds}; done"]
    for folder, command, leave in [
        ("left", stubborn, lambda raw: raw.process.stdin.close()),
        ("terminated", stubborn, lambda raw: raw.process.send_signal(signal.SIGTERM)),
        ("killed", ["sleep", seconds], lambda raw: raw.process.send_signal(signal.SIGKILL)),
    ]:
        raw = Raw(runs.folder, "--allow-run")
        raw.initialize()
        raw.call(2, "run", command=command, folder=folder)
        wait_for(lambda: sleepers(seconds), "the command")
        leave(raw)
        raw.process.wait(HANG)
        # memtrace has the command in its own command line, so it has ended too, and has written the manifest.
        wait_for(lambda: not processes_with(seconds), "the end of the command and of memtrace")
        assert state(folder) == "ended", folder


class Collector(http.server.BaseHTTPRequestHandler):
    """Receives the requests of OTLP's exporters, over HTTP."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/x-protobuf"
        self.server.received.append((self.path, ExportMetricsServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


def pushed(request):
    """The points of a push, by the name of the metric: the attributes and the value."""
    (resource,) = request.resource_metrics
    points = {}
    for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
        kind = metric.WhichOneof("data")
        data = getattr(metric, kind)
        assert kind == "gauge" or data.is_monotonic
        values = [
            ({a.key: a.value.string_value or a.value.int_value for a in point.attributes}, point.as_int)
            for point in data.data_points
        ]
        points[metric.name] = (kind, metric.unit, values)
    return points


async def figures_are_pushed_to_a_collector(runs):
    """`memtrace --otlp`: what a collector gets is what PyTorch counts."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.received = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = HERE.parent / "programs/launcher/served.py"
    url = f"http://127.0.0.1:{server.server_port}"
    command = [MEMTRACE, "--otlp", url, "--no-snapshot", "-q", "-o", runs.folder / "pushed", "--", "python", program]
    environment = {**os.environ, "OTEL_METRIC_EXPORT_INTERVAL": "100", "OTEL_RESOURCE_ATTRIBUTES": "team=vision"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        allocated, reserved = map(int, process.stdout.readline().split())

        def newest():
            return pushed(server.received[-1][1]) if server.received else {}

        def until(question):
            started = time.monotonic()
            while not question(newest()):
                assert time.monotonic() - started < HANG, newest()
                time.sleep(0.05)

        until(lambda points: any(value == allocated for _, value in points.get("memtrace.allocated", (0, 0, []))[2]))

        def categories(points):
            return points.get("memtrace.allocated_by_category", (0, 0, []))[2]

        until(lambda points: sum(value for _, value in categories(points)) == allocated)
        points = newest()
        assert all(a["category"] and a["device"] == 0 and a["pid"] > 1 for a, _ in categories(points)), points
        assert points["memtrace.allocated_by_category"][:2] == ("gauge", "By")
        kind, unit, ((attributes, value),) = points["memtrace.reserved"]
        assert (kind, unit, value) == ("gauge", "By", reserved)
        assert attributes["device"] == 0 and attributes["pid"] > 1
        assert points["memtrace.allocations"][0] == "sum"
        owners = {attributes["owner"]: value for attributes, value in points["memtrace.device_memory"][2]}
        assert owners["PyTorch"] == reserved
        assert points["memtrace.processes"][2] == [({}, 1)]
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "out of memory\n"
        until(lambda points: [value for _, value in points["memtrace.out_of_memory_errors"][2]] == [1])
        _, stderr = process.communicate("\n")
    assert process.returncode == 0 and not stderr, stderr
    assert {path for path, _ in server.received} == {"/v1/metrics"}
    resource = {a.key: a.value.string_value for a in server.received[-1][1].resource_metrics[0].resource.attributes}
    assert resource["service.name"] == "memtrace" and resource["team"] == "vision" and resource["host.name"]
    server.shutdown()


async def pushes_that_fail_are_reported(runs):
    """Nobody listens there. The command runs as without."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    command = [MEMTRACE, "--otlp", url, "-q", "-o", runs.folder / "unpushed", "--", "sh", "-c", "echo done; exit 3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout) == (3, "done\n")
    assert re.search(rf"warning: 1 of 1 pushes to {url}/v1/metrics failed: .*", done.stderr), done.stderr
    for wrong in ["https://example.org", "localhost:4318", "http://", "http:// x"]:
        done = subprocess.run([MEMTRACE, "--otlp", wrong, "--", "true"], capture_output=True, text=True, timeout=HANG)
        assert done.returncode == 125 and "--otlp" in done.stderr, done.stderr


class Redirect(http.server.BaseHTTPRequestHandler):
    """Sends whoever asks to another collector."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        self.send_response(self.server.status)
        self.send_header("Location", self.server.target)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


async def redirects_of_a_collector_are_not_followed(runs):
    """Whoever listens at the address cannot send the figures elsewhere."""
    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    collector.received = []
    redirect = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirect)
    redirect.target = f"http://127.0.0.1:{collector.server_port}/v1/metrics"
    for server in (collector, redirect):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{redirect.server_port}"
    for status in [301, 302, 303, 307, 308]:
        redirect.status, redirect.asked = status, 0
        command = [MEMTRACE, "--otlp", url, "-q", "-o", runs.folder / f"redirected-{status}", "--", "true"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
        assert done.returncode == 0 and redirect.asked == 1 and not collector.received, status
        failed = f"warning: 1 of 1 pushes to {url}/v1/metrics failed: the collector answers {status}, a redirect"
        assert failed in done.stderr, done.stderr
    collector.shutdown()
    redirect.shutdown()


@contextlib.contextmanager
def answering(behavior):
    """A server that treats each connection so, until the end. Yields its URL and the number of its connections so far."""
    accepted = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    connection = listener.accept()[0]
                    accepted.append(connection)
                    threading.Thread(target=treat, args=[connection], daemon=True).start()

        def treat(connection):
            # The client may be gone.
            with contextlib.suppress(OSError):
                behavior(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", lambda: len(accepted)
        for connection in accepted:
            connection.close()


def never_answers(connection):
    connection.recv(1 << 20)


def never_ends_its_head(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X: y\r\n")
        time.sleep(0.05)


def never_ends_its_body(connection):
    connection.recv(1 << 20)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\n\r\n")
    while True:
        connection.sendall(b"x" * (1 << 16))


async def a_push_that_hangs_at_the_end_is_counted(runs):
    """The command ends with memtrace, which reports the push as failed. The collector never closes the connection."""
    for number, behavior in enumerate([never_answers, never_ends_its_head]):
        with answering(behavior) as (url, _):
            folder = runs.folder / f"hanging-{number}"
            command = [MEMTRACE, "--otlp", url, "-q", "-o", folder, "--", "sh", "-c", "echo done; exit 3"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
            assert (done.returncode, done.stdout) == (3, "done\n")
            assert re.search(rf"warning: 1 of 1 pushes to {url}/v1/metrics failed: .+", done.stderr), done.stderr
            assert json.loads((folder / "run.json").read_text())["state"] == "ended"
    # An earlier push hangs when the command ends, so the last one may not even begin.
    with answering(never_answers) as (url, connections):
        command = [MEMTRACE, "--otlp", url, "-q", "-o", runs.folder / "hanging", "--", "cat"]
        environment = {**os.environ, "OTEL_METRIC_EXPORT_INTERVAL": "10"}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True, env=environment) as process:
            wait_for(lambda: connections() > 0, "a push")
            _, stderr = process.communicate("", timeout=HANG)
        failed = re.search(r"warning: (\d+) of (\d+) pushes to .* failed: the collector does not answer in time", stderr)
        assert failed and failed[1] == failed[2] and int(failed[1]) >= 2, stderr


async def a_collector_cannot_fill_the_memory(runs):
    """The status of an answer is enough. Its body never ends."""
    with answering(never_ends_its_body) as (url, connections):
        command = [MEMTRACE, "--otlp", url, "-q", "-o", runs.folder / "endless", "--", "cat"]
        environment = {**os.environ, "OTEL_METRIC_EXPORT_INTERVAL": "10"}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True, env=environment) as process:
            wait_for(lambda: connections() >= 20, "pushes")
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            _, stderr = process.communicate("", timeout=HANG)
        assert process.returncode == 0 and not stderr, stderr
        peak = int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])
        assert peak < 100 << 10, f"{peak} KiB"


TESTS = [
    a_session_begins,
    both_protocols_give_the_same_answers,
    runs_are_listed_newest_first,
    the_summary_is_that_of_the_report,
    the_peak_is_that_of_the_report,
    lists_can_be_paged_through,
    an_out_of_memory_error_is_explained,
    issues_cite_the_line,
    lines_have_the_figures_of_the_table,
    a_difference_is_explained,
    ranks_are_selected,
    bad_input_is_an_error_with_help,
    answers_about_large_runs_are_small,
    calls_at_the_same_time_get_the_same_answers,
    a_run_that_changes_is_read_again,
    garbage_on_stdin_is_survived,
    a_client_that_leaves_ends_the_server,
    a_reading_server_runs_nothing,
    a_command_is_recorded,
    a_dry_run_is_recorded,
    commands_that_cannot_run_are_errors,
    output_is_bounded,
    a_command_ends_at_the_time_limit,
    no_background_process_outlives_a_run,
    no_background_process_outlives_a_killed_server,
    texts_are_printable,
    one_run_at_a_time,
    progress_is_reported,
    a_cancelled_run_ends,
    a_run_does_not_outlive_its_client,
    figures_are_pushed_to_a_collector,
    pushes_that_fail_are_reported,
    redirects_of_a_collector_are_not_followed,
    a_push_that_hangs_at_the_end_is_counted,
    a_collector_cannot_fill_the_memory,
]


def main():
    names = sys.argv[1:]
    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="memtrace-mcp-") as folder:
        folder = pathlib.Path(folder).resolve() / "work"
        folder.mkdir()
        runs = Runs(folder)
        for test in TESTS:
            if names and not any(name in test.__name__ for name in names):
                continue
            start = time.monotonic()
            try:
                asyncio.run(asyncio.wait_for(test(runs), 5 * HANG))
            except BaseException as e:
                if isinstance(e, KeyboardInterrupt):
                    raise
                failed += 1
                # The client wraps what a test raises.
                while isinstance(e, BaseExceptionGroup):
                    e = e.exceptions[0]
                traceback.print_exception(e)
                print(f"FAIL {test.__name__}", flush=True)
            else:
                passed += 1
                print(f"ok   {test.__name__} ({time.monotonic() - start:.1f} s)", flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


main()
