"""Makes docs/images/report.png, the picture of an HTML report: the out-of-memory error of examples/gpt.py on 12 GiB.

    SIMCUDA_MEMORY=12G scripts/sim python docs/images/report.py

Needs target/release/memtrace ($MEMTRACE_BIN names another one) and Chromium ($CHROMIUM, or on PATH).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
# The verdict, the tiles, what to try and the whole timeline.
WIDTH, HEIGHT = 1360, 1400
# Flat colors and gray text need no more; with all colors the file is three times as large.
COLORS = 128

memtrace = os.environ.get("MEMTRACE_BIN") or ROOT / "target/release/memtrace"
chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
if chromium is None:
    sys.exit("error: Chromium is missing\nhelp: on Debian: apt-get install chromium")
with tempfile.TemporaryDirectory() as folder:
    picture = Path(folder, "report.png")
    run = [memtrace, "--quiet", "-o", Path(folder, "run"), "--", "python", "examples/gpt.py"]
    # The program ends with its out-of-memory error.
    subprocess.run(run, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    page = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}",
        "--virtual-time-budget=10000", f"--screenshot={picture}", f"file://{folder}/run/report.html",
    ]
    subprocess.run(page, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    Image.open(picture).convert("RGB").quantize(COLORS).save(ROOT / "docs/images/report.png", optimize=True)
