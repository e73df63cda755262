"""Rows of a base model's embedding and output head that an adapter with added tokens needs."""

from collections.abc import Iterator
from typing import Any


def resize(model: Any, config: Any, weights: dict[str, Any], tokenizer: Any, name: str) -> None:
    """Give the embedding and output head of `model` the rows with which the adapter was trained.

    These are the rows of the matrices among `weights`, else the length of the tokenizer if that is
    larger than the embedding. config: the adapter's, of peft. name: the adapter's, for errors.

    Raises ValueError, naming the matrix, if rows would be left at random.
    """
    matrices = dict(_matrices(model))
    stored = {
        matrix: weights[key].shape[0]
        for matrix, module in matrices.items()
        for key in weights
        if _is_whole(key, matrix) and weights[key].shape[1:] == module.weight.shape[1:]
    }
    (embedding, first), *_ = matrices.items()
    before = first.weight.shape[0]
    if len({*stored.values()}) > 1:
        raise ValueError(
            f"the adapter in {name} has matrices of different vocabularies: {stored}; save all of "
            "them after the tokens were added"
        )
    after = next(iter(stored.values()), before)
    if not stored and tokenizer is not None:
        after = max(before, len(tokenizer))
    if after == before:
        return
    added = range(before, after)
    shared = len({id(module.weight) for module in matrices.values()}) == 1
    given = {*stored, *_with_tokens(config, embedding, added)}
    for matrix in [embedding] if shared and not given else matrices:
        if matrix not in given and not (shared and given):
            raise ValueError(
                f"the adapter in {name} has a tokenizer of {after} tokens, the base model "
                f"{before} rows in {matrix}, and the adapter no weights for the rows {before} to "
                f"{after - 1}: save it with save_embedding_layers=True, or pass the base model's "
                "tokenizer with tokenizer="
            )
    model.resize_token_embeddings(after, mean_resizing=False)


def _matrices(model: Any) -> Iterator[tuple[str, Any]]:
    """Name and module of the embedding, then of the output head."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is not None:
            yield names[id(module)], module


def _is_whole(key: str, matrix: str) -> bool:
    """True if a key of an adapter's weights is the whole matrix of that name."""
    rest = key.removeprefix("base_model.model.").removeprefix(matrix)
    return rest in (".weight", ".base_layer.weight", ".modules_to_save.weight") and matrix in key


def _with_tokens(config: Any, embedding: str, added: range) -> Iterator[str]:
    """Names of the matrices of which the adapter trains the added tokens' rows."""
    of_tokens = getattr(config, "trainable_token_indices", None)
    if of_tokens is None and hasattr(config, "token_indices"):
        layers = config.target_modules or [embedding]
        of_tokens = {layer: config.token_indices for layer in layers}
    if isinstance(of_tokens, list):
        of_tokens = {embedding: of_tokens}
    for layer, indices in (of_tokens or {}).items():
        if {*added} <= {*indices}:
            yield embedding if embedding.endswith(layer) else layer
