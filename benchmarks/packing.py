"""Time and memory of a toy model's update with three methods: padded batches, packed sequences, and packed sequences
that share their prompt.

    OMP_NUM_THREADS=1 python benchmarks/packing.py
    OMP_NUM_THREADS=1 python benchmarks/packing.py --prompt 250 --response 64 --group 8 --prompts 4

padded   transformers' own forward on (prompt + response), right-padded, full logits of the response positions
packed   our packing, but each response has a copy of its prompt (what --attn flash would compute)
shared   our packing as used in training: prompt and image once per group
All three compute the same loss and gradients (checked first). Times are the minimum of interleaved runs on one thread.
Memory is the growth of the resident set during one update, measured in a separate process for each method. The vision
tower is frozen and its features are not cached here: an update with a warm cache also saves that part.
"""

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from PIL import Image  # noqa: E402

import demo  # noqa: E402
from model import Policy, Processor, load_hf  # noqa: E402
from packing import Packer  # noqa: E402
from rollout import Prompt, Rollout  # noqa: E402

SHORT = "--repeats 1 --prompt 60 --response 16 --group 2 --prompts 2 --image 84"


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument(
        "--family", default="qwen2_5_vl", choices=("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), help="architecture"
    )
    p.add_argument("--prompt", type=int, default=250, help="prompt tokens, image included")
    p.add_argument("--response", type=int, default=64, help="longest response; lengths are uniform in its upper half")
    p.add_argument("--group", type=int, default=8, help="responses per prompt")
    p.add_argument("--prompts", type=int, default=4, help="prompts per update")
    p.add_argument("--image", type=int, default=224, help="image size: pixels per side")
    p.add_argument("--micro-tokens", type=int, default=1024, help="token budget of a micro-batch")
    p.add_argument("--repeats", type=int, default=5, help="interleaved runs; the minimum is reported")
    p.add_argument("--short", action="store_true", help=f"only check that it runs; same as {SHORT}")
    args = p.parse_args()
    return p.parse_args([*SHORT.split(), *sys.argv[1:]]) if args.short else args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    with tempfile.TemporaryDirectory() as folder:
        demo.make_model(Path(folder), args.family)
        processor, hf = Processor(folder), load_hf(folder)
    policy = Policy(hf, processor)
    rollouts = []
    for p in range(args.prompts):
        noise = torch.randint(0, 256, (args.image, args.image, 3), generator=generator, dtype=torch.uint8)
        image = processor.image_to_patches(str(p), Image.fromarray(noise.numpy()))
        prompt = processor.tokenize_prompt([{"role": "user", "content": "<image>"}], [image])
        prompt += [draw(0, 250) for _ in range(args.prompt - len(prompt))]
        for _ in range(args.group):
            response = [draw(0, 250) for _ in range(draw(args.response // 2, args.response))]
            sampled = [True] * len(response)
            record = Prompt(str(p), prompt, [image], None, [])
            rollouts.append(Rollout(record, 0, response, sampled, [0.0] * len(sampled), "stop"))
    packer = Packer(args.micro_tokens, processor.image_token_id)
    shared = packer.pack(rollouts)
    copies = replace(packer, share=False).pack(rollouts)
    sequences = [r.prompt.token_ids + r.response for r in rollouts]
    n_trained = sum(len(r.response) for r in rollouts)

    def run_micros(micros) -> float:
        total = 0.0
        for micro in micros:
            loss = -policy(micro).logp_K.sum() / n_trained
            loss.backward()
            total += loss.item()
        return total

    per_row = max(1, args.micro_tokens // (args.prompt + args.response))
    batches = [range(i, min(i + per_row, len(rollouts))) for i in range(0, len(rollouts), per_row)]

    def run_padded() -> float:
        total = 0.0
        for batch in batches:
            length = max(len(sequences[i]) for i in batch)
            ids = torch.zeros(len(batch), length, dtype=torch.long)
            attention = torch.zeros_like(ids)
            for row, i in enumerate(batch):
                ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
                attention[row, : len(sequences[i])] = 1
            images = list(chain.from_iterable(rollouts[i].prompt.images for i in batch))
            hf.model.rope_deltas = None
            logits = hf(
                input_ids=ids,
                attention_mask=attention,
                pixel_values=torch.cat([i.pixel_values() for i in images]),
                image_grid_thw=torch.tensor([i.grid_thw for i in images]),
                mm_token_type_ids=((ids == processor.image_token_id) & attention.bool()).int(),
            ).logits
            logits[..., policy.banned] = -torch.inf
            loss = 0.0
            for row, i in enumerate(batch):
                targets = torch.tensor(rollouts[i].response)
                row_logits = logits[row, args.prompt - 1 : args.prompt - 1 + len(targets)]
                loss = loss - row_logits.log_softmax(-1).gather(1, targets[:, None]).sum() / n_trained
            loss.backward()
            total += loss.item()
        return total

    methods = {"padded": run_padded, "packed": lambda: run_micros(copies), "shared": lambda: run_micros(shared)}
    computed = {
        "padded": sum(len(b) * max(len(sequences[i]) for i in b) for b in batches),
        "packed": sum(m.n_tokens for m in copies),
        "shared": sum(m.n_tokens for m in shared),
    }
    prefixes: set[tuple] = set()  # all distinct prefixes: the tokens that must be computed at least once
    for r, tokens in zip(rollouts, sequences, strict=True):
        prefixes |= {(r.prompt.uid, *tokens[: t + 1]) for t in range(len(tokens) - 1)}

    def memory(update) -> float:
        """Return the MiB that one update adds to the resident set of a new process."""
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()

        def child() -> None:
            before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            update()
            queue.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)

        process = context.Process(target=child)
        process.start()
        growth = queue.get()
        process.join()
        return growth / 2**20

    peak = {name: memory(update) for name, update in methods.items()}  # measured first, before the rest grows the heap
    losses, gradients = {}, {}
    for name, update in methods.items():
        policy.zero_grad()
        losses[name] = update()
        gradients[name] = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    seconds = dict.fromkeys(methods, float("inf"))
    for _ in range(args.repeats):
        for name, update in methods.items():
            policy.zero_grad()
            start_time = time.perf_counter()
            update()
            seconds[name] = min(seconds[name], time.perf_counter() - start_time)
    print(
        f"{args.family}, {args.prompts} prompts of {args.prompt} tokens x {args.group} responses of "
        f"{args.response // 2}-{args.response}"
    )
    widths = {
        "seconds": 9,
        "vs padded": 10,
        "tokens": 8,
        "useful": 7,
        "response tok/s": 15,
        "MiB": 6,
        "loss diff": 10,
        "grad diff": 10,
    }
    columns = list(widths.items())
    print(f"{'':8}" + "".join(f"{name:>{width}}" for name, width in columns))
    for name in methods:
        gap = (gradients[name] - gradients["padded"]).norm().item() / gradients["padded"].norm().item()
        cells = (
            f"{seconds[name]:.3f}",
            f"{seconds['padded'] / seconds[name]:.2f}x",
            computed[name],
            f"{len(prefixes) / computed[name]:.3f}",
            f"{n_trained / seconds[name]:.0f}",
            f"{peak[name]:.0f}",
            f"{abs(losses[name] - losses['padded']):.1e}",
            f"{gap:.1e}",
        )
        print(f"{name:8}" + "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, columns, strict=True)))


if __name__ == "__main__":
    main()
