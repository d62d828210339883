#compdef loractl
# zsh completion for loractl. Written by `make docs`; source it after compinit, or copy it as
# _loractl to a directory of $fpath.

_loractl_word_or_file() {
    _alternative "words:word:($*)" 'files:file:_files'
}

_loractl() {
    local context state state_descr line
    typeset -A opt_args
    local -a commands=(
        'plan:Size the memory for a base model and its adapters, and choose the settings'
        'inspect:Check an adapter from its two headers alone\: ranks, scalings, targets, bytes'
        'resize:Write an adapter with lower ranks\: the best approximation of each of its deltas'
        'push:Upload an adapter as a new, immutable version'
        'promote:Make a version live\: loaded and tried first, then switched in one step'
        'rollback:Make the version that was live before live again'
        'canary:Give a share of an adapter'\''s callers a version that is not live yet'
        'list:List the adapters\: live version, rank, size, and the tier of memory it is in'
        'show:Show an adapter and its versions, or with @VERSION all that is known of that one'
        'history:Show the changes of an adapter, newest first'
        'status:Show what the daemon is doing\: requests, pages, adapters by tier'
        'top:Watch the daemon work\: pages, tiers, loads and evictions, queue, tokens a second and TTFT'
        'doctor:Check socket, permissions, versions of both programs, store, disk and adapters'
        'load:Bring a version onto the device now, so that its first request does not wait'
        'unload:Free a version'\''s memory'
        'pin:Load a version and keep it loaded, also after a restart'
        'unpin:Let a pinned version be evicted again when it is idle'
        'delete:Delete a version and its files, or without a version the whole adapter'
        'gc:Delete versions beyond the newest few of each adapter'
        'drain:Refuse new requests with status 503, and wait until the running ones have ended'
        'resume:Take requests again after a drain'
        'events:Show the changes of every adapter, oldest first'
        'operation:Show an operation, or the last of them'
        'version:Print the versions of loractl and of the daemon'
    )
    _arguments -C \
        '(--install-completion)--install-completion[Install completion for the current shell.]' \
        '(--show-completion)--show-completion[Show completion for the current shell, to copy it or customize the installation.]' \
        '(--help -h)--help[Show the help and exit.]' \
        '(--help -h)-h[Show the help and exit.]' \
        '1: :->command' \
        '*:: :->arguments' && return
    case $state in
        command) _describe -t commands 'loractl command' commands ;;
        arguments)
            case $line[1] in
                plan) _arguments \
                    '(--model)--model=[Base model\: a directory, a config.json, a name such as llama-3.1-8b from the built-in catalogue, or a hub id (its config.json alone is fetched).]:TEXT: _loractl_word_or_file llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3.1-8b llama-3.1-70b llama-3.1-405b llama-3.2-1b llama-3.2-3b llama-3.3-70b tinyllama-1.1b mistral-7b-v0.1 mistral-7b-v0.3 mistral-nemo-12b mixtral-8x7b mixtral-8x22b mixtral-8x22b-instruct qwen2-0.5b qwen2.5-0.5b qwen2-1.5b qwen2.5-1.5b qwen2.5-3b qwen2-7b qwen2.5-7b qwen2.5-14b qwen2.5-32b qwen2-72b qwen2.5-72b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b qwen1.5-moe-a2.7b gemma-2-2b gemma-2-9b gemma-2-27b gemma-3-1b gemma-3-4b gemma-3-12b gemma-3-27b phi-3-mini phi-3-medium phi-4 phi-4-mini smollm2-135m smollm2-360m smollm2-1.7b smollm3-3b deepseek-v2-lite deepseek-v3' \
                    '(--rank)--rank=[Rank of the adapters, 1 to 512; several are a mix in equal parts.]:N\[,N...\]: ' \
                    '*--adapters=[Read ranks and targets from a PEFT adapter, or from every adapter in a directory, instead of --rank. May be given several times.]:DIR:_files' \
                    '(--spectrum)--spectrum[Read the tensors of --adapters of rank 64 and more, and say what rank they need.]' \
                    '(--targets)--targets=[Linears with --rank, joined by commas\: qv, qkv, attn, mlp, all-linear (as PEFT has it), names; with experts also router, experts, experts-3d, experts-merged.]:TEXT:(qv qkv attn mlp all-linear experts experts-3d)' \
                    '(--dtype)--dtype=[Weights and adapters as served\: bfloat16, float16 or float32.]:TEXT:(bfloat16 float16 float32)' \
                    '(--kv-dtype)--kv-dtype=[KV cache\: auto (as --dtype), bfloat16, float16, float32 or fp8.]:TEXT:(auto bfloat16 float16 float32 fp8)' \
                    '(--gpu)--gpu=[GPU by name\: h100-80g, h200, a100-80g, l40s, l4, ... (an unknown one lists all).]:TEXT:(t4-16g v100-16g v100-32g a10g-24g l4-24g rtx3090-24g rtx4090-24g rtx5090-32g a6000-48g l40s-48g a100-40g a100-80g h100-80g h100-nvl-94g gh200-96g h200-141g b200-180g)' \
                    '(--vram)--vram=[Memory of the GPU as CUDA reports it, such as 79.1GiB, instead of --gpu.]:SIZE: ' \
                    '(--slab)--slab=[Bytes for pages alone, as memory.slab_bytes on a CPU, instead of --gpu.]:SIZE: ' \
                    '(--host-ram)--host-ram=[Host memory for cached adapters.]:SIZE: ' \
                    '(--gpu-memory-utilization)--gpu-memory-utilization=[Share of the GPU'\''s memory the daemon may use.]:X: ' \
                    '(--disk-gb-s)--disk-gb-s=[Speed of the version store, in 10^9 bytes per second.]:X: ' \
                    '(--context)--context=[Tokens per sequence, prompt and answer (default\: of --tokens, else 8192).]:N: ' \
                    '(--concurrency)--concurrency=[Sequences that run at once.]:N: ' \
                    '(--tp)--tp=[GPUs the model is split over; figures are per GPU.]:N: ' \
                    '(--max-num-batched-tokens)--max-num-batched-tokens=[Tokens of one step.]:N: ' \
                    '(--fleet)--fleet=[How many adapters there are.]:N: ' \
                    '(--popularity)--popularity=[Who is asked for\: uniform, zipf\:EXPONENT, slora\:ALPHA (1 is uniform, 0.1 very skewed) or file\:COUNTS.csv with adapter,count lines (default\: zipf\:1.0).]:TEXT:(uniform zipf\:1.0 slora\:0.1)' \
                    '(--rate)--rate=[Requests per second.]:X: ' \
                    '(--tokens)--tokens=[Tokens of a usual request; their sum is the default of --context.]:PROMPT\:OUTPUT: ' \
                    '(--trace)--trace=[A CSV of time,adapter lines to replay exactly, instead of --popularity.]:FILE:_files' \
                    '(--miss)--miss=[Share of requests that may find their adapter off the device.]:TEXT: ' \
                    '(--max-loras)--max-loras=[Slots you mean to set (default\: as recommended).]:N: ' \
                    '(--max-cpu-loras)--max-cpu-loras=[Adapters in host memory you mean to set.]:N: ' \
                    '(--max-lora-rank)--max-lora-rank=[Largest rank you mean to admit.]:N: ' \
                    '(--processes)--processes=[Model processes that serve these adapters today.]:N: ' \
                    '(--replicas)--replicas=[Replicas behind one address.]:N: ' \
                    '(--routing)--routing=[How requests reach a replica\: affinity (by adapter) or random.]:TEXT:(affinity random)' \
                    '(--speculation)--speculation=[Speculative decoding you mean to use\: eagle, medusa or ngram.]:TEXT:(eagle medusa ngram)' \
                    '(--compare)--compare=[What vllm and sglang would reserve for the same adapters.]:ENGINE\[,ENGINE\]:(vllm sglang vllm,sglang)' \
                    '(--explain)--explain[Show each formula with its numbers.]' \
                    '(--sweep)--sweep=[Vary one quantity\: rank, slots or context.]:TEXT:(rank slots context)' \
                    '(--plot)--plot=[Draw memory by rank and hits by slots\: a .svg, .html or .png file (png needs matplotlib), or term for the terminal.]:FILE|term: _loractl_word_or_file term' \
                    '(--emit)--emit=[Print settings instead of the plan\: lorad (a lorad.toml), vllm or sglang (flags), or k8s (a Deployment, and a Service that hashes on the adapter).]:TEXT:(lorad vllm sglang k8s)' \
                    '(--check)--check[Compare with the running daemon, to the byte, instead of planning; exit 1 if anything differs.]' \
                    '(--socket)--socket=[Admin socket of the daemon, for --check.]:PATH:_files' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
                inspect) _arguments \
                    '(--base)--base=[Base model to check against\: directory, config.json or hub id.]:TEXT:_files' \
                    '(--strict)--strict[Treat warnings as refusals.]' \
                    '(--max-lora-rank)--max-lora-rank=[Refuse a rank above this, the server'\''s limit.]:N: ' \
                    '(--stats)--stats[Read the tensors\: NaN, zero deltas, norms, digest.]' \
                    '(--spectrum)--spectrum[Also singular values\: which rank would do.]' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1:PATH:_files' ;;
                resize) _arguments \
                    '(--out -o)--out=[New directory to write.]:PATH:_files' \
                    '(--out -o)-o+[New directory to write.]:PATH:_files' \
                    '(--rank)--rank=[Largest rank any module keeps.]:N: ' \
                    '(--energy)--energy=[Share of each delta'\''s squared norm to keep\: 0.99.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1:DIR:_files' ;;
                push) _arguments \
                    '(--version)--version=[Label; the next of v1, v2, ... if not given.]:TEXT: ' \
                    '(--message -m)--message=[What this version is.]:TEXT: ' \
                    '(--message -m)-m+[What this version is.]:TEXT: ' \
                    '(--promote)--promote[Make it live as well.]' \
                    '(--reason -r)--reason=[Why, for the history.]:TEXT: ' \
                    '(--reason -r)-r+[Why, for the history.]:TEXT: ' \
                    '(--if-generation)--if-generation=[Refuse, with exit 7, unless the adapter is still at this generation.]:N: ' \
                    '(--dry-run)--dry-run[Change nothing; exit 1 if the command would change something.]' \
                    '(--detach --wait)--detach[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--detach --wait)--wait[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1:NAME: ' \
                    '2:SOURCE:_files' ;;
                promote) _arguments \
                    '(--check)--check=[Prompts that it must answer rightly first\: JSON lines with prompt (or messages) and must_contain (or tokens).]:FILE:_files' \
                    '(--reason -r)--reason=[Why, for the history.]:TEXT: ' \
                    '(--reason -r)-r+[Why, for the history.]:TEXT: ' \
                    '(--if-generation)--if-generation=[Refuse, with exit 7, unless the adapter is still at this generation.]:N: ' \
                    '(--dry-run)--dry-run[Change nothing; exit 1 if the command would change something.]' \
                    '(--detach --wait)--detach[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--detach --wait)--wait[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1:NAME\[@VERSION\]: ' \
                    '2::\[VERSION\]: ' ;;
                rollback) _arguments \
                    '(--to)--to=[Version to go back to; the one live before if not given.]:TEXT: ' \
                    '(--reason -r)--reason=[Why, for the history.]:TEXT: ' \
                    '(--reason -r)-r+[Why, for the history.]:TEXT: ' \
                    '(--if-generation)--if-generation=[Refuse, with exit 7, unless the adapter is still at this generation.]:N: ' \
                    '(--dry-run)--dry-run[Change nothing; exit 1 if the command would change something.]' \
                    '(--detach --wait)--detach[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--detach --wait)--wait[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1:NAME: ' ;;
                canary) _arguments \
                    '(--percent)--percent=[Share of the bare name'\''s callers; 0 ends it.]:X: ' \
                    '(--off)--off[End it, as --percent 0 does.]' \
                    '(--auto-rollback)--auto-rollback[End it when its requests fail more than live'\''s.]' \
                    '(--reason -r)--reason=[Why, for the history.]:TEXT: ' \
                    '(--reason -r)-r+[Why, for the history.]:TEXT: ' \
                    '(--if-generation)--if-generation=[Refuse, with exit 7, unless the adapter is still at this generation.]:N: ' \
                    '(--dry-run)--dry-run[Change nothing; exit 1 if the command would change something.]' \
                    '(--detach --wait)--detach[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--detach --wait)--wait[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1:NAME\[@VERSION\]: ' \
                    '2::\[VERSION\]: ' ;;
                list) _arguments \
                    '(--tenant)--tenant=[Only this tenant'\''s.]:TEXT: ' \
                    '(--watch -w)--watch[Print again and again; with --json one line each time.]' \
                    '(--watch -w)-w[Print again and again; with --json one line each time.]' \
                    '(--interval)--interval=[Seconds between two looks of --watch.]:X: ' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
                show) _arguments \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1:NAME\[@VERSION\]: ' ;;
                history) _arguments \
                    '(--limit -n)--limit=[How many changes.]:N: ' \
                    '(--limit -n)-n+[How many changes.]:N: ' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1:NAME: ' ;;
                status) _arguments \
                    '(--watch -w)--watch[Print again and again; with --json one line each time.]' \
                    '(--watch -w)-w[Print again and again; with --json one line each time.]' \
                    '(--interval)--interval=[Seconds between two looks of --watch.]:X: ' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
                top) _arguments \
                    '(--once)--once[Print the screen once and end.]' \
                    '(--interval)--interval=[Seconds between two looks of --watch.]:X: ' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
                doctor) _arguments \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
                load) _arguments \
                    '(--pin)--pin[Keep it loaded, also after a restart.]' \
                    '(--dry-run)--dry-run[Change nothing; exit 1 if the command would change something.]' \
                    '(--detach --wait)--detach[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--detach --wait)--wait[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1:NAME\[@VERSION\]: ' ;;
                unload) _arguments \
                    '(--force)--force[Even if it is live or pinned (it is unpinned).]' \
                    '(--drain-timeout)--drain-timeout=[Seconds to wait for its running requests.]:X: ' \
                    '(--dry-run)--dry-run[Change nothing; exit 1 if the command would change something.]' \
                    '(--detach --wait)--detach[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--detach --wait)--wait[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1:NAME\[@VERSION\]: ' ;;
                pin) _arguments \
                    '(--dry-run)--dry-run[Change nothing; exit 1 if the command would change something.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1:NAME\[@VERSION\]: ' ;;
                unpin) _arguments \
                    '(--dry-run)--dry-run[Change nothing; exit 1 if the command would change something.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1:NAME\[@VERSION\]: ' ;;
                delete) _arguments \
                    '(--yes -y)--yes[Do not ask.]' \
                    '(--yes -y)-y[Do not ask.]' \
                    '(--force)--force[Delete an adapter although it is live or pinned.]' \
                    '(--dry-run)--dry-run[Change nothing; exit 1 if the command would change something.]' \
                    '(--detach --wait)--detach[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--detach --wait)--wait[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1:NAME\[@VERSION\]: ' ;;
                gc) _arguments \
                    '(--keep)--keep=[Newest versions of each adapter that stay; registry.keep if not given.]:N: ' \
                    '(--dry-run)--dry-run[Change nothing; exit 1 if the command would change something.]' \
                    '(--detach --wait)--detach[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--detach --wait)--wait[Print the operation'\''s id and go, instead of waiting for its end.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1::\[NAME\]: ' ;;
                drain) _arguments \
                    '(--drain-timeout)--drain-timeout=[Seconds to wait for the running requests.]:X: ' \
                    '(--dry-run)--dry-run[Change nothing; exit 1 if the command would change something.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
                resume) _arguments \
                    '(--dry-run)--dry-run[Change nothing; exit 1 if the command would change something.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
                events) _arguments \
                    '(--after)--after=[Only what came after the event with this id.]:N: ' \
                    '(--follow -f)--follow[Go on with what happens from now on.]' \
                    '(--follow -f)-f[Go on with what happens from now on.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
                operation) _arguments \
                    '(--wait)--wait[Until it has ended; exit 9 after --timeout.]' \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--timeout)--timeout=[Seconds to wait for the daemon.]:X: ' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' \
                    '1::\[ID\]: ' ;;
                version) _arguments \
                    '(--socket)--socket=[Admin socket of the daemon.]:PATH:_files' \
                    '(--json)--json[Print one JSON document.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
            esac
            ;;
    esac
}

if [[ $funcstack[1] == _loractl ]]; then
    _loractl "$@"
else
    compdef _loractl loractl
fi
