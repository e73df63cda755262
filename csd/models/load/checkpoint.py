"""Loading of a checkpoint's `transformers` model and tokenizer, with errors for its owner.

A checkpoint may be a peft adapter: a folder or hub repository as `PeftModel.save_pretrained` writes
it. Every field of `adapter_config.json` is read here, is peft's own, or is refused by name, and so
is every key of the weights; peft itself ignores what it does not know.

Lines that other libraries print while they load are suppressed.
"""

import dataclasses
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypedDict

import torch

from csd.models.fused.config import ModelConfig
from csd.models.fused.families import SUPPORTED
from csd.models.load import gguf as gguf_model
from csd.models.load.gguf.file import read_once
from csd.models.load.resize_for_adapter import resize
from csd.models.refuse import refuse_config, refuse_prompt_learning
from csd.models.text_model import TEXT_KEYS, is_of_other_part, text_config_of
from csd.utils.check import shown
from csd.utils.input_files import check_no_pipes
from csd.utils.json_files import read_file
from csd.utils.lazy import check_installed


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Context in which transformers shows no bar over weights, and the hub logs no retries.

    Bars over downloads stay. If a library's own verbosity is set to INFO or lower, its lines stay
    too.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers

    # importing that module sets the level
    hub_logging.get_verbosity()
    hub = logging.getLogger("huggingface_hub")
    asked = logging.NOTSET < hub.level <= logging.INFO
    level = hub.level
    bars = transformers.is_progress_bar_enabled() and transformers.get_verbosity() > logging.INFO
    if bars:
        downloads = not are_progress_bars_disabled()
        transformers.disable_progress_bar()
        if downloads:
            enable_progress_bars()
    if not asked:
        hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.setLevel(level)
        if bars:
            transformers.enable_progress_bar()
            if not downloads:
                from huggingface_hub.utils import disable_progress_bars

                disable_progress_bars()


class Report(logging.Filter):
    """Context in which transformers does not print its table of keys, which this object keeps.

    The table has each key of a file, as it is there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "LOAD REPORT" not in message:
            return True
        self.text = message
        return False

    def __enter__(self) -> "Report":
        self._logger = logging.getLogger("transformers.modeling_utils")
        self._logger.addFilter(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._logger.removeFilter(self)

    def shapes(self) -> list[str]:
        """Weights whose shapes in the file and by the config differ, with both."""
        found = _MISMATCH.findall(self.text)
        return [f"{name} {have} instead of {want}" for name, have, want in found]


_SHAPE = r"torch\.Size\((\[[\d, ]*\])\)"
_MISMATCH = re.compile(rf"^([\w.{{}}, ]+?) *\|.*ckpt: *{_SHAPE} vs model: *{_SHAPE}", re.MULTILINE)


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

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer beside the adapter; None if there is none."""
        return read_tokenizer(self.folder, {})


def adapter_of(name: str, revision: str | None = None) -> Adapter | None:
    """The adapter of a folder or hub name; None for any other model.

    revision: of a hub name. Raises ValueError for a folder with an adapter and a model.
    """
    if not os.path.exists(name):
        folder = _hub_folder(name, revision)
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

    path, given = os.path.join(adapter.folder, FILE), adapter.config
    kind = given.get("peft_type")
    kinds = {kind.value: cls for kind, cls in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if kind not in kinds:
        raise ValueError(
            f"peft_type in {path} must be a kind of adapter of peft {peft.__version__}, got "
            f"{kind!r}; update peft (pip install -U peft) if it was written by a later version"
        )
    if given.get("task_type") not in _TASKS:
        raise ValueError(
            f"task_type in {path} must be 'CAUSAL_LM' or null, got {given['task_type']!r}: the "
            "adapter belongs to another head than a language model's"
        )
    # peft takes this from its caller alone
    known = {field.name for field in dataclasses.fields(kinds[kind])} - {"runtime_config"}
    for name in sorted(given.keys() - known):
        if given[name]:
            raise ValueError(
                f"{path} has {name}={given[name]!r}, which peft {peft.__version__} does not "
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


# buffers in old checkpoints that the module computes from its config
_DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "position_ids")


# called with the config and the dtype of the weights before these are read; None if unknown
OnConfig = Callable[[ModelConfig, torch.dtype | None], None]


def read_config(
    name: str, place: str, options: dict, wanted: str = "fused"
) -> tuple[Any, ModelConfig | None, bool]:
    """Config of a checkpoint: transformers', and csd's for the fused decoder; of its text model.

    The second is None if the fused decoder does not run the model or `wanted` is "module", and the
    module is not refused; the third is True if the checkpoint has more than the text model. wanted:
    a name in `csd.models.load.choose_decoder.DECODERS`.
    """
    from transformers import AutoConfig

    try:
        with quiet_libraries():
            config = AutoConfig.from_pretrained(place, **options)
    except ValueError as error:
        raise ValueError(f"{name!r} cannot be loaded; {SUPPORTED}: {error}") from error
    except OSError as error:
        raise ValueError(_no_model(name, error)) from error
    except ImportError:
        raise
    # a malformed file may make its readers raise any exception
    except Exception as error:
        raise ValueError(f"{name!r} has an invalid config.json: {_brief(error)}") from error
    try:
        text = text_config_of(config)
        return text, _sizes(text, wanted), text is not config
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{name!r} has an invalid config.json: {_brief(error)}") from error


class _Index(TypedDict):
    weight_map: dict[str, str]


def check_index(name: str, place: str) -> None:
    """Raises ValueError for an index of weights that names files outside of its folder."""
    for path in sorted(Path(place).glob("*.index.json")) if os.path.isdir(place) else []:
        for file in {*read_file(path, _Index)["weight_map"].values()}:
            if os.path.basename(file) != file or file in ("", ".", ".."):
                raise ValueError(
                    f"{name!r} cannot be loaded: {path.name} must name files of its folder, got "
                    f"{shown(file)}"
                )


def _sizes(config: Any, wanted: str) -> ModelConfig | None:
    why = None
    if wanted != "module":
        try:
            return ModelConfig.from_transformers(config)
        except ValueError as error:
            if wanted == "fused":
                raise
            why = str(error)
    try:
        refuse_config(_of_text(config))
    except ValueError as error:
        both = "" if why is None else f". The fused decoder does not run it either: {why}"
        raise ValueError(f"{error}{both}") from error
    return None


def _of_text(config: Any) -> Any:
    """Config of the model that AutoModelForCausalLM loads.

    For a model that also reads images, this is the config of its text model if the family has a
    separate one.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config()
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    made = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded = made[0] if isinstance(made, tuple) else made
    return text if loaded.config_class is type(text) else config


def read_model(
    name: str,
    place: str,
    dtype: torch.dtype | str,
    options: dict,
    before: OnConfig,
    wanted: str = "fused",
) -> Any:
    """The transformers model. One that csd cannot run is refused before gigabytes are read."""
    from transformers import AutoModelForCausalLM

    config, sizes, has_parts = read_config(name, place, options, wanted)
    check_index(name, place)
    if has_parts:
        options = options | {"key_mapping": TEXT_KEYS}
    if sizes is not None:
        before(sizes, config.dtype if isinstance(dtype, str) else dtype)
    try:
        with Report() as report:
            model, seen = AutoModelForCausalLM.from_pretrained(
                place, config=config, dtype=dtype, output_loading_info=True, **options
            )
    except ImportError:
        raise
    except MemoryError as error:
        raise MemoryError(f"{name!r} does not fit into memory: {_brief(error)}") from error
    except Exception as error:
        if shapes := report.shapes():
            raise ValueError(
                f"{name!r} cannot be loaded: the shapes of its weights do not match its "
                f"config.json: {', '.join(shapes[:3])}"
            ) from error
        raise ValueError(_no_model(name, error)) from error
    # transformers would continue with random weights
    if seen["missing_keys"]:
        raise ValueError(
            f"{name!r} lacks the weights {', '.join(sorted(seen['missing_keys'])[:3])}"
        )
    # and it accepts weights that its module does not compute with
    unread = sorted(
        key
        for key in seen["unexpected_keys"]
        if not (key.endswith(_DERIVED) or (has_parts and is_of_other_part(key)))
    )
    if unread:
        raise ValueError(
            f"{name!r} has weights that a {config.model_type} model of {config.num_hidden_layers} "
            f"layers, as in its config, does not use: {', '.join(unread[:3])}"
        )
    return model


def read_gguf(
    name: str, place: str, dtype: torch.dtype | str, options: dict, before: OnConfig
) -> Any:
    """The transformers model of a GGUF file; dtype "auto" is float32, as the file has none."""
    path = os.path.join(place, options["gguf_file"])
    made_in = torch.float32 if isinstance(dtype, str) else dtype
    before(gguf_config(name, path), made_in)
    with _reading_gguf(name):
        return gguf_model.read(path, made_in)


def gguf_config(name: str, path: str) -> ModelConfig:
    with _reading_gguf(name):
        return gguf_model.read_config(path)


@contextmanager
def _reading_gguf(name: str) -> Iterator[None]:
    try:
        with read_once():
            yield
    except MemoryError as error:
        raise MemoryError(f"{name!r} does not fit into memory: {_brief(error)}") from error
    # a malformed file may make its reader raise any exception
    except Exception as error:
        raise ValueError(f"{name!r} cannot be loaded; {SUPPORTED}: {_brief(error)}") from error


def _no_model(name: str, error: Exception) -> str:
    if os.path.exists(name):
        return f"{name!r} cannot be loaded: {_brief(error)}"
    return (
        f"{name!r} is neither a local model folder nor a model that could be loaded from the hub: "
        f"{_brief(error)}"
    )


def _brief(error: Exception) -> str:
    """Message of an error for the model's owner, shortened and without advice for others."""
    if isinstance(error, UnpicklingError):
        return (
            "its weights are a pickle file that executes code, or a damaged file; save them as "
            "*.safetensors"
        )
    text = str(error)
    if not isinstance(error, OSError | ValueError | RuntimeError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 600 else text[:599] + "…"


def check_folder(name: str) -> None:
    check_no_pipes(name)
    have = os.listdir(name)
    if "config.json" not in have:
        raise ValueError(f"{name} is not a model folder: it has no config.json")
    if not any(f.endswith((".safetensors", ".bin")) for f in have):
        raise ValueError(f"{name} is not a model folder: it has no weights (*.safetensors)")


_TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
}


def read_tokenizer(place: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    # for some families transformers makes an empty tokenizer if the folder has none
    local = os.path.isdir(place) and "gguf_file" not in options
    if local and not _TOKENIZER_FILES.intersection(os.listdir(place)):
        return None
    try:
        with read_once() if "gguf_file" in options else nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
    except (OSError, ValueError, KeyError):
        # without a tokenizer, a checkpoint still serves prompts of token ids
        return None
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"the tokenizer of {place!r} cannot be read: {_brief(error)}") from error
    if "gguf_file" in options:
        from csd.models.load.gguf import tokenizer as gguf_tokenizer

        path = os.path.join(place, options["gguf_file"])
        try:
            with read_once():
                gguf_tokenizer.complete(tokenizer, path)
        except Exception as error:
            text = f"the tokenizer of {path!r} cannot be read: {_brief(error)}"
            raise ValueError(text) from error
    return tokenizer
