"""Print a first line on a terminal, because importing torch and transformers takes seconds. Scripts import it
first."""

import os
import sys
from pathlib import Path

SCRIPT = Path(sys.argv[0])
is_script = SCRIPT.resolve().parent == Path(__file__).resolve().parent
if is_script and os.environ.get("RANK", "0") == "0" and sys.stderr and sys.stderr.isatty():
    print(f"{SCRIPT.name}: importing torch and transformers ...", file=sys.stderr, flush=True)
