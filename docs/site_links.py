"""A hook of mkdocs: after a build, links and pictures of the site's pages lead somewhere.

mkdocs itself checks links of Markdown to pages. Here the HTML is read: fragments, links in raw HTML
and in docstrings, and copied files. Addresses of other sites are not fetched.
"""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit


class Page(HTMLParser):
    """The targets of a page's links and pictures, and its fragments."""

    def __init__(self, path: Path):
        super().__init__()
        self.targets: list[str] = []
        self.fragments = {"", "top"}
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.fragments.add(value or "")
            elif name in ("href", "src") and value is not None:
                self.targets.append(value)


def broken(site: Path) -> list[str]:
    """Links of the site that lead nowhere, as "page: target"."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for target in dict.fromkeys(page.targets):
            address, fragment = urldefrag(target)
            if urlsplit(target).scheme or target.startswith("//"):
                continue
            name = unquote(urlsplit(address).path)
            base = site if name.startswith("/") else path.parent
            to = (base / name.lstrip("/")).resolve() if name else path
            to = to / "index.html" if to.is_dir() else to
            known = pages[to].fragments if to in pages else {"", unquote(fragment)}
            if not to.is_file() or unquote(fragment) not in known:
                found.append(f"{path.relative_to(site.resolve())}: {target}")
    return found


def on_post_build(config: Any) -> None:
    if found := broken(Path(config["site_dir"])):
        from mkdocs.exceptions import PluginError

        raise PluginError("links that lead nowhere:\n" + "\n".join(found))
