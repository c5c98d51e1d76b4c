-- digestd's schema: its history as numbered sections, then the views.
--
-- Rules:
--   * A numbered section runs once, in one transaction that also sets PRAGMA user_version to its number.
--   * Never edit a section that has been released: append a new one, then refresh tests/schema.sql.
--   * Views hold no data. They are dropped and made again at each open, so they may be edited freely.
--   * Instants are INTEGER milliseconds since 1970 UTC and end in _at; spans end in _ms; v_* views show text.
--   * A CHECK names the states one by one, without IN: for a longer list SQLite builds a table in each statement, which
--     doubles what a small INSERT costs.
--   * Plain SQL only: no PRAGMA, no trigger, no function that the sqlite3 shell does not have (SQLite >= 3.37).


-- == 1: events, windows, runs, jobs, attempts, repeatables, subscribers, the in-app feed ==

CREATE TABLE meta (
    name        TEXT PRIMARY KEY,       -- what digestd remembers about itself: instance, config, last backup
    value       TEXT NOT NULL,
    updated_at  INTEGER NOT NULL
) STRICT;

CREATE TABLE subscribers (
    id              INTEGER PRIMARY KEY,
    subscriber_id   TEXT NOT NULL UNIQUE CHECK (subscriber_id <> ''),   -- the public id; other tables point here
    first_name      TEXT,
    last_name       TEXT,
    email           TEXT,
    phone           TEXT,
    avatar          TEXT,
    locale          TEXT,
    timezone        TEXT,               -- IANA name; NULL: the workflow's, else the daemon's
    data            TEXT,               -- JSON object, free
    schedule        TEXT,               -- JSON, weekly hours as in the API; NULL: always open
    credentials     TEXT,               -- JSON: by provider, what a chat or push provider needs to reach this one
    is_online       INTEGER CHECK (is_online IN (0, 1)),                -- as an app of yours told
    last_online_at  INTEGER,
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL
) STRICT;
CREATE INDEX subscribers_updated ON subscribers (updated_at, id);

CREATE TABLE preferences (              -- what a subscriber chose to get, or not
    id              INTEGER PRIMARY KEY,
    subscriber_id   TEXT NOT NULL,      -- public id
    workflow        TEXT NOT NULL,      -- '' = for every workflow without a choice of its own
    channel         TEXT NOT NULL CHECK (channel IN ('email', 'sms', 'push', 'chat', 'in_app')),
    enabled         INTEGER NOT NULL CHECK (enabled IN (0, 1)),
    updated_at      INTEGER NOT NULL,
    UNIQUE (subscriber_id, workflow, channel)
) STRICT;

CREATE TABLE senders (                  -- what is remembered of a sender; one that never failed has no row
    id              INTEGER PRIMARY KEY,
    name            TEXT NOT NULL UNIQUE,                               -- as in the config
    state           TEXT NOT NULL DEFAULT 'ok' CHECK (state = 'ok' OR state = 'disabled'),
    failures        INTEGER NOT NULL DEFAULT 0,                         -- in a row, since the last success
    failing_at      INTEGER,            -- when the first of them was
    failed_at       INTEGER,            -- when the last of them was
    disabled_at     INTEGER,
    cause           TEXT,               -- why disabled: gone (410), failing (for days), login (refused), person
    reason          TEXT,               -- the same with what the other side said
    CHECK ((state = 'disabled') = (disabled_at IS NOT NULL AND cause IS NOT NULL))
) STRICT;

CREATE TABLE digests (
    id              INTEGER PRIMARY KEY,
    workflow        TEXT NOT NULL,
    step            TEXT NOT NULL,      -- id of the digest step
    subscriber_id   TEXT NOT NULL,      -- public id
    key             TEXT NOT NULL,      -- canonical JSON of the digest key's value; '' = the group without one
    state           TEXT NOT NULL DEFAULT 'open' CHECK
                        (state = 'open' OR state = 'held' OR state = 'closed' OR state = 'discarded'),
    opened_at       INTEGER NOT NULL CHECK (opened_at > 100000000000),
    closes_at       INTEGER NOT NULL CHECK (closes_at > opened_at),     -- the plan, fixed by the first event
    due_at          INTEGER NOT NULL,   -- when it is looked at next: closes_at, or the end of a hold
    waits           INTEGER NOT NULL DEFAULT 0,                         -- holds for the subscriber's hours so far
    held_at         INTEGER,            -- when the latest hold began
    closed_at       INTEGER,            -- when it was closed or discarded
    reason          TEXT,               -- why it was discarded, or closed other than by time
    CHECK ((state = 'closed' OR state = 'discarded') = (closed_at IS NOT NULL))
) STRICT;
-- The key first: a trigger for many people opens, and later closes, windows that lie beside one another.
CREATE UNIQUE INDEX one_open_window ON digests (key, subscriber_id, workflow, step) WHERE state IN ('open', 'held');
CREATE INDEX digests_due ON digests (due_at) WHERE state IN ('open', 'held');

CREATE TABLE arrivals (                 -- what reached a digest step that starts when repeated, for its look-back
    id              INTEGER PRIMARY KEY,
    workflow        TEXT NOT NULL,
    step            TEXT NOT NULL,
    subscriber_id   TEXT NOT NULL,
    key             TEXT NOT NULL,
    event_id        INTEGER,            -- where it was one event: once that is cancelled, this does not count
    arrived_at      INTEGER NOT NULL
) STRICT;
CREATE INDEX arrivals_of_key ON arrivals (key, subscriber_id, workflow, step, arrived_at);
CREATE INDEX arrivals_arrived ON arrivals (arrived_at);

CREATE TABLE events (
    id              INTEGER PRIMARY KEY,
    workflow        TEXT NOT NULL,
    subscriber_id   TEXT NOT NULL,      -- public id; the subscriber is made when the event is placed
    payload         TEXT NOT NULL DEFAULT '{}',                         -- a JSON object, checked when it is placed
    transaction_id  TEXT,               -- the caller's id, recorded once per workflow and subscriber
    received_at     INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)),
    state           TEXT NOT NULL DEFAULT 'received' CHECK
                        (state = 'received' OR state = 'placed' OR state = 'cancelled' OR state = 'failed'),
    digest_id       INTEGER REFERENCES digests (id),                    -- its first window; NULL: it went on alone
    placed_at       INTEGER,
    finished_at     INTEGER,            -- when it was cancelled or failed
    reason          TEXT,
    CHECK ((state = 'cancelled' OR state = 'failed') = (finished_at IS NOT NULL)),
    CHECK (state <> 'placed' OR placed_at IS NOT NULL)
) STRICT;
CREATE UNIQUE INDEX events_transaction ON events (transaction_id, subscriber_id, workflow) WHERE transaction_id IS NOT NULL;
CREATE INDEX events_received ON events (id) WHERE state = 'received';
CREATE INDEX events_of_digest ON events (digest_id) WHERE digest_id IS NOT NULL;
CREATE INDEX events_failed ON events (id) WHERE state = 'failed';

CREATE TABLE repeatables (
    id              INTEGER PRIMARY KEY,
    key             TEXT NOT NULL,                                      -- identity: name, job id, end, zone, rule
    name            TEXT NOT NULL,
    job_id          TEXT,
    source          TEXT NOT NULL CHECK (source IN ('config', 'command', 'api')),
    cron            TEXT,               -- exactly one of cron and every_ms
    every_ms        INTEGER CHECK (every_ms > 0),
    align           TEXT NOT NULL DEFAULT 'clock' CHECK (align IN ('clock', 'start')),
    offset_ms       INTEGER NOT NULL DEFAULT 0 CHECK (offset_ms >= 0),
    anchor_at       INTEGER NOT NULL DEFAULT 0,                         -- what an interval counts from
    timezone        TEXT NOT NULL,
    start_at        INTEGER,            -- no slot before it
    end_at          INTEGER,            -- no slot after it
    run_limit       INTEGER CHECK (run_limit > 0),                      -- at most this many runs ever
    overlap         TEXT NOT NULL DEFAULT 'allow' CHECK (overlap IN ('allow', 'skip', 'queue')),
    missed          TEXT NOT NULL DEFAULT 'once' CHECK (missed IN ('once', 'skip', 'all')),
    jitter_ms       INTEGER NOT NULL DEFAULT 0 CHECK (jitter_ms >= 0),
    attempts        INTEGER CHECK (attempts > 0),                       -- tries of one run; NULL: as its sender has it
    backoff         TEXT,               -- JSON: waits between them; NULL: as its sender has it
    retention       TEXT,               -- JSON: how many ended runs are kept, and how long; NULL: as the daemon has it
    action          TEXT NOT NULL,      -- JSON: what a run does
    count           INTEGER NOT NULL DEFAULT 0,                         -- runs taken so far
    seq             INTEGER NOT NULL DEFAULT 0,                         -- number of the latest planned run
    behind          INTEGER NOT NULL DEFAULT 0,                         -- missed runs in a row that were made up for
    state           TEXT NOT NULL DEFAULT 'active' CHECK
                        (state = 'active' OR state = 'paused' OR state = 'finished' OR state = 'broken' OR state = 'retired'),
    reason          TEXT,
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL,
    finished_at     INTEGER,
    CHECK ((cron IS NULL) <> (every_ms IS NULL)),
    CHECK ((state = 'finished' OR state = 'retired') = (finished_at IS NOT NULL))
) STRICT;
CREATE UNIQUE INDEX one_spec ON repeatables (key) WHERE state <> 'retired';

CREATE TABLE runs (
    id              INTEGER PRIMARY KEY,
    workflow        TEXT,               -- NULL for a repeatable that sends a message or triggers
    subscriber_id   TEXT,
    event_id        INTEGER REFERENCES events (id),                     -- exactly one of these three began it
    digest_id       INTEGER REFERENCES digests (id),
    repeatable_id   INTEGER REFERENCES repeatables (id),
    seq             INTEGER,            -- of the repeatable's runs, from 1
    slot_at         INTEGER,            -- the planned instant of a repeatable's run
    taken_at        INTEGER,            -- when a repeatable's run was taken; NULL: it is the pending one
    count           INTEGER,            -- which of the repeatable's runs it was, from 1; NULL: not taken yet
    step            TEXT,               -- id of the step it began last; NULL: at the start
    next_at         INTEGER,            -- when its next step begins; NULL: a step is under way, or it is over
    state           TEXT NOT NULL DEFAULT 'active' CHECK
                        (state = 'active' OR state = 'completed' OR state = 'failed' OR state = 'cancelled' OR state = 'merged'),
    created_at      INTEGER NOT NULL,
    finished_at     INTEGER,
    reason          TEXT,
    CHECK ((event_id IS NOT NULL) + (digest_id IS NOT NULL) + (repeatable_id IS NOT NULL) = 1),
    CHECK ((repeatable_id IS NOT NULL) = (seq IS NOT NULL AND slot_at IS NOT NULL)),
    CHECK ((state = 'active') = (finished_at IS NULL))
) STRICT;
CREATE UNIQUE INDEX runs_event ON runs (event_id) WHERE event_id IS NOT NULL;
CREATE UNIQUE INDEX runs_digest ON runs (digest_id) WHERE digest_id IS NOT NULL;
CREATE UNIQUE INDEX runs_seq ON runs (repeatable_id, seq) WHERE repeatable_id IS NOT NULL;
CREATE UNIQUE INDEX one_pending_run ON runs (repeatable_id)
    WHERE repeatable_id IS NOT NULL AND taken_at IS NULL AND state = 'active';
CREATE INDEX runs_in_progress ON runs (repeatable_id)
    WHERE repeatable_id IS NOT NULL AND taken_at IS NOT NULL AND state = 'active';
CREATE INDEX runs_next ON runs (next_at) WHERE next_at IS NOT NULL;
CREATE INDEX runs_finished ON runs (finished_at) WHERE state IN ('completed', 'cancelled');

CREATE TABLE digest_runs (              -- a run that joined a later window, as a whole
    run_id          INTEGER PRIMARY KEY REFERENCES runs (id),
    digest_id       INTEGER NOT NULL REFERENCES digests (id),
    joined_at       INTEGER NOT NULL
) STRICT;
CREATE INDEX digest_runs_of_digest ON digest_runs (digest_id);

CREATE TABLE jobs (
    id              INTEGER PRIMARY KEY,
    run_id          INTEGER NOT NULL REFERENCES runs (id),
    step            TEXT NOT NULL,      -- id of the step; the repeatable's name for its runs
    type            TEXT NOT NULL,      -- email, sms, push, chat, in_app, delay, digest, message, trigger
    sender          TEXT,               -- name in the config
    state           TEXT NOT NULL CHECK
                        (state = 'delayed' OR state = 'waiting' OR state = 'active' OR state = 'completed'
                         OR state = 'failed' OR state = 'skipped' OR state = 'cancelled'),
    due_at          INTEGER NOT NULL,   -- when it may be taken
    tries           INTEGER NOT NULL DEFAULT 0,                         -- tries that reached a result and count for the plan
    waits           INTEGER NOT NULL DEFAULT 0,                         -- holds for the subscriber's hours so far
    public_id       TEXT NOT NULL,      -- the message's id outside: webhook-id, Message-ID; the same on every try
    message         TEXT,               -- JSON: the message as rendered at the first try, until the job is final
    created_at      INTEGER NOT NULL,
    taken_at        INTEGER,            -- when the latest try began
    lane            TEXT NOT NULL DEFAULT '',                           -- it waits for a try of this lane to end; '': for none
    finished_at     INTEGER,
    reason          TEXT,
    UNIQUE (run_id, step),
    CHECK ((state = 'delayed' OR state = 'waiting' OR state = 'active') = (finished_at IS NULL))
) STRICT;
CREATE INDEX jobs_delayed ON jobs (due_at) WHERE state = 'delayed';
CREATE INDEX jobs_waiting ON jobs (sender, lane, type = 'message', due_at) WHERE state = 'waiting';  -- repeatables last
CREATE INDEX jobs_active ON jobs (id) WHERE state = 'active';
CREATE INDEX jobs_failed ON jobs (id) WHERE state = 'failed';

CREATE TABLE attempts (                 -- one row per try, written before the send
    id              INTEGER PRIMARY KEY,
    job_id          INTEGER NOT NULL REFERENCES jobs (id),
    number          INTEGER NOT NULL,   -- 1 for the first
    started_at      INTEGER NOT NULL,
    finished_at     INTEGER,
    outcome         TEXT CHECK
                        (outcome = 'sent' OR outcome = 'temporary' OR outcome = 'permanent' OR outcome = 'interrupted'),
    status_code     INTEGER,            -- HTTP status or SMTP reply code
    enhanced_code   TEXT,               -- a mail server's finer one, such as 4.7.1
    reason          TEXT,               -- what the other side said, or what went wrong
    took_ms         INTEGER,
    UNIQUE (job_id, number),
    CHECK ((outcome IS NULL) = (finished_at IS NULL))
) STRICT;

CREATE TABLE inbox_messages (           -- the in-app feed
    id              INTEGER PRIMARY KEY,
    job_id          INTEGER NOT NULL UNIQUE REFERENCES jobs (id),
    public_id       TEXT NOT NULL UNIQUE,
    subscriber_id   TEXT NOT NULL,
    workflow        TEXT NOT NULL,
    subject         TEXT,
    body            TEXT,
    payload         TEXT NOT NULL,      -- JSON object: the first event's
    created_at      INTEGER NOT NULL,
    seen_at         INTEGER,
    read_at         INTEGER,
    archived_at     INTEGER,
    actions         TEXT                -- JSON: which of its buttons were pressed
) STRICT;
CREATE INDEX inbox_of_subscriber ON inbox_messages (subscriber_id, id);

CREATE TABLE answers (                  -- what a call with an Idempotency-Key was answered, for a day
    key             TEXT PRIMARY KEY,   -- with the way it came in: method, path, key
    body_hash       TEXT NOT NULL,
    status          INTEGER NOT NULL,
    body            TEXT NOT NULL,
    created_at      INTEGER NOT NULL
) STRICT;
CREATE INDEX answers_created ON answers (created_at);


-- == views ==

-- What time does the database think it is?
CREATE VIEW v_now AS
SELECT CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER) AS now_at,
       strftime('%Y-%m-%d %H:%M:%S', 'now') AS now_utc;

-- What should happen next or right now, and how late is it? The most overdue first.
CREATE VIEW v_due AS
SELECT what, id, name, strftime('%Y-%m-%d %H:%M:%S', due_at / 1000, 'unixepoch') AS due_utc,
       round((now_at - due_at) / 1000.0, 1) AS late_s
FROM (
    SELECT 'event' AS what, id, workflow AS name, received_at AS due_at FROM events WHERE state = 'received'
    UNION ALL
    SELECT 'digest', id, workflow || '/' || step || ' ' || subscriber_id || ' ' || key, due_at
    FROM digests WHERE state IN ('open', 'held')
    UNION ALL
    SELECT 'run', id, coalesce(workflow, ''), next_at FROM runs WHERE next_at IS NOT NULL
    UNION ALL
    SELECT 'job', id, step || coalesce(' by ' || sender, ''), due_at FROM jobs WHERE state = 'delayed'
    UNION ALL
    SELECT 'job', id, step || coalesce(' by ' || sender, ''), due_at FROM jobs WHERE state = 'waiting'
        AND NOT EXISTS (SELECT 1 FROM senders s WHERE s.name = jobs.sender AND s.state = 'disabled')
), v_now
ORDER BY due_at;

-- Where is my event? Each event with its window and what became of it.
CREATE VIEW v_journey AS
SELECT e.id AS event, e.transaction_id, e.workflow, e.subscriber_id,
       strftime('%Y-%m-%d %H:%M:%S', e.received_at / 1000, 'unixepoch') AS received_utc,
       e.state AS event_state, e.digest_id AS digest, d.state AS digest_state, r.id AS run, r.state AS run_state,
       j.id AS job, j.step, j.sender, j.state AS job_state, j.tries, coalesce(j.reason, r.reason, d.reason, e.reason) AS reason
FROM events e
LEFT JOIN digests d ON d.id = e.digest_id
LEFT JOIN runs r ON r.event_id = e.id OR r.digest_id = e.digest_id
LEFT JOIN jobs j ON j.run_id = r.id;

-- Which windows are there, with how much in them, closing when? Newest first.
CREATE VIEW v_digests AS
SELECT d.id, d.workflow, d.step, d.subscriber_id, d.key, d.state,
       (SELECT count(*) FROM events e WHERE e.digest_id = d.id AND e.state = 'placed')
       + (SELECT count(*) FROM digest_runs m WHERE m.digest_id = d.id) AS events,
       strftime('%Y-%m-%d %H:%M:%S', d.opened_at / 1000, 'unixepoch') AS opened_utc,
       strftime('%Y-%m-%d %H:%M:%S', d.closes_at / 1000, 'unixepoch') AS closes_utc,
       CASE WHEN d.state = 'held' THEN strftime('%Y-%m-%d %H:%M:%S', d.due_at / 1000, 'unixepoch') END AS held_until_utc,
       d.waits, strftime('%Y-%m-%d %H:%M:%S', d.closed_at / 1000, 'unixepoch') AS closed_utc,
       CASE WHEN d.state IN ('open', 'held') AND now_at > d.due_at THEN round((now_at - d.due_at) / 1000.0, 1) END AS late_s,
       d.reason
FROM digests d, v_now
ORDER BY d.id DESC;

-- Which repeatable jobs exist, how often did they run, when will they run next?
CREATE VIEW v_repeatables AS
SELECT s.id, s.name, s.job_id,
       CASE WHEN s.cron IS NOT NULL THEN 'cron ' || s.cron
            WHEN s.align = 'clock' AND s.offset_ms = 0 THEN 'every ' || s.every_ms || ' ms'
            WHEN s.align = 'clock' THEN 'every ' || s.every_ms || ' ms + ' || s.offset_ms || ' ms'
            ELSE 'every ' || s.every_ms || ' ms from ' || strftime('%Y-%m-%dT%H:%M:%SZ', s.anchor_at / 1000, 'unixepoch')
       END AS schedule, s.timezone,
       s.state, s.count, s.run_limit AS "limit",
       (SELECT strftime('%Y-%m-%d %H:%M:%S', p.slot_at / 1000, 'unixepoch') FROM runs p
        WHERE p.repeatable_id = s.id AND p.taken_at IS NULL AND p.state = 'active') AS next_utc,
       strftime('%Y-%m-%d %H:%M:%S', l.taken_at / 1000, 'unixepoch') AS last_run_utc,
       l.taken_at - l.slot_at AS last_late_ms, (SELECT j.state FROM jobs j WHERE j.run_id = l.id) AS last_state, s.source, s.key, s.reason
FROM repeatables s
LEFT JOIN runs l ON l.repeatable_id = s.id AND l.seq =
    (SELECT max(q.seq) FROM runs q WHERE q.repeatable_id = s.id AND q.taken_at IS NOT NULL)
ORDER BY next_utc IS NULL, next_utc, s.key;

-- How is each job doing? "retrying" looks after itself; "failed" needs a person. Newest first.
CREATE VIEW v_jobs AS
SELECT j.id, coalesce(r.workflow, s.name) AS owner, j.step, j.type, j.sender, r.subscriber_id, j.state,
       CASE WHEN j.state IN ('delayed', 'waiting') AND j.tries > 0 THEN 'retrying' ELSE j.state END AS shown,
       j.tries, strftime('%Y-%m-%d %H:%M:%S', j.due_at / 1000, 'unixepoch') AS due_utc,
       strftime('%Y-%m-%d %H:%M:%S', j.finished_at / 1000, 'unixepoch') AS finished_utc,
       (SELECT a.reason FROM attempts a WHERE a.job_id = j.id ORDER BY a.number DESC LIMIT 1) AS last_answer,
       j.reason, j.public_id, j.run_id AS run, r.digest_id AS digest, r.event_id AS event
FROM jobs j JOIN runs r ON r.id = j.run_id LEFT JOIN repeatables s ON s.id = r.repeatable_id
ORDER BY j.id DESC;

-- What did the other side say, each time? Newest first.
CREATE VIEW v_attempts AS
SELECT a.id, a.job_id AS job, a.number, j.sender, strftime('%Y-%m-%d %H:%M:%S', a.started_at / 1000, 'unixepoch') AS started_utc,
       a.took_ms, coalesce(a.outcome, 'under way') AS outcome, a.status_code, a.enhanced_code, a.reason
FROM attempts a JOIN jobs j ON j.id = a.job_id
ORDER BY a.id DESC;

-- Which senders failed, since when, and what waits for them?
CREATE VIEW v_senders AS
SELECT s.name, s.state, s.failures, strftime('%Y-%m-%d %H:%M:%S', s.failing_at / 1000, 'unixepoch') AS failing_since_utc,
       strftime('%Y-%m-%d %H:%M:%S', s.failed_at / 1000, 'unixepoch') AS last_failure_utc,
       strftime('%Y-%m-%d %H:%M:%S', s.disabled_at / 1000, 'unixepoch') AS disabled_utc, s.cause,
       (SELECT count(*) FROM jobs j WHERE j.sender = s.name AND j.state = 'waiting') AS waiting, s.reason
FROM senders s ORDER BY s.name;

-- What will not mend itself? Empty is good.
CREATE VIEW v_trouble AS
SELECT 'job failed' AS what, j.id, coalesce(r.workflow, s.name) || '/' || j.step AS name, r.subscriber_id,
       strftime('%Y-%m-%d %H:%M:%S', j.finished_at / 1000, 'unixepoch') AS since_utc, j.reason,
       'mend the cause, then: digestd retry ' || j.id AS hint
FROM jobs j JOIN runs r ON r.id = j.run_id LEFT JOIN repeatables s ON s.id = r.repeatable_id
WHERE j.state = 'failed'
UNION ALL
SELECT 'event failed', id, workflow, subscriber_id, strftime('%Y-%m-%d %H:%M:%S', finished_at / 1000, 'unixepoch'), reason,
       'trigger it again as it should be'
FROM events WHERE state = 'failed'
UNION ALL
SELECT 'sender disabled', s.id, s.name, NULL, strftime('%Y-%m-%d %H:%M:%S', s.disabled_at / 1000, 'unixepoch'),
       s.reason || '; ' || (SELECT count(*) FROM jobs j WHERE j.sender = s.name AND j.state = 'waiting') || ' jobs wait',
       'mend the cause, then: digestd sender enable ' || s.name
FROM senders s WHERE s.state = 'disabled'
UNION ALL
SELECT 'repeatable broken', id, name, NULL, strftime('%Y-%m-%d %H:%M:%S', updated_at / 1000, 'unixepoch'), reason,
       'mend its rule where it was added'
FROM repeatables WHERE state = 'broken'
UNION ALL
SELECT what || ' overdue', id, name, NULL, due_utc, 'due ' || CAST(late_s AS INTEGER) || ' s ago',
       'is the daemon running? digestd status'
FROM v_due WHERE late_s > 300;
