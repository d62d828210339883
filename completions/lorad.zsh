#compdef lorad
# zsh completion for lorad. Written by `make docs`; source it after compinit, or copy it as
# _lorad to a directory of $fpath.

_lorad_word_or_file() {
    _alternative "words:word:($*)" 'files:file:_files'
}

_lorad() {
    local context state state_descr line
    typeset -A opt_args
    local -a commands=(
        'start:Serve a base model and its adapters until SIGTERM or Ctrl-C; SIGHUP reloads settings'
        'stop:Ask the daemon to finish its running requests and end'
        'status:Whether the daemon runs, what it serves, and how full it is'
        'check-config:Print every setting'\''s effective value, and where it comes from'
        'version:Print the version'
    )
    _arguments -C \
        '(--install-completion)--install-completion[Install completion for the current shell.]' \
        '(--show-completion)--show-completion[Show completion for the current shell, to copy it or customize the installation.]' \
        '(--help -h)--help[Show the help and exit.]' \
        '(--help -h)-h[Show the help and exit.]' \
        '1: :->command' \
        '*:: :->arguments' && return
    case $state in
        command) _describe -t commands 'lorad command' commands ;;
        arguments)
            case $line[1] in
                start) _arguments \
                    '(--model)--model=[Directory of the base model, or its id on the hub.]:TEXT:_files' \
                    '(--name)--name=[Name of the base model in the API.]:TEXT: ' \
                    '(--device)--device=[auto, cpu or cuda.]:TEXT:(auto cpu cuda)' \
                    '(--dtype)--dtype=[auto, bfloat16, float16 or float32.]:TEXT:(auto bfloat16 float16 float32)' \
                    '(--max-model-len)--max-model-len=[Longest prompt and answer together, in tokens.]:N: ' \
                    '(--host)--host=[Address of the public API.]:TEXT: ' \
                    '(--port)--port=[Its port; 0 takes a free one.]:N: ' \
                    '(--socket)--socket=[Path of the admin socket.]:TEXT:_files' \
                    '(--max-num-seqs)--max-num-seqs=[Sequences that run at once.]:N: ' \
                    '(--max-num-batched-tokens)--max-num-batched-tokens=[Tokens computed in one step.]:N: ' \
                    '(--max-loras)--max-loras=[Different adapters in one step.]:N: ' \
                    '(--max-lora-rank)--max-lora-rank=[Largest rank accepted.]:N: ' \
                    '(--max-cpu-loras)--max-cpu-loras=[Adapters kept in host memory.]:N: ' \
                    '(--threads)--threads=[CPU threads of the engine.]:N: ' \
                    '(--cuda-graphs --no-cuda-graphs)--cuda-graphs[Replay captured decode steps.]' \
                    '(--cuda-graphs --no-cuda-graphs)--no-cuda-graphs[Replay captured decode steps.]' \
                    '(--slab-bytes)--slab-bytes=[Pages for KV and adapters, such as "8GiB".]:TEXT: ' \
                    '(--gpu-memory-utilization)--gpu-memory-utilization=[Share of the GPU'\''s memory that lorad may fill.]:X: ' \
                    '(--registry)--registry=[Directory of the registry and the version store.]:TEXT:_files' \
                    '(--registry-keep)--registry-keep=[Newest versions that stay after a promote; 0\: all.]:N: ' \
                    '(--api-keys)--api-keys=[File of bearer keys.]:TEXT:_files' \
                    '(--log-level)--log-level=[debug, info, warning or error.]:TEXT:(debug info warning error)' \
                    '(--config)--config=[Path of lorad.toml.]:PATH:_files' \
                    '(--detach)--detach[Return when the daemon is ready; it goes on.]' \
                    '(--log-file)--log-file=[With --detach\: where its log goes.]:PATH:_files' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
                stop) _arguments \
                    '(--socket)--socket=[Path of the admin socket.]:TEXT:_files' \
                    '(--timeout)--timeout=[Seconds to wait until it has ended.]:X: ' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
                status) _arguments \
                    '(--socket)--socket=[Path of the admin socket.]:TEXT:_files' \
                    '(--json)--json[Print JSON.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
                check-config) _arguments \
                    '(--config)--config=[Path of lorad.toml.]:PATH:_files' \
                    '(--json)--json[Print JSON.]' \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
                version) _arguments \
                    '(--help -h)--help[Show the help and exit.]' \
                    '(--help -h)-h[Show the help and exit.]' ;;
            esac
            ;;
    esac
}

if [[ $funcstack[1] == _lorad ]]; then
    _lorad "$@"
else
    compdef _lorad lorad
fi
