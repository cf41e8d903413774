"""The report of the document: its tables and their captions. `charts` has its charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from smartspec_bench.gpu.document import BatchPoint, Document, LoadPoint, ModelInfo
from smartspec_bench.gpu.plan import BASELINE, JUDGED
from smartspec_bench.report.blocks import MISSING, Chart, Report, Section, Table, Text

PASSES, RATES, LOADED = "passes", "rates", "load"
"""Sections that have charts."""


def report(document: Document, charts: Mapping[str, Chart] | None = None) -> Report:
    """charts: by section."""
    sections = (
        _device(document),
        _pair(document),
        _bandwidth(document),
        _exactness(document),
        _passes(document),
        _rates(document),
        _load(document),
    )
    head = [Text(document.note, "lead"), Text(f"{document.date}, {document.elapsed_s:.0f} s.")]
    if document.left_out:
        head.append(Text(f"Left out: {'; '.join(document.left_out)}."))
    found = (
        Section(one.name, one.title, [*one.blocks, charts[one.name]])
        if charts and one.name in charts
        else one
        for one in sections
        if one is not None
    )
    return Report("Speculation on one device", head if document.note else head[1:], list(found))


def _device(document: Document) -> Section | None:
    device = document.device
    if device is None:
        return None
    rows = [
        ("device", device.name),
        ("host", f"{device.machine}; {device.driver}"),
        ("memory", f"{device.memory_gb:.1f} GB, {device.free_gb:.1f} GB free"),
        ("copies within it", f"{device.copy_gb_per_s:.1f} GB/s, read and written"),
        ("versions", ", ".join(f"{name} {text}" for name, text in device.versions.items())),
    ]
    return Section("device", "Device", [Table(("", ""), rows, num_words=2)])


def _pair(document: Document) -> Section | None:
    pair = document.pair
    if pair is None:
        return None
    models = [("target", pair.target), ("draft", pair.draft)]
    launches = "replays of CUDA graphs" if pair.uses_graphs else "launched kernel by kernel"
    why = f" ({pair.graph_error})" if pair.graph_error else ""
    text = (
        f"The shipped pair, expanded and prepared on the device in {pair.build_s:.1f} s, in "
        f"{pair.dtype}. Its texts are those of the small models. Up to {pair.max_sequences} "
        f"sequences at once. Short passes are {launches}{why}."
    )
    header = ("", "parameters", "read in a pass", "layers", "hidden", "cache of a token")
    return _section("pair", "Pair", header, [_model(name, model) for name, model in models], text)


def _model(name: str, model: ModelInfo) -> Sequence[str]:
    return (
        name,
        f"{model.num_parameters / 1e6:.1f} M",
        f"{model.bytes_read / 1e9:.3f} GB",
        str(model.size["num_layers"]),
        str(model.size["hidden_size"]),
        f"{model.cache_bytes_per_token / 1024:.0f} KiB",
    )


def _bandwidth(document: Document) -> Section | None:
    found = document.bandwidth
    if found is None:
        return None
    verdict = "reached" if found.share >= found.goal else "missed"
    plain = ""
    if found.plain_ms is not None:
        plain = f" Launched kernel by kernel, such a pass takes {found.plain_ms:.2f} ms."
    text = (
        f"A pass of the target over one token of one sequence reads {found.bytes_read / 1e9:.3f} "
        f"GB of weights and takes {found.median_ms:.2f} ms (median; best {found.best_ms:.2f} ms), "
        f"{found.share:.2f} of the copy bandwidth; the goal of {found.goal} is {verdict}.{plain}"
    )
    return Section("bandwidth", "Share of the copy bandwidth", [Text(text)])


def _exactness(document: Document) -> Section | None:
    if not document.exactness:
        return None
    text = (
        "Greedy texts compared with those without speculation. A text counts once, at its first "
        "difference. A difference that rounding does not explain is a fault."
    )
    header = ("policy", "texts", "tokens", "accepted of drafted", "differ", "near-ties", "faults")
    rows = [
        (
            f"{arm.policy}, {arm.mode}",
            str(arm.num_requests),
            str(arm.num_tokens),
            f"{arm.num_accepted} of {arm.num_drafted}",
            str(arm.num_differences),
            str(arm.num_near_ties),
            str(arm.num_faults),
        )
        for arm in document.exactness
    ]
    return _section("exactness", "Exactness", header, rows, text)


def _passes(document: Document) -> Section | None:
    if not document.batches:
        return None
    num_k = len(document.batches[0].target_ms)
    probs = ", ".join(f"{prob:.2f}" for prob in document.accept_probs)
    text = (
        "Milliseconds of a target pass over 1 + k tokens per sequence, and of a draft pass. The "
        f"last column is the best k by these times and the acceptance of drafts 1, 2, .. ({probs}; "
        "each if those before it were accepted), without the loop's own time."
    )
    header = ("at once", *(f"k = {k}" for k in range(num_k)), "draft", "best k")
    rows = [
        (
            str(point.batch_size),
            *(f"{ms:.2f}" for ms in point.target_ms),
            f"{point.draft_ms:.2f}",
            str(point.predicted_k),
        )
        for point in document.batches
    ]
    return _section(PASSES, "Passes", header, rows, text)


def _rates(document: Document) -> Section | None:
    if not document.batches:
        return None
    policies = [rate.policy for rate in document.batches[0].rates]
    text = (
        "Tokens per second with a fixed number of requests in flight, medians over the rounds. The "
        "best fixed length is chosen after the measurement."
    )
    header = ("at once", "rounds", *policies, f"k of {JUDGED}", "over none", "over best fixed")
    rows = map(_rate_row, document.batches)
    return _section(RATES, "Policies by batch", header, rows, text)


def _rate_row(point: BatchPoint) -> Sequence[str]:
    judged, best = point.rate(JUDGED), point.best_fixed
    return (
        str(point.batch_size),
        str(len(judged.tokens_tps)),
        *(f"{rate.median_tps:.1f}" for rate in point.rates),
        f"{judged.draft_len:.2f}",
        f"{judged.median_tps / point.rate(BASELINE).median_tps:.3f}",
        f"{judged.median_tps / best.median_tps:.3f} ({best.policy})",
    )


def _load(document: Document) -> Section | None:
    if not document.load or document.saturation_rps is None:
        return None
    text = (
        f"Poisson arrivals at shares of {document.saturation_rps:.2f} requests/s, the saturation "
        "rate of none at the largest batch; one phase each. Latency counts from when a request was "
        "due."
    )
    header = ("load", "requests/s", "policy", "requests", "failed", "mean ms", "p95 ms", "tokens/s")
    return _section(LOADED, "Latency under load", header, map(_load_row, document.load), text)


def _load_row(point: LoadPoint) -> Sequence[str]:
    return (
        f"{point.load:g}",
        f"{point.rate_rps:.2f}",
        point.policy,
        str(point.num_requests),
        str(point.num_failed),
        MISSING if point.mean_ms is None else f"{point.mean_ms:.0f}",
        MISSING if point.p95_ms is None else f"{point.p95_ms:.0f}",
        f"{point.tokens_tps:.1f}",
    )


def _section(
    name: str, title: str, header: Sequence[str], rows: Iterable[Sequence[str]], text: str
) -> Section:
    return Section(name, title, [Text(text), Table(header, list(rows))])
