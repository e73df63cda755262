"""PTX as text, and as a list of instructions."""

import re
from dataclasses import dataclass, field

# bits of a register, by the letters of its name
WIDTHS = {"p": 1, "rs": 16, "r": 32, "f": 32, "rd": 64, "fd": 64, "h": 16, "hh": 32}
_REGISTER = re.compile(r"%(rs|rd|fd|hh|[prfh])(\d+)")
_STATEMENT = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_PARAM = re.compile(r"\.param\s+\.[a-z](\d+)[^,)]*?(\w+)\s*[,)]")
_LOC = re.compile(r"\.loc\s.*//\s*(.*)")


@dataclass(frozen=True, slots=True)
class Register:
    width: int
    index: int


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset]; base: a register, the name of a parameter, or None for shared memory's 0."""

    base: Register | str | None
    offset: int


@dataclass(frozen=True, slots=True)
class Float:
    """The bits of a constant."""

    width: int
    bits: int


@dataclass(slots=True)
class Instruction:
    """op: the parts of its name. guard: (register, wanted value) it is predicated on, or None.
    where: "file.py:line:column" of the kernel."""

    op: list[str]
    args: list
    guard: tuple[Register, bool] | None
    text: str
    where: str

    def __str__(self) -> str:
        return f"{self.text} ({self.where})"


@dataclass(slots=True)
class Code:
    """A kernel's. params: bits of each. blocks: instructions up to a jump, barrier or label."""

    name: str
    params: dict[str, int]
    threads: int
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[int, int] = field(default_factory=dict)


def parse(text: str) -> Code:
    """The one kernel of a file of PTX."""
    head, body = text.split("\n{", 1)
    name = re.search(r"\.entry\s+(\w+)", head)[1]
    params = {name: int(bits) for bits, name in _PARAM.findall(head[head.index(".entry") :] + ")")}
    code = Code(name, params, int(re.search(r"\.reqntid\s+(\d+)", head)[1]))
    code.registers = dict.fromkeys((1, 16, 32, 64), 0)
    temporaries: dict[str, str] = {}
    scratch = 0
    block: list[Instruction] = []
    where = ""

    def end_block() -> None:
        nonlocal block
        if block:
            code.blocks.append(block)
        block = []

    for line in body.split("\n}\n", 1)[0].splitlines():
        matched = _LOC.search(line)
        where = _place(matched[1]) if matched else where
        line = line.split("//")[0].strip()
        label = re.match(r"(\$\w+):", line)
        if label:
            end_block()
            code.labels[label[1]] = len(code.blocks)
            continue
        for statement in _statements(line):
            if statement.startswith(".reg"):
                # a scope of its own: any number that nothing else has
                for kind, temporary in re.findall(r"\.\w(\d+)\s+(\w+)$", statement):
                    scratch += 1
                    letters = {"16": "rs", "32": "r", "64": "rd"}[kind]
                    temporaries[temporary] = f"%{letters}{900000 + scratch}"
                continue
            if statement.startswith("."):
                continue
            for temporary, register in temporaries.items():
                statement = re.sub(rf"\b{temporary}\b", register, statement)
            block.append(_instruction(statement, where))
            if block[-1].op[0] in ("bra", "ret", "exit") or block[-1].op[:2] == ["bar", "sync"]:
                end_block()
    end_block()
    _number(code)
    return code


def _place(chain: str) -> str:
    """Innermost line outside Triton's library, of "standard.py:1:2 @[ kernel.py:3:4 ]"."""
    places = re.findall(r"[\w.]+:\d+:\d+", chain)
    own = [place for place in places if not place.startswith(("standard.py", "random.py"))]
    return (own or places or [chain])[0]


def _statements(line: str) -> list[str]:
    """Statements of a line; a scope's braces are none, those around registers belong to one."""
    if re.match(r"\{\s*\.reg", line) or line in ("{", "}"):
        line = re.sub(r"^\{|\}$", "", line)
    return [part.strip() for part in line.split(";") if part.strip(" \t{}")]


def _instruction(text: str, where: str) -> Instruction:
    negated, guard, op, rest = _STATEMENT.fullmatch(text).groups()
    guarded = (_operand(guard), not negated) if guard else None
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)
    args = [_operand(part.strip()) for part in parts]
    return Instruction(op.replace("::", "__").split("."), args, guarded, text, where)


def _operand(text: str):
    if text[0] == "{":
        return [_operand(part.strip()) for part in text[1:-1].split(",")]
    if text[0] == "[":
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        base = None if base == "global_smem" else _operand(base) if base[0] == "%" else base
        return Address(base, int(offset or "0", 0))
    matched = _REGISTER.fullmatch(text)
    if matched:
        return Register(WIDTHS[matched[1]], int(matched[2]))
    if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
        return Float(32, int(text[2:], 16))
    if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
        return Float(64, int(text[2:], 16))
    if re.match(r"-?(0x)?[0-9a-fA-F]+U?$", text):
        return int(text.rstrip("U"), 0)
    # shared memory begins at 0
    return 0 if text == "global_smem" else text


def _number(code: Code) -> None:
    """Registers in the order in which they are met: their numbers in the text have gaps."""
    numbers: dict[Register, Register] = {}

    def numbered(arg):
        if isinstance(arg, list):
            return [numbered(x) for x in arg]
        if isinstance(arg, Address):
            return Address(numbered(arg.base), arg.offset)
        if not isinstance(arg, Register):
            return arg
        if arg not in numbers:
            numbers[arg] = Register(arg.width, code.registers[arg.width])
            code.registers[arg.width] += 1
        return numbers[arg]

    for block in code.blocks:
        for i in block:
            i.args = [numbered(x) for x in i.args]
            if i.guard:
                i.guard = numbered(i.guard[0]), i.guard[1]
