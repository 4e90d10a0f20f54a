"""The same measurements under vLLM's metric names.

For tools that read those names: vLLM's Grafana dashboards and the endpoint picker of the Gateway API
inference extension. What ranks measure has one series per rank (engine="0", "1", ...), as for vLLM's
data-parallel engines. What only the server measures, such as latencies of requests, has engine="0".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

VLLM = "vllm:"
OURS = "epserver_"
# Theirs -> ours, both without prefix. Families that vLLM renamed have both names.
NAMES: Mapping[str, str] = {
    "num_requests_running": "rank_running",
    "num_requests_waiting": "queue_depth",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generated_tokens",
    "num_preemptions": "preemptions",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "request_token_seconds",
    "request_inference_time_seconds": "request_inference_seconds",
    "e2e_request_latency_seconds": "request_seconds",
    "request_queue_time_seconds": "request_queue_seconds",
    "request_prefill_time_seconds": "request_prefill_seconds",
    "request_decode_time_seconds": "request_decode_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_output_tokens",
    "request_max_num_generation_tokens": "request_output_tokens",
    "kv_cache_usage_perc": "kv_cache_usage_ratio",  # 1 is full, in spite of the name
    "gpu_cache_usage_perc": "kv_cache_usage_ratio",
}
PICKER = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
FINISHED: Mapping[str, str] = {"eos": "stop", "stop_token": "stop", "stop_string": "stop", "length": "length"}


def with_vllm_names(registry: CollectorRegistry, model: str) -> CollectorRegistry:
    """A registry with all of `registry`, and again under vLLM's names. model: value of model_name."""
    both = CollectorRegistry()
    both.register(registry)
    both.register(VllmNames(registry, model))
    return both


def for_pickers(loads: CollectorRegistry, model: str) -> CollectorRegistry:
    """A registry with what endpoint pickers read, and nothing else. loads: ServerMetrics.loads."""
    page = CollectorRegistry()
    names = {theirs: NAMES[theirs] for theirs in PICKER}
    page.register(VllmNames(loads, model, names))
    return page


@dataclass(frozen=True, eq=False, slots=True)
class VllmNames(Collector):
    """Reads `source` at every scrape. Families that `source` does not have yet are left out."""

    source: CollectorRegistry
    model: str
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)

    def collect(self) -> Iterator[Metric]:
        """One pass over the source."""
        ours = {family.name.removeprefix(OURS): family for family in self.source.collect()}
        for theirs, name in self.names.items():
            if name in ours:
                yield self._renamed(theirs, ours[name])
        if "requests" in ours:
            yield self._success(ours["requests"])
        if "requests" in ours and "queue_depth" in ours:
            yield self._waiting_by_reason(ours["queue_depth"])
        if "steps" in ours:
            yield self._step_tokens(ours["steps"], ours["step_tokens"])
        if "kv_blocks" in ours:
            yield self._cache_config(ours["kv_blocks"], ours["kv_block_size"])

    def _labels(self, engine: str = "0", **more: str) -> dict[str, str]:
        return {"model_name": self.model, "engine": engine, **more}

    def _renamed(self, theirs: str, family: Metric) -> Metric:
        """A family of the same type. Adds up series that differ in any label but `rank` and `le`."""
        sums: dict[tuple[str, str, str], float] = {}
        for sample in family.samples:
            labels = sample.labels
            key = sample.name.removeprefix(family.name), labels.get("rank", "0"), labels.get("le", "")
            sums[key] = sums.get(key, 0.0) + sample.value
        renamed = Metric(VLLM + theirs, family.documentation, family.type)
        for (suffix, engine, edge), value in sums.items():
            labels = self._labels(engine, le=edge) if edge else self._labels(engine)
            renamed.add_sample(VLLM + theirs + suffix, labels, value)
        return renamed

    def _success(self, requests: Metric) -> Metric:
        ended = dict.fromkeys((*FINISHED.values(), "abort"), 0.0)
        for sample in requests.samples:
            if sample.labels["status"] == "OK":
                ended[FINISHED[sample.labels["finish_reason"]]] += sample.value
            elif sample.labels["status"] == "CANCELLED":
                ended["abort"] += sample.value
        name = f"{VLLM}request_success"
        family = Metric(name, "Requests that finished, by vLLM's reasons.", "counter")
        for reason, number in ended.items():
            family.add_sample(f"{name}_total", self._labels(finished_reason=reason), number)
        return family

    def _waiting_by_reason(self, queued: Metric) -> Metric:
        """All wait for room on their rank: nothing else defers a request."""
        name = f"{VLLM}num_requests_waiting_by_reason"
        family = Metric(name, "Requests in the queue of this rank, by vLLM's reasons.", "gauge")
        for sample in queued.samples:
            for reason, number in (("capacity", sample.value), ("deferred", 0.0)):
                family.add_sample(name, self._labels(sample.labels["rank"], reason=reason), number)
        return family

    def _step_tokens(self, steps: Metric, tokens: Metric) -> Metric:
        """A histogram without inner edges: ranks count steps and tokens, not tokens by step."""
        name = f"{VLLM}iteration_tokens_total"
        family = Metric(name, "Tokens computed in a step.", "histogram")
        sums = {sample.labels["rank"]: sample.value for sample in tokens.samples}
        for sample in steps.samples:
            engine = sample.labels["rank"]
            family.add_sample(f"{name}_bucket", self._labels(engine, le="+Inf"), sample.value)
            family.add_sample(f"{name}_count", self._labels(engine), sample.value)
            family.add_sample(f"{name}_sum", self._labels(engine), sums.get(engine, 0.0))
        return family

    def _cache_config(self, blocks: Metric, size: Metric) -> Metric:
        name = f"{VLLM}cache_config_info"
        family = Metric(name, "Always 1; sizes of a rank's KV cache.", "gauge")
        block_size = str(int(size.samples[0].value))
        for sample in blocks.samples:
            sizes = {"block_size": block_size, "num_gpu_blocks": str(int(sample.value))}
            family.add_sample(name, self._labels(sample.labels["rank"], **sizes), 1.0)
        return family
