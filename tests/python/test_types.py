"""The package passes the strict type checker, for the oldest and the newest Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PACKAGE


@pytest.mark.parametrize("version", ["3.9", "3.13"])
def test_strict_types(version: str, tmp_path: Path) -> None:
    # The stubs of recent NumPy are in the syntax of 3.12.
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n[mypy-numpy.*]\nfollow_imports = skip\nfollow_imports_for_stubs = True\n")
    options = ["--config-file", str(config), "--strict", "--python-version", version, "--cache-dir", str(tmp_path)]
    command = [sys.executable, "-m", "mypy", *options, str(PACKAGE / "gpu_memtrace")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
