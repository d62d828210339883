# fish completion for lorad. Written by `make docs`; source it, or copy it as lorad.fish to
# ~/.config/fish/completions.

function __lorad_command_is
    # The first word that is no option is the command; without an argument: there is none yet.
    for word in (commandline -opc)[2..]
        string match -q -- '-*' $word; and continue
        test (count $argv) -gt 0; and test $word = $argv[1]
        return
    end
    test (count $argv) -eq 0
end

complete -c lorad -f
complete -c lorad -n __lorad_command_is -l install-completion -d 'Install completion for the current shell.'
complete -c lorad -n __lorad_command_is -l show-completion -d 'Show completion for the current shell, to copy it or customize the installation.'
complete -c lorad -n __lorad_command_is -l help -s h -d 'Show the help and exit.'
complete -c lorad -n __lorad_command_is -a start -d 'Serve a base model and its adapters until SIGTERM or Ctrl-C; SIGHUP reloads settings'
complete -c lorad -n __lorad_command_is -a stop -d 'Ask the daemon to finish its running requests and end'
complete -c lorad -n __lorad_command_is -a status -d 'Whether the daemon runs, what it serves, and how full it is'
complete -c lorad -n __lorad_command_is -a check-config -d 'Print every setting\'s effective value, and where it comes from'
complete -c lorad -n __lorad_command_is -a version -d 'Print the version'
complete -c lorad -n "__lorad_command_is start" -l model -r -F -d 'Directory of the base model, or its id on the hub.'
complete -c lorad -n "__lorad_command_is start" -l name -x -d 'Name of the base model in the API.'
complete -c lorad -n "__lorad_command_is start" -l device -x -a 'auto cpu cuda' -d 'auto, cpu or cuda.'
complete -c lorad -n "__lorad_command_is start" -l dtype -x -a 'auto bfloat16 float16 float32' -d 'auto, bfloat16, float16 or float32.'
complete -c lorad -n "__lorad_command_is start" -l max-model-len -x -d 'Longest prompt and answer together, in tokens.'
complete -c lorad -n "__lorad_command_is start" -l host -x -d 'Address of the public API.'
complete -c lorad -n "__lorad_command_is start" -l port -x -d 'Its port; 0 takes a free one.'
complete -c lorad -n "__lorad_command_is start" -l socket -r -F -d 'Path of the admin socket.'
complete -c lorad -n "__lorad_command_is start" -l max-num-seqs -x -d 'Sequences that run at once.'
complete -c lorad -n "__lorad_command_is start" -l max-num-batched-tokens -x -d 'Tokens computed in one step.'
complete -c lorad -n "__lorad_command_is start" -l max-loras -x -d 'Different adapters in one step.'
complete -c lorad -n "__lorad_command_is start" -l max-lora-rank -x -d 'Largest rank accepted.'
complete -c lorad -n "__lorad_command_is start" -l max-cpu-loras -x -d 'Adapters kept in host memory.'
complete -c lorad -n "__lorad_command_is start" -l threads -x -d 'CPU threads of the engine.'
complete -c lorad -n "__lorad_command_is start" -l cuda-graphs -l no-cuda-graphs -d 'Replay captured decode steps.'
complete -c lorad -n "__lorad_command_is start" -l slab-bytes -x -d 'Pages for KV and adapters, such as "8GiB".'
complete -c lorad -n "__lorad_command_is start" -l gpu-memory-utilization -x -d 'Share of the GPU\'s memory that lorad may fill.'
complete -c lorad -n "__lorad_command_is start" -l registry -r -F -d 'Directory of the registry and the version store.'
complete -c lorad -n "__lorad_command_is start" -l registry-keep -x -d 'Newest versions that stay after a promote; 0: all.'
complete -c lorad -n "__lorad_command_is start" -l api-keys -r -F -d 'File of bearer keys.'
complete -c lorad -n "__lorad_command_is start" -l log-level -x -a 'debug info warning error' -d 'debug, info, warning or error.'
complete -c lorad -n "__lorad_command_is start" -l config -r -F -d 'Path of lorad.toml.'
complete -c lorad -n "__lorad_command_is start" -l detach -d 'Return when the daemon is ready; it goes on.'
complete -c lorad -n "__lorad_command_is start" -l log-file -r -F -d 'With --detach: where its log goes.'
complete -c lorad -n "__lorad_command_is start" -l help -s h -d 'Show the help and exit.'
complete -c lorad -n "__lorad_command_is stop" -l socket -r -F -d 'Path of the admin socket.'
complete -c lorad -n "__lorad_command_is stop" -l timeout -x -d 'Seconds to wait until it has ended.'
complete -c lorad -n "__lorad_command_is stop" -l help -s h -d 'Show the help and exit.'
complete -c lorad -n "__lorad_command_is status" -l socket -r -F -d 'Path of the admin socket.'
complete -c lorad -n "__lorad_command_is status" -l json -d 'Print JSON.'
complete -c lorad -n "__lorad_command_is status" -l help -s h -d 'Show the help and exit.'
complete -c lorad -n "__lorad_command_is check-config" -l config -r -F -d 'Path of lorad.toml.'
complete -c lorad -n "__lorad_command_is check-config" -l json -d 'Print JSON.'
complete -c lorad -n "__lorad_command_is check-config" -l help -s h -d 'Show the help and exit.'
complete -c lorad -n "__lorad_command_is version" -l help -s h -d 'Show the help and exit.'
