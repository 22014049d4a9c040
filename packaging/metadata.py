#!/usr/bin/env python3
"""Completes the metadata of a wheel for PyPI, where relative links of README.md lead nowhere.

usage: packaging/metadata.py METADATA [CARGO_TOML]
       packaging/metadata.py --self-test

Rewrites the file METADATA of an unpacked wheel. The repository is the key `repository` of Cargo.toml, the only place that has it.

  With a repository, the project's URLs are added, and relative links lead to the files of the version's tag.
  Without one, the text of a relative link stays without the link.

Code stays as it is, and so do links to headings and absolute links.
"""

import re
import sys
from pathlib import Path

# Code, and the links and images of Markdown.
TOKEN = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)"
    r"|^(?: {4}|\t)[^\n]*$"
    r"|(?P<ticks>`+)[^`].*?(?P=ticks)"
    r"|(?P<image>!)?\[(?P<text>(?:[^][`]|`[^`]*`)*)\]\((?P<link>[^()\s]+)\)",
    re.M | re.S,
)
URLS = {"Repository": "", "Documentation": "/blob/v{version}/docs/README.md", "Changelog": "/blob/v{version}/CHANGELOG.md", "Issues": "/issues"}


def is_relative(link):
    return not re.match(r"[a-z]+:|#|//", link)


def with_links(markdown, repository, version):
    """The text with absolute links, or without relative ones."""

    def replace(match):
        link = match.group("link")
        if not link or not is_relative(link):
            return match.group()
        if not repository:
            return "" if match.group("image") else match.group("text")
        view = "raw" if match.group("image") else "blob"
        return "%s[%s](%s/%s/v%s/%s)" % (match.group("image") or "", match.group("text"), repository, view, version, link)

    return TOKEN.sub(replace, markdown)


def parts(metadata):
    """The headers, the description and the version of the metadata of a wheel."""
    headers, _, description = metadata.partition("\n\n")
    return headers, description, re.search(r"^Version: (.+)$", headers, re.M).group(1)


def complete(metadata, repository):
    """The metadata with the project's URLs, and the description with links that work anywhere."""
    headers, description, version = parts(metadata)
    lines = [line for line in headers.split("\n") if not line.startswith("Project-URL:")]
    if repository:
        urls = ["Project-URL: %s, %s%s" % (name, repository, path.format(version=version)) for name, path in URLS.items()]
        at = next(index for index, line in enumerate(lines) if line.startswith("Version:")) + 1
        lines[at:at] = urls
    return "\n".join(lines) + "\n\n" + with_links(description, repository, version)


def repository_of(cargo):
    found = re.search(r'^repository\s*=\s*"([^"]+)"', cargo, re.M)
    return found and found.group(1).rstrip("/").removesuffix(".git")


def self_test():
    text = "A [page](docs/a.md#b), `[x](y)`, [web](https://example.org), [here](#there) and ![picture](p.png)\n\n    [code](z)\n\n[`x`](d.md)"
    assert with_links(text, "https://example.org/r", "1.0") == (
        "A [page](https://example.org/r/blob/v1.0/docs/a.md#b), `[x](y)`, [web](https://example.org), [here](#there) and "
        "![picture](https://example.org/r/raw/v1.0/p.png)\n\n    [code](z)\n\n[`x`](https://example.org/r/blob/v1.0/d.md)"
    )
    assert with_links(text, None, "1.0") == "A page, `[x](y)`, [web](https://example.org), [here](#there) and \n\n    [code](z)\n\n`x`"
    metadata = "Metadata-Version: 2.4\nName: n\nVersion: 1.0\nLicense-File: L\n\n[a](b)\n"
    completed = complete(metadata, repository_of('[workspace.package]\nrepository = "https://example.org/r.git"\n'))
    assert completed.split("\n")[2:7] == [
        "Version: 1.0",
        "Project-URL: Repository, https://example.org/r",
        "Project-URL: Documentation, https://example.org/r/blob/v1.0/docs/README.md",
        "Project-URL: Changelog, https://example.org/r/blob/v1.0/CHANGELOG.md",
        "Project-URL: Issues, https://example.org/r/issues",
    ], completed
    assert complete(completed, "https://example.org/r") == completed, "twice is once"
    assert "Project-URL" not in complete(metadata, repository_of("[package]\n"))
    print("self-test: links and URLs of two wheels")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    path = Path(sys.argv[1])
    cargo = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parents[1] / "Cargo.toml"
    path.write_text(complete(path.read_text(encoding="utf-8"), repository_of(cargo.read_text(encoding="utf-8"))), encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
