"""Builds and installs memtrace from its sources in the ways that docs/how-to/install.md names, and runs what was installed.

The sources are the files of this checkout that git tracks, as they are now, in a new repository with one commit. Each way builds the
release from them, by commands that a user types. The builds share a target folder, which is removed at the end.
"""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from environments import (
    PEAK,
    PROGRAM,
    ROOT,
    Environment,
    each_command_records_a_program,
    each_command_serves_an_agent,
    has_one_error,
    run,
    served,
    with_simulated_cuda,
)

# As scripts/wheel has it.
MATURIN = "maturin==1.16.0"
RATTLER_BUILD = "py-rattler-build==0.73.0"
# The wheel that tests/wheel/run tests.
WHEEL = Path()
# How long one build may take. It only detects a hang.
BUILD = 3000


def build_environment(sources):
    """The environment of a user who builds: nothing of this test, of an activated environment, or of another build."""
    dropped = re.compile(r"(MEMTRACE|PYTHON|VIRTUAL_ENV|RUSTFLAGS|CARGO_(BUILD|ENCODED|INCREMENTAL|PROFILE|TARGET)|MATURIN)")
    kept = {name: value for name, value in os.environ.items() if not dropped.match(name)}
    # All builds share what they build of other crates, and what cargo has downloaded; not its copies of repositories.
    home = sources.parent / "cargo"
    if not home.exists():
        home.mkdir()
        users = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
        for entry in users.iterdir() if users.exists() else ():
            if entry.name != "git":
                (home / entry.name).symlink_to(entry)
    return {**kept, "CARGO_HOME": str(home), "CARGO_TARGET_DIR": str(sources.parent / "target")}


def repository(scratch):
    """A new repository with the tracked files of this checkout, in one commit."""
    folder = scratch / "repository"
    folder.mkdir()
    git = ["git", "-c", "safe.directory=*", "-C"]
    names = subprocess.run([*git, ROOT, "ls-files", "-z"], stdout=subprocess.PIPE, check=True).stdout.split(b"\0")
    present = b"\0".join(name for name in names if name and (ROOT / os.fsdecode(name)).is_file())
    packed = subprocess.run(["tar", "-C", ROOT, "-c", "--null", "-T", "-"], input=present, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-C", folder, "-x"], input=packed, check=True)
    run(["git", "-C", folder, "init", "--quiet"], os.environ)
    run(["git", "-C", folder, "add", "--all", "--force"], os.environ)
    run([*git, folder, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "-m", "Sources"], os.environ)
    return folder


def works_in(env):
    """Runs what the package that was installed into an environment must do."""
    version = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE).group(1)
    for command in env.commands():
        assert env.shell([*command, "--version"]).stdout == "memtrace %s\n" % version, command
    each_command_records_a_program(env)
    each_command_serves_an_agent(env)


def pip_installs_from_the_repository(python, sources, scratch):
    env = Environment(python, scratch)
    env.pip("install", "git+file://%s" % sources, environment=build_environment(sources), cwd=scratch, timeout=BUILD)
    works_in(env)


def pip_installs_the_source_distribution(python, sources, scratch):
    """The source distribution has every file of the repository, and builds outside of one."""
    env = Environment(python, scratch)
    env.pip("install", MATURIN, environment=build_environment(sources))
    run([env.bin / "maturin", "sdist", "--out", scratch / "dist"], build_environment(sources), cwd=sources)
    (archive,) = (scratch / "dist").iterdir()
    with tarfile.open(archive) as tar:
        members = {name.partition("/")[2] for name in tar.getnames()}
    tracked = set(run(["git", "-C", sources, "ls-files"], os.environ).stdout.splitlines())
    missing = {name for name in tracked - members if not name.startswith(".")}
    assert not missing and members - tracked <= {"PKG-INFO"}, (missing, members - tracked)
    env.pip("uninstall", "--yes", "maturin")
    env.pip("wheel", "--no-deps", "--wheel-dir", scratch / "wheels", archive, environment=build_environment(sources), cwd=scratch, timeout=BUILD)
    (wheel,) = (scratch / "wheels").iterdir()
    env.pip("install", "--no-index", wheel)
    works_in(env)


def cargo_installs(sources, scratch, *options):
    """Installs the programs without Python. Returns the path of `memtrace`."""
    words = ["cargo", "install", "--locked", "--quiet", "--git", "file://%s" % sources, "--root", scratch / "root", "memtrace", *options]
    # rustup takes the version of Rust from the current folder.
    run(words, build_environment(sources), cwd=sources, timeout=BUILD)
    other, program = sorted((scratch / "root/bin").iterdir())
    assert (other.name, program.name) == ("gpu-memtrace", "memtrace"), (other, program)
    assert run([other, "-o", scratch / "seven", "--", "sh", "-c", "exit 7"], expected=7).stdout == ""
    environment = with_simulated_cuda(build_environment(sources))
    run([program, "--quiet", "-o", scratch / "run", "--", sys.executable, PROGRAM], environment)
    return program


def cargo_installs_from_the_repository(_python, sources, scratch):
    program = cargo_installs(sources, scratch)
    has_one_error(run([program, "mcp"], expected=2), "was built without the server for agents", "--features mcp")


def cargo_installs_with_the_server(_python, sources, scratch):
    program = cargo_installs(sources, scratch, "--features", "mcp")
    _, answer = served([program, "mcp"], os.environ, scratch, ("summary", {"run": "run"}))
    assert [device["peak"]["bytes"] for device in answer["devices"]] == [PEAK], answer


def conda_builds_the_recipe(python, sources, scratch):
    """The recipe builds and passes its own tests: the import, the dependencies, and three commands."""
    env = Environment(python, scratch)
    env.pip("install", MATURIN, RATTLER_BUILD, environment=build_environment(sources))
    words = [env.python, ROOT / "tests/wheel/conda.py", sources, scratch]
    name, *files = run(words, build_environment(sources), cwd=sources, timeout=BUILD).stdout.splitlines()
    version = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE).group(1)
    assert name == "gpu-memtrace %s with 2 tests" % version, name
    assert {"bin/memtrace", "bin/gpu-memtrace"} <= set(files), files
    others = [file for file in files if not re.match(r"bin/(gpu-)?memtrace$|lib/python[0-9.]+/site-packages/gpu_memtrace", file)]
    assert not others, others


def a_release_is_reproducible(python, sources, scratch):
    """The files of a release of these sources, made in another folder from a tag. The wheel is `WHEEL` to the byte."""
    environment = build_environment(sources)
    # Debug information divides the path of a file at the folder of its crate, which a link hides.
    environment["CARGO_HOME"] = os.environ.get("CARGO_HOME") or str(Path.home() / ".cargo")
    # The folder of the builds is in the repository, as it is for people.
    del environment["CARGO_TARGET_DIR"]
    # scripts/wheel without SOURCE_DATE_EPOCH uses this time.
    environment["SOURCE_DATE_EPOCH"] = "315532800"
    (version,) = re.findall(r'^version = "(.+)"$', (sources / "Cargo.toml").read_text(), re.MULTILINE)
    dist = scratch / "dist"
    wrong = run([sources / "scripts/release", "99.0.0", dist], environment, expected=1)
    assert "99.0.0 is not the version in Cargo.toml" in wrong.stderr and not dist.exists(), wrong.stderr
    run(["git", "-C", sources, "tag", "v" + version], os.environ)
    run([sources / "scripts/release", "v" + version, dist], environment, timeout=BUILD)
    names = sorted(path.name for path in dist.iterdir())
    stem = "gpu_memtrace-%s-py3-none-manylinux_2_28_x86_64" % version
    assert names == ["SHA256SUMS", stem + ".whl", "memtrace-debug-info-%s.tar.gz" % stem, "release-notes.md"], names
    run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=dist)
    assert (dist / "release-notes.md").read_text().startswith("The first release." if version == "0.1.0" else "")
    again = dist / (stem + ".whl")
    different = contents(again) ^ contents(WHEEL)
    assert again.read_bytes() == WHEEL.read_bytes(), "the wheels differ in %s" % sorted({name for name, _ in different})
    env = Environment(python, scratch)
    env.pip("install", "--no-index", "--find-links", dist, "gpu-memtrace==" + version)
    works_in(env)


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {(name, hashlib.sha256(archive.read(name)).hexdigest()) for name in archive.namelist()}


TESTS = [
    a_release_is_reproducible,
    pip_installs_from_the_repository,
    pip_installs_the_source_distribution,
    cargo_installs_from_the_repository,
    cargo_installs_with_the_server,
    conda_builds_the_recipe,
]


def run_tests(results, python, wheel, pattern):
    """Runs the tests whose names contain a text. `wheel` is what scripts/wheel made of the same sources."""
    global WHEEL
    WHEEL = wheel
    chosen = [function for function in TESTS if pattern in function.__name__]
    if not chosen:
        return
    with tempfile.TemporaryDirectory(prefix="memtrace-sources-") as shared:
        sources = repository(Path(shared))
        for function in chosen:
            with tempfile.TemporaryDirectory(prefix="memtrace-sources-") as scratch:
                results.test(function.__name__, function, python, sources, Path(scratch))
