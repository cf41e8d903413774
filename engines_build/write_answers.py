"""Write the texts that an EAGLE-3 head learns from: a model's own answers to prompts.

Each file of --out has up to 256 texts, with what the model computed when it wrote them: the inputs
of the layers that the head will read, and the most likely next tokens. With --own, the model also
writes prompts: it continues an empty message of the user.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.model_files import end_tokens, load_tokenizer
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner, load_openvino_runner
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig

NUM_ROWS = 48  # texts that are written at once
NUM_TOP = 24  # kept next tokens, and those that are sampled from
MAX_PROMPT = 640
MAX_ANSWER = 160
MAX_OWN = 120  # tokens of a prompt that the model writes
TEXTS_PER_FILE = 256
MARK = "\x1fprompt\x1f"


@dataclass
class Job:
    """A text that is written: tokens so far, of which the first `start` were given."""

    tokens: list[int]
    max_new: int
    temperature: float
    start: int = 0
    num_cached: int = 0
    states: list[torch.Tensor] = field(default_factory=list)
    tops: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = len(self.tokens)


def write(runner: OpenVinoRunner, jobs: Iterator[Job], ends: set[int], seed: int) -> Iterator[Job]:
    """Write the texts of all jobs, and give each when it is complete."""
    generator = torch.Generator().manual_seed(seed)
    rows: dict[int, Job] = {}
    free = list(range(NUM_ROWS))
    while True:
        while free and (job := next(jobs, None)) is not None:
            rows[free.pop()] = job
        if not rows:
            return
        inputs = []
        for row, job in rows.items():
            new = job.tokens[job.num_cached :]
            inputs.append(RowInput(row, job.num_cached, new, 1, job.start - job.num_cached))
        out = runner.forward(inputs)
        logits, ids = out.logits.topk(NUM_TOP)
        temperatures = torch.tensor([job.temperature for job in rows.values()])[:, None]
        sharp = (logits / temperatures.clamp(min=1e-3)).softmax(-1)
        chosen = ids.gather(1, sharp.multinomial(1, generator=generator))[:, 0].tolist()
        probs = logits.softmax(-1).half()
        for i, (row, job) in enumerate(list(rows.items())):
            job.num_cached = len(job.tokens)
            job.states.append(out.states[i].bfloat16())
            job.tops.append((ids[i].int(), probs[i]))
            job.tokens.append(chosen[i])
            is_full = len(job.tokens) - job.start >= job.max_new
            if chosen[i] in ends or is_full:
                del rows[row]
                free.append(row)
                yield job


def save(texts: Sequence[Job], path: Path) -> None:
    """The last token of a text has no state. tops[i] says what follows token start - 1 + i."""
    save_file(
        {
            "tokens": torch.cat(
                [torch.tensor(one.tokens[:-1], dtype=torch.int32) for one in texts]
            ),
            "lengths": torch.tensor([len(one.tokens) - 1 for one in texts]),
            "starts": torch.tensor([one.start for one in texts]),
            "states": torch.cat([state for one in texts for state in one.states]),
            "top_ids": torch.stack([ids for one in texts for ids, _ in one.tops]),
            "top_probs": torch.stack([probs for one in texts for _, probs in one.tops]),
        },
        path,
    )


def load_target(target: Path, layer_ids: Sequence[int]) -> tuple[OpenVinoRunner, set[int]]:
    """The model as the server runs it, and its end tokens."""
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    config = RunnerConfig(
        path=target,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        num_rows=NUM_ROWS,
        max_len=MAX_PROMPT + MAX_ANSWER,
        vocab_size=len(tokenizer),
        state_layers=tuple(layer_ids),
        weights="auto",
        num_threads=torch.get_num_threads(),
    )
    runner = load_openvino_runner(config)
    torch.set_num_threads(1)  # the threads of PyTorch and OpenVINO disturb each other
    return runner, set(end_tokens(target, config.vocab_size, load_tokenizer("model", target)))


def read_prompts(files: Sequence[Path]) -> list[str]:
    """Prompts between lines of four hyphens."""
    found = [part.strip() for file in files for part in file.read_text().split("\n----\n")]
    return list(dict.fromkeys(one for one in found if one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="model folder or GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="files with prompts")
    parser.add_argument("--own", type=int, default=0, help="prompts that the model writes")
    parser.add_argument("--layer-ids", default="2,15,29", help="layers whose inputs a head reads")
    parser.add_argument("--answers", type=Path, help="file for the answers as text")
    parser.add_argument(
        "--greedy",
        type=float,
        default=0.6,
        help="share of greedy answers; the others have a temperature of 0.3 to 1",
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    target = model_folder(args.target)
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
    )
    before, after = chat.split(MARK)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    runner, ends = load_target(target, [int(one) for one in args.layer_ids.split(",")])
    args.out.mkdir(parents=True, exist_ok=True)
    random, start = Random(args.seed), time.monotonic()
    prompts = read_prompts(args.prompts)
    if args.own:
        head = encode(before)
        jobs = (Job(list(head), MAX_OWN, random.uniform(0.8, 1.2)) for _ in range(args.own))
        own = set()
        for job in write(runner, jobs, ends, args.seed):
            if job.tokens[-1] in ends:
                own.add(tokenizer.decode(job.tokens[job.start : -1]).strip())
        prompts += sorted(own)
        print(f"{len(own)} prompts of its own, {time.monotonic() - start:.0f} s", flush=True)
    random.shuffle(prompts)

    def answers() -> Iterator[Job]:
        for prompt in prompts:
            tokens = encode(before + prompt + after)
            if len(tokens) <= MAX_PROMPT:
                is_greedy = random.random() < args.greedy
                yield Job(tokens, MAX_ANSWER, 0.0 if is_greedy else random.uniform(0.3, 1.0))

    texts: list[Job] = []
    num, num_texts, num_files = 0, 0, len(list(args.out.glob("*.safetensors")))
    answer_file = args.answers.open("a") if args.answers else None
    for job in write(runner, answers(), ends, args.seed + 1):
        texts.append(job)
        num_texts += 1
        num += len(job.tokens) - job.start
        if answer_file:
            answer_file.write(
                tokenizer.decode(job.tokens[job.start :], skip_special_tokens=True) + "\n----\n"
            )
        if len(texts) == TEXTS_PER_FILE:
            save(texts, args.out / f"{num_files:05}.safetensors")
            num_files, texts = num_files + 1, []
            print(f"{num_texts} texts, {num} tokens, {time.monotonic() - start:.0f} s", flush=True)
    if texts:
        save(texts, args.out / f"{num_files:05}.safetensors")
    print(f"{num_texts} texts, {num} tokens, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
