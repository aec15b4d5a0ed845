"""Update phase of a toy model three ways: padded batches, packed sequences, and the shared-prompt forest.

    OMP_NUM_THREADS=1 python benchmarks/packing.py
    OMP_NUM_THREADS=1 python benchmarks/packing.py --prompt 250 --response 64 --group 8 --prompts 4

padded   transformers' own forward on (prompt + response), right-padded, full logits of the response positions
packed   ours, each response with a copy of its prompt (what --attn flash would compute)
forest   ours as trained: prompt and picture once per group
All three compute the same loss and gradients (checked first). Interleaved runs, minimum of each, one thread.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from PIL import Image  # noqa: E402

import demo  # noqa: E402
from grpo import Branch, Tree, pack  # noqa: E402
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
    trees = []
    for p in range(args.prompts):
        noise = torch.randint(0, 256, (args.picture, args.picture, 3), generator=generator, dtype=torch.uint8)
        image = processor.image(str(p), Image.fromarray(noise.numpy()))
        prompt = processor.encode([{"role": "user", "content": "<image>"}], [image])
        prompt += [draw(0, 250) for _ in range(args.prompt - len(prompt))]
        responses = [[draw(0, 250) for _ in range(draw(args.response // 2, args.response))] for _ in range(args.group)]
        trees.append(Tree(str(p), prompt, [image], [Branch(r, [True] * len(r), {}) for r in responses]))
    sequences = [(tree, branch) for tree in trees for branch in tree.branches]
    forests = pack(trees, args.micro_tokens)
    copies = pack([Tree(tree.uid, tree.prompt, tree.images, [branch]) for tree, branch in sequences], args.micro_tokens)
    scored = sum(len(branch.tokens) for _, branch in sequences)

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
        for start in range(0, len(sequences), per_batch):
            part = sequences[start : start + per_batch]
            length = max(len(tree.prompt) + len(branch.tokens) for tree, branch in part)
            ids = torch.zeros(len(part), length, dtype=torch.long)
            attention = torch.zeros_like(ids)
            for i, (tree, branch) in enumerate(part):
                row = torch.tensor(list(tree.prompt) + list(branch.tokens))
                ids[i, : len(row)], attention[i, : len(row)] = row, 1
            images = [image for tree, _ in part for image in tree.images]
            hf.model.rope_deltas = None
            logits = hf(
                input_ids=ids, attention_mask=attention, pixel_values=torch.cat([i.pixel_values for i in images]),
                image_grid_thw=torch.tensor([i.grid_thw for i in images]),
                mm_token_type_ids=((ids == processor.image_token_id) & attention.bool()).int(),
            ).logits
            logits[..., policy.banned] = -torch.inf
            loss = 0.0
            for i, (tree, branch) in enumerate(part):
                n, targets = len(tree.prompt), torch.tensor(branch.tokens)
                logp = logits[i, n - 1 : n - 1 + len(targets)].log_softmax(-1).gather(1, targets[:, None])
                loss = loss - logp.sum() / scored
            loss.backward()
            total += loss.item()
        return total

    ways = {"padded": run_padded, "packed": lambda: run_micros(copies), "forest": lambda: run_micros(forests)}
    computed = {
        "padded": None, "packed": sum(m.n_tokens for m in copies), "forest": sum(m.n_tokens for m in forests),
    }
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
    print(f"{'':8} {'seconds':>8} {'vs padded':>10} {'tokens computed':>16} {'response tok/s':>15} {'loss difference':>16} {'gradient':>9}")
    for name in ways:
        gap = (gradients[name] - gradients["padded"]).norm() / gradients["padded"].norm()
        print(f"{name:8} {seconds[name]:8.3f} {seconds['padded'] / seconds[name]:9.2f}x {computed[name] or '-':>16} "
              f"{scored / seconds[name]:15.0f} {abs(losses[name] - losses['padded']):16.1e} {gap.item():9.1e}")


if __name__ == "__main__":
    main()
