#!/usr/bin/env python3
"""Adds to an unpacked wheel the crates that are compiled into it, with their licenses.

usage: packaging/sbom.py DIST_INFO x86_64|aarch64

Writes into the folder `*.dist-info` of the wheel:

  sboms/memtrace.cyclonedx.json           the crates in the program, in the preloaded library and in the simulated CUDA, as CycloneDX 1.6
                                          (the place is that of PEP 770). maturin's own list lacks the embedded libraries, and is replaced
  licenses/THIRD-PARTY-LICENSES.txt       the license texts of these crates, each text once, and for a crate without one the standard text
                                          of its license. METADATA names the file

Needs cargo, and the sources of the crates, which a build has downloaded. The same sources give the same bytes.
"""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

from metadata import parts

ROOT = Path(__file__).resolve().parents[1]
TARGETS = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
# The parts of the wheel's program: the launcher with its features, and the libraries that it embeds.
PACKAGES = ["memtrace", "memtrace-interpose", "simcuda-driver", "simcuda-runtime", "simcuda-libs"]
FEATURES = "memtrace/mcp,memtrace/otlp"
# The files of a crate with its license.
LICENSE = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)([-._].*)?$", re.I)
# The standard texts of licenses, by SPDX id, for crates without a text.
STANDARD = {"Apache-2.0": ROOT / "LICENSE-APACHE"}


def cargo(*words):
    return subprocess.run(["cargo", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout


def linked(target):
    """The names and versions of the crates that are compiled into the wheel."""
    packages = [word for name in PACKAGES for word in ("--package", name)]
    listed = cargo(
        "tree", "--locked", "--target", target, "--edges", "normal,no-proc-macro", "--features", FEATURES,
        "--prefix", "none", "--no-dedupe", "--format", "{p}", *packages,
    )  # fmt: skip
    return {tuple(re.match(r"(\S+) v(\S+)", line).groups()) for line in listed.splitlines() if line}


def crates(target):
    """The third-party crates of the wheel, as `cargo metadata` describes them, by name."""
    names = linked(target)
    packages = json.loads(cargo("metadata", "--locked", "--format-version", "1", "--filter-platform", target, "--all-features"))["packages"]
    found = [package for package in packages if (package["name"], package["version"]) in names and package["source"]]
    return sorted(found, key=lambda package: (package["name"], package["version"]))


def checksums():
    lock = (ROOT / "Cargo.lock").read_text(encoding="utf-8")
    entry = re.compile(r'name = "([^"]+)"\nversion = "([^"]+)"\nsource = "[^"]+"\nchecksum = "([0-9a-f]+)"')
    return {(name, version): checksum for name, version, checksum in entry.findall(lock)}


def component(package, checksum):
    result = {
        "type": "library",
        "bom-ref": "pkg:cargo/%s@%s" % (package["name"], package["version"]),
        "name": package["name"],
        "version": package["version"],
        "purl": "pkg:cargo/%s@%s" % (package["name"], package["version"]),
        # Old manifests write MIT/Apache-2.0.
        "licenses": [{"expression": package["license"].replace("/", " OR ")}],
    }
    if checksum:
        result["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package["repository"]:
        result["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return result


def standard_library():
    """Rust's standard library, which is in every program."""
    version = subprocess.run(["rustc", "--version"], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout.split()[1]
    return {"name": "rust-std", "version": version, "license": "MIT OR Apache-2.0", "repository": "https://github.com/rust-lang/rust"}


def bill(found, version):
    sums = checksums()
    components = [component(package, sums.get((package["name"], package["version"]))) for package in found]
    standard = component(standard_library(), None)
    standard["purl"] = standard["bom-ref"] = "pkg:generic/rust-std@%s" % standard["version"]
    name = "pkg:pypi/gpu-memtrace@" + version
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": name,
                "name": "gpu-memtrace",
                "version": version,
                "purl": name,
                "licenses": [{"expression": "MIT OR Apache-2.0"}],
            }
        },
        "components": [*components, standard],
        "dependencies": [{"ref": name, "dependsOn": sorted(one["bom-ref"] for one in [*components, standard])}],
    }


def license_texts(package):
    folder = Path(package["manifest_path"]).parent
    # Sources of C that a crate compiles are in a folder of it: zstd.
    files = [path for path in folder.iterdir() if path.is_file() and LICENSE.match(path.name)] + list(folder.glob("*/LICENSE"))
    if package["license_file"]:
        files.append(folder / package["license_file"])
    return [plain(path) for path in sorted(set(files))]


def plain(path):
    text = path.read_text(encoding="utf-8", errors="replace")
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def standard_text(package):
    """The standard text of a license of the crate, below a note that the crate has none itself."""
    known = [name for name in re.findall(r"[\w.-]+", package["license"]) if name in STANDARD]
    if not known:
        sys.exit("packaging/sbom.py: %s %s has no license text, and STANDARD has none for %s" % (package["name"], package["version"], package["license"]))
    return "(The crate has no license text. This is the standard text of %s.)\n\n%s" % (known[0], plain(STANDARD[known[0]]))


def third_party(found):
    """The texts of all licenses, each once, below the crates that have it."""
    by_text = {}
    for package in found:
        for text in license_texts(package) or [standard_text(package)]:
            by_text.setdefault(text, []).append("%s %s" % (package["name"], package["version"]))
    parts = ["The programs of this wheel contain these crates. Each is used under one of its licenses.\n"]
    parts += ["%s %s: %s" % (package["name"], package["version"], package["license"]) for package in found]
    for text, names in sorted(by_text.items(), key=lambda item: (item[1], hashlib.sha256(item[0].encode()).digest())):
        parts.append("\n%s\n%s\n\n%s" % ("-" * 80, ", ".join(names), text))
    return "\n".join(parts) + "\n"


def main():
    if len(sys.argv) != 3 or sys.argv[2] not in TARGETS:
        sys.exit(__doc__)
    folder, target = Path(sys.argv[1]), TARGETS[sys.argv[2]]
    metadata = folder / "METADATA"
    headers, description, version = parts(metadata.read_text(encoding="utf-8"))
    found = crates(target)
    sboms = folder / "sboms"
    sboms.mkdir(exist_ok=True)
    for old in sboms.iterdir():
        old.unlink()
    (sboms / "memtrace.cyclonedx.json").write_text(json.dumps(bill(found, version), indent=1) + "\n", encoding="utf-8")
    (folder / "licenses").mkdir(exist_ok=True)
    (folder / "licenses/THIRD-PARTY-LICENSES.txt").write_text(third_party(found), encoding="utf-8")
    line = "License-File: THIRD-PARTY-LICENSES.txt"
    if line not in headers.split("\n"):
        metadata.write_text(headers + "\n" + line + "\n\n" + description, encoding="utf-8")


if __name__ == "__main__":
    main()
