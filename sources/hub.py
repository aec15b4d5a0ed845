"""The connection to the Hugging Face hub."""

import os
import socket
import sys
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants


def offline_remedy(hub_id: str) -> str:
    """Return what to do about a hub id whose files are not in the cache, or "" if the hub can be reached or the id is a
    folder.

    If the hub cannot be reached, set HF_HUB_OFFLINE=1: its client would retry each file for half a minute, but offline
    it reads the cache or fails at once. With a proxy, which may know more addresses than this machine, nothing is
    checked.
    """
    url = urlsplit(constants.ENDPOINT)
    if os.path.isdir(hub_id):
        return ""
    try:
        if not constants.HF_HUB_OFFLINE and not getproxies():
            socket.create_connection((url.hostname, url.port or {"http": 80}.get(url.scheme, 443)), timeout=2).close()
    except OSError as error:
        print(f"no connection to {constants.ENDPOINT} ({error}); only its cache is used", file=sys.stderr)
        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that this one starts
        constants.HF_HUB_OFFLINE = True  # the variable is read only when huggingface_hub is imported
    return constants.HF_HUB_OFFLINE * (
        f"not in the hub's cache, and {constants.ENDPOINT} cannot be reached or HF_HUB_OFFLINE is set; on a machine "
        f"with a connection run `hf download {hub_id} --local-dir FOLDER`, copy FOLDER here and give its path, or set "
        "HF_ENDPOINT to a mirror"
    )
