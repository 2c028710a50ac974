"""A model's files from the Hugging Face hub, or from its cache when offline."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

__all__ = ["ModelNotFound", "snapshot"]

_DESCRIPTION = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
_WEIGHTS = ["*.safetensors"]
_OTHER_COPIES = ["original/*", "onnx/*", "consolidated*"]


class ModelNotFound(Exception):
    """There is no such model here; the message says what to do."""


def snapshot(model_id: str, *, weights: bool) -> Path:
    """The directory of the newest revision, downloaded as far as needed. ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` count.

    Without ``weights`` only the configuration and the tokenizer are fetched. Raises :class:`ModelNotFound`.
    """
    patterns = _DESCRIPTION + (_WEIGHTS if weights else [])
    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns, ignore_patterns=_OTHER_COPIES))
    except HFValidationError:
        raise ModelNotFound(f"{model_id!r} is neither a file or directory here nor a Hugging Face id") from None
    except GatedRepoError:
        raise ModelNotFound(
            f"{model_id!r} is gated: accept its terms on huggingface.co and set HF_TOKEN to a token that may read it"
        ) from None
    except RepositoryNotFoundError:
        raise ModelNotFound(
            f"there is no path {model_id!r} here and no such model on Hugging Face (if it is private, set HF_TOKEN)"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        if constants.is_offline_mode():
            reason = "and HF_HUB_OFFLINE forbids to download it"
        else:
            reason = "and Hugging Face cannot be reached"
        raise ModelNotFound(
            f"{model_id!r} is no path here, it is not in the Hugging Face cache ({constants.HF_HUB_CACHE}), {reason}; "
            f"where there is a network, run: hf download {model_id}"
        ) from None
    except OSError as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelNotFound(f"{model_id!r} could not be downloaded: {first_line}") from error
