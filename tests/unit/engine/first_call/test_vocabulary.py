"""The prior without text has the model's own likeliest tokens behind each token."""

import pytest
import torch
from helpers.models.checkpoints import build

import csd
from csd.cli.main import main
from csd.engine.first_call.vocabulary import vocabulary_prior
from csd.models.demo import toy
from csd.state.context_table import PRIOR_KEY, WEIGHT_ONE


def successors(prior):
    table = prior.table
    used = table.entry_group == PRIOR_KEY
    assert (table.entry_total[used] == WEIGHT_ONE).all()
    assert (table.entry_tokens[used, 1:] == -1).all()
    columns = (table.entry_tokens[used, 0], table.succ_token[used], table.succ_weight[used])
    return {
        t: {s: w for s, w in zip(tokens, weights, strict=True) if s >= 0}
        for t, tokens, weights in zip(*(x.tolist() for x in columns), strict=True)
    }


@pytest.mark.parametrize("slots", [64, 1])
def test_successors_are_the_models(slots):
    model = build("llama", dtype=torch.float64)
    with csd.Engine(model, max_slots=slots) as e:
        found = successors(vocabulary_prior(e))
        vocab = e.config.vocab
    rows = torch.tensor([[0, t] for t in range(vocab)])
    with torch.no_grad():
        probability, token = model(rows).logits[:, -1].softmax(1).topk(8, 1)
    assert found.keys() == {*range(vocab)}
    for t in range(vocab):
        want = dict(zip(token[t].tolist(), probability[t].tolist(), strict=True))
        assert found[t].keys() == want.keys()
        for s, weight in found[t].items():
            # truncated to a whole weight, of a probability in float32
            assert weight == pytest.approx(want[s] * WEIGHT_ONE, abs=1.1)


def test_warmup_writes_one_that_drafts(toy_folder, tmp_path, capsys):
    path = tmp_path / "own.csdprior"
    options = ["-n", "2", "--max-new-tokens", "8", "--prompt-tokens", "8"]
    assert main(["warmup", str(toy_folder), *options, "--prior", str(path)]) == 0
    model, tokenizer = toy()
    prior = csd.Prior.load(path)
    assert f"{prior.contexts} contexts" in capsys.readouterr().out
    assert prior.contexts == model.config.vocab_size and prior.tokens == 0
    asked = dict(max_new_tokens=40, seed=0, budget=12, temperature=0.5)
    with csd.Engine(model, tokenizer=tokenizer) as e:
        plain, out = (e.generate("a b", prior=p, **asked) for p in (None, prior))
    assert out.tokens == plain.tokens and out.stats.accepted["prior"] > 0
