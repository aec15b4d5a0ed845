"""Files of object stores, s3://, gs:// and all else that fsspec knows: tables of the user's, images that rows name."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from errors import UserError, need, refusing
from sources.paths import ROW_SCHEMES, scheme_of, store_errors
from sources.tables import SPLITS


@contextmanager
def refusing_remote(what: str) -> Iterator[None]:
    """Makes of whatever keeps a store's file from being read a UserError."""
    try:
        yield
    except UserError:
        raise
    except ImportError as e:
        package = ROW_SCHEMES.get(scheme_of(what), "")
        raise UserError(f"{what}: {e}; run pip install fsspec {package}".rstrip()) from e
    except (OSError, ValueError, *store_errors()) as e:
        raise UserError(f"{what} cannot be read: {type(e).__name__}: {str(e).partition(chr(10))[0]}") from e


@dataclass(frozen=True)
class RemoteFile:
    """A file or folder of a store, as far as pathlib's Path is used for those of a disk."""

    fs: Any  # fsspec's AbstractFileSystem
    path: str

    @classmethod
    def of(cls, url: str) -> "RemoteFile":
        """Of a URL that the user gave, chained ones too."""
        with refusing_remote(url):
            from fsspec.core import url_to_fs

            return cls(*url_to_fs(url))

    @classmethod
    def of_row(cls, url: str) -> "RemoteFile":
        """Of a URL in a row: the store of its scheme with the user's own settings; nothing else of it is obeyed."""
        need(scheme_of(url) in ROW_SCHEMES and "::" not in url, f"{url[:80]} is no URL that a row may have")
        with refusing_remote(url[:200]):
            import fsspec

            fs = fsspec.filesystem(scheme_of(url))
            return cls(fs, fs._strip_protocol(url))

    def __str__(self) -> str:
        return self.fs.unstrip_protocol(self.path)

    name = property(lambda self: PurePosixPath(self.path).name)
    stem = property(lambda self: PurePosixPath(self.path).stem)
    suffix = property(lambda self: PurePosixPath(self.path).suffix)
    parent = property(lambda self: RemoteFile(self.fs, self.path.rpartition("/")[0]))

    def __truediv__(self, name: str) -> "RemoteFile":
        return RemoteFile(self.fs, f"{self.path.rstrip('/')}/{name}")

    def __lt__(self, other: "RemoteFile") -> bool:
        return self.path < other.path

    def relative_to(self, folder: "RemoteFile") -> str:
        return self.path.removeprefix(folder.path.rstrip("/") + "/")

    def is_dir(self) -> bool:
        with refusing_remote(str(self)):
            return self.fs.isdir(self.path)

    def is_file(self) -> bool:
        with refusing_remote(str(self)):
            return self.fs.isfile(self.path)

    def glob(self, pattern: str = "") -> list["RemoteFile"]:
        """Files of a pattern below this folder; without one this path is a pattern itself."""
        with refusing_remote(str(self)):
            found = self.fs.glob((self / pattern).path if pattern else self.path)
        return [RemoteFile(self.fs, path) for path in sorted(found)]

    def rglob(self, pattern: str) -> list["RemoteFile"]:
        return self.glob(f"**/{pattern}")

    def open(self) -> BinaryIO:
        with refusing_remote(str(self)):
            return self.fs.open(self.path, "rb")


def fetch_remote(file: RemoteFile, timeout: float = 20, max_mb: float = 32, tries: int = 3) -> bytes:
    """Content of a file; `timeout` seconds bound each try as a whole. Raises UserError naming the flag to change."""
    most = int(max_mb * 2**20)

    def content() -> bytes:
        with refusing_remote(str(file)), file.open() as opened:
            return opened.read(most + 1)

    for attempt in range(tries):
        time.sleep(0.5 * attempt)
        pool = ThreadPoolExecutor(1)  # left behind at the deadline
        try:
            data = pool.submit(content).result(timeout)
        except TimeoutError:
            problem = f"timed out (--url-timeout {timeout:g})"
        except UserError as e:
            if isinstance(e.__cause__, FileNotFoundError | PermissionError | ImportError) or e.__cause__ is None:
                raise
            problem = str(e)
        else:
            need(len(data) <= most, f"{file} is larger than {max_mb:g} MiB (raise --url-max-mb)")
            return data
        finally:
            pool.shutdown(wait=False)
    raise UserError(f"{file} could not be fetched in {tries} tries: {problem}; try again or raise --url-tries")


def download(hub_id: str, split: str) -> Path:
    """Fetch the parquet shards of one split of a dataset of the Hugging Face hub; returns the folder."""
    shards = f"{SPLITS[split]}*.parquet"
    remedy = f"run `hf download {hub_id} --repo-type dataset --local-dir FOLDER` elsewhere and pass --input FOLDER"
    told = f"--input {hub_id}: no such local path, and no download from the Hugging Face hub; {remedy}"
    with refusing((ImportError, OSError, ValueError), told):  # the hub's errors are OSErrors; ValueError: malformed id
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=[shards, f"*/{shards}"]))
