"""What mkdocs needs to know of this repository; mkdocs.yml names it as a hook.

Links in the documents are those of the source tree. What they lead to outside of docs/
comes along to the site, below ``repository/``: Markdown as a page, other files on pages
that show them. So every link works on both sides, without a server of the sources.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
OUTSIDE = "repository/"
# Fenced blocks and code between backticks hold no links.
CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.S | re.M)
LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^()\s#]+)(#[^()\s]*)?(?=\))")


def place(source: str) -> str:
    """Where a file of the repository is on the site, both relative to their tops."""
    if source.startswith(DOCS):
        return source[len(DOCS) :]
    return OUTSIDE + source + ("" if source.endswith(".md") else ".md")


def source_of(page: str) -> str:
    """The file of the repository that a page of the site is made of."""
    if not page.startswith(OUTSIDE):
        return DOCS + page
    source = page[len(OUTSIDE) :]
    return source if (ROOT / source).is_file() else source[: -len(".md")]


def target_of(source: str, link: str) -> str:
    """The file of the repository that a link in one of its files leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def targets(source: str) -> Iterator[str]:
    """The files of the repository that a Markdown file leads to."""
    for text in CODE.split((ROOT / source).read_text("utf-8"))[::2]:
        for link in LINK.finditer(text):
            yield target_of(source, link[2])


def outside(pages: list[str]) -> list[str]:
    """What pages of the repository lead to outside of docs/, at however many removes.

    Raises:
        FileNotFoundError: a link that leads to no file.
    """
    found: list[str] = []
    ahead = list(pages)
    while ahead:
        for target in targets(ahead.pop()):
            if target.startswith(DOCS) or target in found:
                continue
            if not (ROOT / target).is_file():
                raise FileNotFoundError(f"{target}: expected a file, got a link to it")
            found.append(target)
            if target.endswith(".md"):
                ahead.append(target)
    return sorted(found)


def shown(source: str) -> str:
    """The Markdown of a file that comes along."""
    text = (ROOT / source).read_text("utf-8")
    if source.endswith(".md"):
        return text
    return f"# {source}\n\n````{Path(source).suffix[1:]}\n{text.rstrip()}\n````\n"


def relinked(markdown: str, source: str) -> str:
    """The Markdown of a file of the repository with the links of the site."""
    here = posixpath.dirname(place(source))

    def link(found: re.Match[str]) -> str:
        there = place(target_of(source, found[2]))
        return f"{found[1]}{posixpath.relpath(there, here or '.')}{found[3] or ''}"

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def anchor(heading: str, separator: str) -> str:
    """What a heading is linked by: as where the sources are read."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    """Give headings the anchors that the documents link to."""
    slugify: Callable[[str, str], str] = anchor
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify
    return config


def on_files(files: Any, config: Any) -> Any:
    """Bring along what the documents lead to, and what the navigation names."""
    from mkdocs.structure.files import File

    pages = [DOCS + file.src_uri for file in files.documentation_pages()]
    for source in outside(pages):
        files.append(File.generated(config, place(source), content=shown(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a page to where their targets are on the site."""
    source = source_of(page.file.src_uri)
    return relinked(markdown, source) if source.endswith(".md") else markdown
