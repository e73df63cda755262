"""A hook of mkdocs: pages of the site that stand outside docs/, and the files that pages link to.

README, DESIGN, CONTRIBUTING, CHANGELOG and SECURITY become pages. Links work on a code host as they
stand in the files; here they are rewritten for the site, and a linked file (a result, an example)
is copied into it.
A line may end at the dots of a long name in a table, and not within a flag of a command. A picture
is a link to its file, which a browser shows at any size.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "DESIGN.md": "design.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
# the target of a link without its fragment, when it is no address
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
# a dotted name at the beginning of a cell
NAME = re.compile(r"(?<=<td>)\w+(?:\.\w+){2,}(?=[<:])")
CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
PICTURE = re.compile(r'(?<=<p>)<img alt="[^"]*" src="([^"]*)" ?/?>(?=</p>)')
FLAG = re.compile(r"--\w[\w-]*")


def rewrite(text: str, folder: str) -> tuple[str, set[str]]:
    """A page with links as the site has them, and the linked files, as paths from the root.

    folder: of the page in the repository: "", "docs" or one below it.
    """
    linked, here = set(), folder.removeprefix("docs").strip("/")

    def target(match: re.Match) -> str:
        path = (ROOT / folder / match[1]).resolve().relative_to(ROOT).as_posix()
        inside = PAGES.get(path, path.removeprefix("docs/"))
        if inside == path:
            linked.add(path)
        return f"]({posixpath.relpath(inside, here or '.')}"

    return LINK.sub(target, text), linked


def on_files(files: Files, config: MkDocsConfig) -> Files:
    texts = {name: (ROOT / path).read_text() for path, name in PAGES.items()}
    pages = {name: rewrite(text, "") for name, text in texts.items()}
    for file in files.documentation_pages():
        folder = posixpath.dirname(f"docs/{file.src_uri}")
        pages[file.src_uri] = rewrite(file.content_string, folder)
    for name, (text, linked) in pages.items():
        page = files.get_file_from_path(name)
        if page is None:
            page = File.generated(config, name, content=text)
            files.append(page)
        else:
            page.content_string = text
        for path in linked:
            # a file that is not there stays a broken link, which strict builds refuse
            if files.get_file_from_path(path) is None and (ROOT / path).is_file():
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_content(html: str, **kwargs: object) -> str:
    html = NAME.sub(lambda match: match[0].replace(".", ".<wbr>"), html)
    html = PICTURE.sub(r'<a href="\1">\g<0></a>', html)
    return CODE.sub(lambda match: FLAG.sub(r'<span class="flag">\g<0></span>', match[0]), html)
