"""Text of an answer: what a model writes outside its thoughts."""

from csd.engine.options.thinking import TAG


def after_thoughts(text: str, inside: bool = False) -> str:
    """The text without its thoughts; a thought that is still open reaches to the end.

    An end tag without a begin tag ends a thought that the prompt opened. inside: True if the prompt
    leaves a thought open, so that a text without an end tag is a thought as a whole.
    """
    answers: list[str] = []
    # name of the open thought's tag; any end tag ends the thought that a prompt opened
    start, name = 0, "" if inside else None
    for tag in TAG.finditer(text):
        if not tag["close"]:
            if name is None:
                answers.append(text[start : tag.start()])
                name = tag["name"]
        elif name is None or name in ("", tag["name"]):
            if name is None:
                answers.clear()
            start, name = tag.end(), None
    if name is None:
        answers.append(text[start:])
    return "".join(answers)


def leaves_thought_open(prompt: str) -> bool:
    """True if the text of a prompt ends inside a thought, as some chat templates begin it."""
    name = None
    for tag in TAG.finditer(prompt):
        if not tag["close"]:
            name = name or tag["name"]
        elif tag["name"] == name:
            name = None
    return name is not None
