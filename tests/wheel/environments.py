"""Environments with memtrace installed, and what memtrace must do in each: what tests/wheel/run and sources.py share."""

import glob
import json
import os
import shutil
import subprocess
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINORS = range(9, 16)
PROGRAM = ROOT / "tests/wheel/program.py"
MIB = 1 << 20
# The allocations of the program PROGRAM.
SIZES, PEAK = [5 * MIB, 3 * MIB], 8 * MIB
# memtrace's own failures.
FAILED = 125


def cache():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("MEMTRACE_CACHE") or os.path.join(base, "memtrace"))


def pythons():
    """One interpreter of each minor version: (3, MINOR) to its path."""
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    found = {}
    for minor in MINORS:
        names = ["python3.%d" % minor, "python3", *sorted(glob.glob("%s/versions/3.%d.*/bin/python3" % (pyenv, minor)))]
        for name in names:
            path = shutil.which(name)
            # A shim of pyenv is on PATH even where its version is not chosen. venv is a package of its own on Debian.
            code = "import sys, venv, ensurepip; print(*sys.version_info[:2], sys.implementation.name, sys.executable)"
            shown = path and subprocess.run([path, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            if shown and shown.returncode == 0 and shown.stdout.startswith("3 %d cpython " % minor):
                found[minor] = shown.stdout.strip().split(" ", 3)[3]
                break
        # Python 3.14 and newer are packages of Debian unstable, which scripts/python unpacks.
        if minor >= 14 and minor not in found:
            path = subprocess.run([ROOT / "scripts/python", "3.%d" % minor], stdout=subprocess.PIPE, text=True)
            if path.returncode == 0:
                found[minor] = path.stdout.strip()
    return found


def run(command, environment=None, expected=0, timeout=600, **more):
    """Runs a command and returns its output. `expected` is its exit status; None: any."""
    environment = environment or plain_environment()
    result = subprocess.run(
        [str(word) for word in command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=timeout, **more
    )
    if expected is not None and result.returncode != expected:
        words = " ".join(str(word) for word in command)
        raise AssertionError("%s: exit status %d\n%s%s" % (words, result.returncode, result.stdout, result.stderr))
    return result


def plain_environment(path=None, **variables):
    """The environment of a user: nothing of this test, of an activated environment, or of another memtrace."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, "PATH": path or "/usr/local/bin:/usr/bin:/bin", **variables}


def with_simulated_cuda(environment):
    """The same environment with the simulated CUDA."""
    return {**environment, "LD_LIBRARY_PATH": simulated_cuda()}


_simulated_cuda = None


def simulated_cuda():
    global _simulated_cuda
    if _simulated_cuda is None:
        command = [str(ROOT / "scripts/sim"), "sh", "-c", "echo $SIMCUDA_LIB"]
        output = subprocess.run(command, env={**os.environ, "SIM_TORCH": "none"}, stdout=subprocess.PIPE, text=True, check=True).stdout
        _simulated_cuda = output.strip()
    return _simulated_cuda


def files(folder):
    """The files below a folder, except compiled ones."""
    return {path for path in Path(folder).rglob("*") if not path.is_dir() and path.suffix != ".pyc"}


class Environment:
    """A virtual environment, and a folder for run folders."""

    def __init__(self, python, scratch, wheel=None):
        self.folder, self.scratch, self.wheel, self.runs = scratch / "an environment", scratch, wheel, 0
        run([python, "-m", "venv", self.folder])
        self.bin = self.folder / "bin"
        self.python = self.bin / "python"
        self.before = files(self.folder)
        if wheel:
            self.pip("install", "--no-index", wheel)

    def pip(self, *words, **more):
        return run([self.python, "-m", "pip", "--disable-pip-version-check", *words], **more)

    def environment(self, **variables):
        return plain_environment("%s:/usr/local/bin:/usr/bin:/bin" % self.bin, **variables)

    def commands(self):
        """Every way to run memtrace."""
        return [["memtrace"], ["gpu-memtrace"], ["python", "-m", "gpu_memtrace"]]

    def shell(self, command, environment=None, expected=0, **more):
        """Runs a command as a shell with the environment's PATH does."""
        return run(["sh", "-c", 'exec "$@"', "sh", *command], environment or self.environment(), expected, **more)

    def record(self, launcher, command, environment=None, expected=0):
        """Records a command and returns the result and the summary."""
        self.runs += 1
        folder = self.scratch / ("run%d" % self.runs)
        result = self.shell([*launcher, "-o", folder, "--", *command], environment, expected)
        summary = folder / "summary.json"
        return result, json.loads(summary.read_text()) if summary.exists() else None


# ---- what memtrace must do


def each_command_records_a_program(env):
    for command in env.commands():
        _, summary = env.record(command, ["python", PROGRAM], with_simulated_cuda(env.environment()))
        assert summary["losses"] == {} and summary["problems"] == [], summary
        (process,) = summary["processes"]
        peak = process["devices"][0]["peak"]
        assert peak["totals"]["allocated_bytes"] == PEAK, peak
        largest = peak["largest_allocations"]
        assert [site["bytes"] for site in largest] == SIZES, largest
        for site in largest:
            assert [frame["name"] for frame in site["stack"]["frames"]] == ["allocates", "<module>"], site


def each_command_serves_an_agent(env):
    """`memtrace mcp` answers a client of the Model Context Protocol as `memtrace report --json` does."""
    env.record(["memtrace"], ["python", PROGRAM], with_simulated_cuda(env.environment()))
    for command in env.commands():
        name = "run%d" % env.runs
        tools, answer = served([*command, "mcp"], env.environment(), env.scratch, ("summary", {"run": name}))
        assert {"runs", "summary", "peak", "lines"} <= tools and "run" not in tools, tools
        (device,) = answer["devices"]
        assert device["peak"]["bytes"] == PEAK, answer


def served(command, environment, folder, call):
    """Starts a server in a folder. Returns the names of its tools, and the answer to one call: its tool and arguments."""
    words = ["sh", "-c", 'exec "$@"', "sh", *map(str, command)]
    server = subprocess.Popen(words, env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(number, method, **parameters):
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": parameters}
        server.stdin.write(json.dumps(message) + "\n")
        server.stdin.flush()
        for line in server.stdout:
            answer = json.loads(line)
            if answer.get("id") == number:
                return answer["result"]
        raise AssertionError("%s: no answer to %s" % (command, method))

    with server:
        ask(1, "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "test", "version": "1"})
        server.stdin.write('{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
        tools = {tool["name"] for tool in ask(2, "tools/list")["tools"]}
        answer = ask(3, "tools/call", name=call[0], arguments=call[1])["structuredContent"]
        server.stdin.close()
        assert server.wait(600) == 0, command
    return tools, answer


def has_one_error(result, error, help):
    """Whether a command printed one error with help, and nothing else."""
    lines = result.stderr.splitlines()
    assert len(lines) == 2 and result.stdout == "", (result.stdout, result.stderr)
    assert lines[0].startswith("error: ") and error in lines[0], lines
    assert lines[1].startswith("help: ") and help in lines[1], lines


class Results:
    """Runs tests, and counts them."""

    def __init__(self):
        self.passed, self.failed = 0, 0

    def test(self, name, function, *arguments):
        try:
            function(*arguments)
        except Exception:
            traceback.print_exc()
            self.failed += 1
            print("FAIL  %s" % name, flush=True)
        else:
            self.passed += 1
            print("ok    %s" % name, flush=True)

    def finish(self):
        """Prints the counts, and returns the exit status."""
        print("%d passed, %d failed" % (self.passed, self.failed))
        return 1 if self.failed else 0
