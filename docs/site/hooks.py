"""Checks and conversions that MkDocs lacks for memtrace's pages.

- The navigation is that of docs/README.md: a section for each `##`, with a group for each `###`. A page that README.md does not list is an error.
- Pages link to files outside docs/: to other documentation, schemas and source code. Each such file gets a page of its own.
- The forge and MkDocs read Markdown differently. A page with other lists, tables, headings or code blocks in the two is an error.
- Every relative link must lead to a file of the repository. External links are checked by their syntax, without a request.
"""

import collections
import json
import posixpath
import re
import subprocess
import urllib.parse
from pathlib import Path

from markdown_it import MarkdownIt
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
# Inline code and fenced or indented blocks, which hold no links, and the links.
TOKEN = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)|^(?: {4}|\t)[^\n]*$|(?P<ticks>`+)[^`].*?(?P=ticks)|\]\((?P<link>[^()\s]*)\)", re.M | re.S
)
LANGUAGES = {"rs": "rust", "py": "python", "toml": "toml", "json": "json", "yml": "yaml", "sh": "bash"}

# The path in the repository of each page.
sources = {}


def tracked():
    """The files of the repository, and their folders."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True,
    ).stdout
    files = {path for path in listed.split("\0") if path and (ROOT / path).exists()}
    folders = {str(parent) for path in files for parent in Path(path).parents}
    return files, folders


def links(text):
    return [match.group("link") for match in TOKEN.finditer(text) if match.group("link")]


def target(source, link):
    """The path in the repository and the anchor of a relative link in the file `source`."""
    path, _, anchor = link.partition("#")
    if not path:
        return source, anchor
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), urllib.parse.unquote(path))), anchor


def page_of(path):
    """The page of a file or folder, relative to docs/."""
    if path.startswith("docs/") and (path.endswith(".md") or (ROOT / path).is_file() and not path.endswith(".py")):
        return path[len("docs/"):]
    return "repository/" + (path if path.endswith(".md") else path + ".md")


def schema_page(path, schema):
    """A JSON Schema as tables, one for each structure."""

    def kind(field):
        if "$ref" in field:
            name = field["$ref"].rsplit("/", 1)[-1]
            return f"[{name}](#{name.lower()})"
        if "const" in field:
            return "`%s`" % json.dumps(field["const"])
        for key in ("anyOf", "oneOf", "allOf"):
            if key in field:
                return " or ".join(dict.fromkeys(kind(choice) for choice in field[key]))
        if "enum" in field:
            return " or ".join("`%s`" % json.dumps(value) for value in field["enum"])
        name = field.get("type", "any")
        name = " or ".join(name) if isinstance(name, list) else name
        if name == "array":
            return "array of " + kind(field.get("items", {}))
        if name == "object" and isinstance(field.get("additionalProperties"), dict):
            return "object with values of " + kind(field["additionalProperties"])
        return name

    def flat(text):
        return " ".join(text.split()).replace("|", "\\|")

    def table(structure):
        yield flat(structure.get("description", ""))
        yield ""
        fields = structure.get("properties")
        if fields:
            yield "| Field | Type | Meaning |\n|---|---|---|"
            for name, field in fields.items():
                needed = "" if name in structure.get("required", []) else " (optional)"
                yield f"| `{name}` | {kind(field)}{needed} | {flat(field.get('description', '') if isinstance(field, dict) else '')} |"
        elif any(key in structure for key in ("enum", "oneOf", "anyOf", "type")):
            for choice in structure.get("oneOf", [structure]):
                yield f"- {kind(choice)}: {flat(choice.get('description', ''))}" if choice is not structure else kind(choice)
        yield ""

    lines = [f"# {path.rsplit('/', 1)[-1]}", "", f"Every field of this structure, from the JSON Schema `{path}`.", "", *table(schema)]
    for name, structure in sorted((schema.get("$defs") or schema.get("definitions") or {}).items()):
        lines += [f"## {name}", "", *table(structure)]
    return "\n".join(lines) + "\n"


def content(path, files):
    """The Markdown of the page for a file or folder outside docs/."""
    if (ROOT / path).is_dir():
        inside = sorted(file for file in files if file.startswith(path + "/"))
        return f"# {path}\n\n" + "".join(f"- `{file}`\n" for file in inside)
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    if path.endswith(".schema.json"):
        return schema_page(path, json.loads(text))
    language = LANGUAGES.get(path.rsplit(".", 1)[-1], "text")
    return f"# {path}\n\n~~~~~~{language}\n{text}\n~~~~~~\n"


def on_config(config):
    nav, section, group, listed = [{"Home": "README.md"}], None, None, set()
    for line in (ROOT / "docs/README.md").read_text().splitlines():
        if line.startswith("## "):
            section, group = [], None
            nav.append({line[3:]: section})
        elif line.startswith("### "):
            group = []
            section.append({line[4:]: group})
        for name, link in re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", line):
            page = page_of(target("docs/README.md", link)[0])
            # The introduction names pages in lower case before the lists do.
            if page.endswith(".md") and page not in listed and line.startswith(("- ", "  ")):
                listed.add(page)
                name = name.replace("`", "")
                pages = next(pages for pages in (group, section, nav) if pages is not None)
                pages.append({name if "." in name else name[0].upper() + name[1:]: page})
    config.nav = nav
    return config


def on_files(files, config):
    known, folders = tracked()
    sources.clear()
    waiting = []
    listed = {target("docs/README.md", link)[0] for link in links((ROOT / "docs/README.md").read_text())}
    for file in files.documentation_pages():
        sources[file.src_uri] = "docs/" + file.src_uri
        if sources[file.src_uri] not in listed | {"docs/README.md"}:
            raise PluginError(f"docs/README.md lists no page {file.src_uri}")
        waiting.append((sources[file.src_uri], (ROOT / sources[file.src_uri]).read_text()))
    while waiting:
        source, text = waiting.pop()
        for link in links(text):
            if re.match(r"[a-z][a-z0-9+.-]*:", link):
                check_external(source, link)
                continue
            path, _ = target(source, link)
            if path not in known and path not in folders:
                raise PluginError(f"{source} links to {link}: the repository has no {path}")
            page = page_of(path)
            if files.get_file_from_path(page) is None:
                text_of_page = content(path, known)
                files.append(File.generated(config, page, content=text_of_page))
                sources[page] = path
                if path.endswith(".md"):
                    waiting.append((path, text_of_page))
    return files


def check_external(source, link):
    parts = urllib.parse.urlsplit(link)
    if parts.scheme == "mailto":
        return
    if parts.scheme != "https" or not re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", parts.hostname or ""):
        raise PluginError(f"{source} links to {link}: an address is https://HOST.DOMAIN/PATH")


def on_page_markdown(markdown, page, config, files):
    source = sources.get(page.file.src_uri)

    def replace(match):
        link = match.group("link")
        if not link or link.startswith("#") or re.match(r"[a-z][a-z0-9+.-]*:", link):
            return match.group()
        path, anchor = target(source, link)
        relative = posixpath.relpath(page_of(path), posixpath.dirname(page.file.src_uri))
        return f"]({relative}{'#' + anchor if anchor else ''})"

    return TOKEN.sub(replace, markdown) if source else markdown


def blocks(html):
    return collections.Counter(re.findall(r"<(h[1-6]|li|ul|ol|table|tr|td|pre|blockquote)\b", html))


def on_page_content(html, page, config, files):
    on_forge, here = blocks(MarkdownIt("commonmark").enable("table").render(page.markdown)), blocks(html)
    if on_forge != here:
        different = ", ".join(f"{on_forge[tag]} <{tag}> on the forge, {here[tag]} here" for tag in sorted(on_forge | here) if on_forge[tag] != here[tag])
        raise PluginError(f"{sources.get(page.file.src_uri, page.file.src_uri)}: {different}")
