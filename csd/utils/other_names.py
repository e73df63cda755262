"""Names of arguments in other libraries and clients, and their names in csd."""

from collections.abc import Iterable
from difflib import get_close_matches

_SAME = {
    "num_samples": "n num_return_sequences num_generations num_outputs samples",
    "max_new_tokens": "max_tokens max_length max_completion_tokens max_output_tokens "
    "max_gen_toks max_gen_len num_predict n_predict",
    "min_new_tokens": "min_tokens min_length",
    "stop": "stop_strings stop_sequences stop_words stop_str stop_regex",
    "stop_token_ids": "stop_ids stop_tokens",
    "end_token_ids": "eos_token_id eos_token_ids eos_ids",
    "include_stop": "include_stop_str_in_output no_stop_trim",
    "repetition_penalty": "repeat_penalty",
    "frequency_penalty": "freq_penalty alpha_frequency",
    "presence_penalty": "alpha_presence",
    "no_repeat_ngram_size": "ngram_size no_repeat_ngram",
    "bad_words": "bad_words_ids bad_words_list banned_words banned_tokens",
    "allowed_token_ids": "allowed_tokens allowed_ids prefix_allowed_tokens_fn",
    "suppress_tokens": "banned_token_ids suppressed_tokens",
    "logit_bias": "logits_bias bias",
    "logits_processor": "logits_processors custom_logit_processor logits_warper",
    "max_thinking_tokens": "thinking_budget thinking_token_budget reasoning_budget "
    "max_reasoning_tokens thinking_budget_tokens",
    "top_logprobs": "top_logprobs_num num_logprobs",
    "prompt_logprobs": "echo return_prompt_logprobs",
    "entropy": "return_entropy entropies",
    "json_schema": "guided_json response_format structured_outputs schema output_schema",
    "regex": "guided_regex pattern",
    "grammar": "guided_grammar ebnf lark structural_tag",
    "thinking_tags": "reasoning_parser think_tokens thinking_tokens",
    "temperature": "do_sample temp greedy",
    "min_p": "minp",
    "top_p": "topp nucleus_p",
    "top_k": "topk",
    "seed": "random_seed rng generator manual_seed sampling_seed",
    "until": "stopping_criteria early_stopping",
    "callback": "streamer on_token on_tokens",
    "progress": "use_tqdm show_progress progress_bar verbose disable_tqdm",
    "truncate_prompt": "truncate_prompt_tokens truncation",
    "drafter": "assistant_model draft_model speculative_model speculative_config",
    "budget": "num_assistant_tokens num_speculative_tokens draft_tokens",
    "chat_template_kwargs": "add_generation_prompt continue_final_message chat_template tools "
    "documents enable_thinking tokenizer_kwargs template_kwargs",
    "tokenizer": "processing_class processor",
    "attention_mask": "mask",
    "device": "device_map",
    "dtype": "torch_dtype precision",
    # arguments of an engine
    "max_slots": "max_num_seqs max_batch_size batch_size max_running_requests",
    "memory": "gpu_memory_utilization mem_fraction_static memory_fraction",
    "prefill_chunk": "chunked_prefill_size max_num_batched_tokens prefill_chunk_size",
    "exact": "deterministic batch_invariant",
}
_NAMES = {other: name for name, others in _SAME.items() for other in others.split()}

_ALWAYS = "log-probabilities are always returned, as out[i].logprobs and out[i].raw_logprobs"
_UNSUPPORTED = (
    "num_beams num_beam_groups guidance_scale tool_choice length_penalty sequence_bias "
    "begin_suppress_tokens encoder_repetition_penalty"
)
_REMARKS = {
    **dict.fromkeys(("logprobs", "return_logprobs", "return_logprob", "output_scores"), _ALWAYS),
    "output_logits": _ALWAYS,
    "best_of": "csd.best_of chooses among the num_samples that are drawn: did you mean num_samples",
    "stream": "did you mean csd.stream, which yields each sample when it has finished",
    "generation_config": "the model's generation config applies: set model.generation_config, or "
    "pass single options as arguments",
    "sampling_params": "pass its fields as arguments, such as temperature and top_p",
    **dict.fromkeys(_UNSUPPORTED.split(), "csd does not implement it"),
}


def hint(name: str, known: Iterable[str]) -> str:
    """Suggestion for an unknown argument; "" if no name is similar.

    known: the names that are accepted.
    """
    if name in _REMARKS:
        return f"; {_REMARKS[name]}"
    meant = similar(name, known)
    return "" if meant is None else f"; did you mean {meant}?"


def similar(name: str, known: Iterable[str]) -> str | None:
    """The known name with the meaning or the spelling of another one; None if there is none."""
    known = set(known)
    meant = _NAMES.get(name)
    if meant in known:
        return meant
    # a name without its underscores is as far from its own as a typo
    near = get_close_matches(name.lower(), known, 1, 0.7)
    return near[0] if near else None


def unknown_argument(name: str, known: Iterable[str]) -> TypeError:
    """Make the error of a call with an unknown argument: a hint, else the known names."""
    names = sorted(known)
    suggestion = hint(name, names) or f"; the arguments are {', '.join(names)}"
    return TypeError(f"unknown argument {name!r}{suggestion}")
