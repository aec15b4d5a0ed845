"""What a path or a URL names, and whether rows may name it."""

import sys
from pathlib import Path
from typing import Any

from errors import plug_in

File = Any  # a Path, or a remote.RemoteFile
# Schemes that rows may name: remote stores, and nothing that could be this machine, or code. The user may name any.
ROW_SCHEMES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
               "abfss": "adlfs", "hf": "huggingface_hub", "oss": "ossfs", "r2": "s3fs"}  # fmt: skip
THEIR_ERRORS = {  # of the stores' libraries, where they are loaded
    "botocore.exceptions": "BotoCoreError", "google.auth.exceptions": "GoogleAuthError",
    "azure.core.exceptions": "AzureError", "aiohttp": "ClientError", "gcsfs.retry": "HttpError",
}  # fmt: skip


def scheme_of(name: str) -> str:
    """Of a URL, in small letters; "" of what is none."""
    return name.partition("://")[0].lower() if "://" in name else ""


def store_errors() -> tuple[type[Exception], ...]:
    """What reading may raise besides OSErrors and ValueErrors."""
    return tuple(getattr(sys.modules[m], name) for m, name in THEIR_ERRORS.items() if m in sys.modules)


def as_path(name: str) -> File:
    """Return what the user names: a path, file:// one too, or a URL."""
    if scheme_of(name) in ("", "file"):
        return Path(name.removeprefix("file://"))
    return plug_in("sources.remote", name, "give a path of this machine").RemoteFile.of(name)
