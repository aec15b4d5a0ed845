"""Datasets of the Hugging Face hub."""

from pathlib import Path

from errors import UserError
from sources.tables import SPLITS


def download(hub_id: str, split: str) -> Path:
    """Fetch the parquet shards of one split of a dataset; returns the folder."""
    shards = f"{SPLITS[split]}*.parquet"
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=[shards, f"*/{shards}"]))
    except (ImportError, OSError, ValueError) as e:  # the hub's errors are OSErrors, a malformed id is a ValueError
        reason = str(e).splitlines()[0]
        raise UserError(
            f"--input {hub_id}: no such local path, and no download from the Hugging Face hub ({reason}). Where "
            f"huggingface_hub and network are, run `hf download {hub_id} --repo-type dataset --local-dir FOLDER`, "
            "then pass --input FOLDER"
        ) from e
