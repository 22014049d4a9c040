"""The tasks and the debug configuration of docs/how-to/vs-code.md, run as VS Code runs them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any, Dict, List

import pytest
from conftest import Workplace, blocks, python

PROGRAM = "import torch\nblock = torch.empty(3 << 20, dtype=torch.uint8, device='cuda')\nprint('done')\n"
TASKS, LAUNCH = (json.loads(block) for block in blocks("vs-code.md", "json"))


def substituted(value: Any, workplace: Workplace) -> Any:
    """The value, with the variables of VS Code in its texts."""
    if isinstance(value, str):
        variables = {
            "${command:python.interpreterPath}": python(),
            "${file}": str(workplace.folder / "train.py"),
            "${workspaceFolder}": str(workplace.folder),
        }
        for name, text in variables.items():
            value = value.replace(name, text)
        assert "${" not in value, value
        return value
    if isinstance(value, list):
        return [substituted(item, workplace) for item in value]
    if isinstance(value, dict):
        return {name: substituted(item, workplace) for name, item in value.items()}
    return value


def run_task(workplace: Workplace, label: str, **env: str) -> str:
    (task,) = (task for task in TASKS["tasks"] if task["label"] == label)
    task = substituted(task, workplace)
    assert task["type"] == "process" and task["options"]["cwd"] == str(workplace.folder)
    return workplace.run(task["command"], *task["args"], **env).output


def peaks(workplace: Workplace) -> List[int]:
    (folder,) = workplace.folder.glob("memtrace-*")
    summary = workplace.summary(folder.name)
    return [d["highest"]["allocated_bytes"] for process in summary["processes"] for d in process["devices"]]


def test_record_and_open(workplace: Workplace) -> None:
    assert TASKS["version"] == "2.0.0"
    (workplace.folder / "train.py").write_text(PROGRAM)
    assert "done" in run_task(workplace, "memtrace: record this file")
    assert peaks(workplace) == [3 << 20]
    browser = workplace.folder / "browser"
    browser.write_text('#!/bin/sh\necho "$1" >opened.new && mv opened.new opened\n')
    browser.chmod(0o755)
    run_task(workplace, "memtrace: open the newest report", BROWSER=str(browser))
    # memtrace does not wait for the browser.
    while not (workplace.folder / "opened").exists():
        time.sleep(0.05)
    assert (workplace.folder / "opened").read_text().endswith("/report.html\n")


def test_tests_with_memory_limits(workplace: Workplace) -> None:
    (workplace.folder / "test_one.py").write_text(
        "import pytest, torch\n\n@pytest.mark.memtrace(max_peak='4MiB')\ndef test_one():\n"
        "    torch.empty(3 << 20, dtype=torch.uint8, device='cuda')\n"
    )
    assert "1 passed" in run_task(workplace, "memtrace: tests with memory limits")
    assert peaks(workplace) == [3 << 20]


class Adapter:
    """The debug adapter that VS Code talks to, over its standard input and output."""

    def __init__(self, workplace: Workplace) -> None:
        command = [sys.executable, "-m", "debugpy.adapter"]
        self.process = subprocess.Popen(
            command, env=workplace.environment, cwd=workplace.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.sent = 0

    def request(self, command: str, arguments: Dict[str, Any]) -> None:
        self.sent += 1
        body = json.dumps({"seq": self.sent, "type": "request", "command": command, "arguments": arguments}).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def until(self, kind: str, name: str) -> Dict[str, Any]:
        """The next event or response of this name. A failed response is an error."""
        assert self.process.stdout is not None
        while True:
            header = self.process.stdout.readline()
            assert header, f"the adapter ended before {name}"
            while self.process.stdout.readline() != b"\r\n":
                pass
            message = json.loads(self.process.stdout.read(int(header.split(b":")[1])))
            assert message.get("success", True), message
            if message["type"] == kind and message.get("event", message.get("command")) == name:
                return message


@pytest.mark.parametrize("configuration", LAUNCH["configurations"], ids=lambda found: found["name"])
def test_debug(workplace: Workplace, configuration: Dict[str, Any]) -> None:
    assert LAUNCH["version"] == "0.2.0" and configuration["type"] == "debugpy"
    (workplace.folder / "train.py").write_text(PROGRAM)
    # VS Code shows the terminal for `integratedTerminal`; here the adapter starts the program itself.
    arguments = {**substituted(configuration, workplace), "console": "internalConsole"}
    adapter = Adapter(workplace)
    try:
        adapter.request("initialize", {"clientID": "test", "adapterID": "debugpy"})
        adapter.until("response", "initialize")
        adapter.request("launch", arguments)
        adapter.until("event", "initialized")
        adapter.request("setBreakpoints", {"source": {"path": arguments["program"]}, "breakpoints": [{"line": 3}]})
        adapter.until("response", "setBreakpoints")
        adapter.request("configurationDone", {})
        stopped = adapter.until("event", "stopped")
        assert stopped["body"]["reason"] == "breakpoint"
        adapter.request("continue", {"threadId": stopped["body"]["threadId"]})
        adapter.until("event", "terminated")
        adapter.request("disconnect", {})
        adapter.until("response", "disconnect")
        adapter.process.communicate(timeout=60)
    finally:
        adapter.process.kill()
        adapter.process.wait()
    assert peaks(workplace) == [3 << 20]
