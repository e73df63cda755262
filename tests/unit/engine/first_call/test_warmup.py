"""`engine.warmup()` and `csd warmup` leave nothing for the first call to make."""

import pytest
from helpers.models.scripted import PrefixSum, engine
from helpers.runs.engine_cases import assert_same_samples

import csd
from csd.cli import doctor
from csd.cli.main import main


def test_a_call_behind_it_allocates_nothing_and_draws_the_same():
    asked = dict(num_samples=5, max_new_tokens=40, seed=3)
    want = engine(PrefixSum()).generate([1, 2, 3], **asked)
    with engine(PrefixSum()) as made:
        made.warmup(num_samples=5, prompt_tokens=70, max_new_tokens=40)
        step = made.caches.step
        assert step.slots.count == 5 and len(step.cache.allocator) == step.cache.pages
        assert_same_samples([made.generate([1, 2, 3], **asked)], [want])
        assert made.caches.step is step


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(num_samples=0), "num_samples must be at least 1, got 0"),
        (dict(prompt_tokens=1), "prompt_tokens must be at least 2, got 1"),
        (dict(prompt_tokens=9000), "prompt_tokens must be at .*, got 9000"),
        # a list of so many tokens would take all memory
        (dict(prompt_tokens=2**40), "prompt_tokens must be at .*, got 1099511627776"),
    ],
)
def test_sizes_that_no_call_can_have_are_refused(given, message):
    with engine(PrefixSum()) as made, pytest.raises(ValueError, match=message):
        made.warmup(**given)


def test_within_a_stream_it_raises():
    with engine(PrefixSum()) as made:
        stream = made.stream([1, 2], num_samples=2, max_new_tokens=9, seed=0)
        next(stream)
        with pytest.raises(RuntimeError, match="still used by a stream"):
            made.warmup()
        stream.close()


def test_the_command_compiles_for_filters_lora_and_training_too(toy_folder, capsys, monkeypatch):
    pytest.importorskip("peft")
    drawn, trained = [], []
    generate, logprobs = csd.Engine.generate, doctor.logprobs

    def noted(self, *args, **options):
        drawn.append((self.decoder.name, options.keys() & doctor.FILTERS.keys()))
        return generate(self, *args, **options)

    monkeypatch.setattr(csd.Engine, "generate", noted)
    monkeypatch.setattr(
        doctor, "logprobs", lambda model, *rest: trained.append(model) or logprobs(model, *rest)
    )
    command = ["warmup", str(toy_folder), "-n", "2", "--max-new-tokens", "4"]
    for flags, models in (([], 1), (["--train"], 1), (["--lora", "--train"], 2)):
        drawn.clear(), trained.clear()
        assert main([*command, *flags]) == 0
        assert [keys for _, keys in drawn if keys] == [doctor.FILTERS.keys()] * models
        assert len(trained) == models * ("--train" in flags)
        parameters = [p for model in trained for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None for p in parameters)
    text = capsys.readouterr().out
    assert text.count("kernels of LoRA and training in another") == 2


def test_the_command(toy_folder, capsys):
    assert (
        main(
            ["warmup", str(toy_folder), "-n", "2", "--max-new-tokens", "8", "--prompt-tokens", "9"]
        )
        == 0
    )
    assert "warmed up in" in capsys.readouterr().out
    assert main(["warmup", str(toy_folder), "--prompt-tokens", "1"]) == 2
    assert "prompt_tokens must be at least 2" in capsys.readouterr().err
