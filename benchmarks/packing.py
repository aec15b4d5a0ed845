"""Update phase of a toy model three ways: padded batches, packed sequences, and the shared-prompt forest.

    OMP_NUM_THREADS=1 python benchmarks/packing.py
    OMP_NUM_THREADS=1 python benchmarks/packing.py --prompt 250 --response 64 --group 8 --prompts 4

padded   transformers' own forward on (prompt + response), right-padded, full logits of the response positions
packed   ours, each response with a copy of its prompt (what --attn flash would compute)
forest   ours as trained: prompt and picture once per group
All three compute the same loss and gradients (checked first). Interleaved runs, minimum of each, one thread; memory is
the growth of the resident set during one update, each way in a process of its own. The vision tower is frozen and its
features are not cached here: an update with a warm cache saves that part too.
"""

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from PIL import Image  # noqa: E402

import demo  # noqa: E402
from grpo import Sample, pack  # noqa: E402
from model import Policy, load_hf, load_processor  # noqa: E402


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--family", default="qwen2_5_vl", choices=("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), help="architecture")
    p.add_argument("--prompt", type=int, default=250, help="prompt tokens, picture included")
    p.add_argument("--response", type=int, default=64, help="longest response; lengths are uniform in its upper half")
    p.add_argument("--group", type=int, default=8, help="responses per prompt")
    p.add_argument("--prompts", type=int, default=4, help="prompts per update")
    p.add_argument("--picture", type=int, default=224, help="pixels a side")
    p.add_argument("--micro-tokens", type=int, default=1024, help="token budget of a micro-batch")
    p.add_argument("--repeats", type=int, default=5, help="interleaved runs; the minimum counts")
    return p.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    with tempfile.TemporaryDirectory() as folder:
        demo.make_model(Path(folder), args.family)
        processor, hf = load_processor(folder), load_hf(folder)
    policy = Policy(hf, processor)
    samples = []
    for p in range(args.prompts):
        noise = torch.randint(0, 256, (args.picture, args.picture, 3), generator=generator, dtype=torch.uint8)
        image = processor.image(str(p), Image.fromarray(noise.numpy()))
        prompt = processor.encode([{"role": "user", "content": "<image>"}], [image])
        prompt += [draw(0, 250) for _ in range(args.prompt - len(prompt))]
        for _ in range(args.group):
            response = [draw(0, 250) for _ in range(draw(args.response // 2, args.response))]
            samples.append(Sample(str(p), prompt + response, [False] * len(prompt) + [True] * len(response), {}, [image]))
    apart = [Sample(f"{s.uid}/{i}", s.tokens, s.scored, {}, s.images) for i, s in enumerate(samples)]
    forests = pack(samples, args.micro_tokens, processor.image_token_id)
    copies = pack(apart, args.micro_tokens, processor.image_token_id)
    scored = sum(sum(s.scored) for s in samples)

    def run_micros(micros) -> float:
        total = 0.0
        for micro in micros:
            loss = -policy(micro)[0].sum() / scored
            loss.backward()
            total += loss.item()
        return total

    def run_padded() -> float:
        total = 0.0
        per_batch = max(1, args.micro_tokens // (args.prompt + args.response))
        for start in range(0, len(samples), per_batch):
            part = samples[start : start + per_batch]
            length = max(len(s.tokens) for s in part)
            ids = torch.zeros(len(part), length, dtype=torch.long)
            attention = torch.zeros_like(ids)
            for i, s in enumerate(part):
                ids[i, : len(s.tokens)], attention[i, : len(s.tokens)] = torch.tensor(s.tokens), 1
            images = [image for s in part for image in s.images]
            hf.model.rope_deltas = None
            logits = hf(
                input_ids=ids, attention_mask=attention, pixel_values=torch.cat([i.pixel_values for i in images]),
                image_grid_thw=torch.tensor([i.grid_thw for i in images]),
                mm_token_type_ids=((ids == processor.image_token_id) & attention.bool()).int(),
            ).logits
            logits[..., policy.banned] = -torch.inf
            loss = 0.0
            for i, s in enumerate(part):
                n = args.prompt
                targets = torch.tensor(s.tokens[n:])
                logp = logits[i, n - 1 : n - 1 + len(targets)].log_softmax(-1).gather(1, targets[:, None])
                loss = loss - logp.sum() / scored
            loss.backward()
            total += loss.item()
        return total

    ways = {"padded": run_padded, "packed": lambda: run_micros(copies), "forest": lambda: run_micros(forests)}
    per_row = max(1, args.micro_tokens // (args.prompt + args.response))
    batches = [samples[i : i + per_row] for i in range(0, len(samples), per_row)]
    computed = {
        "padded": sum(len(b) * max(len(s.tokens) for s in b) for b in batches),
        "packed": sum(m.n_tokens for m in copies),
        "forest": sum(m.n_tokens for m in forests),
    }
    distinct = len({(s.uid, *s.tokens[: t + 1]) for s in samples for t in range(s.n_inputs)})  # what has to be computed once

    def memory(way) -> float:
        """MiB that one update adds to the resident set of a fresh process."""
        context, queue = (c := multiprocessing.get_context("fork")), c.SimpleQueue()

        def child() -> None:
            before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            way()
            queue.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)

        process = context.Process(target=child)
        process.start()
        grown = queue.get()
        process.join()
        return grown / 2**20

    peak = {name: memory(way) for name, way in ways.items()}  # before anything else has grown the heap
    losses, gradients = {}, {}
    for name, way in ways.items():
        policy.zero_grad()
        losses[name] = way()
        gradients[name] = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(args.repeats):
        for name, way in ways.items():
            policy.zero_grad()
            began = time.perf_counter()
            way()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    print(f"{args.family}, {args.prompts} prompts of {args.prompt} tokens x {args.group} responses of {args.response // 2}-{args.response}")
    widths = {"seconds": 9, "vs padded": 10, "tokens": 8, "useful": 7, "response tok/s": 15, "MiB": 6, "loss diff": 10, "gradient": 9}
    columns = list(widths.items())
    print(f"{'':8}" + "".join(f"{name:>{width}}" for name, width in columns))
    for name in ways:
        gap = (gradients[name] - gradients["padded"]).norm().item() / gradients["padded"].norm().item()
        cells = (f"{seconds[name]:.3f}", f"{seconds['padded'] / seconds[name]:.2f}x", computed[name], f"{distinct / computed[name]:.3f}",
                 f"{scored / seconds[name]:.0f}", f"{peak[name]:.0f}", f"{abs(losses[name] - losses['padded']):.1e}", f"{gap:.1e}")
        print(f"{name:8}" + "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, columns, strict=True)))


if __name__ == "__main__":
    main()
