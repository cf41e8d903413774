"""Train the tiny target/draft pair that is part of the repository.

The roles, in the order in which to run them (all on CPU, with random numbers from `--seed`):

    tokenizer   byte-level BPE, 2,048 entries, trained on generated documents
    copy        the copy lesson: repeated random spans, with a growing number of symbols
    target      a Llama model that answers the four workloads; starts from the copy lesson
    draft       a smaller Llama model with the same tokenizer; starts from a part of that lesson

These choices make the models learn to copy (measured, see tiny/README.md): rotary base 100, heads
of 16, untied embeddings, AdamW (0.9, 0.98) without weight decay, and documents from their start.
The most important one is a first lesson of repeated spans with few symbols. It takes about 1,130
steps (1.7 M tokens). Without it, training on documents mixed with repeated spans had not learned
to copy after 1,450 steps (3.1 M tokens).
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from smartspec_bench.workloads import Example, generate, stream

ROLES = ("tokenizer", "copy", "target", "draft")
END = "<|end|>"
VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
HEAD_SIZE = 16
PROMPT_WEIGHT = 0.2  # loss weight of a prompt token; an answer token has 1
REPEAT_SHARE = 0.15  # share of sequences that are repeated random spans
PEAK_RATE = 2e-3
WARMUP_STEPS = 100
COPY_WARMUP_STEPS = 50
LEARNT_LOSS = 0.5  # nats; below this loss, the copy lesson doubles its symbols
SAVE_EVERY_S = 60.0
LOG_EVERY_STEPS = 50


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; all heads have `HEAD_SIZE`."""

    num_layers: int
    hidden_size: int
    intermediate_size: int


# The draft drafts best what it saw most. Its shares make the acceptance rate differ by workload, as
# in real use.
SHARES = {
    "target": {"chat": 1, "sql": 1, "summarize": 1, "qa": 1},
    "draft": {"chat": 2, "sql": 3, "summarize": 2, "qa": 3},
}
SHAPES = {"target": Shape(3, 128, 384), "draft": Shape(2, 128, 64)}


@dataclass
class Batch:
    """Token ids int64 (batch, length) and loss weights float32 (batch, length)."""

    tokens: torch.Tensor
    weights: torch.Tensor


def train_tokenizer(out: Path, seed: int) -> None:
    """Write a Hugging Face fast tokenizer; `<|end|>` has id 0 and is end of text and padding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = stream(seed)
    texts = (e.prompt + e.answer for e, _ in zip(documents, range(40_000), strict=False))
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.model_max_length = MAX_POSITIONS
    fast.save_pretrained(out)


def build(shape: Shape, seed: int) -> LlamaForCausalLM:
    """A model with random weights, float32."""
    torch.manual_seed(seed)
    num_heads = shape.hidden_size // HEAD_SIZE
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def _document_row(tokenizer: Tokenizer, example: Example) -> tuple[list[int], list[float]]:
    prompt = tokenizer.encode(example.prompt).ids
    answer = [*tokenizer.encode(example.answer).ids, 0]
    return prompt + answer, [PROMPT_WEIGHT] * len(prompt) + [1.0] * len(answer)


def _repeat_row(span: list[int], length: int) -> tuple[list[int], list[float]]:
    """A span repeated up to `length` tokens. Only tokens that can be copied have weight."""
    tokens = (span * (length // len(span) + 1))[:length]
    return tokens, [0.0] * len(span) + [1.0] * (length - len(span))


def _pad(rows: list[tuple[list[int], list[float]]]) -> Batch:
    longest = max(len(tokens) for tokens, _ in rows)
    return Batch(
        torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in rows]),
        torch.tensor([weights + [0.0] * (longest - len(weights)) for _, weights in rows]),
    )


def mixed_documents(seed: int, shares: dict[str, int]) -> Iterator[Example]:
    """Documents without end; each workload occurs in proportion to its share."""
    turn = [workload for workload, share in shares.items() for _ in range(share)]
    for index in count():
        workload = turn[index % len(turn)]
        yield generate(workload, seed, index)


def document_batches(
    tokenizer: Tokenizer, seed: int, rows_per_batch: int, shares: dict[str, int]
) -> Iterator[Batch]:
    """Batches without end. Every batch mixes the workloads, because their lengths are similar.

    Repeated spans use only tokens from the documents. Other tokens would not help.
    """
    rng = random.Random(seed)
    documents = mixed_documents(seed, shares)
    num_rows = rows_per_batch * 8
    num_repeats = round(num_rows * REPEAT_SHARE)
    while True:
        rows = [_document_row(tokenizer, next(documents)) for _ in range(num_rows - num_repeats)]
        known = sorted({token for tokens, _ in rows for token in tokens})
        rows += [
            _repeat_row(rng.sample(known, rng.randrange(4, 50)), rng.randrange(100, 130))
            for _ in range(num_repeats)
        ]
        rng.shuffle(rows)
        for i in range(0, num_rows, rows_per_batch):
            yield _pad(rows[i : i + rows_per_batch])


class Alphabet:
    """The symbols of the copy lesson: 64 tokens of documents, doubled each time they are learnt."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = random.Random(seed)
        prompts = (e.prompt for e in islice(stream(seed + 2), 400))
        self._known = sorted({token for p in prompts for token in tokenizer.encode(p).ids})
        self._rng.shuffle(self._known)
        self.size = 64

    def batch(self) -> Batch:
        """Rows (24, 64) of spans of 8 to 32 symbols."""
        symbols = self._known[: self.size]
        return _pad(
            [
                _repeat_row(
                    [self._rng.choice(symbols) for _ in range(self._rng.randrange(8, 33))], 64
                )
                for _ in range(24)
            ]
        )

    def grow(self) -> bool:
        """Double the number of symbols; return False if there are not enough."""
        if 2 * self.size > len(self._known):
            return False
        self.size *= 2
        return True


def sampled_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy in nats of next tokens. A token's weight is its probability to be used.

    The expected value is that of the weighted mean. But only the used positions (about half) need
    logits over the vocabulary, the most expensive part of a step at this size.
    """
    hidden = model.model(batch.tokens[:, :-1], use_cache=False).last_hidden_state
    weights = batch.weights[:, 1:]
    keep = torch.rand(weights.shape) < weights
    return functional.cross_entropy(model.lm_head(hidden[keep]), batch.tokens[:, 1:][keep])


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0)


def train_step(
    model: LlamaForCausalLM, optimizer: torch.optim.AdamW, batch: Batch, rate: float
) -> float:
    """One update with learning rate `rate`; returns the loss in nats before the update."""
    optimizer.param_groups[0]["lr"] = rate
    loss = sampled_loss(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def rate_at(step: int, progress: float) -> float:
    """Linear warm-up, then a cosine over `progress` in [0, 1] down to 2 % of the peak rate."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_RATE * warmup * (0.02 + 0.49 * (1 + math.cos(math.pi * min(progress, 1.0))))


def save(model: LlamaForCausalLM, tokenizer: Path, out: Path, report: dict[str, object]) -> None:
    """Write bf16 weights, configs, tokenizer and training record; the model stays in float32."""
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.save_pretrained(out)
    AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False).save_pretrained(out)
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    for path in out.iterdir():
        path.chmod(0o644)


def learn_to_copy(args: argparse.Namespace) -> None:
    """The copy lesson: only repeated spans, until nearly all tokens of documents are copied."""
    model = build(SHAPES["target"], args.seed)
    optimizer = make_optimizer(model)
    alphabet = Alphabet(load_tokenizer(args.tokenizer), args.seed)
    mean_loss, step = 5.0, 0
    while True:
        rate = PEAK_RATE * min(1.0, (step + 1) / COPY_WARMUP_STEPS)
        mean_loss = 0.95 * mean_loss + 0.05 * train_step(model, optimizer, alphabet.batch(), rate)
        step += 1
        if step % LOG_EVERY_STEPS == 0:
            print(f"step {step} symbols {alphabet.size} loss {mean_loss:.3f}", flush=True)
        if mean_loss < LEARNT_LOSS:
            report = {
                "role": "copy",
                "seed": args.seed,
                "steps": step,
                "symbols": alphabet.size,
            }
            save(model, args.tokenizer, args.out, report | {"cpu_s": round(time.process_time())})
            mean_loss = 3.0
            if not alphabet.grow():
                return


def train(args: argparse.Namespace) -> None:
    """Train on documents for `args.minutes` of wall-clock time, and save every minute."""
    model = build(SHAPES[args.role], args.seed)
    if args.init:
        start_from(model, args.init)
    optimizer = make_optimizer(model)
    data = document_batches(load_tokenizer(args.tokenizer), args.seed, args.rows, SHARES[args.role])
    start = last_save = time.monotonic()
    limit_s = 60 * args.minutes
    step = num_tokens = 0
    mean_loss = 0.0
    while (elapsed_s := time.monotonic() - start) < limit_s:
        batch = next(data)
        loss = train_step(model, optimizer, batch, rate_at(step, elapsed_s / limit_s))
        step, num_tokens = step + 1, num_tokens + batch.tokens.numel()
        mean_loss = loss if step == 1 else 0.98 * mean_loss + 0.02 * loss
        is_due = time.monotonic() - last_save > SAVE_EVERY_S
        if is_due or step % LOG_EVERY_STEPS == 0:
            report = describe(args, step, num_tokens, elapsed_s, mean_loss)
            print(json.dumps(report), flush=True)
        if is_due:
            save(model, args.tokenizer, args.out, report)
            last_save = time.monotonic()
    report = describe(args, step, num_tokens, elapsed_s, mean_loss)
    save(model, args.tokenizer, args.out, report)


@torch.no_grad()
def start_from(model: LlamaForCausalLM, folder: Path) -> None:
    """Copy the weights of a larger model: its first layers, and their first MLP neurons.

    The first two attention layers do most of the copying. Without the third layer and most neurons,
    nearly all of this ability remains, so the draft does not have to learn it again.
    """
    source = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, parameter in model.named_parameters():
        parameter.copy_(source[name][tuple(slice(size) for size in parameter.shape)])


def describe(
    args: argparse.Namespace, step: int, num_tokens: int, elapsed_s: float, mean_loss: float
) -> dict[str, object]:
    """The record of a training run for training.json."""
    return {
        "role": args.role,
        "seed": args.seed,
        "shape": asdict(SHAPES[args.role]),
        "starts_from": str(args.init.name) if args.init else "random weights",
        "rows_per_batch": args.rows,
        "steps": step,
        "tokens": num_tokens,
        "wall_s": round(elapsed_s),
        "cpu_s": round(time.process_time()),
        "tokens_per_cpu_s": round(num_tokens / time.process_time()),
        "loss": round(mean_loss, 4),
    }


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--role", choices=ROLES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--tokenizer", type=Path, help="folder that the tokenizer role wrote")
    parser.add_argument("--init", type=Path, help="folder of the model to start from")
    parser.add_argument("--minutes", type=float, default=24.0, help="training time, wall clock")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=16, help="sequences per step")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    if args.role == "tokenizer":
        train_tokenizer(args.out, args.seed)
    elif args.role == "copy":
        learn_to_copy(args)
    else:
        train(args)


if __name__ == "__main__":
    main()
