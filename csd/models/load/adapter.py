"""Loading of a peft adapter that has no base model beside it, and of the base model's added rows.

An adapter is a folder or hub repository as `PeftModel.save_pretrained` writes it. Every field of
`adapter_config.json` is read here, is peft's own, or is refused by name, and so is every key of the
weights; peft itself ignores what it does not know.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from csd.models.load.checkpoint import quiet_libraries, read_tokenizer
from csd.models.refuse import refuse_prompt_learning
from csd.utils.files import check_no_pipes
from csd.utils.lazy import check_installed

FILE = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# files of a hub repository that belong to an adapter; it may hold states of an optimiser too
_FILES = (
    "config.json",
    "adapter_*",
    "*token*",
    "vocab*",
    "merges.txt",
    "*.jinja",
    "tekken.json",
    "generation_config.json",
)
# task types whose weights are a causal language model's
_TASKS = (None, "CAUSAL_LM")
# starts of a LoRA that leave the base's weights as they are; others, as PiSSA's, subtract from them
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal")
# fields of a LoRA that reads or copies weights of the base
_OF_BASE = ("use_dora", "target_parameters", "layer_replication")


@dataclass(frozen=True)
class Adapter:
    """An adapter that has no base model beside it."""

    name: str  # as it was given
    folder: str  # on this machine
    config: dict[str, Any]

    @property
    def base(self) -> str:
        """Folder or hub name of the base model."""
        base = self.config.get("base_model_name_or_path")
        if not base or not isinstance(base, str):
            raise ValueError(
                f"{os.path.join(self.folder, FILE)} must name its base model "
                f"(base_model_name_or_path), got {base!r}; load both with peft, and pass the model"
            )
        return base

    @property
    def base_revision(self) -> str | None:
        """Revision of the base model, for a base on the hub."""
        revision = self.config.get("revision")
        if revision in (None, "main"):
            return None
        if os.path.exists(self.base):
            raise ValueError(
                f"revision must be null in {os.path.join(self.folder, FILE)} for the base model "
                f"{self.base!r}, which is a local path, got {revision!r}"
            )
        return str(revision)

    @property
    def leaves_base(self) -> bool:
        """True for products beside the base's layers alone, so that its weights may stay packed.

        Other adapters replace, extend or read weights of the base.
        """
        from safetensors import safe_open

        path = os.path.join(self.folder, WEIGHTS[0])
        if not os.path.exists(path) or self.config.get("init_lora_weights") not in _PLAIN_STARTS:
            return False
        if any(self.config.get(name) for name in _OF_BASE):
            return False
        try:
            with safe_open(path, "pt") as file:
                keys = [*file.keys()]
        # `with_adapter` has the error
        except Exception:
            return False
        return all(key.endswith((".lora_A.weight", ".lora_B.weight")) for key in keys)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer beside the adapter; None if there is none."""
        return read_tokenizer(self.folder, {})


def adapter_of(name: str, revision: str | None = None) -> Adapter | None:
    """The adapter of a folder or hub name; None for any other model.

    revision: of a hub name. Raises ValueError for a folder with an adapter and a model.
    """
    if not os.path.exists(name):
        # a GGUF file that is not there: the reader of models has the error
        folder = None if name.endswith(".gguf") else _hub_folder(name, revision)
    else:
        folder = name if os.path.isdir(name) else None
    if folder is None or not os.path.exists(path := os.path.join(folder, FILE)):
        return None
    check_no_pipes(folder)
    # if the folder also holds a model, the adapter's base is ambiguous
    if os.path.exists(os.path.join(folder, "config.json")):
        raise ValueError(
            f"{name} has an adapter in addition to its base model; load it with "
            "peft.AutoPeftModelForCausalLM, and pass the model"
        )
    if revision is not None and folder == name:
        raise ValueError(f"revision must be None for a local path, got {name}")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        if not isinstance(config, dict):
            raise ValueError(f"expected an object, got {type(config).__name__}")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not the config of an adapter: {error}") from error
    return Adapter(name, folder, config)


def _hub_folder(name: str, revision: str | None) -> str | None:
    """Folder of the hub's cache with an adapter's files; None if the name is no adapter's."""
    from huggingface_hub import snapshot_download
    from transformers.utils import find_adapter_config_file

    revision = revision or "main"
    try:
        with quiet_libraries():
            if find_adapter_config_file(name, revision=revision) is None:
                return None
            return snapshot_download(name, revision=revision, allow_patterns=[*_FILES])
    # not a name of the hub, or not reachable: the reader of models has the error
    except (OSError, ValueError):
        return None


def with_adapter(model: Any, adapter: Adapter, tokenizer: Any = None) -> Any:
    """`model` in a PeftModel with the adapter, unmerged, in evaluation mode.

    tokenizer: decides the rows of the embedding if the adapter's weights have none.
    Raises ValueError naming the field, key or matrix that cannot be used.
    """
    check_installed("peft", "lora", f"the adapter in {adapter.name}")
    import peft

    _check_config(adapter)
    if not any(os.path.exists(os.path.join(adapter.folder, file)) for file in WEIGHTS):
        raise ValueError(f"the adapter in {adapter.name} has no weights ({WEIGHTS[0]})")
    try:
        config = peft.PeftConfig.from_pretrained(adapter.folder)
        config.inference_mode = True
        weights = peft.utils.load_peft_weights(adapter.folder, device="cpu")
    # peft passes on any exception of its file readers
    except Exception as error:
        raise ValueError(f"the adapter in {adapter.name} cannot be loaded: {error}") from error
    resize(model, config, weights, tokenizer, adapter.name)
    try:
        made = peft.PeftModelForCausalLM(model, config)
        read = made.load_adapter(adapter.folder, "default", torch_device=str(model.device))
    except KeyError as error:
        raise ValueError(f"the adapter in {adapter.name} lacks the weights {error}") from error
    except Exception as error:
        raise ValueError(f"the adapter in {adapter.name} cannot be loaded: {error}") from error
    refuse_prompt_learning(made)
    _check_keys(adapter.name, made, read, weights)
    return made.eval()


def _check_config(adapter: Adapter) -> None:
    """Raises ValueError for a field that neither csd nor the installed peft reads."""
    import peft

    path, config = os.path.join(adapter.folder, FILE), adapter.config
    kind = config.get("peft_type")
    kinds = {kind.value: cls for kind, cls in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if kind not in kinds:
        raise ValueError(
            f"peft_type in {path} must be a kind of adapter of peft {peft.__version__}, got "
            f"{kind!r}; update peft (pip install -U peft) if it was written by a later version"
        )
    if config.get("task_type") not in _TASKS:
        raise ValueError(
            f"task_type in {path} must be 'CAUSAL_LM' or null, got {config['task_type']!r}: the "
            "adapter belongs to another head than a language model's"
        )
    # peft takes this from its caller alone
    known = {field.name for field in dataclasses.fields(kinds[kind])} - {"runtime_config"}
    for name in sorted(config.keys() - known):
        if config[name]:
            raise ValueError(
                f"{path} has {name}={config[name]!r}, which peft {peft.__version__} does not "
                f"compute with; update peft (pip install -U peft), or remove {name} from the file "
                "if the adapter does not depend on it"
            )


def _check_keys(name: str, model: Any, read: Any, weights: dict[str, torch.Tensor]) -> None:
    """Raises ValueError, with names, if weights of the file fit nothing, or the file lacks some.

    read: keys that peft reports from loading.
    """
    unread = sorted(key for key in read.unexpected_keys if not _is_copy(key, weights))
    if unread:
        raise ValueError(
            f"the adapter in {name} has {len(unread)} weights that fit nothing in a "
            f"{type(model.get_base_model()).__name__}: {', '.join(unread[:3])}; save it with "
            "PeftModel.save_pretrained from a model without wrappers, or rename these keys"
        )
    # a tensor that several layers share is in the file once
    tensors = model.state_dict(keep_vars=True)
    missing = {key for key in read.missing_keys if key in tensors}
    loaded = {tensor.data_ptr() for key, tensor in tensors.items() if key not in missing}
    left = sorted(key for key in missing if tensors[key].data_ptr() not in loaded)
    if left:
        raise ValueError(
            f"the adapter in {name} lacks the weights {', '.join(left[:3])} ({len(left)} in all), "
            f"which its {FILE} asks for"
        )


def _is_copy(key: str, weights: dict[str, torch.Tensor]) -> bool:
    """True for the second copy that peft writes of an embedding that was resized and trained."""
    first = key.replace(".modules_to_save.", ".")
    return first != key and first in weights and torch.equal(weights[key], weights[first])


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
    trained = {*stored, *_with_tokens(config, embedding, added)}
    untrained = [matrix for matrix in matrices if matrix not in trained]
    if untrained and not (shared and trained):
        raise ValueError(
            f"the adapter in {name} has a tokenizer of {after} tokens, the base model {before} "
            f"rows in {untrained[0]}, and the adapter no weights for the rows {before} to "
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
