"""One line for every error code and class of lorad.errors: what docs/errors.md says of it."""

from __future__ import annotations

from lorad.errors import ErrorClass

CLASSES = {
    ErrorClass.NEGATIVE: "The answer is no: it does not fit, or a dry run would change something.",
    ErrorClass.USAGE: "What was typed or sent cannot be understood or is out of bounds.",
    ErrorClass.UNREACHABLE: "No daemon answers, or it is stopping.",
    ErrorClass.PERMISSION: "The caller may not do this.",
    ErrorClass.NOT_FOUND: "What was named does not exist.",
    ErrorClass.NOT_ALLOWED: "It exists, and does not take this method.",
    ErrorClass.INVALID_ADAPTER: "The adapter would be served wrong, so it is refused.",
    ErrorClass.CONFLICT: "It cannot be done in the present state of things.",
    ErrorClass.NO_CAPACITY: "There is no room for it now.",
    ErrorClass.TIMEOUT: "It took too long; what was begun may still go on.",
    ErrorClass.INTERNAL: "Something went wrong on the daemon's side; its log has the details.",
}

CODES = {
    "check.failed": "A prompt of `promote --check` was answered wrong; nothing was promoted.",
    "usage.invalid": "Options or arguments that do not go together, or a value out of bounds.",
    "name.invalid": "Not a name: each part is 1 to 64 of a-z 0-9 . _ - , with a letter or digit "
    "at both ends.",
    "name.reserved": "No adapter may have this name: the base model or a route has it, or it is "
    "`base`, which stands for the base model in answers.",
    "request.invalid": "A field of the request is missing, unknown, or has a wrong value.",
    "request.too_large": "The body of the request, or an uploaded file, exceeds its limit.",
    "request.context_length": "Prompt and answer together exceed the model's context length.",
    "config.invalid": "A setting's value is of the wrong kind, out of bounds, or cannot be used "
    "on this machine.",
    "config.unknown_key": "lorad.toml has a section or key that does not exist.",
    "model.invalid": "The base model's files contradict one another or cannot be read.",
    "model.unsupported": "The base model has an architecture or a feature that is not served.",
    "path.not_found": "A file or directory does not exist.",
    "model.not_found": "The base model is neither a directory here nor to be had from the hub.",
    "adapter.not_found": "No adapter has this name, or the caller's tenant may not see it.",
    "version.not_found": "The adapter has no such version.",
    "upload.not_found": "The upload does not exist, has been committed, or was idle too long.",
    "operation.not_found": "There is no operation with this id.",
    "route.not_found": "There is no such route.",
    "route.method_not_allowed": "The route is there for other methods; `allow` names them.",
    "adapter.config_missing": "The directory has no adapter_config.json.",
    "adapter.config_invalid": "adapter_config.json is not what PEFT writes: not JSON, or a value "
    "of the wrong kind.",
    "adapter.weights_missing": "The directory has no adapter_model.safetensors.",
    "adapter.unsafe_format": "The weights are a pickle, or a file is a link or no regular file.",
    "adapter.weights_corrupt": "The safetensors file is cut short or contradicts its own header.",
    "adapter.empty_tensor": "Tensors without numbers: a sharded trainer saved them ungathered.",
    "adapter.nonfinite_weights": "A tensor holds NaN or infinity, or would in the serving dtype.",
    "adapter.zero_delta": "The adapter changes nothing: every one of its deltas is zero.",
    "adapter.rank_exceeds_max": "A module's rank is above engine.max_lora_rank, or above 512.",
    "adapter.rank_mismatch": "The rank in the configuration is not the rank of the tensors.",
    "adapter.shape_mismatch": "A factor has a shape that no linear layer's factor can have.",
    "adapter.dtype_unsupported": "A tensor is neither float32 nor bfloat16 nor float16.",
    "adapter.base_mismatch": "The tensors belong to a base model of other shapes.",
    "adapter.no_module_matched": "Not one tensor belongs to a module of the base model.",
    "adapter.unmatched_tensor": "A tensor belongs to no module, or two claim the same place.",
    "adapter.unpaired_tensor": "A module has lora_A without lora_B, or the other way round.",
    "adapter.target_unsupported": "Factors on a module that is not served with LoRA, such as an "
    "embedding.",
    "adapter.pattern_unsupported": "A key of rank_pattern or alpha_pattern cannot be matched in "
    "bounded time.",
    "adapter.scaling_invalid": "alpha and rank give a scaling that is zero, infinite or absurd.",
    "adapter.config_key_unsupported": "adapter_config.json sets something that changes the maths "
    "and is not served, or not known.",
    "adapter.dora_unsupported": "DoRA adapters are not served.",
    "adapter.lora_bias_unsupported": "Biases on lora_B are not served.",
    "adapter.bias_unsupported": "Trained biases of the base model are not served.",
    "adapter.modules_to_save_unsupported": "Full copies of base modules are not served.",
    "adapter.alora_unsupported": "Activated LoRA is not served.",
    "adapter.init_mutates_base": "The adapter's initialisation changed the base model, so it does "
    "not belong to the plain one.",
    "adapter.too_large": "A file or header is larger than any adapter's.",
    "selftest.failed": "The engine adds another delta than the version's files say, or the version "
    "answers with NaN or not at all; nothing was promoted.",
    "version.exists": "The label or the content belongs to another version already.",
    "version.live": "The version is live; promote another one first.",
    "version.failed": "The version's stored files are damaged, so it cannot be served.",
    "version.pinned": "The version is pinned; unpin it first.",
    "version.canary": "The version is a canary; end that first.",
    "canary.no_live": "A canary needs a live version beside it; promote one first.",
    "idempotency.conflict": "The Idempotency-Key was used for another request already.",
    "generation.changed": "Somebody else moved the adapter meanwhile; look again, then decide.",
    "rollback.no_previous": "There is no earlier live version to go back to.",
    "upload.incomplete": "A file of the upload is missing, or another request is working on it.",
    "daemon.already_running": "Another daemon holds this socket or this state directory.",
    "socket.in_use": "The address or the path is taken by something else.",
    "socket.permission": "The socket may not be opened by this user, or not be made here.",
    "path.permission": "A file may not be read by this user.",
    "auth.invalid_key": "The API key is missing, unknown, or not allowed to do this.",
    "memory.no_capacity": "The device's pages cannot hold it beside what is in use.",
    "queue.full": "As many requests or uploads as allowed are under way; try again shortly.",
    "output.failed": "What the command prints cannot be written: the disk behind it is full, say.",
    "store.no_space": "The disk of the state directory is full.",
    "daemon.unreachable": "Nothing answers on the admin socket, or the connection broke off.",
    "daemon.stopping": "The daemon is ending and takes nothing new.",
    "daemon.draining": "The daemon was told to take no new requests; `loractl resume` ends that.",
    "operation.timeout": "No answer within the time given.",
    "drain.timeout": "Requests still use the version; nothing was unloaded.",
    "adapter.load_failed": "The version could not be brought into memory.",
    "store.digest_mismatch": "The stored files are not those that were pushed; never served.",
    "store.unavailable": "The state directory or its database cannot be used.",
    "engine.failed": "The engine failed in a step or at the start, or has ended, and the daemon "
    "with it.",
    "engine.device_fault": "The device has failed, which only a new process gets over: the daemon "
    "ends with this.",
    "engine.hung": "A step has not ended within `engine.step_timeout`; `/health` says so, and the "
    "watchdog is told no more.",
    "engine.nonfinite_logits": "The model computed NaN or infinity for this request alone.",
    "daemon.error": "A fault of the daemon's own.",
    "daemon.version_mismatch": "The daemon speaks another version of the admin API.",
}
