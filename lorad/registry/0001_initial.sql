-- Adapters, their immutable versions, the aliases that point at them, and what happened.

CREATE TABLE adapters (
    id          INTEGER PRIMARY KEY,
    base_model  TEXT NOT NULL,
    tenant      TEXT NOT NULL,
    name        TEXT NOT NULL,
    -- Counts changes of this adapter's aliases: a caller who read generation 3 may ask that
    -- its change be refused unless it is still 3.
    generation  INTEGER NOT NULL DEFAULT 0,
    -- The number that the next unlabelled push may take; it only grows, so a deleted label
    -- is never given to other content.
    next_number INTEGER NOT NULL DEFAULT 1,
    created_at  REAL NOT NULL,
    UNIQUE (base_model, tenant, name)
) STRICT;

CREATE TABLE versions (
    id              INTEGER PRIMARY KEY,
    adapter_id      INTEGER NOT NULL REFERENCES adapters (id),
    label           TEXT NOT NULL,
    digest          TEXT NOT NULL,
    -- available: may be served. failed: its files are gone or altered (`failure` says how).
    -- retired: deleted; the row stays so that the label keeps its meaning.
    state           TEXT NOT NULL CHECK (state IN ('available', 'failed', 'retired')),
    failure         TEXT NOT NULL DEFAULT '',
    pinned          INTEGER NOT NULL DEFAULT 0 CHECK (pinned IN (0, 1)),
    config_bytes    INTEGER NOT NULL,
    weights_bytes   INTEGER NOT NULL,
    max_rank        INTEGER NOT NULL,
    modules         INTEGER NOT NULL,
    targets         TEXT NOT NULL,  -- JSON array of linear names
    warnings        TEXT NOT NULL,  -- JSON array of [code, sentence]
    trained_on      TEXT NOT NULL,  -- base_model_name_or_path of the adapter's own config
    message         TEXT NOT NULL,
    created_at      REAL NOT NULL,
    created_uid     INTEGER NOT NULL,
    created_pid     INTEGER NOT NULL,
    UNIQUE (adapter_id, label),
    UNIQUE (adapter_id, digest)
) STRICT;

CREATE TABLE aliases (
    adapter_id  INTEGER NOT NULL REFERENCES adapters (id),
    alias       TEXT NOT NULL,
    version_id  INTEGER NOT NULL REFERENCES versions (id),
    since       REAL NOT NULL,
    PRIMARY KEY (adapter_id, alias)
) STRICT, WITHOUT ROWID;

CREATE INDEX aliases_by_version ON aliases (version_id);

-- One row for every change, in the same transaction as the change. `id` only grows.
CREATE TABLE events (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    adapter_id    INTEGER NOT NULL REFERENCES adapters (id),
    at            REAL NOT NULL,
    uid           INTEGER NOT NULL,
    pid           INTEGER NOT NULL,
    action        TEXT NOT NULL,
    alias         TEXT,  -- the alias that moved, NULL when none did
    from_version  TEXT,
    to_version    TEXT,
    generation    INTEGER NOT NULL,
    reason        TEXT NOT NULL
) STRICT;

CREATE INDEX events_by_adapter ON events (adapter_id, id);
