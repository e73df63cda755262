"""Names of the hub where no network reaches it, and paths of nothing."""

import threading
import time
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

import csd
from csd.models.load import config_of, load, tokenizer_of
from csd.utils import hub

pytestmark = pytest.mark.quick


@pytest.fixture
def asked(monkeypatch):
    """asked(head): a hub's session whose only request is `head`; a list of its calls."""

    def use(head):
        calls = []

        def counted(*args, **kwargs):
            calls.append(kwargs)
            return head()

        session = SimpleNamespace(head=counted)
        monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: session)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        return calls

    return use


def refused():
    raise OSError("no network")


@pytest.mark.parametrize("read", [load, config_of, tokenizer_of, csd.Engine])
def test_a_name_without_a_network_is_refused_at_once(read, asked):
    """After one question, not after retries for each file; the library is as it was."""
    calls, start = asked(refused), time.perf_counter()
    if read is tokenizer_of:
        # without a tokenizer, prompts of token ids are served
        assert read("nobody/nothing") is None
    else:
        with pytest.raises(ValueError, match=r"'nobody/nothing' is neither .*\(no network\)"):
            read("nobody/nothing")
    assert len(calls) == 1 and time.perf_counter() - start < 10
    assert not constants.HF_HUB_OFFLINE and hub.unreached() is None


def test_a_hub_that_does_not_answer_is_waited_for_some_seconds(asked, monkeypatch):
    ended = threading.Event()
    asked(ended.wait)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    assert "no answer within 0.2 s" in hub.no_hub()
    ended.set()
    assert hub.no_hub() is None


def test_no_question_for_what_is_on_this_machine(asked, toy_folder, monkeypatch):
    calls = asked(refused)
    load(toy_folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="nobody/nothing"):
        load("nobody/nothing")
    assert calls == []


@pytest.mark.parametrize("read", [load, config_of, tokenizer_of])
@pytest.mark.parametrize("name", ["./none", "/none/at/all", "a/b/c", "~/none", "..", "none.gguf"])
def test_a_path_of_nothing_is_no_question_to_the_hub(name, read, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = asked(refused)
    with pytest.raises(ValueError, match=r"no such folder|does not exist|no config.json"):
        read(name)
    assert calls == []
