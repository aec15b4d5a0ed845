"""Memory and time for reading data, for files of different sizes.

    python benchmarks/data_memory.py                              # 512 and 2048 MiB, in a temporary folder
    python benchmarks/data_memory.py --mib 64 --keep out/data    # smaller; the files stay for another run

Each file is written by prepare_data.py and has one noise image per row, JPEG or PNG, of 100 to 300 kB. A separate
process without torch reads and checks all rows; then 4 threads decode --batches batches of 16 random rows, as in
training. All figures are of that process:

    start            resident memory after imports
    after the check  largest resident memory until all rows are checked
    peak             largest resident memory
    check            time to read and check all rows
    ms per row       mean time to read the bytes of a row that was not read before, without decoding
"""

import argparse
import io
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from prepare_data import DataFormatConfig, Example, read_examples, write_examples  # noqa: E402


def noise(rng: np.random.Generator, name: str) -> bytes:
    """Return a noise image as a file of 100 to 300 kB."""
    side = int(rng.integers(190, 310) if name == "PNG" else rng.integers(270, 450))
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8)).save(out, name, quality=90, compress_level=1)
    return out.getvalue()


def rows(mib: int) -> Iterator[Example]:
    """Yield rows of about `mib` MiB in total. Only 64 different images are used, but parquet does not deduplicate."""
    rng = np.random.default_rng(0)
    images = [noise(rng, "PNG" if i % 4 == 0 else "JPEG") for i in range(64)]
    size, index = 0, 0
    while size < mib << 20:
        image = images[rng.integers(len(images))]
        text = f"<image>Which noise is number {index}?"
        extra = {"split": "train", "index": index}
        yield Example(f"noise-{index}", "noise", [{"role": "user", "content": text}], [image], str(index), extra)
        size += len(image)
        index += 1


def peak() -> float:
    """Return the largest resident memory so far, in MiB. Linux's ru_maxrss would include that of the parent process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def measure(file: Path, batches: int) -> dict[str, float]:
    """Return the figures of one file, measured in this process."""
    figures = {"torch": "torch" in sys.modules, "start": peak()}
    start_time = time.perf_counter()
    examples, _ = read_examples(file, DataFormatConfig())
    figures |= {"rows": len(examples), "check_s": time.perf_counter() - start_time, "checked": peak()}
    chosen = random.Random(0).sample(examples, 64 + 16 * batches)
    start_time = time.perf_counter()
    for example in chosen[:64]:
        assert len(example.images[0]) > 50_000
    figures["row_ms"] = (time.perf_counter() - start_time) / 64 * 1000
    with ThreadPoolExecutor(4) as pool:
        for i in range(64, len(chosen), 16):
            list(pool.map(lambda example: example.pil_images, chosen[i : i + 16]))
    return figures | {"peak": peak()}


SHORT = "--mib 32 --batches 1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[512, 2048], help="sizes of the files in MiB")
    parser.add_argument("--batches", type=int, default=50, help="batches of 16 rows to decode")
    parser.add_argument("--keep", type=Path, help="folder to keep the files in (default: a temporary folder)")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--short", action="store_true", help=f"only check that it runs; same as {SHORT}")
    args = parser.parse_args()
    if args.short:
        args = parser.parse_args([*SHORT.split(), *sys.argv[1:]])
    if args.measure:
        print(json.dumps(measure(args.measure, args.batches)))
        return
    with tempfile.TemporaryDirectory() as folder:
        print("file, MiB | rows | start, MiB | after the check, MiB | peak, MiB | check, s | ms per row")
        for mib in args.mib:
            file = (args.keep or Path(folder)) / f"noise_{mib}.parquet"
            if not file.exists():
                write_examples(rows(mib), file)
            command = [sys.executable, __file__, "--measure", str(file), "--batches", str(args.batches)]
            done = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            f = json.loads(done.splitlines()[-1])
            assert not f["torch"]
            memory = " | ".join(f"{f[name]:.0f}" for name in ("start", "checked", "peak"))
            print(
                f"{file.stat().st_size / 2**20:.0f} | {f['rows']} | {memory} | {f['check_s']:.1f} | {f['row_ms']:.2f}"
            )


if __name__ == "__main__":
    main()
