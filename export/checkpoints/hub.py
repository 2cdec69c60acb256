"""Whether a checkpoint is there at all, on this machine or on the Hugging Face hub: asked before anything else."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from ...errors import ExportError, first_line

FILE = "config.json"


def require_there(source: str) -> str:
    """``source``. Raises ExportError for one that leads nowhere: a path, or a hub id that the hub does not know or
    cannot be asked about, if no cache here has it."""
    if source and Path(source).exists():
        return source
    path = not source or source.startswith(("/", ".", "~")) or source.count("/") > 1
    if fault := "no such directory (nor is it a hub id, like OWNER/NAME)" if path else _fault(source):
        raise ExportError(f"no checkpoint '{source}': {fault}")
    return source


def _fault(name: str) -> str | None:
    """What is wrong with a name that is no directory here; None if the hub has such a repository, or refuses it for a
    reason that reading it will show. Makes one request, for transformers tries six times before it reports anything."""
    try:
        if isinstance(try_to_load_from_cache(name, FILE), str):
            return None
        get_hf_file_metadata(hf_hub_url(name, FILE))
    except HFValidationError:
        return "no such directory (nor is it a hub id, like OWNER/NAME)"
    except GatedRepoError:
        return None
    except RepositoryNotFoundError:
        return "there is no directory of that name here, and no repository on the hub that can be read from here"
    except HfHubHTTPError:
        return None
    except Exception as error:  # of the network, or because HF_HUB_OFFLINE is set
        return f"there is no directory of that name here, and the hub could not be asked ({first_line(error)})"
    return None
