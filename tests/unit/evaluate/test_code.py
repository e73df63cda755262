"""Programs of samples: how they are cut, and what passes their tests."""

import sys

import pytest

from csd.evaluate.code.execute import Limits, Suite, passes
from csd.evaluate.code.program import of_answer

TESTS = Suite("def check(f):\n    assert f(1) == 2\n    assert f(-1) == 0\n", "step")
GOOD = "def step(x):\n    return x + 1\n"
SHORT = Limits(seconds=1)

# none of them reaches the last line of the tests
FAILING = {
    "a wrong result": "def step(x):\n    return x\n",
    "half of the tests": "def step(x):\n    return 2\n",
    "no function": "x = 1\n",
    "no program": "def step(x:\n",
    "an infinite loop": "while True:\n    pass\n",
    "a call that sleeps": "import time\ndef step(x):\n    time.sleep(60)\n",
    "a memory hog": f"hog = bytearray(8 << 30)\n{GOOD}",
    "a fork": f"import os\nos.fork()\n{GOOD}",
    "a program": f"import subprocess\nsubprocess.run(['true'])\n{GOOD}",
    "a signal to the parent": f"import os\nos.kill(os.getppid(), 0)\n{GOOD}",
    "a socket": f"import socket\nsocket.socket()\n{GOOD}",
    "an exit": f"import sys\nsys.exit(0)\n{GOOD}",
    "an exit within the tests": "import sys\ndef step(x):\n    sys.exit(0)\n",
    "an exit without handlers": "import os\ndef step(x):\n    os._exit(0)\n",
    "a result of its own": "def step(x):\n    print('passed')\n    raise SystemExit\n",
    "an open string": f'{GOOD}text = """',
    "a block that ends the file": f"{GOOD}if False:\n",
    "a large file": f"with open('a', 'wb') as f:\n    f.write(bytes(64 << 20))\n{GOOD}",
    "many files": f"files = [open('a', 'w') for _ in range(200)]\n{GOOD}",
}


@pytest.mark.parametrize("program", FAILING.values(), ids=FAILING)
def test_a_program_passes_only_by_the_last_line_of_its_tests(program):
    assert not passes(program, TESTS, SHORT)


def test_a_right_program_passes():
    own_file = "with open('a', 'w') as f:\n    f.write('x')\n"
    assert passes(GOOD, TESTS)
    assert passes(f"{own_file}print('text')\n{GOOD}", TESTS)


@pytest.mark.parametrize(
    "change",
    [
        "open({path!r}, 'w')",
        "import os; os.remove({path!r})",
        "import os; os.rename({path!r}, 'mine')",
        "import os; os.symlink({path!r}, 'link'); open('link', 'w')",
    ],
)
def test_files_of_others_keep_their_bytes(tmp_path, change):
    path = tmp_path / "file"
    path.write_text("mine")
    program = f"{change.format(path=str(path))}\n{GOOD}"
    assert not passes(program, TESTS, SHORT)
    assert path.read_text() == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux limits files by Landlock")
def test_the_kernel_refuses_where_the_audit_hook_does_not_look(tmp_path):
    """A path that is relative to a descriptor is not known to the hook."""
    from csd.evaluate.code import child

    if child.ctypes.CDLL(None).syscall(444, None, child.ctypes.c_size_t(0), 1) < 1:
        pytest.skip("this kernel has no Landlock")
    path = tmp_path / "file"
    path.write_text("mine")
    program = (
        f"import os\nplace = os.open({str(tmp_path)!r}, os.O_RDONLY)\n"
        f"os.remove('file', dir_fd=place)\n{GOOD}"
    )
    assert not passes(program, TESTS, SHORT)
    assert path.read_text() == "mine"


def test_secrets_of_the_environment_are_not_passed_on(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert passes(f"import os\nassert 'HF_TOKEN' not in os.environ\n{GOOD}", TESTS)


PROMPT = 'import math\n\ndef step(x):\n    """Add one."""\n'


@pytest.mark.parametrize(
    "answer",
    [
        f"Here it is:\n```python\n{GOOD}```\nDone.",
        f"```py\n{GOOD}```",
        f"```\n{GOOD}",
        f"First\n```python\nstep(1)\n```\nthen\n```python\n{GOOD}```",
        GOOD,
        "```python\n    return x + 1\n```",
        "    return x + 1\n",
        "```python\ndef step(x):\n    return math.floor(x) + 1\n```",
        f"A draft:\n```python\ndef step(x):\n    return x\n```\nBetter:\n```python\n{GOOD}```",
    ],
)
def test_the_program_of_an_answer(answer):
    assert passes(of_answer(answer, PROMPT, "step"), TESTS)
