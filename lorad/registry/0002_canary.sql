-- A canary is an alias beside `live`: its version takes a share of the bare name's requests.

ALTER TABLE aliases ADD COLUMN percent REAL CHECK (percent > 0 AND percent <= 100);
ALTER TABLE aliases ADD COLUMN auto_rollback INTEGER NOT NULL DEFAULT 0
    CHECK (auto_rollback IN (0, 1));

-- The share that an event gave to the canary, NULL for every other event.
ALTER TABLE events ADD COLUMN percent REAL;
