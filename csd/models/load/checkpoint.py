"""Loading of a checkpoint's `transformers` model and tokenizer, with errors for its owner.

Lines that other libraries print while they load are suppressed.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypedDict

import torch

from csd.models.fused.config import ModelConfig
from csd.models.fused.families import SUPPORTED
from csd.models.load import gguf as gguf_model
from csd.models.load.gguf.header import CutFile
from csd.models.refuse import class_of, refuse_config
from csd.models.text_model import TEXT_KEYS, is_of_other_part, text_config_of
from csd.utils.check import shown
from csd.utils.files import check_no_pipes, read_file
from csd.utils.hub import unreached


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


@contextmanager
def _key_reports() -> Iterator[list[str]]:
    """Context in which transformers does not print its tables of keys, which the list takes.

    A table has each key of a file, as it is there.
    """
    taken: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if "LOAD REPORT" not in (message := record.getMessage()):
            return True
        taken.append(message)
        return False

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        yield taken
    finally:
        logger.removeFilter(keep)


# weights whose shapes in the file and by the config differ, in such a table
_SHAPE = r"torch\.Size\((\[[\d, ]*\])\)"
_MISMATCH = re.compile(rf"^([\w.{{}}, ]+?) *\|.*ckpt: *{_SHAPE} vs model: *{_SHAPE}", re.MULTILINE)
# buffers in old checkpoints that the module computes from its config
_DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "position_ids")
# called with the dtype and the sizes of the weights before these are read, if both are known
OnConfig = Callable[[torch.dtype, ModelConfig], None] | None


def read_config(
    name: str, path: str, options: dict, wanted: str = "fused"
) -> tuple[Any, ModelConfig | None, bool]:
    """Config of a checkpoint: transformers', and csd's for the fused decoder; of its text model.

    The second is None if the fused decoder does not run the model or `wanted` is "module", and the
    module is not refused; the third is True if the checkpoint has more than the text model. wanted:
    a name in `csd.models.load.choose_decoder.DECODERS`.
    """
    from transformers import AutoConfig

    try:
        with quiet_libraries():
            config = AutoConfig.from_pretrained(path, **options)
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


def check_index(name: str, source: str) -> None:
    """Raises ValueError for an index of weights that names files outside of its folder."""
    for path in sorted(Path(source).glob("*.index.json")):
        for file in {*read_file(path, _Index)["weight_map"].values()}:
            if os.path.basename(file) != file or file in ("", ".", ".."):
                raise ValueError(
                    f"{name!r} cannot be loaded: {path.name} must name files of its folder, got "
                    f"{shown(file)}"
                )


def _sizes(config: Any, wanted: str) -> ModelConfig | None:
    both = ""
    if wanted != "module":
        try:
            return ModelConfig.from_transformers(config)
        except ValueError as error:
            if wanted == "fused":
                raise
            both = f". The fused decoder does not run it either: {error}"
    try:
        refuse_config(_of_text(config))
    except ValueError as error:
        raise ValueError(f"{error}{both}") from error
    return None


def _of_text(config: Any) -> Any:
    """Config of the model that AutoModelForCausalLM loads.

    For a model that also reads images, this is the config of its text model if the family has a
    separate one.
    """
    text, loaded = config.get_text_config(), class_of(config)
    return text if loaded is not None and loaded.config_class is type(text) else config


def read_model(
    name: str,
    path: str,
    dtype: torch.dtype | str,
    options: dict,
    before: OnConfig,
    wanted: str = "fused",
) -> Any:
    """The transformers model. One that csd cannot run is refused before gigabytes are read."""
    from transformers import AutoModelForCausalLM

    config, sizes, has_parts = read_config(name, path, options, wanted)
    check_index(name, path)
    if has_parts:
        options = options | {"key_mapping": TEXT_KEYS}
    made_in = config.dtype if isinstance(dtype, str) else dtype
    if sizes is not None and before is not None and isinstance(made_in, torch.dtype):
        before(made_in, sizes)
    try:
        with _key_reports() as reports:
            model, seen = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, output_loading_info=True, **options
            )
    except ImportError:
        raise
    except MemoryError as error:
        raise MemoryError(f"{name!r} does not fit into memory: {_brief(error)}") from error
    except Exception as error:
        if shapes := _MISMATCH.findall(reports[-1] if reports else ""):
            differ = ", ".join(f"{key} {have} instead of {want}" for key, have, want in shapes[:3])
            raise ValueError(
                f"{name!r} cannot be loaded: the shapes of its weights do not match its "
                f"config.json: {differ}"
            ) from error
        raise ValueError(_no_model(name, error)) from error
    # transformers would continue with random weights
    if missing := sorted(seen["missing_keys"]):
        raise ValueError(f"{name!r} lacks the weights {', '.join(missing[:3])}")
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


def check_gguf(
    name: str, path: str, dtype: torch.dtype | str, before: OnConfig, as_stored: bool
) -> torch.dtype | None:
    """dtype with which `gguf.read` is to read a file; "auto" is float32, as the file has none.

    as_stored: keep the file's quantised matrices, if it has any (None), and compute in float32.
    """
    made_in = torch.float32 if isinstance(dtype, str) else dtype
    with reading_gguf(name):
        as_stored = as_stored and gguf_model.has_quantized(path)
        config = gguf_model.read_config(path)
    if before is not None:
        before(torch.float32 if as_stored else made_in, config)
    return None if as_stored else made_in


@contextmanager
def reading_gguf(name: str) -> Iterator[None]:
    """Context in which errors of a GGUF file's reader become those of its owner."""
    try:
        yield
    except CutFile as error:
        raise ValueError(f"{name!r} is cut off: {error}; copy or download it once more") from error
    except MemoryError as error:
        raise MemoryError(f"{name!r} does not fit into memory: {_brief(error)}") from error
    # a malformed file may make its reader raise any exception
    except Exception as error:
        raise ValueError(f"{name!r} cannot be loaded: {_brief(error)}; {SUPPORTED}") from error


def _no_model(name: str, error: Exception) -> str:
    if os.path.exists(name):
        return f"{name!r} cannot be loaded: {_brief(error)}"
    if why := unreached():
        return f"{name!r} is neither a local model folder nor in the hub's cache here, and {why}"
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


def _kind_of(folder: str, options: dict) -> dict[str, str]:
    """Kind of a GGUF file's tokenizer, for which transformers would parse the header once more."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    if "gguf_file" not in options or os.path.exists(os.path.join(folder, "tokenizer_config.json")):
        return {}
    family = gguf_model.family_of(os.path.join(folder, options["gguf_file"]))
    return {"tokenizer_type": family} if family and TOKENIZER_MAPPING_NAMES.get(family) else {}


_TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
}


def read_tokenizer(folder: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    # for some families transformers makes an empty tokenizer if the folder has none
    local = os.path.isdir(folder) and "gguf_file" not in options
    if local and not _TOKENIZER_FILES.intersection(os.listdir(folder)):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options, **_kind_of(folder, options))
    except (OSError, ValueError, KeyError):
        # without a tokenizer, a checkpoint still serves prompts of token ids
        return None
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"the tokenizer of {folder!r} cannot be read: {_brief(error)}") from error
    if "gguf_file" in options:
        from csd.models.load.gguf import tokenizer as gguf_tokenizer

        path = os.path.join(folder, options["gguf_file"])
        try:
            gguf_tokenizer.complete(tokenizer, path)
        except Exception as error:
            text = f"the tokenizer of {path!r} cannot be read: {_brief(error)}"
            raise ValueError(text) from error
    return tokenizer
