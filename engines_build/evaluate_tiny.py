"""Measures the tiny pair (stored in bf16, run in float32) on documents that training never saw.

For every workload, over `num_prompts` held-out documents:

    exact              share of the target's greedy answers that equal the reference exactly
    names_from_prompt  share of the names and numbers in the answers that occur in the prompt
    perplexity         of each model on the reference answers, including the end of text
    acceptance         share of the target's greedy tokens that are also the draft's argmax
    accepted_at_4      mean number of accepted tokens per step with four greedy drafts
"""

import json
import math
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM

from smartspec_bench.workloads import WORKLOADS, Example, generate

END_ID = 0
MAX_NEW_TOKENS = 120
DRAFT_LEN = 4
BATCH = 50
DETERMINISTIC = ("sql", "qa")  # workloads whose prompt determines the answer
FACTUAL = ("summarize", "qa")  # workloads whose answers use only names from the prompt


@dataclass(frozen=True)
class Pair:
    """Both models in float32, and their tokenizer."""

    tokenizer: Tokenizer
    target: LlamaForCausalLM
    draft: LlamaForCausalLM


def evaluate(target: Path, draft: Path, seed: int, num_prompts: int) -> dict[str, object]:
    """Measure each workload; `seed` must differ from the training seed."""
    pair = Pair(Tokenizer.from_file(str(target / "tokenizer.json")), _load(target), _load(draft))
    workloads = {
        workload: _measure(pair, [generate(workload, seed, i) for i in range(num_prompts)])
        for workload in WORKLOADS
    }
    return {
        "seed": seed,
        "prompts_per_workload": num_prompts,
        "parameters": {
            "target": sum(p.numel() for p in pair.target.parameters()),
            "draft": sum(p.numel() for p in pair.draft.parameters()),
        },
        "workloads": workloads,
    }


def write_evaluation(folder: Path, seed: int, num_prompts: int) -> None:
    """Evaluate `folder`/target and `folder`/draft, and write `folder`/evaluation.json."""
    result = evaluate(folder / "target", folder / "draft", seed, num_prompts)
    text = json.dumps(result, indent=2)
    (folder / "evaluation.json").write_text(text + "\n")
    print(text)


def _load(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def _measure(pair: Pair, examples: list[Example]) -> dict[str, float]:
    workload = examples[0].workload
    prompts = [pair.tokenizer.encode(e.prompt).ids for e in examples]
    references = [[*pair.tokenizer.encode(e.answer).ids, END_ID] for e in examples]
    answers = _greedy(pair.target, prompts)
    texts = [pair.tokenizer.decode(answer) for answer in answers]
    agreements = _agreements(pair.draft, prompts, answers)
    result = {
        "prompt_tokens": _mean([len(p) for p in prompts]),
        "answer_tokens": _mean([len(a) for a in answers]),
        "target_perplexity": math.exp(_mean(_losses(pair.target, prompts, references))),
        "draft_perplexity": math.exp(_mean(_losses(pair.draft, prompts, references))),
        "acceptance": _mean([float(hit) for run in agreements for hit in run]),
        "accepted_at_4": _mean([n for run in agreements for n in _accepted_lengths(run)]),
    }
    if workload in DETERMINISTIC:
        result["exact"] = _mean([t == e.answer for t, e in zip(texts, examples, strict=True)])
    if workload in FACTUAL:
        found = [_names(t) <= _names(e.prompt) for t, e in zip(texts, examples, strict=True)]
        shares = [
            word in _names(e.prompt)
            for t, e in zip(texts, examples, strict=True)
            for word in _names(t)
        ]
        result["names_from_prompt"] = _mean(shares)
        result["answers_all_from_prompt"] = _mean(found)
    return {key: round(value, 4) for key, value in result.items()}


def _names(text: str) -> set[str]:
    """Numbers, and capitalised words of four letters or more."""
    return set(re.findall(r"\d+|\b[A-Z][a-z]{3,}", text))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _greedy(model: LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations, including the end of text; prompts are padded on the left."""
    answers = []
    for batch in _batched(prompts):
        longest = max(map(len, batch))
        tokens = torch.tensor([[END_ID] * (longest - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
        out = model.generate(
            tokens, attention_mask=mask, do_sample=False, max_new_tokens=MAX_NEW_TOKENS
        )
        for row in out[:, longest:].tolist():
            answers.append(row[: row.index(END_ID) + 1] if END_ID in row else row)
    return answers


def _batched(items: list[list[int]]) -> list[list[list[int]]]:
    rest = iter(items)
    return list(iter(lambda: list(islice(rest, BATCH)), []))


def _answer_logits(
    model: LlamaForCausalLM, prompt: list[int], answer: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (answer, vocab) that predict the tokens of the answer, and these tokens (answer,)."""
    logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :], torch.tensor(answer)


def _losses(
    model: LlamaForCausalLM, prompts: list[list[int]], answers: list[list[int]]
) -> list[float]:
    """Cross-entropy in nats of every answer token."""
    losses: list[float] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits, tokens = _answer_logits(model, prompt, answer)
        losses += functional.cross_entropy(logits, tokens, reduction="none").tolist()
    return losses


def _agreements(
    draft: LlamaForCausalLM, prompts: list[list[int]], answers: list[list[int]]
) -> list[list[bool]]:
    """For every token of the target's answers, whether the draft's argmax is the same token."""
    runs = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits, tokens = _answer_logits(draft, prompt, answer)
        runs.append((logits.argmax(-1) == tokens).tolist())
    return runs


def _accepted_lengths(run: list[bool]) -> list[int]:
    """Accepted tokens of each step with four drafts: [T, T, F, T] is two steps, 2 and 1.

    An accepted draft equals the target's token. So later tokens have the same context as in `run`.
    """
    lengths, start = [], 0
    while start < len(run):
        drafted = run[start : start + DRAFT_LEN]
        accepted = drafted.index(False) if False in drafted else len(drafted)
        lengths.append(accepted)
        start += accepted + 1
    return lengths
