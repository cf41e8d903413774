"""Train Medusa heads for a target model, on texts that the target writes itself.

Only the residual blocks are trained. The LM head is the target's, so it is not stored. Head i
learns the target's own distribution of the token i + 2 positions after the one whose state it
reads. The texts answer the four workloads, two thirds sampled at temperature 1, one third greedy.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM

from smartspec_bench.workloads import WORKLOADS, generate

HELD_OUT_SEED = 1_000_000  # added to the seed for prompts that training never saw
END_ID = 0
MAX_NEW_TOKENS = 120
ROWS = 50  # texts that are written at once
BATCH = 512  # positions per step
PEAK_RATE = 1e-3
HEAD_DECAY = 0.8  # loss weight of a head over that of the head before it
LOG_EVERY_STEPS = 200
NUM_BEST = 4


@dataclass
class States:
    """The target's states after its last norm, [n, hidden_size], of all texts one after another.
    tokens: [n], the token that follows each. texts: [n], the number of the text."""

    states: torch.Tensor
    tokens: torch.Tensor
    texts: torch.Tensor

    def with_next(self, num_heads: int) -> torch.Tensor:
        """Positions that have num_heads more positions of the same text after them."""
        last = len(self.texts) - num_heads
        return (self.texts[:last] == self.texts[num_heads:]).nonzero()[:, 0]


class Blocks(torch.nn.Module):
    """One residual block per head: x + SiLU(W x + b). W is zero at first, so heads begin as the
    target's own guess of the next token."""

    def __init__(self, num_heads: int, hidden_size: int) -> None:
        super().__init__()
        layers = [torch.nn.Linear(hidden_size, hidden_size) for _ in range(num_heads)]
        self.layers = torch.nn.ModuleList(layers)
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, num_heads, H]"""
        return torch.stack(
            [states + functional.silu(layer(states)) for layer in self.layers], dim=1
        )


@torch.no_grad()
def write_answers(
    target: LlamaForCausalLM, tokenizer: Tokenizer, prompts: list[str], temperature: float
) -> list[tuple[list[int], list[int]]]:
    """Let the target answer the prompts; temperature 0 is greedy. Tokens of prompts and answers."""
    found = []
    for first in range(0, len(prompts), ROWS):
        encoded = [tokenizer.encode(prompt).ids for prompt in prompts[first : first + ROWS]]
        longest = max(map(len, encoded))
        ids = torch.tensor([[END_ID] * (longest - len(one)) + one for one in encoded])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in encoded])
        written = target.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_k=0 if temperature else None,
            eos_token_id=END_ID,
            pad_token_id=END_ID,
        )
        for row, prompt in zip(written[:, longest:].tolist(), encoded, strict=True):
            found.append((prompt, row[: row.index(END_ID) + 1] if END_ID in row else row))
    return found


@torch.no_grad()
def write_texts(
    target: LlamaForCausalLM, tokenizer: Tokenizer, prompts: list[str], temperature: float
) -> States:
    """The target's answers to the prompts, and its states."""
    states, tokens, texts = [], [], []
    for prompt, answer in write_answers(target, tokenizer, prompts, temperature):
        found = target.model(torch.tensor([prompt + answer])).last_hidden_state
        states.append(found[0, len(prompt) - 1 : -1])
        tokens.append(torch.tensor(answer))
        texts.append(torch.full((len(answer),), len(texts)))
    return States(torch.cat(states).clone(), torch.cat(tokens), torch.cat(texts))


def train(
    blocks: Blocks, lm_head: torch.Tensor, data: States, steps: int, generator: torch.Generator
) -> None:
    num_heads = len(blocks.layers)
    usable = data.with_next(num_heads)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=PEAK_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    weights = HEAD_DECAY ** torch.arange(num_heads)
    start, mean_loss = time.monotonic(), 0.0
    for step in range(1, steps + 1):
        chosen = usable[torch.randint(len(usable), (BATCH,), generator=generator)]
        with torch.no_grad():
            later = chosen[:, None] + 1 + torch.arange(num_heads)
            wanted = functional.linear(data.states[later], lm_head).softmax(-1)
        guessed = functional.linear(blocks(data.states[chosen]), lm_head).log_softmax(-1)
        loss = ((-wanted * guessed).sum(-1).mean(0) * weights).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        mean_loss = loss.item() if step == 1 else 0.98 * mean_loss + 0.02 * loss.item()
        if step % LOG_EVERY_STEPS == 0:
            print(f"step {step} loss {mean_loss:.3f} {time.monotonic() - start:.0f} s", flush=True)


@torch.inference_mode()
def accuracy(blocks: Blocks, lm_head: torch.Tensor, data: States) -> dict[str, object]:
    """Share of right guesses per head, of its best token and among its best NUM_BEST; and tokens
    per step of a chain of all heads, the target's own token included."""
    num_heads = len(blocks.layers)
    usable = data.with_next(num_heads)
    best = functional.linear(blocks(data.states[usable]), lm_head).topk(NUM_BEST).indices
    right = data.tokens[usable[:, None] + 1 + torch.arange(num_heads)]
    is_first = best[..., 0] == right
    chain = 1 + is_first.cumprod(1).sum(1).double().mean()
    return {
        "right": [round(float(x), 3) for x in is_first.double().mean(0)],
        f"among_best_{NUM_BEST}": [
            round(float(x), 3) for x in (best == right[..., None]).any(-1).double().mean(0)
        ],
        "tokens_per_step": round(float(chain), 2),
    }


def save(blocks: Blocks, target: Path, out: Path, report: dict[str, object]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for head, layer in enumerate(blocks.layers):
        tensors[f"{head}.0.linear.weight"] = layer.weight.detach().bfloat16()
        tensors[f"{head}.0.linear.bias"] = layer.bias.detach().bfloat16()
    path = out / "medusa_lm_head.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library writes it for its owner alone
    config = {
        "base_model_name_or_path": target.name,
        "medusa_num_heads": len(blocks.layers),
        "medusa_num_layers": 1,
        "shares_lm_head": True,
        "hidden_size": blocks.layers[0].in_features,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--samples", type=int, default=6000, help="texts to train on")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=100, help="prompts per workload to evaluate")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    target = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    lm_head = target.lm_head.weight.detach()
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    start = time.monotonic()
    prompts = [
        generate(WORKLOADS[i % len(WORKLOADS)], args.seed, i).prompt for i in range(args.samples)
    ]
    num_greedy = args.samples // 3
    parts = [
        write_texts(target, tokenizer, prompts[:num_greedy], 0.0),
        write_texts(target, tokenizer, prompts[num_greedy:], 1.0),
    ]
    parts[1].texts += num_greedy
    data = States(
        *(torch.cat([getattr(p, f) for p in parts]) for f in ("states", "tokens", "texts"))
    )
    print(f"{len(data.tokens)} positions, {time.monotonic() - start:.0f} s", flush=True)
    blocks = Blocks(args.num_heads, lm_head.shape[1])
    train(blocks, lm_head, data, args.steps, torch.Generator().manual_seed(args.seed))
    report: dict[str, object] = {
        "seed": args.seed,
        "texts": args.samples,
        "positions": len(data.tokens),
        "steps": args.steps,
        "prompts_per_workload": args.prompts,
    }
    blocks.bfloat16().float()  # as stored
    for workload in WORKLOADS:
        held_out = [
            generate(workload, args.seed + HELD_OUT_SEED, i).prompt for i in range(args.prompts)
        ]
        report[workload] = accuracy(blocks, lm_head, write_texts(target, tokenizer, held_out, 0.0))
        print(workload, report[workload], flush=True)
    save(blocks, args.target, args.out, report)


if __name__ == "__main__":
    main()
