"""Speed of rewards, and how much of their time overlaps with sampling.

    python benchmarks/rewards.py [--n 4000]

Answers per second: `geo3k` grades responses like those of Geometry3K (numbers, decimals, fractions, roots, degrees,
units, names; a tenth of them are wrong), all different, in this process and in worker processes. Start-up time is not
counted.

Overlap: a reward sleeps 5 ms per response, and an engine delivers the responses one by one over two seconds. The table
shows the seconds from the last response to the last reward; in brackets, the seconds that grading takes if it only
starts then.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from reward import RewardConfig  # noqa: E402
from rewards.grade import Grader, make_rollout_stub  # noqa: E402

THINKING = "By the law of sines the side that is asked for is such, as the two angles are known. " * 6
FORMS = (  # response, truth; N is a number
    ("N", "N"), ("N.5", "N.5"), (r"\frac{N}{7}", r"\frac { N } { 7 }"), (r"N\sqrt{3}", r"N \sqrt { 3 }"),
    (r"N^\circ", "N"), ("N cm", "N"), ("x = N", "N"), (r"N\pi", r"N \pi"), ("N1", "N"),
    (r"\frac{N\sqrt{2}}{2}", r"\frac { N \sqrt { 2 } } { 2 }"),
)  # fmt: skip
SLEEPS = "import time\ndef score(response, example):\n    time.sleep(0.005)\n    return 1.0\n"


def make_rollouts(n: int) -> list[SimpleNamespace]:
    rng = random.Random(0)
    rollouts = []
    for i in range(n):
        form, truth = rng.choice(FORMS)
        number = str(rng.randint(2, 4000))
        truth = truth.replace("N", number)
        example = SimpleNamespace(data_source="geo3k", ground_truth=truth, extra={}, uid=str(i // 8))
        text = f"<think>{THINKING}</think> \\boxed{{{form.replace('N', number)}}}"
        rollouts.append(make_rollout_stub(example, text))
    return rollouts


def time_grading(grader: Grader, rollouts: Sequence[SimpleNamespace], seconds: float = 0.0) -> tuple[float, float]:
    """Grade responses that arrive over `seconds`. Return the seconds from the first response to the last reward, and
    from the last response to the last reward."""
    start = time.perf_counter()
    for i, rollout in enumerate(rollouts):
        grader.submit(rollout)
        time.sleep(max(0.0, start + seconds * i / len(rollouts) - time.perf_counter()))
    sampled = time.perf_counter()
    results = grader.collect(rollouts)
    end = time.perf_counter()
    assert not grader.failed and len(results) == len(rollouts)
    return end - start, end - sampled


def main(n: int) -> None:
    rollouts = make_rollouts(n)
    print(f"| --reward-workers | geometry, answers/s | 5 ms x {n // 10} responses: seconds after sampling |")
    print("|--:|--:|---|")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sleeps.py").write_text(SLEEPS)
        for workers in (0, 1, 2):
            grader = Grader(RewardConfig(reward_workers=workers, reward_timeout=100.0))
            time_grading(grader, rollouts[:64])
            fastest = min(time_grading(grader, rollouts)[0] for _ in range(3))
            grader.close()
            spec = (f"{folder}/sleeps.py:score",)
            grader = Grader(RewardConfig(reward=spec, reward_workers=workers, reward_timeout=100.0))
            slow_rollouts = rollouts[: n // 10]
            time_grading(grader, slow_rollouts[:8])
            total = time_grading(grader, slow_rollouts)[0]
            remaining = time_grading(grader, slow_rollouts, seconds=2.0)[1]
            grader.close()
            print(f"| {workers} | {n / fastest:,.0f} | {remaining:.2f} (of {total:.2f}) |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=4000, help="number of responses")
    parser.add_argument("--short", action="store_true", help="only check that it runs; same as --n 40")
    args = parser.parse_args()
    main(40 if args.short else args.n)
