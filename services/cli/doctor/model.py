"""The model: whether each service takes it, and what memory it needs. Its weights are not read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli.doctor.findings import Finding, Section
from services.cli.parts import missing, part
from services.common import checkpoint
from services.common.config import Resolved, ServiceConfig
from services.common.errors import StartError

if TYPE_CHECKING:
    from services.scheduler.core.limits import Limits
    from services.scheduler.identity import Model

TITLE = "Model"

Fit = Any
"""services.executor.fit.Fit; the command must not know the executor's modules, not even for their types."""


def unread(reason: str) -> Section:
    """In place of all, where the configuration cannot be read."""
    return Section(TITLE, (Finding("config", reason, "fault"),))


def sections(resolved: Mapping[str, Resolved[ServiceConfig]]) -> tuple[Section, ...]:
    """Model and attention, as the three services with these configs would find them."""
    # Only what is here already is examined: a doctor brings no weights.
    configs = {name: one.config.model_copy(update={"offline": True}) for name, one in resolved.items()}
    paths: dict[str, Path] = {}
    findings: list[Finding] = []
    for name, config in configs.items():
        try:
            paths[name] = checkpoint.find(
                config.model, revision=config.revision, offline=config.offline, weights=name == "executor"
            )
        except StartError as error:
            findings.append(Finding(name, _not_there(config.model, error), "fault"))
    if findings:
        return (Section(TITLE, tuple(findings)),)
    findings.append(Finding("folder", ", ".join(sorted({str(path) for path in paths.values()}))))
    text = _tried("frontend", lambda: _text_side(configs["frontend"]))
    steps = _tried("scheduler", lambda: _model(configs["scheduler"]))
    fit = _tried("executor", lambda: _fit(paths["executor"], steps.found, configs["executor"]))
    findings += [text.finding, steps.finding]
    if fit.found is None:
        findings.append(fit.finding)
        return (Section(TITLE, tuple(findings)),)
    if steps.found is not None:
        findings += _memory(fit.found, steps.found)
    return (Section(TITLE, tuple(findings)), _attention(fit.found))


@dataclass(frozen=True)
class _Tried:
    found: Any
    finding: Finding


def _tried(service: str, attempt: Callable[[], tuple[Any, str]]) -> _Tried:
    """What a service makes of the model, or its reason against it."""
    try:
        found, text = attempt()
        return _Tried(found, Finding(service, text))
    except ModuleNotFoundError as error:
        fault = missing(error, extra=service, what=f"the {service}")
        if not isinstance(fault, StartError):
            raise
        return _Tried(None, Finding(service, str(fault), "fault"))
    except StartError as error:
        return _Tried(None, Finding(service, str(error), "fault"))


def _not_there(model: str, error: StartError) -> str:
    if model == checkpoint.EMBEDDED_MODEL and not checkpoint.is_fetched(model):
        return f"{model} is not fetched yet, so it cannot be examined; `triptych model fetch` brings it"
    return str(error)


def _text_side(config: ServiceConfig) -> tuple[Any, str]:
    module = part("services.frontend.served_model", extra="frontend", what="the frontend")
    model = module.load(config.model, None, revision=config.revision, offline=config.offline)
    ends = ", ".join(map(str, sorted(model.eos_ids))) or "none, so answers end at max_tokens"
    return model, f"the tokenizer loads; end-of-sequence ids: {ends}"


def _model(config: Any) -> tuple[Model, str]:
    module = part("services.scheduler.identity", extra="scheduler", what="the scheduler")
    model: Model = module.Model.read(config)
    ids = model.vocab_size or "its family's number of"
    return model, f"{model.name}: context {model.context_tokens} tokens, {ids} ids"


def _fit(path: Path, model: Model | None, config: ServiceConfig) -> tuple[Fit, str]:
    if model is None:
        raise StartError("not examined, since the scheduler does not take the model")
    module = part("services.executor.fit", extra="executor", what="the executor")
    return module.fit(path, model.engine_config(), config), ""


def _memory(fit: Fit, model: Model) -> list[Finding]:
    blocks = fit.kv_bytes // fit.block_bytes
    tokens = max(0, blocks - 1) * model.config.block_size
    facts = {
        "weight_bytes": fit.weight_bytes,
        "available_bytes": fit.available_bytes,
        "kv_bytes": fit.kv_bytes,
        "kv_bytes_per_token": fit.token_bytes,
        "fitting_tokens": tokens,
        "dtype": fit.dtype,
        "kv_dtype": fit.kv_dtype,
        "ranks": len(fit.rank_weight_bytes),
        "rank_weight_bytes": list(fit.rank_weight_bytes),
    }
    text = (
        f"weights {_size(fit.weight_bytes)}, computed in {fit.dtype}; KV {fit.token_bytes / 1e6:.3f} MB a token, "
        f"in {fit.kv_dtype}; of {_size(fit.available_bytes)} free {_size(fit.kv_bytes)} are for KV: "
        f"{_count(tokens)} tokens fit"
    )
    return [Finding("memory", text, facts=facts), *_ranks(fit), _pool(fit, model), _compute(fit)]


def _ranks(fit: Fit) -> list[Finding]:
    """How the weights are divided; nothing where one process holds them."""
    if len(fit.rank_weight_bytes) < 2:
        return []
    text = (
        f"{len(fit.rank_weight_bytes)} processes hold {', '.join(map(_size, fit.rank_weight_bytes))}, each all norms; "
        "KV figures are of one"
    )
    text += "".join(f"; whole in each: {one}" for one in fit.whole)
    return [Finding("ranks", text, facts={"whole": list(fit.whole)})]


def _compute(fit: Fit) -> Finding:
    """How a step is computed."""
    if fit.device != "cpu":
        between = f"torch's own kernels, since {fit.eager_since}" if fit.eager_since else "compiled by torch.compile"
        each = " and those after it, one a rank" if len(fit.rank_weight_bytes) > 1 else ""
        text = (
            f"{fit.device}{each}: the model's own code over our kernels; norms, gates and sums are {between}; decode "
            f"steps are captured in CUDA graphs, as --executor.cuda-graph-sizes says; on the CPU {fit.threads.count} "
            f"threads, since {fit.threads.reason}"
        )
        facts = {"threads": fit.threads.count, "compiled_graphs": not fit.eager_since, "eager_since": fit.eager_since}
        return Finding("compute", text, facts=facts)
    text = (
        f"{fit.threads.count} threads, since {fit.threads.reason}; eager: the model's own code over our kernels, which "
        "are compiled once for this CPU and kept in the cache; no graph is compiled, and no compiler is needed; "
        f"products in tiles of {fit.tile[0]} rows by {fit.tile[1]} outputs, vectors of {fit.vector_bits} bits; "
        f"weights of bfloat16 are held in {fit.bfloat16_bits} bits each, to the bit"
    )
    facts = {
        "threads": fit.threads.count,
        "compiled_graphs": False,
        "vector_bits": fit.vector_bits,
        "bfloat16_bits": fit.bfloat16_bits,
    }
    return Finding("compute", text, facts=facts)


def _pool(fit: Fit, model: Model) -> Finding:
    """What the scheduler would make of it."""
    try:
        limits = _limits(fit, model)
    except StartError as error:
        return Finding("pool", str(error), "fault")
    facts = {"pool_tokens": limits.pool_tokens, "context_tokens": limits.context_tokens}
    text = f"{_count(limits.pool_tokens)} tokens for up to {limits.max_slots} requests at once"
    if limits.context_tokens < model.context_tokens:
        text += (
            f"; the context is lowered to {limits.context_tokens} from {model.context_tokens} tokens; a larger "
            "--executor.kv-memory-bytes or --scheduler.num-kv-blocks raises it"
        )
        return Finding("pool", text, "note", facts)
    return Finding("pool", text, facts=facts)


def _limits(fit: Fit, model: Model) -> Limits:
    link = part("services.scheduler.executor_link", extra="scheduler", what="the scheduler")
    facts = link.ExecutorFacts(
        device=fit.device,
        version=1,
        weights_hash="",
        config_hash="",
        vocab_size=fit.vocab_size,
        block_bytes=fit.block_bytes,
        kv_bytes=fit.kv_bytes,
        max_in_flight=1,
        dtype=fit.dtype,
        kv_dtype=fit.kv_dtype,
    )
    return model.limits(facts)


def _attention(fit: Fit) -> Section:
    """Each backend, and which is taken; a fault where none is."""
    able = [name for name, reasons in fit.backends.items() if not reasons and fit.backend in (None, name)]
    chosen = able[0] if able else None
    told: list[Finding] = []
    if fit.backend is not None:
        text = f"{fit.backend}, as --executor.attention-backend says"
        told.append(Finding("choice", text, "ok" if chosen else "fault"))
    for name, reasons in fit.backends.items():
        if reasons:
            text = f"cannot serve this model: {', '.join(reasons)}"
            told.append(Finding(name, text, "note" if chosen else "fault", {"reasons": list(reasons)}))
        else:
            told.append(Finding(name, "is used" if name == chosen else "could serve it too", facts={"reasons": []}))
    return Section("Attention", tuple(told))


def _size(count_bytes: int) -> str:
    return f"{count_bytes / 1e9:.2f} GB" if count_bytes >= 10_000_000 else f"{count_bytes / 1e6:.2f} MB"


def _count(tokens: int) -> str:
    return f"{tokens // 1000}k" if tokens >= 10_000 else str(tokens)
