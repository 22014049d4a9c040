"""`memtrace kernel`, and the life of its kernel: interrupts, restarts, the end of the kernel and of its server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest
from conftest import TIMEOUT_S, kernel, memtrace, summary_of, wait_until
from jupyter_client.manager import KernelManager

ALLOCATE = "import os, time, torch\nkept = torch.zeros(4 << 20, dtype=torch.uint8, device='cuda')"


def test_install_and_remove(jupyter: Path, tmp_path: Path) -> None:
    done = kernel("install", "--python", sys.executable, "--", "--stacks", "both", "--runs", "/data/runs")
    assert done.returncode == 0 and done.stdout == "", done
    assert done.stderr == (
        f"installed the kernel memtrace in {jupyter / 'memtrace'}\n"
        f'help: choose the kernel "Python 3.{sys.version_info[1]} (memtrace)" in the notebook\n'
    )
    spec = json.loads((jupyter / "memtrace" / "kernel.json").read_text())
    options = ["--quiet", "--reports-in-background", "--stacks", "both", "--runs", "/data/runs"]
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--ext=gpu_memtrace"]
    assert spec["argv"] == [os.path.realpath(memtrace()), "run", *options, "--", *command]
    assert (spec["language"], spec["display_name"]) == ("python", f"Python 3.{sys.version_info[1]} (memtrace)")
    assert (jupyter / "memtrace" / "logo-64x64.png").exists()
    # Again, with another name for people: the kernel is replaced.
    done = kernel("install", "--python", sys.executable, "--user", "--display-name", "Recorded")
    assert done.returncode == 0, done.stderr
    assert json.loads((jupyter / "memtrace" / "kernel.json").read_text())["display_name"] == "Recorded"
    # In a folder that Jupyter does not search.
    done = kernel("install", "--python", sys.executable, "--prefix", tmp_path / "prefix", "--name", "Other")
    other = tmp_path / "prefix" / "share" / "jupyter" / "kernels" / "other"
    assert done.returncode == 0 and other.is_dir(), done.stderr
    assert f"warning: {other.parent} is not in the search path" in done.stderr
    assert kernel("remove", "--python", sys.executable, "--name", "other").returncode == 2
    assert kernel("remove", "--python", sys.executable, "--name", "other", "--prefix", tmp_path / "prefix").returncode == 0
    assert not other.exists()
    done = kernel("remove", "--python", sys.executable)
    assert (done.returncode, done.stderr) == (0, f"removed {jupyter / 'memtrace'}\n")
    assert not (jupyter / "memtrace").exists()


def without(tmp_path: Path, module: str) -> str:
    """A Python that lacks a module: a script that runs this one."""
    hidden = f"import sys; sys.modules[{module!r}] = None"
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(hidden)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path / "hide"}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


def error(*arguments: object) -> Tuple[str, str]:
    """The error and the help of a command that fails."""
    done = kernel(*arguments)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == "" and len(lines) == 2, done
    assert lines[0].startswith("error: ") and lines[1].startswith("help: "), lines
    return lines[0][len("error: ") :], lines[1][len("help: ") :]


def test_errors(jupyter: Path, tmp_path: Path) -> None:
    message, help = error("install", "--python", without(tmp_path, "ipykernel"))
    assert message == f"{sys.executable} has no ipykernel" and help.startswith(f"{sys.executable} -m pip install ipykernel")
    assert error("install", "--python", tmp_path / "missing")[0] == f"cannot execute {tmp_path / 'missing'}: No such file or directory"
    assert error("install", "--python", "/bin/false")[0] == "/bin/false cannot install a kernel: it printed nothing"
    assert error("install", "--python", sys.executable, "--name", "a b")[0].startswith("Invalid kernel name 'a b'")
    (tmp_path / "file").touch()
    message, help = error("install", "--python", sys.executable, "--prefix", tmp_path / "file")
    assert message.startswith(f"cannot write {tmp_path / 'file'}") and "--user" in help, message
    assert error("install", "--", "--stacks", "wrong")[0].startswith("`memtrace run` refuses the options after --: invalid value")
    assert "--runs DIR" in error("install", "--", "-o", "run")[1]
    assert error("remove", "--python", sys.executable)[0] == "there is no kernel memtrace"
    foreign = jupyter / "foreign"
    foreign.mkdir(parents=True)
    (foreign / "kernel.json").write_text('{"argv": ["x"], "display_name": "x", "language": "y"}')
    for action in ("install", "remove"):
        message, _ = error(action, "--python", sys.executable, "--name", "foreign")
        assert message == f"{foreign} is a kernel that memtrace has not installed"
    assert (foreign / "kernel.json").exists()
    assert kernel("install", "--user", "--sys-prefix").returncode == 2


def test_a_python_without_the_package(jupyter: Path, tmp_path: Path) -> None:
    hide = without(tmp_path, "gpu_memtrace")
    # `find_spec` refuses a module that is None.
    (tmp_path / "hide" / "sitecustomize.py").write_text("import sys; sys.path[:] = [p for p in sys.path if 'launcher/python' not in p]")
    done = kernel("install", "--python", hide)
    assert done.returncode == 0 and "warning: " in done.stderr and "has no gpu_memtrace" in done.stderr, done.stderr
    assert "--ext=gpu_memtrace" not in json.loads((jupyter / "memtrace" / "kernel.json").read_text())["argv"]


class Session:
    """A running kernel and its client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manager = KernelManager(kernel_name="memtrace")
        self.manager.start_kernel(cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT_S)

    def run(self, code: str) -> Dict[str, Any]:
        """Runs a cell. The answer, with what it printed."""
        texts: List[str] = []

        def output(message: Dict[str, Any]) -> None:
            content = message["content"]
            texts.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

        reply = self.client.execute_interactive(code, timeout=TIMEOUT_S, output_hook=output)
        return {**reply["content"], "output": "".join(texts)}

    def interrupted(self, code: str, interrupt: Callable[[], None]) -> Dict[str, Any]:
        """Runs a cell that sleeps after `code`, and interrupts it there."""
        flag = self.folder / "is-running"

        def wait_and_interrupt() -> None:
            wait_until(flag.exists, "the cell")
            interrupt()

        thread = threading.Thread(target=wait_and_interrupt)
        thread.start()
        result = self.run(f"{code}\nopen({str(flag)!r}, 'w').close()\ntime.sleep({TIMEOUT_S})")
        thread.join()
        flag.unlink()
        return result

    def runs(self) -> List[Path]:
        return sorted(path for path in self.folder.iterdir() if path.name.startswith("memtrace-"))

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture
def session(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/train gpt.ipynb")
    (tmp_path / "work").mkdir()
    session = Session(tmp_path / "work")
    try:
        yield session
    finally:
        session.close()


def test_interrupts_reach_the_cell_once(session: Session) -> None:
    assert session.run(ALLOCATE)["status"] == "ok"
    launcher = session.manager.provisioner.pid
    # Jupyter interrupts the process group. Others send the signal to the process that they started.
    for interrupt in (session.manager.interrupt_kernel, lambda: os.kill(launcher, signal.SIGINT)):
        result = session.interrupted("pass", interrupt)
        assert (result["status"], result["ename"]) == ("error", "KeyboardInterrupt"), result
        # A second interrupt would end this cell.
        assert session.run("time.sleep(0.5)")["status"] == "ok"
    # The figures up to the interrupt are shown.
    result = session.interrupted("%%memtrace\nmore = torch.zeros(8 << 20, dtype=torch.uint8, device='cuda')", session.manager.interrupt_kernel)
    assert result["ename"] == "KeyboardInterrupt" and "8.00 MiB" in result["output"], result


def test_a_restart_begins_a_new_run(session: Session) -> None:
    assert session.run(ALLOCATE)["status"] == "ok"
    (first,) = session.runs()
    assert first.name.startswith("memtrace-train_gpt-"), first
    session.manager.restart_kernel()
    session.client.wait_for_ready(timeout=TIMEOUT_S)
    assert session.run(ALLOCATE)["status"] == "ok"
    assert session.run("import gpu_memtrace; print(gpu_memtrace.run_folder())")["output"].strip() not in ("", str(first))
    session.client.shutdown()
    wait_until(lambda: session.manager.provisioner.process.poll() is not None, "the end of the launcher")
    runs = session.runs()
    assert len(runs) == 2 and first in runs
    for run in runs:
        manifest = json.loads((run / "run.json").read_text())
        losses = {name for name, count in manifest["losses"].items() if count and name != "events"}
        assert manifest["state"] == "ended" and manifest["losses"]["events"] > 0 and not losses, manifest
        # The launcher has ended; the reports follow.
        (process,) = summary_of(run)["processes"]
        assert process["recording_end_reason"] is not None


def test_the_kernel_ends_with_its_server(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    server = subprocess.Popen([sys.executable, __file__, str(tmp_path / "work")], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pids = [int(pid) for pid in server.stdout.readline().split()]
    assert len(pids) == 2, "the launcher and the kernel"
    server.kill()
    server.wait()

    def has_ended(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    wait_until(lambda: all(map(has_ended, pids)), "the end of the kernel")
    (run,) = (path for path in (tmp_path / "work").iterdir() if path.name.startswith("memtrace-notebook-"))
    assert json.loads((run / "run.json").read_text())["state"] == "ended"
    assert summary_of(run)["run"]["events"] > 0


def serve(folder: Path) -> None:
    """Starts a kernel as a Jupyter server does, and waits to be killed."""
    session = Session(folder)
    kernel_pid = session.run(f"{ALLOCATE}\nprint(os.getpid())")["output"].strip()
    print(session.manager.provisioner.pid, kernel_pid, flush=True)
    signal.pause()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
