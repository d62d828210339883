# bash completion for loractl. Written by `make docs`; source it, or copy it as loractl to
# ~/.local/share/bash-completion/completions.
# shellcheck shell=bash

_loractl_words() {
    mapfile -t COMPREPLY < <(compgen -W "$1" -- "$2")
}

_loractl_paths() {
    compopt -o filenames 2>/dev/null
    mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$1")
}

_loractl() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
    local command="" word i
    COMPREPLY=()
    # `--option=value` comes as three words.
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $previous == "=" ]]; then
        previous=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ $word != -* ]]; then
            command=$word
            break
        fi
    done

    case "$command $previous" in
        "plan --model") _loractl_words "llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3.1-8b llama-3.1-70b llama-3.1-405b llama-3.2-1b llama-3.2-3b llama-3.3-70b tinyllama-1.1b mistral-7b-v0.1 mistral-7b-v0.3 mistral-nemo-12b mixtral-8x7b mixtral-8x22b mixtral-8x22b-instruct qwen2-0.5b qwen2.5-0.5b qwen2-1.5b qwen2.5-1.5b qwen2.5-3b qwen2-7b qwen2.5-7b qwen2.5-14b qwen2.5-32b qwen2-72b qwen2.5-72b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b qwen1.5-moe-a2.7b gemma-2-2b gemma-2-9b gemma-2-27b gemma-3-1b gemma-3-4b gemma-3-12b gemma-3-27b phi-3-mini phi-3-medium phi-4 phi-4-mini smollm2-135m smollm2-360m smollm2-1.7b smollm3-3b deepseek-v2-lite deepseek-v3" "$current"; _loractl_paths "$current"; return ;;
        "plan --rank") return ;;
        "plan --adapters") _loractl_paths "$current"; return ;;
        "plan --targets") _loractl_words "qv qkv attn mlp all-linear experts experts-3d" "$current"; return ;;
        "plan --dtype") _loractl_words "bfloat16 float16 float32" "$current"; return ;;
        "plan --kv-dtype") _loractl_words "auto bfloat16 float16 float32 fp8" "$current"; return ;;
        "plan --gpu") _loractl_words "t4-16g v100-16g v100-32g a10g-24g l4-24g rtx3090-24g rtx4090-24g rtx5090-32g a6000-48g l40s-48g a100-40g a100-80g h100-80g h100-nvl-94g gh200-96g h200-141g b200-180g" "$current"; return ;;
        "plan --vram") return ;;
        "plan --slab") return ;;
        "plan --host-ram") return ;;
        "plan --gpu-memory-utilization") return ;;
        "plan --disk-gb-s") return ;;
        "plan --context") return ;;
        "plan --concurrency") return ;;
        "plan --tp") return ;;
        "plan --max-num-batched-tokens") return ;;
        "plan --fleet") return ;;
        "plan --popularity") _loractl_words "uniform zipf:1.0 slora:0.1" "$current"; return ;;
        "plan --rate") return ;;
        "plan --tokens") return ;;
        "plan --trace") _loractl_paths "$current"; return ;;
        "plan --miss") return ;;
        "plan --max-loras") return ;;
        "plan --max-cpu-loras") return ;;
        "plan --max-lora-rank") return ;;
        "plan --processes") return ;;
        "plan --replicas") return ;;
        "plan --routing") _loractl_words "affinity random" "$current"; return ;;
        "plan --speculation") _loractl_words "eagle medusa ngram" "$current"; return ;;
        "plan --compare") _loractl_words "vllm sglang vllm,sglang" "$current"; return ;;
        "plan --sweep") _loractl_words "rank slots context" "$current"; return ;;
        "plan --plot") _loractl_words "term" "$current"; _loractl_paths "$current"; return ;;
        "plan --emit") _loractl_words "lorad vllm sglang k8s" "$current"; return ;;
        "plan --socket") _loractl_paths "$current"; return ;;
        "inspect --base") _loractl_paths "$current"; return ;;
        "inspect --max-lora-rank") return ;;
        "resize --out"|"resize -o") _loractl_paths "$current"; return ;;
        "resize --rank") return ;;
        "resize --energy") return ;;
        "push --version") return ;;
        "push --message"|"push -m") return ;;
        "push --reason"|"push -r") return ;;
        "push --if-generation") return ;;
        "push --socket") _loractl_paths "$current"; return ;;
        "push --timeout") return ;;
        "promote --check") _loractl_paths "$current"; return ;;
        "promote --reason"|"promote -r") return ;;
        "promote --if-generation") return ;;
        "promote --socket") _loractl_paths "$current"; return ;;
        "promote --timeout") return ;;
        "rollback --to") return ;;
        "rollback --reason"|"rollback -r") return ;;
        "rollback --if-generation") return ;;
        "rollback --socket") _loractl_paths "$current"; return ;;
        "rollback --timeout") return ;;
        "canary --percent") return ;;
        "canary --reason"|"canary -r") return ;;
        "canary --if-generation") return ;;
        "canary --socket") _loractl_paths "$current"; return ;;
        "canary --timeout") return ;;
        "list --tenant") return ;;
        "list --interval") return ;;
        "list --socket") _loractl_paths "$current"; return ;;
        "list --timeout") return ;;
        "show --socket") _loractl_paths "$current"; return ;;
        "show --timeout") return ;;
        "history --limit"|"history -n") return ;;
        "history --socket") _loractl_paths "$current"; return ;;
        "history --timeout") return ;;
        "status --interval") return ;;
        "status --socket") _loractl_paths "$current"; return ;;
        "status --timeout") return ;;
        "top --interval") return ;;
        "top --socket") _loractl_paths "$current"; return ;;
        "top --timeout") return ;;
        "doctor --socket") _loractl_paths "$current"; return ;;
        "doctor --timeout") return ;;
        "load --socket") _loractl_paths "$current"; return ;;
        "load --timeout") return ;;
        "unload --drain-timeout") return ;;
        "unload --socket") _loractl_paths "$current"; return ;;
        "unload --timeout") return ;;
        "pin --socket") _loractl_paths "$current"; return ;;
        "pin --timeout") return ;;
        "unpin --socket") _loractl_paths "$current"; return ;;
        "unpin --timeout") return ;;
        "delete --socket") _loractl_paths "$current"; return ;;
        "delete --timeout") return ;;
        "gc --keep") return ;;
        "gc --socket") _loractl_paths "$current"; return ;;
        "gc --timeout") return ;;
        "drain --drain-timeout") return ;;
        "drain --socket") _loractl_paths "$current"; return ;;
        "drain --timeout") return ;;
        "resume --socket") _loractl_paths "$current"; return ;;
        "resume --timeout") return ;;
        "events --after") return ;;
        "events --socket") _loractl_paths "$current"; return ;;
        "operation --socket") _loractl_paths "$current"; return ;;
        "operation --timeout") return ;;
        "version --socket") _loractl_paths "$current"; return ;;
    esac

    case $command in
        "") _loractl_words "plan inspect resize push promote rollback canary list show history status top doctor load unload pin unpin delete gc drain resume events operation version --install-completion --show-completion --help -h" "$current" ;;
        plan)
            _loractl_words "--model --rank --adapters --spectrum --targets --dtype --kv-dtype --gpu --vram --slab --host-ram --gpu-memory-utilization --disk-gb-s --context --concurrency --tp --max-num-batched-tokens --fleet --popularity --rate --tokens --trace --miss --max-loras --max-cpu-loras --max-lora-rank --processes --replicas --routing --speculation --compare --explain --sweep --plot --emit --check --socket --json --help -h" "$current" ;;
        inspect)
            if [[ $current == -* ]]; then _loractl_words "--base --strict --max-lora-rank --stats --spectrum --json --help -h" "$current"; else _loractl_paths "$current"; fi ;;
        resize)
            if [[ $current == -* ]]; then _loractl_words "--out -o --rank --energy --json --help -h" "$current"; else _loractl_paths "$current"; fi ;;
        push)
            if [[ $current == -* ]]; then _loractl_words "--version --message -m --promote --reason -r --if-generation --dry-run --detach --wait --socket --timeout --json --help -h" "$current"; else _loractl_paths "$current"; fi ;;
        promote)
            _loractl_words "--check --reason -r --if-generation --dry-run --detach --wait --socket --timeout --json --help -h" "$current" ;;
        rollback)
            _loractl_words "--to --reason -r --if-generation --dry-run --detach --wait --socket --timeout --json --help -h" "$current" ;;
        canary)
            _loractl_words "--percent --off --auto-rollback --reason -r --if-generation --dry-run --detach --wait --socket --timeout --json --help -h" "$current" ;;
        list)
            _loractl_words "--tenant --watch -w --interval --socket --timeout --json --help -h" "$current" ;;
        show)
            _loractl_words "--socket --timeout --json --help -h" "$current" ;;
        history)
            _loractl_words "--limit -n --socket --timeout --json --help -h" "$current" ;;
        status)
            _loractl_words "--watch -w --interval --socket --timeout --json --help -h" "$current" ;;
        top)
            _loractl_words "--once --interval --socket --timeout --json --help -h" "$current" ;;
        doctor)
            _loractl_words "--socket --timeout --json --help -h" "$current" ;;
        load)
            _loractl_words "--pin --dry-run --detach --wait --socket --timeout --json --help -h" "$current" ;;
        unload)
            _loractl_words "--force --drain-timeout --dry-run --detach --wait --socket --timeout --json --help -h" "$current" ;;
        pin)
            _loractl_words "--dry-run --socket --timeout --json --help -h" "$current" ;;
        unpin)
            _loractl_words "--dry-run --socket --timeout --json --help -h" "$current" ;;
        delete)
            _loractl_words "--yes -y --force --dry-run --detach --wait --socket --timeout --json --help -h" "$current" ;;
        gc)
            _loractl_words "--keep --dry-run --detach --wait --socket --timeout --json --help -h" "$current" ;;
        drain)
            _loractl_words "--drain-timeout --dry-run --socket --timeout --json --help -h" "$current" ;;
        resume)
            _loractl_words "--dry-run --socket --timeout --json --help -h" "$current" ;;
        events)
            _loractl_words "--after --follow -f --socket --json --help -h" "$current" ;;
        operation)
            _loractl_words "--wait --socket --timeout --json --help -h" "$current" ;;
        version)
            _loractl_words "--socket --json --help -h" "$current" ;;
    esac
}

complete -F _loractl loractl
