"""Settings: which source wins, what is refused, and where the error says it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lorad.config import (
    SETTINGS,
    Config,
    environment_name,
    load_config,
    parse_size,
    unknown_variables,
)
from lorad.errors import LoradError

# A value that is allowed and not the default, for every setting that is not a number or text.
_CHOSEN = {
    "model.dtype": "float16",
    "model.device": "cpu",
    "log.level": "debug",
    "memory.slab_bytes": "3MiB",
    "memory.host_cache_bytes": "3MiB",
    "engine.cuda_graphs": False,
}


def other_value(setting: str) -> object:
    default = SETTINGS[setting].default
    if setting in _CHOSEN:
        return _CHOSEN[setting]
    if isinstance(default, str):
        return "some text"
    return default + 1 if isinstance(default, int) else 0.5


def as_loaded(value: object) -> object:
    return 3 * 2**20 if value == "3MiB" else value


def written(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


@pytest.fixture
def toml(tmp_path: Path):
    return lambda text: written(tmp_path / "lorad.toml", text)


def refused(file: Path | None, environment: dict[str, str] | None = None, **flags) -> LoradError:
    with pytest.raises(LoradError) as error:
        load_config(file, environment or {}, {k.replace("__", "."): v for k, v in flags.items()})
    return error.value


# --- sources ----------------------------------------------------------------------------------


def test_the_nearer_source_wins(toml) -> None:
    file = toml("[server]\nport = 1001\nhost = 'file'\n\n[engine]\nmax_loras = 3\n")
    environment = {"LORAD_SERVER_PORT": "1002", "LORAD_SERVER_HOST": "env", "OTHER": "x"}
    loaded = load_config(file, environment, {"server.port": 1003, "server.host": None})
    config, origins = loaded.config, loaded.origins
    assert (config.server.port, origins["server.port"]) == (1003, "flag")
    assert (config.server.host, origins["server.host"]) == ("env", "LORAD_SERVER_HOST")
    assert (config.engine.max_loras, origins["engine.max_loras"]) == (3, f"{file}:6")
    assert (config.log.level, origins["log.level"]) == ("info", "default")
    assert origins.keys() == SETTINGS.keys()


def test_variables_that_mean_nothing_are_warned_of() -> None:
    known = dict.fromkeys([*map(environment_name, SETTINGS), "LORAD_CONFIG", "HOME"], "x")
    assert unknown_variables(known) == []
    assert unknown_variables({"LORAD_SERVR_PORT": "1", "LORAD_X": "1", **known}) == [
        "LORAD_SERVR_PORT is no setting; is LORAD_SERVER_PORT meant?",
        "LORAD_X is no setting",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "lorad.main", "check-config", "--json"],
        env={**os.environ, "LORAD_ENGINE_TREADS": "3"},
        capture_output=True,
        text=True,
    )
    assert "warning: LORAD_ENGINE_TREADS is no setting; is LORAD_ENGINE_THREADS" in done.stderr
    assert (done.returncode, json.loads(done.stdout)["schema"]) == (0, "lorad/config/v1")


def test_without_any_source_the_defaults_hold() -> None:
    loaded = load_config(None, {}, {})
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}
    assert dict(loaded.config.items()) == {name: key.default for name, key in SETTINGS.items()}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_can_come_from_every_source(setting: str, toml) -> None:
    value = other_value(setting)
    section, key = setting.split(".")
    sources = (
        (toml(f"[{section}]\n{key} = {json.dumps(value)}\n"), {}, {}),
        (None, {environment_name(setting): str(value)}, {}),
        (None, {}, {setting: value}),
    )
    for file, environment, flags in sources:
        loaded = load_config(file, environment, flags)
        assert dict(loaded.config.items())[setting] == as_loaded(value)
        others = dict(loaded.config.items()).items() - {(setting, as_loaded(value))}
        assert all(SETTINGS[name].default == other for name, other in others)


@pytest.mark.parametrize("text", ["yes", "1", ""])
def test_a_truth_in_the_environment_is_true_or_false(text: str) -> None:
    with pytest.raises(LoradError) as error:
        load_config(None, {"LORAD_ENGINE_CUDA_GRAPHS": text}, {})
    assert "LORAD_ENGINE_CUDA_GRAPHS: engine.cuda_graphs is" in error.value.message
    loaded = load_config(None, {"LORAD_ENGINE_CUDA_GRAPHS": "false"}, {})
    assert loaded.config.engine.cuda_graphs is False


def test_names_in_the_environment() -> None:
    names = [environment_name(setting) for setting in SETTINGS]
    assert "LORAD_SERVER_PORT" in names
    assert "LORAD_MEMORY_SLAB_BYTES" in names
    assert len(set(names)) == len(SETTINGS)
    # The socket's is the one that loractl reads; the file's names no setting.
    assert environment_name("admin.socket") == "LORAD_SOCKET"
    assert "LORAD_CONFIG" not in names


# --- unknown keys -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("[server]\nport = 1\nprot = 2\n", 3, "server.prot"),
        ("# port\n\n[engine]\n# prot = 1\n  prot = 2\n", 5, "engine.prot"),
        ("[server]\nport = 1\n[engine]\nport = 2\n", 4, "engine.port"),
        ("server.port = 1\nserver.prot = 2\n", 2, "server.prot"),
        ("[server]\n'prot' = 2\n", 2, "server.prot"),
        ('[server]\n"prot" = 2\n', 2, "server.prot"),
        ("\nserver = { port = 1, prot = 2 }\n", 2, "server.prot"),
        ("[server]\nport = 1\n\n[server.tls]\ncert = 'x'\n", 4, "server.tls"),
        ("[server]\nport = 1\n\n[sever]\nport = 1\n", 4, "[sever]"),
        ("[ sever ]\nport = 1\n", 1, "[sever]"),
        ("[[server]]\nport = 1\n", 1, "[server]"),
        ("\nport = 8000\n", 2, "[port]"),
        ("\n\nsever.port = 8000\n", 3, "[sever]"),
    ],
)
def test_an_unknown_key_is_named_with_file_and_line(toml, text: str, line: int, what: str) -> None:
    file = toml(text)
    error = refused(file)
    assert error.code == "config.unknown_key"
    assert error.message == f"{file}:{line}: {what} is not a setting"
    assert ("server" if what.startswith("[") else what.split(".")[0] + "_")[0] in error.hint
    assert error.kind.exit_code == 2


def test_the_hint_names_what_is_known_there(toml) -> None:
    assert "known here: host, port, api_keys" in refused(toml("[server]\nprot = 1")).hint
    assert "known here: server, admin, model" in refused(toml("[sever]\nport = 1")).hint


# --- wrong values -----------------------------------------------------------------------------

WRONG = {
    "server.port": ["true", "8000.0", '"8000"', '"http"', "[8000]", "-1", "65536", "1979-05-27"],
    "server.host": ["8000", "true", "['a']"],
    "server.drain_timeout": ["-0.5", "3601", "nan", "inf", "true", '"30"'],
    "model.dtype": ['"fp16"', '""', "16"],
    "log.level": ['"INFO"', '"trace"'],
    "engine.max_num_seqs": ["0", "4097", "{ a = 1 }"],
    "engine.max_lora_rank": ["0", "513"],
    "memory.gpu_memory_utilization": ["0", "1", "1.0", "90"],
    "memory.slab_bytes": ["-1", "1.5", "true", '"2GB"', '"2 gib"', '"GiB"', '""', '"1e9"'],
}


@pytest.mark.parametrize(("setting", "value"), [(s, v) for s, vs in WRONG.items() for v in vs])
def test_a_wrong_value_is_named_with_file_and_line(toml, setting: str, value: str) -> None:
    section, key = setting.split(".")
    file = toml(f"# a comment\n[{section}]\n\n{key} = {value}\n")
    error = refused(file)
    assert error.code == "config.invalid"
    assert error.message.startswith(f"{file}:4: {setting} is ")
    assert error.hint
    assert error.details == {"key": setting}


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("server.port", "http"),
        ("server.port", ""),
        ("server.port", "80.5"),
        ("server.drain_timeout", "soon"),
        ("model.device", "tpu"),
        ("memory.slab_bytes", "lots"),
    ],
)
def test_a_wrong_value_in_the_environment_names_the_variable(setting: str, text: str) -> None:
    error = refused(None, {environment_name(setting): text})
    assert error.code == "config.invalid"
    assert error.message.startswith(f"{environment_name(setting)}: {setting} is ")


def test_a_wrong_flag_says_that_it_was_a_flag() -> None:
    assert refused(None, server__port=70000).message.startswith("flag: server.port is 70000")


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        ("server.port", "0", 0),
        ("server.port", "65535", 65535),
        ("engine.max_lora_rank", "512", 512),
        ("server.drain_timeout", "3600", 3600.0),
        ("memory.gpu_memory_utilization", "0.99", 0.99),
        ("engine.adapter_wait", "0", 0.0),
    ],
)
def test_bounds_belong_to_the_range(toml, setting: str, text: str, value: float) -> None:
    section, key = setting.split(".")
    for loaded in (
        load_config(toml(f"[{section}]\n{key} = {text}"), {}, {}),
        load_config(None, {environment_name(setting): text}, {}),
    ):
        got = dict(loaded.config.items())[setting]
        assert got == value
        assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("5B", 5),
        ("1KiB", 1024),
        ("2 MiB", 2 * 2**20),
        (" 8GiB ", 8 * 2**30),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["1GB", "1gib", "1.5GiB", "-1", "1 2", "", "GiB", -1, 1.0, True, None]
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match=r"is .*, not a size"):
        parse_size(text)


# --- broken files -----------------------------------------------------------------------------


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = refused(tmp_path / "none.toml")
    assert missing.code == "path.not_found"
    assert "none.toml" in missing.message
    for broken in (
        written(tmp_path / "syntax.toml", "[server\nport = 1"),
        written(tmp_path / "twice.toml", "[server]\nport = 1\nport = 2"),
        tmp_path,
    ):
        error = refused(broken)
        assert error.code == "config.invalid"
        assert error.message.startswith(f"{broken}: ")
    assert "line 1" in refused(tmp_path / "syntax.toml").message
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert refused(tmp_path / "binary.toml").code == "config.invalid"


def test_an_empty_file_is_a_file(toml) -> None:
    assert load_config(toml(""), {}, {}).config == Config()
    assert load_config(toml("[server]\n[log]\n"), {}, {}).config == Config()


# --- lorad check-config -----------------------------------------------------------------------


def check_config(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lorad.main", "check-config", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("LORAD_")},
            "PYTHONPATH": os.pathsep.join(sys.path),
            **environment,
        },
    )


def test_check_config_prints_values_and_where_they_come_from(toml) -> None:
    file = toml("[engine]\nmax_loras = 7\n[memory]\nslab_bytes = '2GiB'\n")
    done = check_config("--config", str(file), LORAD_SERVER_PORT="9000")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert list(rows) == list(SETTINGS)
    assert rows["engine.max_loras"] == ["7", f"{file}:2"]
    assert rows["memory.slab_bytes"] == [str(2**31), f"{file}:4"]
    assert rows["server.port"] == ["9000", "LORAD_SERVER_PORT"]
    assert rows["server.host"] == ["'127.0.0.1'", "default"]


def test_check_config_as_json(toml) -> None:
    file = toml("[engine]\nmax_loras = 7\n")
    done = check_config("--json", LORAD_CONFIG=str(file), LORAD_LOG_LEVEL="debug")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["schema"] == "lorad/config/v1"
    assert list(document["settings"]) == list(SETTINGS)
    assert document["settings"]["engine.max_loras"] == {"value": 7, "from": f"{file}:2"}
    assert document["settings"]["log.level"] == {"value": "debug", "from": "LORAD_LOG_LEVEL"}
    assert document["settings"]["server.port"] == {"value": 8000, "from": "default"}


def test_check_config_refuses_without_a_traceback(toml, tmp_path: Path) -> None:
    file = toml("[server]\nprot = 1\n")
    done = check_config("--config", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {file}:2: server.prot is not a setting")
    assert "hint:  known here: host, port" in done.stderr
    assert "Traceback" not in done.stderr

    done = check_config("--json", "--config", str(tmp_path / "none.toml"))
    assert (done.returncode, done.stdout) == (5, "")
    document = json.loads(done.stderr)
    assert document["schema"] == "lorad/error/v1"
    assert document["error"]["code"] == "path.not_found"
