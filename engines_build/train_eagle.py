"""Train an EAGLE-3 head on the answers that `write_answers.py` wrote.

The head starts as the target's last layer. It learns the target's own distribution at every answer
position, over chains of several drafts: from the second on, a draft reads the state that the head
itself returned. Embedding and output rows are the target's and are not stored. The head drafts
the most frequent tokens of the answers only.
"""

import argparse
import ctypes
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AutoConfig

from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.checkpoints.tensors import file_tensors

NUM_STEPS = 4  # drafts of a chain in training
NUM_SHOWN = 5  # drafts of a chain in the evaluation
NUM_RANKS = 8  # guesses of each draft in the evaluation
STEP_DECAY = 0.9  # loss weight of a draft over that of the draft before it
TOKENS_PER_STEP = 4096
MIN_MASS = 0.3  # of the target's probability in the head's vocabulary, to learn from a place
PEAK_RATE = 1e-3
LOG_EVERY_STEPS = 20
LAYER = "layers.0"
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


class Head(torch.nn.Module):
    """Parameters have the names of speculators' layout."""

    def __init__(self, target: Path, layer_ids: list[int], vocabulary: torch.Tensor) -> None:
        """vocabulary: the tokens that the head drafts, ascending."""
        super().__init__()
        self.layer_ids, self.vocabulary = layer_ids, vocabulary
        self.config = config = AutoConfig.from_pretrained(target, trust_remote_code=False)
        width = config.hidden_size
        self.num_heads, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        self.theta = config.rope_parameters["rope_theta"]
        tensors = file_tensors(target)
        self.embed = tensors["model.embed_tokens.weight"].bfloat16()
        rows = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        self.lm_head = rows[vocabulary].bfloat16()
        last = f"model.layers.{config.num_hidden_layers - 1}."

        def of_last(name: str) -> torch.Tensor:
            return tensors[f"{last}{name}.weight"].float()

        fc = torch.zeros(width, len(layer_ids) * width)
        fc[:, -width:] = torch.eye(width)
        made = {
            "fc": fc,
            "norm": tensors["model.norm.weight"].float(),
            f"{LAYER}.hidden_norm": of_last("input_layernorm"),
            f"{LAYER}.input_layernorm": torch.ones(width),
            f"{LAYER}.post_attention_layernorm": of_last("post_attention_layernorm"),
        }
        for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            made[f"{LAYER}.{name}"] = of_last(name)
        for name in ("q_proj", "k_proj", "v_proj"):
            of_states = of_last(f"self_attn.{name}")
            of_tokens = 0.02 * torch.randn(len(of_states), width)
            made[f"{LAYER}.self_attn.{name}"] = torch.cat([of_tokens, of_states], 1)
        self.weights = {name: torch.nn.Parameter(one.clone()) for name, one in made.items()}

    def norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        weight, eps = self.weights[name], self.config.rms_norm_eps
        return functional.rms_norm(states.float(), states.shape[-1:], weight, eps).bfloat16()

    def linear(self, states: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(states, self.weights[name].bfloat16())

    def rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """heads [B, heads, N, D], turned by their positions [B, N]."""
        half = heads.shape[-1] // 2
        angles = positions[:, None, :, None] * self.theta ** (-torch.arange(half) / half)
        left, right = heads[..., :half], heads[..., half:]
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def layer(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        places: torch.Tensor,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """tokens [B, N], states [B, N, H] -> own states [B, N, H].

        places: where the chains are in the text, [B, N]; all places in the first pass. cache: keys
        and values of each draft of the chains so far. A chain at place t sees those of the first
        pass up to t, and its own later ones.
        """
        embedded = self.norm(functional.embedding(tokens, self.embed), f"{LAYER}.input_layernorm")
        both = torch.cat([embedded, self.norm(states, f"{LAYER}.hidden_norm")], -1)
        q, k, v = (
            self.linear(both, f"{LAYER}.self_attn.{name}_proj")
            .unflatten(-1, (heads, -1))
            .transpose(1, 2)
            for name, heads in (("q", self.num_heads), ("k", self.num_kv), ("v", self.num_kv))
        )
        shift, repeats = len(cache), self.num_heads // self.num_kv
        q, k = self.rotated(q, places + shift), self.rotated(k, places + shift)
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        cache.append((k, v))
        if shift:
            scores = q @ cache[0][0].transpose(2, 3)
            length = scores.shape[-1]
            is_later = torch.arange(length) > places[:, None, :, None]
            scores = scores.masked_fill(is_later, -torch.inf)
            own = [(q * keys).sum(-1, keepdim=True) for keys, _ in cache[1:]]
            shares = (torch.cat([scores, *own], -1).float() * q.shape[-1] ** -0.5).softmax(-1)
            shares = shares.bfloat16()
            mixed = shares[..., :length] @ cache[0][1]
            for i, (_, values) in enumerate(cache[1:]):
                mixed = mixed + shares[..., length + i, None] * values
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = self.linear(mixed.transpose(1, 2).flatten(2), f"{LAYER}.self_attn.o_proj")
        states = states + attended
        normed = self.norm(states, f"{LAYER}.post_attention_layernorm")
        gate = functional.silu(self.linear(normed, f"{LAYER}.mlp.gate_proj"))
        gated = gate * self.linear(normed, f"{LAYER}.mlp.up_proj")
        return states + self.linear(gated, f"{LAYER}.mlp.down_proj")

    def chains(self, batch: dict[str, torch.Tensor], num: int) -> Iterator[torch.Tensor]:
        """States of each of num drafts at all places of the answers, [B, A, H]. The drafts before
        are those of the text."""
        tokens, places = batch["tokens"], batch["places"]
        every = torch.arange(tokens.shape[1])[None].expand(len(tokens), -1)
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        states = self.linear(batch["states"], "fc")
        states = self.layer(tokens.roll(-1, 1), states, every, cache)
        states = states.gather(1, places[:, :, None].expand(-1, -1, states.shape[-1]))
        yield states
        for step in range(1, num):
            read = tokens.roll(-1 - step, 1).gather(1, places)
            states = self.layer(read, states, places, cache)
            yield states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.norm(states, "norm"), self.lm_head)


class Answers:
    """The texts of the files of a folder, in memory."""

    def __init__(self, files: list[Path]) -> None:
        self.texts: list[dict[str, torch.Tensor]] = []
        for file in files:
            with safe_open(file, "pt") as opened:
                of = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            lengths, starts = of["lengths"], of["starts"]
            nums = (lengths - starts + 1).tolist()
            parts = zip(
                of["tokens"].split(lengths.tolist()),
                of["states"].split(lengths.tolist()),
                of["top_ids"].split(nums),
                of["top_probs"].split(nums),
                starts.tolist(),
                strict=True,
            )
            self.texts += [
                {"tokens": a, "states": b, "top_ids": c, "top_probs": d, "start": e}
                for a, b, c, d, e in parts
            ]

    def vocabulary(self, num: int, vocab_size: int) -> torch.Tensor:
        """The num most frequent tokens of the answers, ascending."""
        counts = torch.zeros(vocab_size)
        for text in self.texts:
            # what the target would choose, too: sampled answers have rare tokens
            found = torch.cat(
                [text["tokens"][text["start"] :].long(), text["top_ids"][:, 0].long()]
            )
            counts.index_add_(0, found, torch.ones(len(found)))
        return counts.topk(num).indices.sort().values

    def batches(self, random: Random) -> list[list[int]]:
        """Texts of similar length, up to TOKENS_PER_STEP tokens with padding; in random order."""
        lengths = [len(one["tokens"]) for one in self.texts]
        order = sorted(range(len(lengths)), key=lambda i: lengths[i] + random.random() * 24)
        found: list[list[int]] = [[]]
        longest = 0
        for i in order:
            longest = max(longest, lengths[i])
            if found[-1] and longest * (len(found[-1]) + 1) > TOKENS_PER_STEP:
                found.append([])
                longest = lengths[i]
            found[-1].append(i)
        random.shuffle(found)
        return found

    def batch(self, chosen: list[int], entries: torch.Tensor) -> dict[str, torch.Tensor]:
        """Texts, padded. entries: of each token in the head's vocabulary, -1 if it lacks it.

        tokens [B, T], states [B, T, width]. places [B, A]: of the tokens after which the answer
        goes on. ids and probs [B, A + NUM_STEPS, NUM_TOP]: what the target expects after each of
        them; probs are 0 after the end and for tokens that the head lacks.
        """
        texts = [self.texts[i] for i in chosen]
        size, longest = len(texts), max(len(one["tokens"]) for one in texts)
        num_places = max(len(one["top_ids"]) for one in texts)
        width, num_top = texts[0]["states"].shape[1], texts[0]["top_ids"].shape[1]
        tokens = torch.zeros(size, longest, dtype=torch.long)
        states = torch.zeros(size, longest, width, dtype=torch.bfloat16)
        ids = torch.zeros(size, num_places + NUM_STEPS, num_top, dtype=torch.long)
        probs = torch.zeros(size, num_places + NUM_STEPS, num_top)
        for i, one in enumerate(texts):
            length = len(one["tokens"])
            tokens[i, :length], states[i, :length] = one["tokens"], one["states"]
            found = entries[one["top_ids"].long()]
            ids[i, : len(found)] = found.clamp(min=0)
            probs[i, : len(found)] = one["top_probs"].float() * (found >= 0)
        starts = torch.tensor([one["start"] - 1 for one in texts])
        places = (starts[:, None] + torch.arange(num_places)).clamp(max=longest - 1)
        return {"tokens": tokens, "states": states, "places": places, "ids": ids, "probs": probs}


def loss_of(head: Head, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    num_places, loss = batch["places"].shape[1], torch.zeros(())
    for step, states in enumerate(head.chains(batch, NUM_STEPS)):
        # The chain at place t guesses what follows token t + 1 + step.
        right = batch["probs"][:, 1 + step : 1 + step + num_places]
        mass = right.sum(-1)
        is_used = mass > MIN_MASS
        guessed = head.logits(states[is_used]).float()
        ids = batch["ids"][:, 1 + step : 1 + step + num_places][is_used]
        chosen = guessed.gather(1, ids) - guessed.logsumexp(-1, keepdim=True)
        shares = right[is_used] / mass[is_used][:, None]
        loss = loss + STEP_DECAY**step * -(shares * chosen).sum(-1).mean()
    return loss


def train(head: Head, answers: Answers, minutes: float, random: Random) -> int:
    """Returns the number of steps."""
    parameters = list(head.weights.values())
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    entries = torch.full((head.config.vocab_size,), -1)
    entries[head.vocabulary] = torch.arange(len(head.vocabulary))
    start, step, mean_loss, waiting, passes = time.monotonic(), 0, 0.0, [], 0
    while (used := (time.monotonic() - start) / (60 * minutes)) < 1.0:
        if not waiting:
            waiting, passes = answers.batches(random), passes + 1
        rate = (
            PEAK_RATE * min(1.0, (step + 1) / 100) * (0.02 + 0.49 * (1 + math.cos(math.pi * used)))
        )
        optimizer.param_groups[0]["lr"] = rate
        loss = loss_of(head, answers.batch(waiting.pop(), entries))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        mean_loss = loss.item() if step == 1 else 0.98 * mean_loss + 0.02 * loss.item()
        if step % LOG_EVERY_STEPS == 0:
            seconds = time.monotonic() - start
            print(f"step {step} loss {mean_loss:.3f} {seconds:.0f} s pass {passes}", flush=True)
    return step


@torch.no_grad()
def accuracy(head: Head, answers: Answers) -> dict[str, object]:
    """Share of right drafts per step, if those before are right, and the mean number of accepted
    drafts of a chain of three; for trees, also the share of each rank of the head's guesses. Drafts
    are greedy, and so must be the texts."""
    entries = torch.full((head.config.vocab_size,), -1)
    starts, num_accepted = torch.zeros(NUM_SHOWN), 0.0
    by_rank = torch.zeros(NUM_SHOWN, NUM_RANKS)
    for chosen in answers.batches(Random(0)):
        batch = answers.batch(chosen, entries)
        places, tokens = batch["places"], batch["tokens"]
        ends = torch.tensor([len(answers.texts[i]["tokens"]) for i in chosen])[:, None]
        still = places + 1 + NUM_SHOWN < ends
        for step, states in enumerate(head.chains(batch, NUM_SHOWN)):
            guesses = head.vocabulary[head.logits(states).topk(NUM_RANKS).indices]
            starts[step] += still.sum()
            is_right = guesses == tokens.roll(-2 - step, 1).gather(1, places)[..., None]
            is_right &= still[..., None]
            by_rank[step] += is_right.sum((0, 1))
            still = is_right[..., 0]
            num_accepted += int(still.sum()) if step < 3 else 0
    right = (by_rank / starts.clamp(min=1)[:, None]).tolist()
    return {
        "chains": int(starts[0]),
        "right_if_those_before": [round(of_step[0], 3) for of_step in right],
        "right_by_rank": [[round(one, 3) for one in of_step] for of_step in right],
        "mean_accepted_of_3": round(num_accepted / max(1, int(starts[0])), 3),
    }


def keep_memory() -> None:
    """Large tensors would be given back to the system after each use, and cleared by it before the
    next: a step took four times as long."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def save(head: Head, out: Path, report: dict[str, object]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "model.safetensors"
    tensors = {f"{name}.weight": one.detach().bfloat16() for name, one in head.weights.items()}
    tensors["d2t"] = head.vocabulary - torch.arange(len(head.vocabulary))
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library writes it for its owner alone
    kept = json.loads(head.config.to_json_string())
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(head.vocabulary),
        "eagle_aux_hidden_state_layer_ids": head.layer_ids,
        "norm_before_residual": False,
        "transformer_layer_config": kept | {"num_hidden_layers": 1},
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="model folder or GGUF file")
    parser.add_argument(
        "--answers", type=Path, nargs="+", required=True, help="folders of write_answers.py"
    )
    parser.add_argument("--held-out", type=Path, nargs="*", default=[], help="such folders")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--layer-ids", default="2,15,29", help="as for write_answers.py")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens the head can draft")
    parser.add_argument("--minutes", type=float, default=40.0, help="duration of the training")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    keep_memory()
    target = model_folder(args.target)
    answers = Answers(
        [file for folder in args.answers for file in sorted(folder.glob("*.safetensors"))]
    )
    vocab_size = AutoConfig.from_pretrained(target, trust_remote_code=False).vocab_size
    layer_ids = [int(one) for one in args.layer_ids.split(",")]
    head = Head(target, layer_ids, answers.vocabulary(args.vocabulary, vocab_size))
    steps = train(head, answers, args.minutes, Random(args.seed))
    report: dict[str, object] = {"texts": len(answers.texts), "steps": steps, "seed": args.seed}
    for folder in args.held_out:
        report[folder.name] = accuracy(head, Answers(sorted(folder.glob("*.safetensors"))))
        print(folder.name, report[folder.name], flush=True)
    save(head, args.out, report)


if __name__ == "__main__":
    main()
