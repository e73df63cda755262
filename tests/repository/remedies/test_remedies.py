"""Remedies that errors, warnings and log lines name: each is carried out, and csd runs after it."""

import ast
import re
from pathlib import Path

import pytest
import remedies_of_calls
import remedies_of_integrations
import remedies_of_models
from helpers.targets import few

import csd

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(csd.__file__).parents[1]
VERBS = (
    "ask build call choose chmod close create delete drop free gather give install keep leave "
    "load lower make merge move name pass pip put raise read reduce remove rename run save send "
    "set shorten start stop take train try turn undo unload update use wait write"
)
# an imperative behind a statement
REMEDY = re.compile(
    rf"(^(pass|use) )|([;:,]|[.] ) ?`?(or )?({VERBS.replace(' ', '|')}) |pip install|chmod ",
    re.IGNORECASE,
)

EXECUTED = (
    remedies_of_models.EXECUTED | remedies_of_calls.EXECUTED | remedies_of_integrations.EXECUTED
)
# words of a message -> the test of another file that carries out its remedy
ELSEWHERE = {
    "take its dequantize()": (
        "tests/unit/kernels/layers/test_quantized.py",
        "test_other_operations_are_refused_by_name",
    ),
    "a quantised weight stays on the CPU, in float32": (
        "tests/unit/models/load/test_gguf_logits.py",
        "test_logits_are_those_of_the_equivalent_module",
    ),
    "x @ W of a quantised W has no gradient; use F.linear": (
        "tests/unit/kernels/layers/test_quantized.py",
        "test_a_linear_takes_it_and_passes_gradients_to_x",
    ),
    "save it with save_pretrained, and pass the folder's path": (
        "tests/unit/models/load/test_quantization.py",
        "test_refused_with_a_module",
    ),
    "leave it out, or pass the folder of the original model": (
        "tests/unit/models/load/test_quantization.py",
        "test_refused_with_a_file",
    ),
    "; give its rows as a file, with --task ": (
        "tests/unit/evaluate/test_data_sets.py",
        "test_a_folder_and_a_file_of_its_rows_have_equal_samples",
    ),
    "; take a model whose template does (docs/serve.md)": (
        "tests/unit/serve/http/test_tools.py",
        "test_a_named_tool_gets_arguments_of_its_schema",
    ),
    "; give another --host": (
        "tests/unit/serve/processes/test_process.py",
        "test_a_port_in_use_precedes_loading",
    ),
    "give another --port; 0 takes a free one": (
        "tests/unit/serve/processes/test_process.py",
        "test_a_port_in_use_precedes_loading",
    ),
    "has an adapter in addition to its base model": (
        "tests/unit/integrations/lora/test_adapter_folder.py",
        "test_a_folder_with_a_model_too_is_refused_and_peft_loads_it",
    ),
    "weights that fit nothing in a ": (
        "tests/unit/integrations/lora/test_adapter_folder.py",
        "test_keys_that_fit_nothing_are_refused_until_they_are_renamed",
    ),
    "does not compute with; update peft": (
        "tests/unit/integrations/lora/test_adapter_folder.py",
        "test_every_field_of_the_config_is_read_or_refused_by_name",
    ),
    "must name its base model": (
        "tests/unit/integrations/lora/test_lora.py",
        "test_tokens_are_those_of_the_adapter_that_is_active",
    ),
    " tokens, the base model ": (
        "tests/unit/integrations/lora/test_adapter_folder.py",
        "test_rows_that_would_be_random_are_refused",
    ),
    "still used by a stream; close the stream first": (
        "tests/unit/engine/test_engine.py",
        "test_closing_a_stream_leaves_the_engine_usable",
    ),
    "no text fits the schema from here on; remove ": (
        "tests/unit/engine/rules/test_grammar.py",
        "test_a_dead_end_of_a_schema_names_its_part_and_the_remedy_works",
    ),
    "joins the prompt's end  with : move ": (
        "tests/unit/engine/results/test_sample_texts.py",
        "test_a_completion_that_joins_with_its_prompt_is_refused_with_a_remedy",
    ),
    "write these words in the content of a message": (
        "tests/unit/models/text/test_messages.py",
        "test_calls_of_tools_that_a_template_leaves_out_are_refused",
    ),
    "set TRITON_CACHE_DIR to a writable folder": (
        "tests/unit/engine/first_call/test_first_use.py",
        "test_a_folder_that_cannot_be_written_is_named",
    ),
    "text_model.py: pass the folder or hub name of its checkpoint": (
        "tests/unit/models/test_text_model.py",
        "test_a_whole_model_in_memory_is_refused_and_its_checkpoint_is_not",
    ),
    "pass --model MODEL to measure its step times": (
        "tests/unit/cli/test_commands.py",
        "test_replay_with_a_model_answers_in_one_sentence",
    ),
    "fields.py: use re": (
        "tests/unit/serve/http/test_http_fields.py",
        "test_the_field_that_an_error_names_instead_is_served",
    ),
    "fields.py: use input": (
        "tests/unit/serve/http/test_responses.py",
        "test_an_input_is_the_messages_of_a_chat",
    ),
    "fields.py: use max_output_tokens": (
        "tests/unit/serve/http/test_responses.py",
        "test_the_text_is_that_of_a_chat",
    ),
    "fields.py: use text.format": (
        "tests/unit/serve/http/test_responses.py",
        "test_a_format_is_a_grammar",
    ),
    "fields.py: use grammar": (
        "tests/unit/serve/http/test_http_fields.py",
        "test_the_field_that_an_error_names_instead_is_served",
    ),
    "can be written by other users: chmod go-w": (
        "tests/robustness/hostile/test_shared_folders.py",
        "test_the_message_is_the_remedy",
    ),
    "cli/eval.py: \ninterrupted; run the same command again": (
        "tests/unit/evaluate/test_evaluate.py",
        "test_ctrl_c_leaves_whole_problems",
    ),
    "do harm as any program of yours may: give --run-code": (
        "tests/unit/evaluate/test_data_sets.py",
        "test_pass_at_k_counts_programs_that_pass",
    ),
    "has programs, which do not vote: give --y pass": (
        "tests/unit/evaluate/test_data_sets.py",
        "test_pass_at_k_counts_programs_that_pass",
    ),
    "has none: give their text as prompt_file": (
        "tests/unit/evaluate/test_data_sets.py",
        "test_worked_examples_of_a_split_and_of_a_file_are_the_same_prompt",
    ),
    "two sources of worked examples: give one": (
        "tests/unit/evaluate/test_data_sets.py",
        "test_worked_examples_of_a_split_and_of_a_file_are_the_same_prompt",
    ),
    "training/command.py: \ninterrupted; run the same command again": (
        "tests/unit/research/training/test_train_head.py",
        "test_an_interrupted_run_ends_with_the_same_bits",
    ),
    "cli/trace.py: \ninterrupted; run the same command again": (
        "tests/unit/cli/test_cli.py",
        "test_an_interrupted_recording_goes_on",
    ),
    "text needs a tokenizer: make the engine with tokenizer=": (
        "tests/unit/engine/test_session.py",
        "test_text_needs_a_tokenizer",
    ),
    " needs Triton, else kernels='reference' or 'cpu'": (
        "tests/repository/test_lazy_imports.py",
        "test_csd_samples_without_triton_and_names_it_for_a_gpu",
    ),
    "this client's share of them: wait for earlier ones": (
        "tests/unit/serve/http/test_shares.py",
        "test_a_key_leaves_requests_for_others",
    ),
    "for other ones set n, leave the seed out, or send seed=-1": (
        "tests/unit/serve/test_repeats.py",
        "test_requests_of_a_server",
    ),
    ", and values are computed with =: pass the engine as model": (
        "tests/unit/gradient/test_logprobs.py",
        "test_an_engine_whose_samples_have_other_bits_is_named",
    ),
    "pip install --force-reinstall --no-deps ": (
        "tests/repository/test_package.py",
        "test_another_csd_is_noticed_and_the_notice_removes_it",
    ),
}
PIP = "pip needs the index; test_install_hints.py checks each name that pip would install"
# words of a message -> why its remedy is not carried out
NOT_HERE = {
    " answers began alike for ": "it describes what was saved, not a remedy",
    "whether steps have fixed shapes and never read": "it describes what runs, not a remedy",
    "if it was written by a later version": "it needs another version of peft",
    "an FSDP model has sharded weights": "it needs several processes",
    "is a shard of DeepSpeed ZeRO-3": "it needs DeepSpeed",
    "DeepSpeed ZeRO-3 shards the weights": "it needs DeepSpeed",
    "synced_gpus: gather the weights": "it needs several processes",
    " is a DTensor; pass a model with plain local weights": "it needs several processes",
    "; pass a model with plain local weights": "it needs another package's tensors",
    "the weights are on more than one device": "it needs a second device",
    "not a plain Linear: quantised or wrapped": "it needs another package's layers",
    "tokenizer.ggml.pre=": "it needs the original model",
    "has matrices of different vocabularies": "peft writes no such file",
    ", got bfloat16, which needs : pass dtype=torch.float16": "it needs an old GPU",
    "compute-exclusive mode": "it needs a GPU",
    "is split into instances (MIG)": "it needs a GPU",
    "this machine has an AMD GPU": "it needs a GPU",
    "(pip install arctic-inference)": PIP,
    "several times slower: pip install numba": PIP,
    "numba: pip install numba": PIP,
    "the demo's model is missing: pip install": PIP,
    "csd/utils/lazy.py: pip install -e '.[": PIP,
    "need llguidance (`pip install": PIP,
    "pip install torch --index-url": PIP,
    "must compile within ": "a grammar that does not takes 5 s of CPU",
    "a model with adapters cannot be split over ranks": "it needs several processes",
    ": raise --max-new-tokens": "no model of the tests writes an answer, at any length",
    "nucleus sampling: keep ": "it describes an option",
    "use speculative decoding": "it describes an option",
    "fields.py: use tools": "the chat template of the served model has no tools",
}


@few(24)
@pytest.mark.parametrize("words", EXECUTED)
def test_csd_runs_after_the_remedy(words, tmp_path):
    fails, remedy = EXECUTED[words](tmp_path)
    try:
        # a warning or a log line is returned
        message = fails()
    except Exception as error:
        message = error
    # in an f-string a value may stand between the words
    assert words.strip() in str(message)
    remedy()
    csd.release()


def literal(node):
    """Text of a string without the values of an f-string, None of anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(filter(None, map(literal, node.values)))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def texts(node):
    """Each string below a node with its line; the strings of a `raise` are one."""
    text = literal(node)
    if isinstance(node, ast.Raise) and node.exc is not None:
        text = "".join(text for _, text in texts(node.exc))
    if text is not None:
        yield node.lineno, text
        return
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        # a string alone is a docstring
        children = [x for x in children if not (isinstance(x, ast.Expr) and literal(x.value))]
    for child in children:
        yield from texts(child)


def remedies():
    """Text of each message of csd that names a remedy, without its values."""
    for path in sorted((ROOT / "csd").rglob("*.py")):
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8"))):
            if REMEDY.search(text):
                name = path.relative_to(ROOT)
                yield f"{name}:{line}", f"{name}: {text}"


def test_every_remedy_is_carried_out_or_listed_with_the_reason():
    known = [*EXECUTED, *ELSEWHERE, *NOT_HERE]
    texts = dict(remedies())
    unknown = {at: text for at, text in texts.items() if not any(k in text for k in known)}
    assert not unknown
    assert not [words for words in known if not any(words in text for text in texts.values())]
    for path, name in ELSEWHERE.values():
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
