"""`python -m bench jobs`: prompts of each job, ratios of pairs, and README's table."""

import pytest

from bench.e2e import jobs

pytestmark = pytest.mark.bench


class Tokenizer:
    """Tokens are the characters of a text."""

    chat_template = "yes"

    def __call__(self, text):
        return {"input_ids": [*map(ord, text)]}

    def apply_chat_template(self, messages, add_generation_prompt):
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self(text + "<assistant>")

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


class Side:
    """A side whose answers are one word, in `seconds` for each call."""

    def __init__(self, seconds):
        self.seconds, self.begun, self.asked = seconds, 0, []

    def begin(self):
        self.begun += 1

    def draw(self, prompts, n, tokens, seed, settings, whole):
        self.asked.append(("".join(map(chr, prompts[-1])), settings["temperature"], whole))
        return [[[*map(ord, "done")]] * n for _ in prompts], self.seconds


def test_a_chat_has_the_answers_so_far():
    side = Side(1.0)
    drawn, seconds = jobs.run(side, "chat", 1, Tokenizer(), jobs.PLAIN)
    assert (drawn, seconds, side.begun, len(side.asked)) == ([4] * 4, 4.0, 1, 4)
    last = side.asked[-1][0]
    assert last.count("<assistant>done") == 3 and last.endswith("<assistant>")
    assert last.startswith(side.asked[0][0])


def test_problems_of_an_evaluation_share_their_beginning():
    (prompts,) = jobs.calls("evaluation", 0, Tokenizer())
    texts = ["".join(map(chr, ids)) for ids in prompts]
    begin = texts[0].rindex("Question:")
    assert len({*texts}) == 4 and len({text[:begin] for text in texts}) == 1
    side = Side(2.0)
    assert jobs.run(side, "evaluation", 3, Tokenizer(), jobs.PLAIN) == ([4] * 32, 2.0)
    assert side.asked[0][1:] == (0.7, True)


def test_ratios_are_of_pairs_and_to_the_fastest_other(tmp_path):
    sides = {"csd": Side(1.0), "llama.cpp": Side(2.0), "vLLM": Side(4.0)}
    pairs = {"csd": 3, "llama.cpp": 3, "vLLM": 1}
    rows = [jobs.measure(job, sides, pairs, Tokenizer(), jobs.PLAIN) for job in jobs.JOBS]
    assert rows[1]["settings"]["temperature"] == 0.2 and rows[1]["ended"]["vLLM"] == [16]
    rows[0]["seconds"]["csd"] = [1.0, 0.5, 4.0]
    found = jobs.figures(rows[0])
    assert (found["fastest other"], found["pairs"]) == ("llama.cpp", 3)
    assert (found["times"], found["low"], found["high"]) == (2.0, 0.5, 4.0)
    assert found["csd"] == 32.0 and found["vLLM"] == 8.0
    machine = {"cores": 2, "cpu": "a CPU", "instructions": ["avx2"]}
    result = {"model": "m.gguf", "vLLM": "1", "vllm_dtype": "bfloat16"}
    result |= {"rows": rows, "machine": machine}
    readme = tmp_path / "README.md"
    readme.write_text(f"a\n{jobs.BEGIN}\nold\n{jobs.END}\nb\n")
    for _ in range(2):
        jobs.update(result, readme)
    text = readme.read_text()
    assert text.startswith("a\n") and text.endswith("\nb\n") and "old" not in text
    assert "| **32** | 16 | 8 | **2.0** (0.5 to 4.0) | 3 |" in text
