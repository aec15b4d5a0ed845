"""Cost of multi-turn episodes with a slow environment, and with prompts that are recomputed in each turn.

    OMP_NUM_THREADS=1 python benchmarks/episodes.py            # a toy model with random weights

1. 32 episodes of four turns; in one episode, the environment sleeps in each turn. The benchmark measures when the other
   episodes and all episodes end, with and without the sleep. With a barrier in each turn all 32 would take as long as
   the slow one.
2. The same episodes, but the engine recomputes the whole prompt in each turn, as with a chat API, instead of continuing
   from its KV cache.
"""

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

import demo  # noqa: E402
import model as M  # noqa: E402
from engines.hf import HFEngine  # noqa: E402
from envs import Environment, Observation  # noqa: E402
from envs._episodes import Episode, EpisodeEngine  # noqa: E402
from envs._factory import EnvFactory  # noqa: E402
from prepare_data import Example  # noqa: E402
from rollout import EnvConfig, SamplingParams, make_prompts  # noqa: E402
from tasks.shapes import encode_png  # noqa: E402

TURNS, ASLEEP = 4, "u0"
SHORT = "--episodes 4 --sleep 0.1 --repeats 1"


class Sleeper(Environment):
    """An environment that shows an image in each turn; for one row it sleeps before that."""

    seconds = 0.0

    def reset(self, example: Example) -> tuple:
        self.uid, self.turn = example.uid, 0
        return example.messages, example.images

    def step(self, response: str) -> Observation:
        self.turn += 1
        if self.uid == ASLEEP:
            time.sleep(self.seconds)
        return Observation("look", [Image.new("RGB", (84, 84), (len(response) % 250, 40 * self.turn, 9))])


def time_episodes(episodes: EpisodeEngine, prompts: list, max_tokens: int) -> tuple[float, float]:
    """Return the seconds until all episodes except the slow one have ended, and until all have."""
    end_times: dict[str, float] = {}
    start_time = time.perf_counter()
    episodes.generate(
        prompts, 1, SamplingParams(max_tokens), lambda r: end_times.update({r.prompt.uid: time.perf_counter()})
    )
    total = time.perf_counter() - start_time
    end_times.pop(ASLEEP)
    return max(end_times.values()) - start_time, total


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        demo.make_model(Path(folder) / "toy", hidden=128, layers=3)
        hf, processor = M.load_hf(f"{folder}/toy").eval(), M.Processor(f"{folder}/toy")
    processor.eos_ids = sorted({*processor.eos_ids, *range(0, 256, 10)})  # a model with random weights must also stop
    image = encode_png(Image.new("RGB", (84, 84), "red"))
    rows = []
    for i in range(args.episodes):
        messages = [{"role": "user", "content": f"<image>What is it? {i}"}]
        rows.append(Example(f"u{i}", "x", messages, [image], "", {}))
    with patch("envs._factory.load_class", return_value=Sleeper):
        env_factory = EnvFactory(EnvConfig(env="sleeper", max_turns=TURNS, env_timeout=600))
    prompts = make_prompts(rows, processor, reset_fn=env_factory.reset_example)
    episodes = EpisodeEngine(HFEngine(hf, processor, torch.device("cpu")), env_factory, processor)
    time_episodes(episodes, prompts, 800)
    rewritten = partial(Episode, rewritten=True)  # with `separate`, each turn becomes a separate sequence
    results: dict[str, list[tuple[float, float]]] = {"fast": [], "slow": [], "recomputed": []}
    for _ in range(args.repeats):
        for name, seconds in (("fast", 0.0), ("slow", args.sleep), ("recomputed", 0.0)):
            Sleeper.seconds, episodes.separate, env_factory.all_answered_quickly = seconds, name == "recomputed", True
            with patch("envs._episodes.Episode", rewritten if name == "recomputed" else Episode):
                results[name].append(time_episodes(episodes, prompts, 800))
    others, total = (min(times[i] for times in results["fast"]) for i in (0, 1))
    others_with_slow, total_with_slow = (min(times[i] for times in results["slow"]) for i in (0, 1))
    recomputed = min(times[1] for times in results["recomputed"])
    slept = TURNS * args.sleep
    print(f"{args.episodes} episodes of {TURNS} turns; minimum of {args.repeats} interleaved repeats")
    print(f"no sleep: {args.episodes - 1} episodes end within {others:.2f} s, all within {total:.2f} s")
    print(f"one sleeps {slept:g} s: the others end within {others_with_slow:.2f} s, all within {total_with_slow:.2f} s")
    print(f"  that is {total_with_slow / slept:.2f} times the sleep")
    print(f"prompt computed again in each turn: {recomputed:.2f} s, {recomputed / total:.2f} times as long")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--sleep", type=float, default=2.0, help="seconds to sleep in each turn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--short", action="store_true", help=f"only check that it runs; same as {SHORT}")
    args = parser.parse_args()
    main(parser.parse_args([*SHORT.split(), *sys.argv[1:]]) if args.short else args)
