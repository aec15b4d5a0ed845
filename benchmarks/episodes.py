"""What episodes cost: environments that are slow, and turns that go on from what the engine has computed.

    OMP_NUM_THREADS=1 python benchmarks/episodes.py            # a toy of random weights, made from nothing

1. 32 episodes of four turns. In one of them the environment sleeps in each turn. When are the others over, with and
   without it, and all, against the sleep? A barrier in each turn would hold all 32 as long as that one.
2. The same episodes where each turn's prompt is computed anew, as a chat API would be asked, in place of going on.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

import demo  # noqa: E402
import model as M  # noqa: E402
from engines.hf import HFEngine  # noqa: E402
from envs import Environment, Observation  # noqa: E402
from envs._load import EnvFactory  # noqa: E402
from envs._play import EpisodeEngine  # noqa: E402
from prepare_data import Example  # noqa: E402
from rollout import EnvConfig, SamplingParams, make_prompts  # noqa: E402
from tasks.shapes import encode_png  # noqa: E402

TURNS, ASLEEP = 4, "u0"
SHORT = "--episodes 4 --sleep 0.1 --repeats 1"


class Sleeper(Environment):
    """Shows an image in each turn; that of one row sleeps first."""

    seconds = 0.0

    def reset(self, example: Example) -> tuple:
        self.uid, self.turn = example.uid, 0
        return example.messages, example.images

    def step(self, response: str) -> Observation:
        self.turn += 1
        if self.uid == ASLEEP:
            time.sleep(self.seconds)
        return Observation("look", [Image.new("RGB", (84, 84), (len(response) % 250, 40 * self.turn, 9))])


def seconds_of(episodes: EpisodeEngine, prompts: list, max_tokens: int) -> tuple[float, float]:
    """Until all but the one that sleeps are over, and until all are."""
    over: dict[str, float] = {}
    began = time.perf_counter()
    episodes.generate(
        prompts, 1, SamplingParams(max_tokens), lambda r: over.update({r.prompt.uid: time.perf_counter()})
    )
    total = time.perf_counter() - began
    over.pop(ASLEEP)
    return max(over.values()) - began, total


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        demo.make_model(Path(folder) / "toy", hidden=128, layers=3)
        hf, processor = M.load_hf(f"{folder}/toy").eval(), M.Processor(f"{folder}/toy")
    processor.eos_ids = sorted({*processor.eos_ids, *range(0, 256, 10)})  # so that a random toy ends its responses
    image = encode_png(Image.new("RGB", (84, 84), "red"))
    rows = []
    for i in range(args.episodes):
        messages = [{"role": "user", "content": f"<image>What is it? {i}"}]
        rows.append(Example(f"u{i}", "x", messages, [image], "", {}))
    with patch("envs._load.load_class", return_value=Sleeper):
        environments = EnvFactory(EnvConfig(env="sleeper", max_turns=TURNS, env_timeout=600))
    prompts = make_prompts(rows, processor, start_of=environments.reset_example)
    episodes = EpisodeEngine(HFEngine(hf, processor, torch.device("cpu")), environments, processor)
    seconds_of(episodes, prompts, 800)
    episodes.rewritten = lambda said, written: True  # where turns are to be sequences of their own
    found: dict[str, list[tuple[float, float]]] = {"awake": [], "asleep": [], "anew": []}
    for _ in range(args.repeats):
        for name, seconds in (("awake", 0.0), ("asleep", args.sleep), ("anew", 0.0)):
            Sleeper.seconds, episodes.separate, environments.all_answered_quickly = seconds, name == "anew", True
            found[name].append(seconds_of(episodes, prompts, 800))
    others, total = (min(times[i] for times in found["awake"]) for i in (0, 1))
    others_beside, total_asleep = (min(times[i] for times in found["asleep"]) for i in (0, 1))
    anew = min(times[1] for times in found["anew"])
    slept = TURNS * args.sleep
    print(f"{args.episodes} episodes of {TURNS} turns, {args.repeats} interleaved repeats, the least of each")
    print(f"none sleeps: {args.episodes - 1} are over after {others:.2f} s, all after {total:.2f} s")
    print(f"one sleeps {slept:g} s: the others are over after {others_beside:.2f} s, all after {total_asleep:.2f} s")
    print(f"  that is {total_asleep / slept:.2f} times the sleep")
    print(f"each turn's prompt computed anew: {anew:.2f} s, {anew / total:.2f} times as long")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--sleep", type=float, default=2.0, help="seconds, in each turn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--short", action="store_true", help=f"does it run? The same as {SHORT}")
    args = parser.parse_args()
    main(parser.parse_args([*SHORT.split(), *sys.argv[1:]]) if args.short else args)
