"""What the manual pages say beside the commands: purpose, environment, files, examples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Manual:
    """`backticks` in texts mean bold; an example is (what for, command lines)."""

    tagline: str
    description: tuple[str, ...]
    exit_status: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, str], ...]
    examples: tuple[tuple[str, tuple[str, ...]], ...]
    see_also: tuple[str, ...]


_XDG_RUNTIME = (
    "XDG_RUNTIME_DIR",
    "The admin socket of a user other than root is `lorad/lorad.sock` in it; without it, "
    "`lorad-UID/lorad.sock` in the directory for temporary files.",
)
_HUB = (
    (
        "HF_TOKEN, HF_HOME, HF_ENDPOINT",
        "Access token, cache directory and address of the Hugging Face hub.",
    ),
    ("HF_HUB_OFFLINE", "Set to 1, nothing is ever fetched from the hub."),
)
_SOCKETS = (
    ("/run/lorad/lorad.sock", "Admin socket of a daemon that root started."),
    ("$XDG_RUNTIME_DIR/lorad/lorad.sock", "Admin socket of any other user's daemon."),
)
_DONE = ("0", "Done, or it was so already.")
_INTERRUPTED = ("130", "Interrupted by Ctrl-C.")
_NOBODY_READS = ("141", "Whoever read its output has gone, as after `| head`.")

LORAD = Manual(
    tagline="serve one base LLM and thousands of LoRA adapters at once",
    description=(
        "`lorad` loads a base model once and serves it through the OpenAI API together with any "
        "number of LoRA adapters; the `model` field of a request names the adapter. Every row "
        "of a batch may use a different adapter or none. KV cache and adapters share one slab of "
        "pages, and adapters move between the version store, host memory and the device as they "
        "are asked for.",
        "Adapters are pushed, promoted and rolled back with `loractl`, over an admin socket that "
        "only the daemon's user, root and the members of `admin.group` can use. The public port "
        "can change nothing.",
        "Settings come from options, then from `LORAD_*` variables, then from lorad.toml, then "
        "from their defaults; `lorad check-config` prints each with its origin.",
        "SIGTERM and SIGINT end the daemon: it takes no new requests, lets running ones go on "
        "for `server.drain_timeout` seconds, and removes its socket.",
        "SIGHUP reads the settings again, and the file of API keys. What can change while the "
        "daemon runs is taken over (lorad.toml(5) marks those settings), and the log names it; "
        "for the others it says that they wait for a restart. A file that is wrong changes "
        "nothing. A daemon whose terminal has been closed ends.",
    ),
    exit_status=(_DONE, _INTERRUPTED, _NOBODY_READS),
    environment=(
        ("LORAD_CONFIG", "Path of lorad.toml; `--config` goes before it."),
        (
            "LORAD_SOCKET",
            "Path of the admin socket; `--socket` and `admin.socket` go before it.",
        ),
        (
            "LORAD_SECTION_KEY",
            "Any setting: `LORAD_SERVER_PORT` is `port` in section `[server]`. All of them are "
            "in lorad.toml(5). Another name that begins with `LORAD_` is warned of.",
        ),
        _XDG_RUNTIME,
        (
            "XDG_CONFIG_HOME, XDG_STATE_HOME, XDG_CACHE_HOME",
            "Where configuration, state and cache lie, as under FILES.",
        ),
        *_HUB,
        ("CUDA_VISIBLE_DEVICES", "Which GPU is used; lorad uses the first one it sees."),
    ),
    files=(
        ("~/.config/lorad/lorad.toml, /etc/lorad/lorad.toml", "The first that exists is read."),
        *_SOCKETS,
        ("/var/lib/lorad, ~/.local/state/lorad", "Registry and version store: root's, a user's."),
    ),
    examples=(
        (
            "Try it on a CPU with a model from the hub:",
            ("lorad start --model HuggingFaceTB/SmolLM2-135M-Instruct --device cpu",),
        ),
        (
            "In the background, on a free port, with a log of its own:",
            ("lorad start --model ./model --port 0 --detach --log-file lorad.log", "lorad status"),
        ),
        (
            "From a configuration file, as a service would:",
            ("lorad check-config --config lorad.toml", "lorad start --config lorad.toml"),
        ),
        ("End it, giving its requests two minutes:", ("lorad stop --timeout 120",)),
    ),
    see_also=("loractl(1)", "lorad.toml(5)"),
)

LORACTL = Manual(
    tagline="size, inspect and manage LoRA adapters and their versions",
    description=(
        "`loractl` works beside the daemon `lorad`. `plan`, `inspect` and `resize` need no "
        "daemon, no GPU and no weights of a base model; the other commands talk to the daemon "
        "over its admin socket.",
        "An adapter has a name, `tenant/name` or `name`. Each push makes an immutable version "
        "of it: v1, v2 and so on. One version is live: the one that the bare name serves. "
        "`name@v3` names one version, in `loractl` as in the `model` field of a request.",
        "Data goes to stdout, everything else to stderr. With `--json` a command prints one JSON "
        "document whose `schema` tells its kind and version. An error ends with its code in "
        "brackets; docs/errors.md explains each.",
    ),
    exit_status=(_DONE, _INTERRUPTED, _NOBODY_READS),
    environment=(
        ("LORAD_SOCKET", "Path of the admin socket; `--socket` goes before it."),
        _XDG_RUNTIME,
        ("NO_COLOR", "Set to anything, no colours are printed."),
        *_HUB,
    ),
    files=_SOCKETS,
    examples=(
        (
            "How many adapters fit beside a model, and what other engines would reserve for them:",
            (
                "loractl plan --model llama-3.1-8b --rank 16 --gpu h100-80g --fleet 1000 \\",
                "    --compare vllm,sglang",
            ),
        ),
        (
            "Whether an adapter would be served right by this base model:",
            ("loractl inspect ./adapter --base ./model --stats",),
        ),
        (
            "Push a version, look at it, make it live, take it back:",
            (
                "loractl push acme/support ./adapter -m 'trained on the June tickets'",
                "loractl show acme/support@v2",
                "loractl promote acme/support v2 --reason 'better on refunds'",
                "loractl rollback acme/support --reason 'too terse'",
                "loractl history acme/support",
            ),
        ),
        (
            "In a script: promote only if nobody else moved the name meanwhile:",
            ("loractl promote acme/support v3 --if-generation 7 --json",),
        ),
    ),
    see_also=("lorad(1)", "lorad.toml(5)"),
)

MANUALS = {"lorad": LORAD, "loractl": LORACTL}
