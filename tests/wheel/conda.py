"""Builds the conda recipe of a repository and runs the recipe's own tests: `python conda.py SOURCES SCRATCH`.

The Python that runs it is that of a virtual environment with py-rattler-build, the engine of rattler-build, and with maturin. The channel
is a folder of packages made here from this environment and from this machine's Rust and C compiler, so no conda channel is needed. That
conda-forge has packages of these names is not tested. Prints the package's name and version, and its files, one a line.
"""

import hashlib
import json
import os
import shutil
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

from rattler_build import Package, assemble_package, build_recipes

PLATFORM = "linux-64"
ENVIRONMENT = Path(sys.prefix)
PYTHON = "%d.%d" % sys.version_info[:2]
SITE = "lib/python%s/site-packages" % PYTHON
# The variables of this environment that Rust needs. rattler-build passes nothing on to the script of a recipe.
KEPT = ("HOME", "CARGO_HOME", "RUSTUP_HOME", "CARGO_TARGET_DIR")


def python_package(folder):
    """This environment as a package: a prefix with its configuration and its links is such an environment, too."""
    (folder / "bin").mkdir()
    shutil.copy(ENVIRONMENT / "pyvenv.cfg", folder)
    for name in ("python", "python3", "python" + PYTHON):
        (folder / "bin" / name).symlink_to((ENVIRONMENT / "bin/python").resolve())


def installed_package(name):
    """A package of this environment as a conda package."""

    def fill(folder):
        for source in (ENVIRONMENT / SITE).glob(name + "*"):
            shutil.copytree(source, folder / SITE / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        if (ENVIRONMENT / "bin" / name).read_bytes().startswith(b"\x7fELF"):
            (folder / "bin").mkdir()
            shutil.copy(ENVIRONMENT / "bin" / name, folder / "bin")

    return fill


def rust_package(folder):
    """This machine's Rust."""
    (folder / "bin").mkdir()
    settings = " ".join("%s='%s'" % (name, os.environ[name]) for name in KEPT if name in os.environ)
    for name in ("cargo", "rustc"):
        program = folder / "bin" / name
        program.write_text('#!/bin/sh\nexport %s\nexec "%s" "$@"\n' % (settings, shutil.which(name)))
        program.chmod(0o755)


def of_this_machine(folder):
    """This machine's C compiler and C library are on every PATH, so their packages are empty but for this file."""
    (folder / "share").mkdir()
    (folder / "share" / folder.name).touch()


def channel(scratch):
    """A channel with all that the recipe needs."""
    packages = {
        "python": ("%d.%d.%d" % sys.version_info[:3], [], python_package),
        "pip": (version("pip"), ["python"], installed_package("pip")),
        "maturin": (version("maturin"), ["python"], installed_package("maturin")),
        "rust_" + PLATFORM: ("1", [], rust_package),
        "gcc_" + PLATFORM: ("1", [], of_this_machine),
        "sysroot_" + PLATFORM: ("2.28", [], of_this_machine),
    }
    index = {}
    for name, (number, depends, fill) in packages.items():
        staged, target = scratch / "staged" / name, scratch / "channel" / PLATFORM
        staged.mkdir(parents=True)
        target.mkdir(parents=True, exist_ok=True)
        fill(staged)
        made = assemble_package(name, number, PLATFORM, "0", target, files_dir=staged, depends=depends, compression_level=1)
        digest = hashlib.sha256(made.path.read_bytes()).hexdigest()
        row = {"name": name, "version": number, "build": "0", "build_number": 0, "depends": depends, "subdir": PLATFORM, "sha256": digest}
        index[made.path.name] = {**row, "size": made.path.stat().st_size}
    for platform, rows in ((PLATFORM, index), ("noarch", {})):
        folder = scratch / "channel" / platform
        folder.mkdir(exist_ok=True)
        content = {"info": {"subdir": platform}, "packages": {}, "packages.conda": rows, "repodata_version": 1}
        (folder / "repodata.json").write_text(json.dumps(content))
    return "file://%s" % (scratch / "channel")


def main():
    sources, scratch = map(Path, sys.argv[1:])
    # It is deprecated, but it alone reads the recipe's variants, as the command rattler-build does.
    warnings.simplefilter("ignore", DeprecationWarning)
    recipe, output = sources / "packaging/conda/recipe.yaml", scratch / "output"
    # The folder has no compressed index and no shards.
    plain = {"use_zstd": False, "use_bz2": False, "use_sharded": False}
    channels = [channel(scratch)]
    build_recipes([recipe], channel=channels, output_dir=output, test="skip", **plain)
    (built,) = (output / PLATFORM).glob("*.conda")
    package = Package.from_file(built)
    results = package.run_tests(channel=channels, **plain)
    for result in results:
        if not result.success:
            sys.exit("\n".join(result.output))
    print(package.name, package.version, "with", len(results), "tests")
    print(*sorted(str(file) for file in package.files), sep="\n")


main()
