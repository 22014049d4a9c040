"""The plugin of pytest, and docs/how-to/pytest.md."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from typing import Dict, List

import pytest
from conftest import PACKAGE, ROOT, Workplace, blocks, python

MIB = 1 << 20
PYTEST = ["-m", "pytest", "-p", "no:cacheprovider"]


def run(workplace: Workplace, text: str, *options: str, fails: bool = True, **env: str) -> str:
    """Runs a file of tests with --memtrace. Returns the output of pytest."""
    (workplace.folder / "test_it.py").write_text("import pytest, torch\n" + text)
    command = [python(), *PYTEST, "--memtrace", "--memtrace-output=run", *options, "test_it.py"]
    return workplace.run(*command, fails=fails, **env).output


def outcomes(output: str) -> Dict[str, int]:
    (line,) = re.findall(r"^=* ?(\d+ (?:passed|failed|skipped|xfailed|error).*) in [\d.]+s", output, flags=re.M)
    return {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", line)}


def verdicts(output: str) -> List[str]:
    return re.findall(r"^((?:peak|growth|kept) .* > max_.*)", output, flags=re.M)


def test_the_entry_point_is_that_of_the_wheel() -> None:
    from conftest import ENTRY_POINTS

    table = (ROOT / "pyproject.toml").read_text().split("[project.entry-points.pytest11]\n")[1].split("\n\n")[0]
    assert table.replace('"', "").strip() == ENTRY_POINTS.split("]\n")[1].strip()
    assert (PACKAGE / "gpu_memtrace" / "pytest_plugin.py").exists()


def test_the_example_of_the_page(workplace: Workplace) -> None:
    assert workplace.write(blocks("pytest.md", "python")) == ["test_model.py"]
    failure, without = blocks("pytest.md", "text")
    command = [python(), *PYTEST, "test_model.py"]
    result = workplace.run(*command, "--memtrace", "--memtrace-output", "run", fails=True)
    assert outcomes(result.stdout) == {"failed": 1, "passed": 2}
    assert failure in result.stdout
    assert "activations" not in failure and "temporaries" in result.stdout
    assert "The recording is in run: memtrace report run, or memtrace open run" in result.stdout
    name = "test_model.py::test_batch[8192]"
    text = workplace.run(workplace.environment["MEMTRACE_BIN"], "report", "run", "--range", name).stdout
    assert failure.split("\n\n")[1].strip() in text
    # Without memtrace, the tests pass.
    alone = workplace.run(*command)
    assert outcomes(alone.stdout) == {"passed": 3} and without.strip() in alone.stdout
    # The configuration of the page adds the option.
    (configuration,) = blocks("pytest.md", "ini")
    (workplace.folder / "pytest.ini").write_text(configuration)
    assert failure.split("\n")[0] in workplace.run(*command, fails=True).stdout
    # memtrace -- pytest
    (workplace.folder / "pytest.ini").unlink()
    assert failure in workplace.run(workplace.environment["MEMTRACE_BIN"], "-q", "-o", "own", "--", *command, fails=True).stdout


def test_a_dry_run_holds_the_limits(workplace: Workplace) -> None:
    workplace.write(blocks("pytest.md", "python"))
    command = [python(), *PYTEST, "test_model.py", "-m", "memtrace", "--memtrace-output", "run"]
    result = workplace.run(*command, "--memtrace-dry-run", "a100-40gb", fails=True)
    assert outcomes(result.stdout) == {"failed": 1, "passed": 2}
    assert "growth 64.0 MiB > max_growth 40.0 MiB on GPU 0" in result.stdout and "NVIDIA A100" in result.stdout
    assert workplace.summary()["run"]["simulated"]["gpu"].startswith("NVIDIA A100")
    wrong = workplace.run(*command, "--memtrace-dry-run", "a100-41gb", fails=True)
    assert "the nearest are a100-40gb" in wrong.stderr


def test_peaks_are_those_of_pytorch(workplace: Workplace) -> None:
    """A limit of the peak that PyTorch measures passes. One byte less fails."""
    output = run(
        workplace,
        """
import json

kept = []

@pytest.fixture(scope="module")
def before():
    # The peak of an earlier test or fixture is not that of the test.
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    return torch.empty(3 << 20, dtype=torch.uint8, device="cuda")

def work(n):
    a = torch.empty(n << 20, dtype=torch.uint8, device="cuda")
    kept.append(torch.empty(1000, device="cuda"))
    del a
    b = torch.nn.Linear(64, 64).cuda()
    b(torch.empty(n, 64, device="cuda")).sum().backward()

@pytest.mark.parametrize("n", [2, 5, 9])
def test_measure(before, n):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    work(n)
    figures = [torch.cuda.max_memory_allocated(), start, torch.cuda.memory_allocated()]
    print("FIGURES", json.dumps([n, *figures]))
    with open("figures.jsonl", "a") as file:
        file.write(json.dumps([n, *figures]) + "\\n")
""",
        "-s",
        fails=False,
    )
    assert outcomes(output) == {"passed": 3}
    for line in (workplace.folder / "figures.jsonl").read_text().splitlines():
        n, peak, start, end = json.loads(line)
        name = f"test_it.py::test_measure[{n}]"
        report = workplace.run(workplace.environment["MEMTRACE_BIN"], "report", "run", "--json", "--range", name).stdout
        (device,) = json.loads(report)["processes"][0]["devices"]
        found = device["range"]
        assert found["peak"]["totals"]["allocated_bytes"] == peak
        assert (found["start_bytes"], found["end_bytes"]) == (start, end)
        assert sum(row["bytes"] for row in found["peak"]["by_category"]) == peak


def test_limits_to_the_byte(workplace: Workplace) -> None:
    output = run(
        workplace,
        """
kept = []

def allocate(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

@pytest.fixture(scope="module", autouse=True)
def before():
    kept.append(allocate(8))

@pytest.mark.memtrace(max_peak=12 << 20, max_growth=4 << 20, max_kept=0)
def test_passes():
    allocate(4)

@pytest.mark.memtrace(max_peak=(12 << 20) - 1)
def test_peak():
    allocate(4)

@pytest.mark.memtrace(max_growth=(4 << 20) - 1)
def test_growth():
    allocate(4)

@pytest.mark.memtrace(max_kept="1MiB", max_peak="1GiB")
def test_kept():
    kept.append(allocate(2))
""",
    )
    assert outcomes(output) == {"failed": 3, "passed": 1}
    before = "8.00 MiB were allocated before the test"
    assert verdicts(output) == [
        f"peak 12.0 MiB > max_peak 12.0 MiB (12,582,912 > 12,582,911 bytes) on GPU 0; {before}",
        f"growth 4.00 MiB > max_growth 4.00 MiB (4,194,304 > 4,194,303 bytes) on GPU 0; {before}",
        f"kept 2.00 MiB > max_kept 1.00 MiB on GPU 0; {before}",
    ]


def test_other_outcomes(workplace: Workplace) -> None:
    """A test that fails by itself keeps its own error. A skipped test and an expected failure stay what they are."""
    output = run(
        workplace,
        """
pytestmark = pytest.mark.memtrace(max_growth="1MiB")

def allocate():
    torch.empty(4 << 20, dtype=torch.uint8, device="cuda")

def test_own_error():
    allocate()
    raise KeyError("own error")

def test_skipped():
    allocate()
    pytest.skip("own reason")

@pytest.mark.xfail(strict=True)
def test_expected():
    allocate()

@pytest.mark.memtrace(max_growth="4MiB")
def test_nearest_marker():
    allocate()

@pytest.mark.memtrace(device="cuda:1")
def test_other_device():
    allocate()

def test_without_memory():
    pass

import unittest

class TestCase(unittest.TestCase):
    def test_method(self):
        allocate()
""",
        "--junitxml=junit.xml",
    )
    assert outcomes(output) == {"failed": 2, "passed": 3, "skipped": 1, "xfailed": 1}
    assert "KeyError: 'own error'" in output and "Captured memtrace call" in output
    assert len(verdicts(output)) == 2
    cases = {case.get("name"): case for case in xml.etree.ElementTree.parse(workplace.folder / "junit.xml").iter("testcase")}
    assert "own error" in (cases["test_own_error"].find("failure").get("message") or "")
    assert "growth 4.00 MiB > max_growth 1.00 MiB" in (cases["test_method"].find("failure").get("message") or "")


@pytest.mark.parametrize(
    "marker, message",
    [
        ("max_peak='20G'", "'20G' is no size: use a unit such as 2GiB"),
        ("'2GiB'", "unknown argument of the marker memtrace"),
        ("max='2GiB'", "unknown argument of the marker memtrace"),
        ("max_peak='2GiB', device='gpu'", "'gpu' is no device: use a number, 'cuda:N' or 'cpu'"),
    ],
)
def test_wrong_markers(workplace: Workplace, marker: str, message: str) -> None:
    (workplace.folder / "test_it.py").write_text(f"import pytest\n\n@pytest.mark.memtrace({marker})\ndef test_it(): pass\n")
    assert message in workplace.run(python(), *PYTEST, "--strict-markers", "test_it.py", fails=True).output


def test_xdist(workplace: Workplace) -> None:
    text = """
@pytest.mark.memtrace(max_growth="4MiB")
@pytest.mark.parametrize("mib", range(1, 9))
def test_it(mib):
    torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
"""
    output = run(workplace, text, "-n", "2")
    assert outcomes(output) == {"failed": 4, "passed": 4}
    found = sorted(line.split(" on GPU")[0] for line in verdicts(output))
    assert found == [f"growth {mib}.00 MiB > max_growth 4.00 MiB" for mib in range(5, 9)]
    assert len(workplace.summary()["processes"]) == 2, "a process for each worker"
    alone = workplace.run(python(), *PYTEST, "-n", "2", "test_it.py").output
    assert "The limits of 8 tests were not checked: run pytest --memtrace" in alone


def test_a_test_that_runs_again(workplace: Workplace) -> None:
    """Each run of a test has a range of its own."""
    (workplace.folder / "conftest.py").write_text(
        "def pytest_runtest_protocol(item, nextitem):\n"
        "    from _pytest.runner import runtestprotocol\n"
        "    runtestprotocol(item, nextitem=nextitem)\n"
    )
    output = run(
        workplace,
        """
sizes = [9, 2]

@pytest.mark.memtrace(max_growth="4MiB")
def test_it():
    torch.empty(sizes.pop(0) << 20, dtype=torch.uint8, device="cuda")
""",
    )
    assert outcomes(output) == {"failed": 1, "passed": 1}
    assert verdicts(output)[0].startswith("growth 9.00 MiB")


def test_a_recording_with_gaps(workplace: Workplace) -> None:
    output = run(
        workplace,
        """
import gpu_memtrace

@pytest.mark.memtrace(max_peak="64MiB")
def test_it():
    torch.empty(1 << 20, device="cuda")
    with gpu_memtrace.paused():
        torch.empty(1 << 20, device="cuda")
""",
        fails=False,
    )
    assert "memtrace: the recording is incomplete, so figures may be too low" in output


def test_the_option_in_a_program_of_its_own(workplace: Workplace) -> None:
    program = workplace.folder / "runner.py"
    program.write_text("import sys, pytest\nsys.exit(pytest.main(['--memtrace', 'test_it.py']))\n")
    (workplace.folder / "test_it.py").write_text("def test_it(): pass\n")
    assert "cannot restart this program, because it called pytest.main()" in workplace.run(python(), program, fails=True).output


def test_signals_and_exit_statuses(workplace: Workplace) -> None:
    """The exit status of pytest passes through: 5 without tests, 4 for bad usage."""
    (workplace.folder / "test_it.py").write_text("")
    for options, status in ((["test_it.py"], 5), (["--no-such-option"], 4)):
        assert workplace.run(python(), *PYTEST, "--memtrace", *options, fails=True).returncode == status


def test_what_a_run_without_memtrace_imports(workplace: Workplace) -> None:
    """The plugin is loaded by each pytest of the environment, and loads no large package."""
    (workplace.folder / "test_it.py").write_text(
        "import sys\n\ndef test_it():\n    assert 'gpu_memtrace.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'numpy', 'gpu_memtrace.integrations'} & set(sys.modules)\n"
    )
    assert outcomes(workplace.run(python(), *PYTEST, "test_it.py").stdout) == {"passed": 1}


def test_a_test_sees_a_smaller_gpu(workplace: Workplace) -> None:
    output = run(
        workplace,
        """
def room():
    return torch.cuda.mem_get_info()

@pytest.mark.memtrace(limit="1GiB")
def test_smaller():
    assert room()[1] == 1 << 30
    torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="total capacity of 1024.00 MiB|total capacity of 1.00 GiB"):
        torch.empty((1 << 30) + 1, dtype=torch.uint8, device="cuda")

def test_as_before():
    assert room()[1] == 8 << 30
    torch.empty(2 << 30, dtype=torch.uint8, device="cuda")

@pytest.mark.memtrace(limit="3GiB", max_peak="1GiB")
def test_both():
    torch.empty(2 << 30, dtype=torch.uint8, device="cuda")

@pytest.mark.memtrace(limit="3GiB")
class TestAll:
    @pytest.mark.memtrace(limit="2GiB")
    def test_nearest(self):
        assert room()[1] == 2 << 30

    def test_class(self):
        assert room()[1] == 3 << 30

@pytest.mark.memtrace(limit=0)
def test_nothing():
    pass
""",
        "-k",
        "not nothing",
    )
    assert outcomes(output) == {"failed": 1, "passed": 4, "deselected": 1}, output
    (verdict,) = verdicts(output)
    assert verdict.startswith("peak 2.00 GiB > max_peak 1.00 GiB"), verdict
    wrong = run(workplace, "@pytest.mark.memtrace(limit=0)\ndef test_nothing():\n    pass\n", "--memtrace-output=wrong")
    assert "a limit of 0 bytes permits nothing" in wrong
