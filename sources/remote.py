"""Files in object stores (s3://, gs:// and everything else that fsspec supports): the user's tables, and images that
rows name."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from errors import UserError, as_user_error, describe_error, need
from sources.hub import offline_remedy
from sources.tables import ROW_SCHEMES, SPLITS, store_errors, url_scheme


@contextmanager
def remote_read_errors(name: str) -> Iterator[None]:
    """Turn the errors of reading a file from a store into a UserError."""
    package = ROW_SCHEMES.get(url_scheme(name), "")
    with as_user_error(ImportError, f"{name}: run pip install fsspec {package}".rstrip()):
        try:
            yield
        except (OSError, ValueError, *store_errors()) as e:
            raise UserError(f"{name} cannot be read: {describe_error(e)}") from e


@dataclass(frozen=True)
class RemoteFile:
    """A file or folder in an object store, with the part of pathlib.Path's interface that is used for local files."""

    fs: Any  # fsspec's AbstractFileSystem
    path: str

    @classmethod
    def from_url(cls, url: str) -> "RemoteFile":
        """Return the file or folder that a URL from the user names; chained URLs are allowed."""
        with remote_read_errors(url):
            from fsspec.core import url_to_fs

            return cls(*url_to_fs(url))

    @classmethod
    def from_row_url(cls, url: str) -> "RemoteFile":
        """Return the file that a URL in a row names. Only its scheme and path are used; the settings of the store are
        the user's own."""
        need(url_scheme(url) in ROW_SCHEMES and "::" not in url,
             f"{url[:80]!r} has a scheme that rows may not use; use http, https, {', '.join(ROW_SCHEMES)}")
        with remote_read_errors(url[:200]):
            import fsspec

            fs = fsspec.filesystem(url_scheme(url))
            return cls(fs, fs._strip_protocol(url))

    def __str__(self) -> str:
        return self.fs.unstrip_protocol(self.path)

    name = property(lambda self: PurePosixPath(self.path).name)
    stem = property(lambda self: PurePosixPath(self.path).stem)
    suffix = property(lambda self: PurePosixPath(self.path).suffix)
    parent = property(lambda self: RemoteFile(self.fs, self.path.rpartition("/")[0]))

    def __truediv__(self, name: str) -> "RemoteFile":
        return RemoteFile(self.fs, f"{self.path.rstrip('/')}/{name}")

    def relative_to(self, folder: "RemoteFile") -> str:
        return self.path.removeprefix(folder.path.rstrip("/") + "/")

    def is_dir(self) -> bool:
        with remote_read_errors(str(self)):
            return self.fs.isdir(self.path)

    def is_file(self) -> bool:
        with remote_read_errors(str(self)):
            return self.fs.isfile(self.path)

    def glob(self, pattern: str) -> list["RemoteFile"]:
        with remote_read_errors(str(self)):
            return [RemoteFile(self.fs, path) for path in self.fs.glob(f"{self.path.rstrip('/')}/{pattern}")]

    def rglob(self, pattern: str) -> list["RemoteFile"]:
        return self.glob(f"**/{pattern}")

    def open(self) -> BinaryIO:
        with remote_read_errors(str(self)):
            return self.fs.open(self.path)


def download(hub_id: str, split: str) -> Path:
    """Download the parquet shards of one split of a dataset from the Hugging Face hub and return their folder."""
    shards = f"{SPLITS[split]}*.parquet"
    remedy = f"run `hf download {hub_id} --repo-type dataset --local-dir FOLDER` elsewhere and pass --input FOLDER"
    message = f"--input {hub_id} is not a local path and cannot be downloaded from the Hugging Face hub; {remedy}"
    # the hub's errors are OSErrors; a malformed id is a ValueError
    with as_user_error((ImportError, OSError, ValueError), message):
        from huggingface_hub import snapshot_download

        offline_remedy(hub_id)  # so that it fails at once
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=[shards, f"*/{shards}"]))
