#!/usr/bin/env python3
"""Runs the commands that pages show, and compares their output and the figures in the text."""

import argparse
import concurrent.futures
import difflib
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DESCRIPTION = """\
Runs the commands that pages show, over the simulated CUDA, and compares their output with that on the page.

A page is checked if it has a block in the language `console`. A line of the block that begins with `$ ` is a command; a backslash
at its end continues it. The lines after it are its output, stdout and stderr together. A line `...` stands for any number of lines,
`[..]` for any part of a line. Commands of one page run one after another in a new folder, which has copies of examples/ and
scripts/sim; memtrace is on PATH, and so is the python of scripts/venv. A comment `<!-- run: COMMAND -->` runs a command that the page does
not show, and `<!-- env: NAME=VALUE -->` sets a variable for the commands after it.

Every figure with a unit (GiB, MiB, KiB, %, blocks) in the text must stand in one of the page's commands or in its output, which
includes the part of the output that the page leaves out.

  MEMTRACE_BIN   the memtrace to run (default: release/memtrace of the target folder)
"""

ROOT = Path(__file__).resolve().parents[2]
PIECE = re.compile(r"^```console\n(?P<block>.*?)^```$|^<!-- run: (?P<hidden>.*?) -->$|^<!-- env: (?P<name>\w+)=(?P<value>\S*) -->$", re.M | re.S)
CODE = re.compile(r"^```.*?^```$|^<!--.*?-->$", re.M | re.S)
FIGURE = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)? (?:[KMGT]iB|%|blocks)(?!\w)")


def steps(block):
    """The commands of a block with their output, as (command lines, output lines)."""
    found = []
    continues = False
    for line in block.splitlines():
        if continues:
            found[-1][0].append(line)
        elif line.startswith("$ "):
            found.append(([line[2:]], []))
        elif found:
            found[-1][1].append(line)
        else:
            raise ValueError("a console block begins with a command: %r" % line)
        continues = bool(found) and found[-1][1] == [] and found[-1][0][-1].endswith("\\")
    return found


def line_matches(expected, line):
    pattern = ".*".join(re.escape(part) for part in expected.rstrip().split("[..]"))
    return re.fullmatch(pattern, line.rstrip()) is not None


def first_difference(expected, lines):
    """The first line of `expected` that `lines` lack at its place, or None."""
    # The places in `lines` that the lines of `expected` so far can end at.
    places = {0}
    for line in expected:
        if line.strip() == "...":
            places = set(range(min(places), len(lines) + 1))
            continue
        following = {place + 1 for place in places if place < len(lines) and line_matches(line, lines[place])}
        if not following:
            return line
        places = following
    return None if len(lines) in places else "(the end of the output)"


def updated(expected, lines):
    """The expected lines with the figures of `lines`, or all lines where they are too different."""
    words = lambda line: re.sub(r"[\d.,#]+", "0", " ".join(line.split()))
    result, start = [], 0
    for line in expected:
        if line.strip() == "...":
            result.append(line)
            continue
        for place in range(start, len(lines)):
            if "[..]" in line and line_matches(line, lines[place]):
                result.append(line)
                break
            if difflib.SequenceMatcher(None, words(line), words(lines[place])).ratio() > 0.85:
                result.append(lines[place])
                break
        else:
            return lines
        start = place + 1
    return result if first_difference(result, lines) is None else lines


def prepare(folder):
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "scripts").mkdir()
    sim = folder / "scripts/sim"
    sim.write_text('#!/bin/sh\nexec "%s" "$@"\n' % (ROOT / "scripts/sim"))
    sim.chmod(0o755)


def variables():
    target = os.environ.get("CARGO_TARGET_DIR") or str(ROOT / "target")
    memtrace = os.path.abspath(os.environ.get("MEMTRACE_BIN") or target + "/release/memtrace")
    if not os.access(memtrace, os.X_OK):
        sys.exit("error: cannot run %s\nhelp: cargo build --release -p memtrace" % memtrace)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMTRACE_", "SIMCUDA_", "SIM_"))}
    for name in ("MEMTRACE_CACHE",):
        if name in os.environ:
            kept[name] = os.environ[name]
    path = os.pathsep.join([os.path.dirname(memtrace), python_folder(), os.environ["PATH"]])
    kept.update(PATH=path, CARGO_TARGET_DIR=target, PYTHONDONTWRITEBYTECODE="1")
    return kept


@functools.cache
def python_folder():
    """The folder of the Python that scripts/sim uses."""
    venv = subprocess.run([ROOT / "scripts/venv"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return venv + "/bin"


def run(command, folder, more):
    result = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**variables(), **more}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600
    )
    return result.stdout.decode(errors="replace")


def check_page(path, text, update=False, runner=run):
    """The errors of a page, and its text with the output of today."""
    errors, outputs, new, more = [], [], text, {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        prepare(folder)
        for piece in PIECE.finditer(text):
            if piece.group("name"):
                more[piece.group("name")] = piece.group("value")
                outputs.append(re.sub(r"\b(\d+)([KMGT])\b", r"\1 \2iB", piece.group("value")))
                continue
            if piece.group("hidden"):
                runner(piece.group("hidden"), folder, more)
                continue
            blocks = []
            for command, expected in steps(piece.group("block")):
                output = runner("\n".join(command), folder, more)
                outputs.append(output)
                # A size in a command (SIMCUDA_MEMORY=12G) is a figure that the text may repeat.
                outputs.append(re.sub(r"(\d)([KMGT])(?:iB)?\b", r"\1 \2iB", " ".join(command)))
                lines = output.rstrip("\n").split("\n") if output.strip() else []
                difference = first_difference(expected, lines)
                if difference is not None:
                    shown = "\n".join(difflib.unified_diff(expected, lines, "page", "today", lineterm=""))
                    errors.append("%s: $ %s: not in the output: %s\n%s" % (path, " ".join(command), difference, shown))
                    expected = updated(expected, lines)
                blocks.append("\n".join(["$ " + command[0], *command[1:], *expected]) + "\n")
            new = new.replace(piece.group(), "```console\n" + "".join(blocks) + "```", 1)
    known = set(FIGURE.findall(" ".join(" ".join(outputs).split())))
    for figure in dict.fromkeys(FIGURE.findall(" ".join(CODE.sub("", text).split()))):
        if figure not in known:
            errors.append("%s: no command of the page prints %s" % (path, figure))
    if update and new != text:
        path.write_text(new)
    return errors


def self_test():
    """Checks the comparison on a page that is right, and on wrong ones. Returns the number of wrong answers."""
    output = "peak 13.7 GiB\n  weights 12 %  in 3 blocks\nfolder /tmp/x\nend\n"
    good = "Peak 13.7 GiB, 12 % in 3 blocks.\n\n```console\n$ a\npeak 13.7 GiB\n...\nfolder [..]\nend\n```\n"
    cases = [
        (good, True),
        (good.replace("$ a\n", "$ a \\\n    b\n"), True),
        (good.replace("$ a\n", "$ A=12G a\n").replace("Peak", "Of 12 GiB,"), True),
        (good.replace("...\n", ""), False),
        (good.replace("$ a\npeak 13.7", "$ a\npeak 13.8"), False),
        (good.replace("Peak 13.7", "Peak 13.8"), False),
        (good.replace("12 %", "13 %"), False),
        (good.replace("3 blocks.", "4 blocks."), False),
        (good.replace("Peak 13.7", "Peak 3.7"), False),
        (good.replace("\nend\n", "\n"), False),
        (good.replace("end\n", "end\nmore\n"), False),
        (good.replace("...", "[..]"), True),
        (good.replace("folder [..]\n", ""), True),
        (good.replace("...\nfolder [..]\nend", "folder [..]\n..."), False),
        ("<!-- env: SIMCUDA_MEMORY=12G -->\n\nOf 12 GiB: " + good, True),
        ("<!-- env: SIMCUDA_MEMORY=11G -->\n\nOf 12 GiB: " + good, False),
    ]
    wrong = 0
    for text, right in cases:
        if (check_page("page", text, runner=lambda command, folder, more: output) == []) != right:
            print("self-test: %s: %r" % ("an error" if right else "no error", text))
            wrong += 1
    page = good.replace("peak 13.7 GiB\n...", "peak 1.7 GiB\n...")
    if updated(page.split("$ a\n")[1].split("\n```")[0].split("\n"), output.split("\n")[:-1])[0] != "peak 13.7 GiB":
        print("self-test: a figure is not updated")
        wrong += 1
    print("self-test: %d cases, %d wrong" % (len(cases) + 1, wrong))
    return wrong


def main():
    parser = argparse.ArgumentParser(prog="scripts/docs --outputs", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write today's output into the pages")
    parser.add_argument("--self-test", action="store_true", help="check that wrong pages are found, and no others")
    parser.add_argument("page", nargs="*", type=Path, help="pages (default: all)")
    arguments = parser.parse_args()
    if arguments.self_test:
        return min(self_test(), 1)
    pages = [path.resolve() for path in arguments.page] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages = [(path, text) for path in pages if "\n```console\n" in (text := path.read_text())]
    # The longest page first.
    pages.sort(key=lambda page: -page[1].count("\n$ "))
    # Builds the simulated CUDA if it is older than its sources, so that no page has the messages of the build.
    if subprocess.run([ROOT / "scripts/sim", "true"], env=variables()).returncode != 0:
        return 1
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        results = [(path, pool.submit(check_page, path, text, arguments.update)) for path, text in pages]
        for path, result in results:
            errors = result.result()
            failed += bool(errors)
            print("\n".join(errors) if errors else "ok   %s" % path.relative_to(ROOT))
            if errors:
                print("FAIL %s" % path.relative_to(ROOT))
    print("%d passed, %d failed" % (len(pages) - failed, failed))
    if failed:
        print("help: scripts/docs --outputs --update writes today's output into the pages")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
