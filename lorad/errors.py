"""Every error a user can meet: a stable dotted code, what was wrong, where, and a hint.

One table gives each code its class; the class gives the HTTP status on the admin socket and
the exit code of the command line, so that the three can never disagree.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class ErrorClass(Enum):
    """What kind of failure a code is: (HTTP status, exit code)."""

    NEGATIVE = (422, 1)
    USAGE = (400, 2)
    UNREACHABLE = (503, 3)
    PERMISSION = (403, 4)
    NOT_FOUND = (404, 5)
    NOT_ALLOWED = (405, 2)
    INVALID_ADAPTER = (422, 6)
    CONFLICT = (409, 7)
    NO_CAPACITY = (503, 8)
    TIMEOUT = (504, 9)
    INTERNAL = (500, 10)

    @property
    def http_status(self) -> int:
        return self.value[0]

    @property
    def exit_code(self) -> int:
        return self.value[1]


_INVALID = ErrorClass.INVALID_ADAPTER

ERROR_CODES: dict[str, ErrorClass] = {
    # The answer to a question that was asked is no.
    "check.failed": ErrorClass.NEGATIVE,
    # What a person or a client typed.
    "usage.invalid": ErrorClass.USAGE,
    "name.invalid": ErrorClass.USAGE,
    "name.reserved": ErrorClass.USAGE,
    "request.invalid": ErrorClass.USAGE,
    "request.too_large": ErrorClass.USAGE,
    "request.context_length": ErrorClass.USAGE,
    "config.invalid": ErrorClass.USAGE,
    "config.unknown_key": ErrorClass.USAGE,
    "model.invalid": ErrorClass.USAGE,
    "model.unsupported": ErrorClass.USAGE,
    # What does not exist.
    "path.not_found": ErrorClass.NOT_FOUND,
    "model.not_found": ErrorClass.NOT_FOUND,
    "adapter.not_found": ErrorClass.NOT_FOUND,
    "version.not_found": ErrorClass.NOT_FOUND,
    "upload.not_found": ErrorClass.NOT_FOUND,
    "operation.not_found": ErrorClass.NOT_FOUND,
    "route.not_found": ErrorClass.NOT_FOUND,
    "route.method_not_allowed": ErrorClass.NOT_ALLOWED,
    # An adapter that would be served wrong, or cannot be served at all.
    "adapter.config_missing": _INVALID,
    "adapter.config_invalid": _INVALID,
    "adapter.weights_missing": _INVALID,
    "adapter.unsafe_format": _INVALID,
    "adapter.weights_corrupt": _INVALID,
    "adapter.empty_tensor": _INVALID,
    "adapter.nonfinite_weights": _INVALID,
    "adapter.zero_delta": _INVALID,
    "adapter.rank_exceeds_max": _INVALID,
    "adapter.rank_mismatch": _INVALID,
    "adapter.shape_mismatch": _INVALID,
    "adapter.dtype_unsupported": _INVALID,
    "adapter.base_mismatch": _INVALID,
    "adapter.no_module_matched": _INVALID,
    "adapter.unmatched_tensor": _INVALID,
    "adapter.unpaired_tensor": _INVALID,
    "adapter.target_unsupported": _INVALID,
    "adapter.pattern_unsupported": _INVALID,
    "adapter.scaling_invalid": _INVALID,
    "adapter.config_key_unsupported": _INVALID,
    "adapter.dora_unsupported": _INVALID,
    "adapter.lora_bias_unsupported": _INVALID,
    "adapter.bias_unsupported": _INVALID,
    "adapter.modules_to_save_unsupported": _INVALID,
    "adapter.alora_unsupported": _INVALID,
    "adapter.init_mutates_base": _INVALID,
    "adapter.too_large": _INVALID,
    "selftest.failed": _INVALID,
    # Two things that cannot both be.
    "version.exists": ErrorClass.CONFLICT,
    "version.live": ErrorClass.CONFLICT,
    "version.failed": ErrorClass.CONFLICT,
    "version.pinned": ErrorClass.CONFLICT,
    "version.canary": ErrorClass.CONFLICT,
    "canary.no_live": ErrorClass.CONFLICT,
    "generation.changed": ErrorClass.CONFLICT,
    "idempotency.conflict": ErrorClass.CONFLICT,
    "rollback.no_previous": ErrorClass.CONFLICT,
    "upload.incomplete": ErrorClass.CONFLICT,
    "daemon.already_running": ErrorClass.CONFLICT,
    "socket.in_use": ErrorClass.CONFLICT,
    # Who may do what, and what there is room for.
    "socket.permission": ErrorClass.PERMISSION,
    "path.permission": ErrorClass.PERMISSION,
    "auth.invalid_key": ErrorClass.PERMISSION,
    "memory.no_capacity": ErrorClass.NO_CAPACITY,
    "queue.full": ErrorClass.NO_CAPACITY,
    "store.no_space": ErrorClass.NO_CAPACITY,
    "output.failed": ErrorClass.NO_CAPACITY,
    "daemon.unreachable": ErrorClass.UNREACHABLE,
    "daemon.stopping": ErrorClass.UNREACHABLE,
    "daemon.draining": ErrorClass.UNREACHABLE,
    "operation.timeout": ErrorClass.TIMEOUT,
    "drain.timeout": ErrorClass.TIMEOUT,
    # What went wrong on our side.
    "adapter.load_failed": ErrorClass.INTERNAL,
    "store.digest_mismatch": ErrorClass.INTERNAL,
    "store.unavailable": ErrorClass.INTERNAL,
    "engine.failed": ErrorClass.INTERNAL,
    "engine.device_fault": ErrorClass.INTERNAL,
    "engine.hung": ErrorClass.UNREACHABLE,
    "engine.nonfinite_logits": ErrorClass.INTERNAL,
    "daemon.error": ErrorClass.INTERNAL,
    "daemon.version_mismatch": ErrorClass.INTERNAL,
}


class LoradError(Exception):
    """An error with a stable code; `details` holds plain JSON values (names, shapes, paths)."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        hint: str = "",
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = ERROR_CODES[code]
        self.code = code
        self.message = message
        self.hint = hint
        self.details = details or {}

    def to_dict(self, request_id: str = "") -> dict[str, Any]:
        """The `error` object of the admin API and of `loractl --json`."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "details": self.details,
            "request_id": request_id,
        }

    @classmethod
    def from_dict(cls, error: dict[str, Any]) -> LoradError:
        """Rebuild an error sent by a daemon; a code this version does not know is kept in text."""
        code = str(error.get("code", ""))
        message = str(error.get("message", "the daemon sent an error without a message"))
        if code not in ERROR_CODES:
            code, message = "daemon.error", f"{message} ({code})" if code else message
        details = error.get("details")
        return cls(
            code,
            message,
            hint=str(error.get("hint", "")),
            details=details if isinstance(details, dict) else {},
        )
