"""A hook of mkdocs: after a build, the site's search finds what people look for.

The index has a section for each heading. Material ranks words of a heading far above those of a
text, so each question has a section of its page whose heading has all its words.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

# words of a question -> the page that answers it; the index leaves out words such as "why" and "it"
QUESTIONS = {
    "7B 16 GB": "will_it_run/",
    "will it run": "will_it_run/",
    "licence": "will_it_run/",
    "cite": "will_it_run/",
    "maintained": "will_it_run/",
    "why is it not faster": "faq/",
    "the same samples again": "faq/",
    "my LoRA": "faq/",
    "judge": "recipes/",
    "my own reward": "recipes/",
    "compare GGUF files": "recipes/",
}


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def missing(sections: list[dict[str, str]]) -> list[str]:
    """Questions whose page has no heading with all of their words, as "words: page".

    sections: of the index, with "location" (the page's address and its heading's fragment) and
    "title" (the heading).
    """
    headings = [(s["location"].partition("#")[0], words(s["title"])) for s in sections]
    return [
        f"{question}: {page}"
        for question, page in QUESTIONS.items()
        if not any(at == page and words(question) <= heading for at, heading in headings)
    ]


# the index is written after a build, by the plugin of the search
@event_priority(-100)
def on_post_build(config: Any) -> None:
    index = json.loads((Path(config["site_dir"]) / "search" / "search_index.json").read_text())
    if found := missing(index["docs"]):
        from mkdocs.exceptions import PluginError

        raise PluginError("questions without a heading:\n" + "\n".join(found))
