"""docs/errors.md: every code, what it means, and how each interface reports it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from docgen.error_meanings import CLASSES, CODES
from lorad.errors import ERROR_CODES, ErrorClass, LoradError
from lorad.server.errors import public_error

_INTRO = """\
# Errors

Every error that a user can meet has a stable dotted code. Its class decides the HTTP status on
the admin socket and the exit status of `lorad` and `loractl`. Both print the error, its code in
brackets and a hint on stderr; with `--json` they print the same object that the admin API sends:

```json
{"error": {"code": "adapter.not_found", "message": "...", "hint": "...", "details": {},
           "request_id": "..."}}
```

`details` holds plain JSON values: names, shapes, paths, limits. Codes are never renamed.

This page is written by `make docs`."""

_PUBLIC = """\
## On the public port

OpenAI's clients get the body they expect: `{"error": {"message", "type", "param", "code"}}`. The
status is that of the class, except where OpenAI has a word of its own, and except that a refused
adapter or a conflict is 500 with `x-should-retry: false`: clients would retry 409."""

_NEVER_SENT = (ErrorClass.NEGATIVE, ErrorClass.INVALID_ADAPTER, ErrorClass.CONFLICT)


def errors_page() -> str:
    _check_complete()
    parts = [_INTRO, _classes()]
    parts += [_class(kind) for kind in CLASSES if kind in ERROR_CODES.values()]
    parts += [f"{_PUBLIC}\n\n{_public()}"]
    return "\n\n".join(parts) + "\n"


def _check_complete() -> None:
    """A code without a meaning, or a meaning without a code, stops the generator."""
    missing, extra = ERROR_CODES.keys() - CODES.keys(), CODES.keys() - ERROR_CODES.keys()
    if missing or extra or CLASSES.keys() != set(ErrorClass):
        raise ValueError(
            "docgen/error_meanings.py and lorad/errors.py differ: "
            f"without a meaning {sorted(missing)}, without a code {sorted(extra)}"
        )


def _classes() -> str:
    rows = [
        (kind.name.lower(), str(kind.http_status), str(kind.exit_code), meaning)
        for kind, meaning in CLASSES.items()
    ]
    return "## Classes\n\n" + _table(("Class", "HTTP status", "Exit status", "Meaning"), rows)


def _class(kind: ErrorClass) -> str:
    rows = [
        (f"`{code}`", str(kind.http_status), str(kind.exit_code), CODES[code])
        for code, its_kind in ERROR_CODES.items()
        if its_kind is kind
    ]
    heading = f"## {kind.name.lower()}"
    return f"{heading}\n\n" + _table(("Code", "HTTP", "Exit", "Meaning"), rows)


def _public() -> str:
    return _table(("Code", "Status", "`type`", "`code`"), list(_public_rows()))


def _public_rows() -> Iterator[tuple[str, ...]]:
    for code, kind in ERROR_CODES.items():
        public = public_error(LoradError(code, ""))
        own = public.code != code or public.status != kind.http_status
        if own and kind not in _NEVER_SENT:
            yield f"`{code}`", str(public.status), f"`{public.type}`", f"`{public.code}`"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
