"""Train an EAGLE-3 head for a small target model, on texts that the target writes itself.

The head starts as the target's last layer. It learns the target's own distribution at every answer
position, over chains of three drafts: the second and third read the state that the head itself
returned ("training-time test"). Embedding and LM head are the target's and are not stored. The
texts answer the four workloads, two thirds sampled at temperature 1, one third greedy.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional
from train_heads import HELD_OUT_SEED, write_answers
from transformers import LlamaForCausalLM

from smartspec_bench.workloads import WORKLOADS, generate

NUM_STEPS = 3  # drafts of a chain in training
NUM_SHOWN = 5  # drafts of a chain in the evaluation
STEP_DECAY = 0.8  # loss weight of a draft over that of the draft before it
ROWS = 24  # texts per training step
PEAK_RATE = 2e-3
LOG_EVERY_STEPS = 50

Text = tuple[list[int], list[int]]
"""Tokens of a prompt and of its answer."""


class Head(torch.nn.Module):
    """Parameters have the names of speculators' layout."""

    def __init__(self, target: LlamaForCausalLM, layer_ids: list[int]) -> None:
        super().__init__()
        self.layer_ids, config = layer_ids, target.config
        width = config.hidden_size
        self.num_heads, self.eps = config.num_attention_heads, config.rms_norm_eps
        self.theta = config.rope_parameters["rope_theta"]
        self.embed, self.lm_head = target.model.embed_tokens.weight, target.lm_head.weight
        last = target.model.layers[-1].state_dict()
        fc = torch.zeros(width, len(layer_ids) * width)
        fc[:, -width:] = torch.eye(width)
        made = {
            "fc": fc,
            "norm": target.model.norm.weight.clone(),
            "layers.0.hidden_norm": last["input_layernorm.weight"].clone(),
            "layers.0.input_layernorm": torch.ones(width),
        }
        for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            made[f"layers.0.{name}"] = last[f"{name}.weight"].clone()
        made["layers.0.post_attention_layernorm"] = last["post_attention_layernorm.weight"].clone()
        for name in ("q_proj", "k_proj", "v_proj"):
            of_states = last[f"self_attn.{name}.weight"]
            of_tokens = 0.02 * torch.randn(len(of_states), width)
            made[f"layers.0.self_attn.{name}"] = torch.cat([of_tokens, of_states], 1)
        self.weights = {name: torch.nn.Parameter(one) for name, one in made.items()}

    def norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(states, states.shape[-1:], self.weights[name], self.eps)

    def linear(self, states: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(states, self.weights[name])

    def rotated(self, heads: torch.Tensor, shift: int) -> torch.Tensor:
        """[B, heads, T, D], turned by the position plus shift."""
        half = heads.shape[-1] // 2
        angles = (torch.arange(heads.shape[2])[:, None] + shift) * self.theta ** (
            -torch.arange(half) / half
        )
        left, right = heads[..., :half], heads[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def layer(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """tokens [B, T], states [B, T, H] -> own states [B, T, H].

        cache: keys and values of each draft of the chains so far. A chain at place t sees those of
        the first pass up to t, and its own later ones.
        """
        embedded = functional.embedding(tokens, self.embed)
        both = torch.cat(
            [
                self.norm(embedded, "layers.0.input_layernorm"),
                self.norm(states, "layers.0.hidden_norm"),
            ],
            -1,
        )
        q, k, v = (
            self.linear(both, f"layers.0.self_attn.{name}_proj")
            .unflatten(-1, (self.num_heads, -1))
            .transpose(1, 2)
            for name in "qkv"
        )
        shift = len(cache)
        q, k = self.rotated(q, shift), self.rotated(k, shift)
        cache.append((k, v))
        scores = q @ cache[0][0].transpose(2, 3)
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
        own = [(q * keys).sum(-1, keepdim=True) for keys, _ in cache[1:]]
        shares = (torch.cat([scores, *own], -1) * q.shape[-1] ** -0.5).softmax(-1)
        length = scores.shape[-1]
        mixed = shares[..., :length] @ cache[0][1]
        for i, (_, values) in enumerate(cache[1:]):
            mixed = mixed + shares[..., length + i, None] * values
        states = states + self.linear(mixed.transpose(1, 2).flatten(2), "layers.0.self_attn.o_proj")
        normed = self.norm(states, "layers.0.post_attention_layernorm")
        gate = functional.silu(self.linear(normed, "layers.0.mlp.gate_proj"))
        gated = gate * self.linear(normed, "layers.0.mlp.up_proj")
        return states + self.linear(gated, "layers.0.mlp.down_proj")

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.norm(states, "norm"), self.lm_head)

    def fused(self, target: LlamaForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The head's input states and the target's logits."""
        with torch.no_grad():
            out = target(ids, output_hidden_states=True)
        read = torch.cat([out.hidden_states[i] for i in self.layer_ids], -1)
        return self.linear(read, "fc"), out.logits


def padded(texts: list[Text]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids [B, T], and for each text the lengths of its prompt and of all [B]."""
    whole = [prompt + answer for prompt, answer in texts]
    longest = max(map(len, whole))
    ids = torch.tensor([one + [0] * (longest - len(one)) for one in whole])
    starts = torch.tensor([len(prompt) for prompt, _ in texts])
    return ids, starts, torch.tensor([len(one) for one in whole])


def chain_places(starts: torch.Tensor, ends: torch.Tensor, longest: int, step: int) -> torch.Tensor:
    """Where draft `step` of a chain, which guesses the token at t + 2 + step, is of the answer."""
    places = torch.arange(longest)
    return (places >= starts[:, None] - 1) & (places + 2 + step < ends[:, None])


def loss_of(head: Head, target: LlamaForCausalLM, texts: list[Text]) -> torch.Tensor:
    ids, starts, ends = padded(texts)
    states, wanted = head.fused(target, ids)
    loss, cache = torch.zeros(()), []
    for step in range(NUM_STEPS):
        states = head.layer(ids.roll(-1 - step, 1), states, cache)
        is_used = chain_places(starts, ends, ids.shape[1], step)
        right = wanted.roll(-1 - step, 1)[is_used].softmax(-1)
        guessed = head.logits(states[is_used]).log_softmax(-1)
        loss = loss + STEP_DECAY**step * -(right * guessed).sum(-1).mean()
    return loss


def train(
    head: Head,
    target: LlamaForCausalLM,
    texts: list[Text],
    minutes: float,
    generator: torch.Generator,
) -> int:
    """Returns the number of steps. Texts of similar length share a step."""
    texts = sorted(texts, key=lambda text: len(text[0]) + len(text[1]))
    parameters = list(head.weights.values())
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE, weight_decay=0.0)
    start, step, mean_loss = time.monotonic(), 0, 0.0
    while (used := (time.monotonic() - start) / (60 * minutes)) < 1.0:
        rate = PEAK_RATE * min(1.0, (step + 1) / 50) * min(1.0, 1.05 - used)
        optimizer.param_groups[0]["lr"] = rate
        first = int(torch.randint(len(texts) - ROWS + 1, (1,), generator=generator))
        loss = loss_of(head, target, texts[first : first + ROWS])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        mean_loss = loss.item() if step == 1 else 0.98 * mean_loss + 0.02 * loss.item()
        if step % LOG_EVERY_STEPS == 0:
            print(f"step {step} loss {mean_loss:.3f} {time.monotonic() - start:.0f} s", flush=True)
    return step


@torch.no_grad()
def accuracy(head: Head, target: LlamaForCausalLM, texts: list[Text]) -> dict[str, object]:
    """Share of right drafts per step, if those before are right; and tokens per step of a chain of
    four, with the target's own token. Drafts are greedy, as are the texts."""
    ids, starts, ends = padded(texts)
    states, _ = head.fused(target, ids)
    tokens, cache = ids.roll(-1, 1), []
    still = chain_places(starts, ends, ids.shape[1], NUM_SHOWN - 1)
    num_chains, right, tokens_per_step = int(still.sum()), [], 1.0
    for step in range(NUM_SHOWN):
        states = head.layer(tokens, states, cache)
        tokens = head.logits(states).argmax(-1)
        num_before = int(still.sum())
        still = still & (tokens == ids.roll(-2 - step, 1))
        right.append(round(int(still.sum()) / max(1, num_before), 3))
        tokens_per_step += int(still.sum()) / num_chains if step < NUM_SHOWN - 1 else 0.0
    return {"right_if_those_before": right, "tokens_per_step": round(tokens_per_step, 2)}


def save(head: Head, target: Path, out: Path, report: dict[str, object]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "model.safetensors"
    tensors = {f"{name}.weight": one.detach().bfloat16() for name, one in head.weights.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library writes it for its owner alone
    layer = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": layer["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": head.layer_ids,
        "norm_before_residual": False,
        "transformer_layer_config": layer,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--layer-ids", default="0,1,2", help="layers whose inputs the head reads")
    parser.add_argument("--samples", type=int, default=6000, help="texts to train on")
    parser.add_argument("--minutes", type=float, default=12.0, help="duration of the training")
    parser.add_argument("--prompts", type=int, default=100, help="prompts per workload to evaluate")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    target = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    target.requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    start = time.monotonic()
    prompts = [
        generate(WORKLOADS[i % len(WORKLOADS)], args.seed, i).prompt for i in range(args.samples)
    ]
    num_greedy = args.samples // 3
    texts = write_answers(target, tokenizer, prompts[:num_greedy], 0.0)
    texts += write_answers(target, tokenizer, prompts[num_greedy:], 1.0)
    print(f"{len(texts)} texts, {time.monotonic() - start:.0f} s", flush=True)
    head = Head(target, [int(one) for one in args.layer_ids.split(",")])
    steps = train(head, target, texts, args.minutes, torch.Generator().manual_seed(args.seed))
    report: dict[str, object] = {"seed": args.seed, "texts": len(texts), "steps": steps}
    for weight in head.weights.values():
        weight.data = weight.data.bfloat16().float()  # as stored
    for workload in WORKLOADS:
        held_out = [
            generate(workload, args.seed + HELD_OUT_SEED, i).prompt for i in range(args.prompts)
        ]
        found = write_answers(target, tokenizer, held_out, 0.0)
        report[workload] = accuracy(head, target, found)
        print(workload, report[workload], flush=True)
    save(head, args.target, args.out, report)


if __name__ == "__main__":
    main()
