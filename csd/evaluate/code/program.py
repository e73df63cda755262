"""The program of a sample: a fenced block of an answer, or a completion behind its prompt."""

import re

ASK = (
    "Complete this Python function. Answer with the whole function in one ```python block.\n\n"
    "```python\n{}\n```"
)

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)


def of_answer(text: str, prompt: str, entry_point: str) -> str:
    """The program of a chat answer, whose thoughts are cut.

    It is the last fenced block that defines `entry_point`, behind what the prompt has before its
    own definition, such as imports; else the first block, or the text, as the rest of the prompt.
    """
    blocks = _FENCE.findall(text) or [text]
    defines = re.compile(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}\b", re.MULTILINE)
    whole = [block for block in blocks if defines.search(block)]
    if not whole:
        return prompt + blocks[0]
    own = defines.search(prompt)
    return (prompt[: own.start()] if own else prompt) + whole[-1]
