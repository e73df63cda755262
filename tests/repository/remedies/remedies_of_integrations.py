"""Remedies of integrations, kernels and the server: each error with the call that raises it."""

import asyncio
import logging
import pickle
import threading
from functools import partial
from pathlib import PurePosixPath
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from helpers.kernels.attention_cases import attention_case, laid_out
from helpers.kernels.elementwise_cases import rotary_case
from helpers.models import checkpoints, scripted
from helpers.models.scripted import Letters, PrefixSum
from helpers.runs.hf_generate_cases import ROWS, cache
from transformers import LogitsProcessorList, TopKLogitsWarper

import csd
from csd.kernels import attention
from csd.kernels.layers import rotary
from csd.models.load import load

# whose programs need no compilation
engine = partial(scripted.engine, kernels="reference")


def hf_generate(wrong, right):
    model = checkpoints.build("qwen3", dtype=torch.float16)
    ids = torch.tensor(ROWS[:1])

    def call(options):
        options = options(model, ids) if callable(options) else options
        options = {"input_ids": ids, "custom_generate": csd.hf_generate} | options
        model.generate(max_new_tokens=2, do_sample=True, **options)

    return lambda: call(wrong), lambda: call(right)


def direct_call():
    model = checkpoints.build("qwen3", dtype=torch.float16)
    ids = torch.tensor(ROWS[:1])
    return (
        lambda: csd.hf_generate(model, ids),
        lambda: model.generate(ids, max_new_tokens=2, custom_generate=csd.hf_generate),
    )


def replaced_forward():
    model = checkpoints.build("llama")
    model.model.norm.forward = model.model.norm.forward

    def remedy():
        del model.model.norm.forward
        csd.apply_kernels(model)

    return lambda: csd.apply_kernels(model), remedy


def changed_layer():
    model = checkpoints.build("llama")
    plain = checkpoints.build("llama")
    hook = model.lm_head.register_forward_hook(lambda module, args, out: out + 1)

    def call(model):
        csd.Engine(model, decoder="fused", kernels="reference").generate([1, 2], max_new_tokens=2)

    return lambda: call(model), lambda: [call(plain), hook.remove(), call(model)]


def pickled(folder):
    checkpoints.make("llama", folder)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(PurePosixPath("a")))

    def remedy():
        (folder / "pytorch_model.bin").unlink()
        path.write_bytes(content)
        load(str(folder))

    return lambda: load(str(folder)), remedy


def attention_of_a_tree(**changes):
    """A model whose attention is `csd_tree`, the inputs of a tree, and its cache."""
    model = checkpoints.build("llama", **changes)
    with torch.no_grad():
        past = model(torch.tensor([[5, 6]])).past_key_values
    model.set_attn_implementation("csd_tree")
    cache = csd.TreeCache([past], [1], 8)
    return model, cache, cache.tree([[6, 7, 8]], [[-1, 0, 1]])


def dropout():
    model, _, tree = attention_of_a_tree(attention_dropout=0.5)
    model.train()

    @torch.no_grad()
    def call():
        model(**tree.inputs)

    return call, lambda: [model.eval(), call()]


def gradients():
    model, _, tree = attention_of_a_tree()

    def train():
        packed = csd.PackedTree([[5, 6]], [[[7, 8], [7, 9]]])
        model(**packed.inputs).logits.sum().backward()

    return lambda: model(**tree.inputs), lambda: [
        torch.no_grad()(model)(**tree.inputs),
        train(),
    ]


def no_pass():
    model, cache, tree = attention_of_a_tree()

    @torch.no_grad()
    def remedy():
        drawn = model(**tree.inputs).logits[0].argmax(-1)
        cache.commit(tree, tree.accepted(drawn))

    return lambda: cache.commit(tree, [[0]]), remedy


def tree_cache():
    past = [(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))]
    return (
        lambda: csd.TreeCache([past], [10**12], 4),
        lambda: [csd.TreeCache([past], [2], 4), csd.TreeCache([past], [1], 40)],
    )


def early():
    early = pytest.importorskip("csd.integrations.trl.early")
    trainer = SimpleNamespace(beta=0.1, reward_funcs=[], reward_func_names=[])

    def remedy():
        trainer.beta = 0
        early._check_trainer(trainer)

    return lambda: early._check_trainer(trainer), remedy


def too_few_cores():
    from csd.integrations.ray import check_room

    def remedy():
        check_room({"CPU": 2.0}, 1, 1, 0)
        check_room({"CPU": 9.0}, 8, 1, 0)
        check_room({"CPU": 1.0}, 8, 0, 0)

    return lambda: check_room({"CPU": 2.0}, 8, 1, 0), remedy


def without_gradient(function, arguments, name, *others):
    arguments[name].requires_grad_()

    @torch.no_grad()
    def remedy():
        function(**arguments)

    return lambda: function(**arguments), remedy


def option_of_the_start():
    made = csd.Prior(contexts=1024)
    model = engine(PrefixSum(), Letters(), max_slots=2)

    def wrong():
        with csd.AsyncEngine(model) as service:
            service.submit([1, 2], max_new_tokens=2, prior=made)

    def remedy():
        with csd.AsyncEngine(model, prior=made) as service:
            service.submit([1, 2], max_new_tokens=2).result(30)

    return wrong, remedy


def learning_prior(folder):
    path, learns = folder / "prior.csdprior", csd.Prior(contexts=1024, learn=True)
    learns.add([1], [[2, 3]])
    learns.save(path)
    model = engine(PrefixSum(), Letters(), max_slots=2)

    def call(prior):
        with csd.AsyncEngine(model, prior=prior) as service:
            service.submit([1, 2], max_new_tokens=2).result(30)

    return lambda: call(learns), lambda: call(csd.Prior.load(path))


def too_many_slots():
    large, small = dict(max_slots=256), dict(max_slots=4)

    def call(max_slots=4, max_tokens=4096, prefill_chunk=64, memory=1.0):
        model = engine(PrefixSum(), memory=memory, max_slots=max_slots, prefill_chunk=prefill_chunk)
        with patch("csd.engine.resources.caches.free_bytes", lambda device: 30_000_000):
            csd.AsyncEngine(model, max_tokens=max_tokens).close()

    def remedy():
        call(**small)
        call(**large, max_tokens=512)
        for one in dict(prefill_chunk=4096), dict(memory=0.2):
            with pytest.raises(MemoryError):
                call(**one)
        call(prefill_chunk=64, memory=1.0)

    return lambda: call(**large), remedy


def full_queue():
    service = csd.AsyncEngine(engine(PrefixSum(), Letters(), max_slots=1), max_queue=1)
    waiting = []

    def ask():
        waiting.append(service.submit([1, 2], max_new_tokens=60, ignore_eos=True))

    def remedy():
        for handle in waiting:
            handle.result(30)
        ask()
        waiting[-1].result(30)
        service.close()

    # more than the engine draws meanwhile
    return lambda: [ask() for _ in range(9)], remedy


def keys():
    from csd.serve.http.clients import Clients, check_keys

    return lambda: check_keys("api_key", [" "]), lambda: Clients((), False)


def bytes_of_a_client():
    from csd.serve.http.clients import Shares

    shares = Shares("bodies", 10)
    shares.take("a", 6)
    return lambda: shares.take("a", 6), lambda: [shares.give("a", 6), shares.take("a", 6)]


def slow_bodies():
    from csd.serve.http.clients import Readers

    async def run(count):
        readers, goes_on = Readers(1, 1, 0.1), threading.Event()
        try:
            work = [readers.run("a", 1, goes_on.wait if count > 1 else int) for _ in range(count)]
            await asyncio.gather(*work)
        finally:
            goes_on.set()

    return lambda: asyncio.run(run(3)), lambda: asyncio.run(run(1))


def open_server():
    from csd.serve.http.run import process
    from csd.serve.http.server import Server

    service = csd.AsyncEngine(engine(PrefixSum(), Letters(), max_slots=2))

    def lines(**options):
        written = []
        handler = logging.Handler()
        handler.emit = lambda record: written.append(record.getMessage())
        log = logging.getLogger("csd")
        log.addHandler(handler)
        try:
            process(Server(service, "toy", **options), host="0.0.0.0")
        finally:
            log.removeHandler(handler)
        return "\n".join(written)

    def remedy():
        assert not lines(keys=("secret",))
        service.close()

    return lines, remedy


# words of the message -> the call that raises it, and the calls that carry out its remedy
EXECUTED = {
    "inputs_embeds: csd drafts and verifies token ids; pass": lambda folder: hf_generate(
        lambda model, ids: dict(
            input_ids=None, inputs_embeds=model.get_input_embeddings()(ids).detach()
        ),
        {},
    ),
    "past_key_values: csd has its own cache of keys and values; pass": lambda folder: hf_generate(
        lambda model, ids: dict(past_key_values=cache(model)), {}
    ),
    "; set the option in the generation config if it has": lambda folder: hf_generate(
        dict(logits_processor=LogitsProcessorList([TopKLogitsWarper(3)])), dict(top_k=3)
    ),
    "got None: call model.generate(..., custom_generate=": lambda folder: direct_call(),
    "(offloading, or kernels of another library); remove that": lambda folder: replaced_forward(),
    "does not support; undo it, or pass the plain model": lambda folder: changed_layer(),
    "its weights are a pickle file that executes code, or a damaged file; save them": pickled,
    ": call model.eval()": lambda folder: dropout(),
    "tree attention over a cache has no backward: call the model under": lambda folder: gradients(),
    ": call model(**tree.inputs) first": lambda folder: no_pass(),
    " are free: use fewer samples or tokens": lambda folder: tree_cache(),
    "): set it to 0": lambda folder: early(),
    " are free, so Ray would wait forever. Use fewer actors": lambda folder: too_few_cores(),
    "tree_attention has no backward: call it under": lambda folder: without_gradient(
        attention.tree_attention, laid_out(attention_case([{0: 2}], [5], [3])), "q"
    ),
    "rotary has no backward: call it under": lambda folder: without_gradient(
        rotary.rotary, rotary_case(3, 2, 1, 8, torch.float32), "q"
    ),
    " applies to all requests: set it when the AsyncEngine is made": lambda folder: (
        option_of_the_start()
    ),
    "load it with csd.Prior.load(path), which only reads": learning_prior,
    "lower max_slots, max_tokens or prefill_chunk, or raise memory": lambda folder: (
        too_many_slots()
    ),
    " waiting requests: try again later": lambda folder: full_queue(),
    " must not be empty or blank: leave it out": lambda folder: keys(),
    " bytes together: wait for earlier ones": lambda folder: bytes_of_a_client(),
    " seconds: send fewer or smaller requests at once": lambda folder: slow_bodies(),
    " can use the server: set --api-key or CSD_API_KEYS": lambda folder: open_server(),
}
