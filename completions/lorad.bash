# bash completion for lorad. Written by `make docs`; source it, or copy it as lorad to
# ~/.local/share/bash-completion/completions.
# shellcheck shell=bash

_lorad_words() {
    mapfile -t COMPREPLY < <(compgen -W "$1" -- "$2")
}

_lorad_paths() {
    compopt -o filenames 2>/dev/null
    mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$1")
}

_lorad() {
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
        "start --model") _lorad_paths "$current"; return ;;
        "start --name") return ;;
        "start --device") _lorad_words "auto cpu cuda" "$current"; return ;;
        "start --dtype") _lorad_words "auto bfloat16 float16 float32" "$current"; return ;;
        "start --max-model-len") return ;;
        "start --host") return ;;
        "start --port") return ;;
        "start --socket") _lorad_paths "$current"; return ;;
        "start --max-num-seqs") return ;;
        "start --max-num-batched-tokens") return ;;
        "start --max-loras") return ;;
        "start --max-lora-rank") return ;;
        "start --max-cpu-loras") return ;;
        "start --threads") return ;;
        "start --slab-bytes") return ;;
        "start --gpu-memory-utilization") return ;;
        "start --registry") _lorad_paths "$current"; return ;;
        "start --registry-keep") return ;;
        "start --api-keys") _lorad_paths "$current"; return ;;
        "start --log-level") _lorad_words "debug info warning error" "$current"; return ;;
        "start --config") _lorad_paths "$current"; return ;;
        "start --log-file") _lorad_paths "$current"; return ;;
        "stop --socket") _lorad_paths "$current"; return ;;
        "stop --timeout") return ;;
        "status --socket") _lorad_paths "$current"; return ;;
        "check-config --config") _lorad_paths "$current"; return ;;
    esac

    case $command in
        "") _lorad_words "start stop status check-config version --install-completion --show-completion --help -h" "$current" ;;
        start)
            _lorad_words "--model --name --device --dtype --max-model-len --host --port --socket --max-num-seqs --max-num-batched-tokens --max-loras --max-lora-rank --max-cpu-loras --threads --cuda-graphs --no-cuda-graphs --slab-bytes --gpu-memory-utilization --registry --registry-keep --api-keys --log-level --config --detach --log-file --help -h" "$current" ;;
        stop)
            _lorad_words "--socket --timeout --help -h" "$current" ;;
        status)
            _lorad_words "--socket --json --help -h" "$current" ;;
        check-config)
            _lorad_words "--config --json --help -h" "$current" ;;
        version)
            _lorad_words "--help -h" "$current" ;;
    esac
}

complete -F _lorad lorad
