"""`loractl plan --emit`: the plan as settings that a daemon or a cluster takes."""

from __future__ import annotations

import json
import math
import shlex

from loractl.model_source import model_id
from loractl.plan_inputs import PlanOptions
from lorad.sizing.other_engines import vllm_rank
from lorad.sizing.planner import Plan


def emit_settings(made: Plan, options: PlanOptions, what: str) -> str:
    """The text for `lorad`, `vllm`, `sglang` or `k8s`, with a line break at its end."""
    emitters = {"lorad": _lorad, "vllm": _vllm, "sglang": _sglang, "k8s": _k8s}
    return emitters[what](made, options)


def _max_rank(made: Plan) -> int:
    return max(kind.rank for kind in made.question.kinds)


def _host_loras(made: Plan) -> int:
    if made.question.deployment.max_cpu_loras:
        return made.question.deployment.max_cpu_loras
    return made.recommendation.max_cpu_loras if made.recommendation else made.slots


def _quoted(text: str) -> str:
    """A TOML basic string, which a JSON string is too; and a YAML double-quoted one."""
    return json.dumps(text)


def _lorad(made: Plan, options: PlanOptions) -> str:
    demand, machine = made.question.demand, made.question.machine
    memory = [f"block_size = {demand.block_size}"]
    if options.slab:
        memory.insert(0, f"slab_bytes = {machine.slab if machine else 0}")
    else:
        memory.insert(0, f"gpu_memory_utilization = {options.utilization:g}")
    lines = [
        "[model]",
        f"path = {_quoted(model_id(options.model))}",
        f"dtype = {_quoted(options.dtype)}",
        f"max_model_len = {demand.context}",
        "",
        "[engine]",
        f"max_num_seqs = {demand.concurrency}",
        f"max_num_batched_tokens = {demand.max_num_batched_tokens}",
        f"max_loras = {made.slots}",
        f"max_cpu_loras = {_host_loras(made)}",
        f"max_lora_rank = {_max_rank(made)}",
        "",
        "[memory]",
        *memory,
    ]
    return "\n".join(lines) + "\n"


def _flags(pairs: list[tuple[str, object]]) -> str:
    words = [f"{flag} {shlex.quote(str(value))}" if value != "" else flag for flag, value in pairs]
    return " \\\n  ".join(words) + "\n"


def _vllm(made: Plan, options: PlanOptions) -> str:
    demand = made.question.demand
    rank = vllm_rank(_max_rank(made)) or _max_rank(made)
    pairs: list[tuple[str, object]] = [
        ("vllm serve", model_id(options.model)),
        ("--dtype", options.dtype),
        ("--max-model-len", demand.context),
        ("--max-num-seqs", demand.concurrency),
        ("--max-num-batched-tokens", demand.max_num_batched_tokens),
        ("--gpu-memory-utilization", f"{options.utilization:g}"),
        ("--tensor-parallel-size", demand.tp),
        ("--enable-lora", ""),
        ("--max-loras", made.slots),
        ("--max-cpu-loras", max(made.slots, _host_loras(made))),
        ("--max-lora-rank", rank),
    ]
    if options.kv_dtype == "fp8":
        pairs.append(("--kv-cache-dtype", "fp8"))
    return _flags(pairs)


def _sglang(made: Plan, options: PlanOptions) -> str:
    demand = made.question.demand
    leaves = sorted({leaf for kind in made.question.kinds for leaf in kind.leaves})
    pairs: list[tuple[str, object]] = [
        ("python -m sglang.launch_server --model-path", model_id(options.model)),
        ("--dtype", options.dtype),
        ("--context-length", demand.context),
        ("--max-running-requests", demand.concurrency),
        ("--mem-fraction-static", f"{options.utilization:g}"),
        ("--tp-size", demand.tp),
        ("--enable-lora", ""),
        # A request for the base model takes a place too.
        ("--max-loras-per-batch", made.slots + 1),
        ("--max-loaded-loras", max(made.slots + 1, _host_loras(made))),
        ("--max-lora-rank", _max_rank(made)),
    ]
    return _flags(pairs).rstrip("\n") + f" \\\n  --lora-target-modules {' '.join(leaves)}\n"


def _k8s(made: Plan, options: PlanOptions) -> str:
    """One replica keeps its store on a claim of its own; several are a StatefulSet, so that
    each has one: every replica has a registry, and versions are pushed to all of them."""
    host = _host_loras(made) * made.mean_bytes
    memory_gib = math.ceil((host + 8 * 1024**3) / 1024**3)
    config = "\n".join(f"    {line}".rstrip() for line in _lorad(made, options).splitlines())
    one = options.replicas == 1
    return _MANIFEST.format(
        kind="Deployment" if one else "StatefulSet",
        rollout=_ONE_ROLLOUT if one else _MANY_ROLLOUT,
        replicas=options.replicas,
        tp=made.question.demand.tp,
        memory=memory_gib,
        config=config,
        volume=_ONE_VOLUME if one else "",
        claim=_ONE_CLAIM if one else "",
        templates="" if one else _MANY_CLAIMS,
    )


_ONE_ROLLOUT = "strategy: {type: Recreate}  # one daemon at a time may hold the store"
_MANY_ROLLOUT = "serviceName: lorad"
_ONE_VOLUME = """
        - name: store
          persistentVolumeClaim: {claimName: lorad}"""
_ONE_CLAIM = """\
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: lorad
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 100Gi}}
---
"""
_MANY_CLAIMS = """
  volumeClaimTemplates:
    - metadata: {name: store}
      spec:
        accessModes: [ReadWriteOnce]
        resources: {requests: {storage: 100Gi}}"""
_MANIFEST = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: lorad
data:
  lorad.toml: |
{config}
---
{claim}apiVersion: apps/v1
kind: {kind}
metadata:
  name: lorad
  labels: {{app: lorad}}
spec:
  replicas: {replicas}
  {rollout}
  selector:
    matchLabels: {{app: lorad}}
  template:
    metadata:
      labels: {{app: lorad}}
    spec:
      terminationGracePeriodSeconds: 120
      containers:
        - name: lorad
          image: lorad:latest  # your own image
          args: [start, --host, 0.0.0.0, --port, "8000", --config, /etc/lorad/lorad.toml]
          ports:
            - {{name: http, containerPort: 8000}}
          readinessProbe:
            httpGet: {{path: /health, port: http}}
            periodSeconds: 5
          resources:
            requests: {{memory: {memory}Gi}}
            limits: {{memory: {memory}Gi, nvidia.com/gpu: {tp}}}
          volumeMounts:
            - {{name: config, mountPath: /etc/lorad, readOnly: true}}
            - {{name: store, mountPath: /var/lib/lorad}}
      volumes:
        - name: config
          configMap: {{name: lorad}}{volume}{templates}
---
apiVersion: v1
kind: Service
metadata:
  name: lorad
  labels: {{app: lorad}}
spec:
  selector: {{app: lorad}}
  ports:
    - {{name: http, port: 80, targetPort: http}}
---
# A Service alone spreads requests at random, so that every replica loads every adapter. With
# Istio this rule keeps an adapter on one replica: requests carry its name in x-lora-adapter.
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata:
  name: lorad
spec:
  host: lorad
  trafficPolicy:
    loadBalancer:
      consistentHash:
        httpHeaderName: x-lora-adapter
"""
