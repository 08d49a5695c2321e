"""The ledger's tables: what they are, how those of earlier versions become them, and what a connection sees of them.

A connection is of everything (the worker's, the supervisor's, who cleans up), or of one tenant, and "" is the owner. Of
one tenant, the names of the tables are views of that tenant's rows (SHARE), whatever the statement: it cannot read
another's. Writing is to the table in `main`, and to rows that were found so; a statement that forgets it is an error of
SQLite's (a view cannot be written). `tenant()` in a statement is the connection's tenant, and `tenant_key(?)` an
idempotency key as that tenant's: no client can send the line break in it.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from groupwise.errors import GroupwiseError
from groupwise.store.tenants import OWNER, check_tenant

VERSION = 10  # `user_version` of these tables; a change of them is one more, with what it does to the one before
RATERS = """
    CREATE TABLE known_vote (                   -- what a rater said first of an answer to a prompt of `raters`
        sender TEXT NOT NULL,
        author TEXT NOT NULL,                   -- its user ('' is nobody in particular)
        prompt TEXT NOT NULL,                   -- its digest
        seq INTEGER NOT NULL,                   -- of the rating
        agreed INTEGER NOT NULL,                -- 1: it was as good as the rating said
        PRIMARY KEY (sender, author, prompt)
    );
    CREATE TABLE distrusted (                   -- raters whose ratings count nowhere
        sender TEXT NOT NULL,
        author TEXT NOT NULL,
        at REAL NOT NULL,
        PRIMARY KEY (sender, author)
    )
"""
_BASE = "json_extract({0}config, '$.base_adapter')"
# the name of the adapter that a job continues, of "name" or "name@3"; null for none, or where `config` is damaged
READS = f"CASE json_valid({{0}}config) WHEN 1 THEN substr({_BASE}, 1, instr({_BASE} || '@', '@') - 1) END"
TURNS = f"""
    CREATE INDEX job_turn ON job (turn);
    CREATE INDEX job_own ON job (tenant, adapter, own);
    CREATE INDEX job_makes ON job (tenant, adapter) WHERE finished_at IS NULL;
    CREATE INDEX job_reads ON job (tenant, {READS.format("")}) WHERE finished_at IS NULL
"""
QUEUE = """
    CREATE INDEX job_ahead ON job (tenant, own);
    CREATE INDEX job_behind ON job (tenant, own) WHERE finished_at IS NULL AND version IS NULL;
    CREATE INDEX job_waiting ON job (tenant) WHERE state = 'queued';
    CREATE INDEX job_deadline ON job (tenant, deadline) WHERE state = 'queued' AND deadline IS NOT NULL
"""
UPGRADES = {  # a version -> what makes the tables of the one before it into its own
    7: "ALTER TABLE rollout ADD COLUMN job TEXT; ALTER TABLE rollout ADD COLUMN reward REAL",
    8: f"""
        ALTER TABLE job ADD COLUMN tenant TEXT NOT NULL DEFAULT '';
        ALTER TABLE job ADD COLUMN turn INTEGER NOT NULL DEFAULT 0;
        CREATE INDEX job_tenant ON job (tenant, turn);
        ALTER TABLE rollout ADD COLUMN tenant TEXT NOT NULL DEFAULT '';
        ALTER TABLE rollout ADD COLUMN nth INTEGER NOT NULL DEFAULT 0;
        UPDATE rollout SET nth = seq;
        DROP INDEX rollout_age;
        DROP INDEX rollout_upto;
        CREATE INDEX rollout_age ON rollout (tenant, created_at);
        CREATE INDEX rollout_upto ON rollout (tenant, upto);
        CREATE INDEX rollout_nth ON rollout (tenant, nth);
        ALTER TABLE feedback ADD COLUMN tenant TEXT NOT NULL DEFAULT '';
        ALTER TABLE feedback ADD COLUMN nth INTEGER NOT NULL DEFAULT 0;
        UPDATE feedback SET nth = seq;
        CREATE INDEX feedback_tenant ON feedback (tenant, nth);
        ALTER TABLE feedback ADD COLUMN sender TEXT NOT NULL DEFAULT '';
        {RATERS}
    """,
    9: f"""
        ALTER TABLE job ADD COLUMN alone INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE job ADD COLUMN own REAL NOT NULL DEFAULT 0;
        ALTER TABLE job ADD COLUMN tokens INTEGER NOT NULL DEFAULT 0;
        UPDATE job SET turn = 0;
        {TURNS}
    """,
    10: f"ALTER TABLE job ADD COLUMN deadline REAL; {QUEUE}",
}
SCHEMA = """
    CREATE TABLE job (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order of submission
        id TEXT NOT NULL UNIQUE,
        kind TEXT NOT NULL,
        adapter TEXT NOT NULL,
        state TEXT NOT NULL DEFAULT 'queued',
        phase TEXT NOT NULL DEFAULT 'waiting',
        config TEXT NOT NULL,
        effective TEXT NOT NULL DEFAULT '{}',   -- fields of config that are null, and what acts in their place
        summary TEXT NOT NULL,
        auto_load INTEGER NOT NULL,
        cancel_requested INTEGER NOT NULL DEFAULT 0,
        attempt INTEGER NOT NULL DEFAULT 0,     -- how often it was leased: with the worker's name, the fencing token
        released INTEGER NOT NULL DEFAULT 0,    -- how many of these were orderly stops
        step INTEGER NOT NULL DEFAULT 0,
        steps INTEGER NOT NULL,
        metrics TEXT NOT NULL DEFAULT '{}',
        version TEXT,
        error TEXT,
        unhealthy TEXT,                         -- what was wrong at its end, so that its version was not activated
        created_at REAL NOT NULL,
        started_at REAL,
        finished_at REAL,
        worker TEXT,
        lease_until REAL NOT NULL DEFAULT 0,    -- monotonic clock
        lease_seconds REAL NOT NULL DEFAULT 0,
        -- deaths of the server while the job was leased, in a row without a step further than death_step
        server_deaths INTEGER NOT NULL DEFAULT 0,
        death_step INTEGER NOT NULL DEFAULT -1,
        swaps_begun INTEGER NOT NULL DEFAULT 0, -- that did not end, since the server died in them
        -- tokens: of a pass after memory ran out (else as configured), of the largest pass, of the longest sample
        micro_tokens INTEGER,
        pass_tokens INTEGER,
        least_tokens INTEGER,
        tenant TEXT NOT NULL DEFAULT '',        -- whose it is: "" is the owner
        turn INTEGER NOT NULL DEFAULT 0,        -- its tenant's clock when it was last set (ledger_turns)
        alone INTEGER NOT NULL DEFAULT 0,       -- 1: nothing is to be trained beside it (ledger_attempts)
        own REAL NOT NULL DEFAULT 0,            -- its adapter's clock when it was last set
        deadline REAL,                          -- when it is to have ended, seconds since 1970 (null: whenever)
        tokens INTEGER NOT NULL DEFAULT 0       -- that were trained, packed, again after a crash too
    );
    CREATE INDEX job_state ON job (state, seq);
    CREATE INDEX job_tenant ON job (tenant, turn);
    CREATE TABLE idempotency (
        key TEXT PRIMARY KEY,                   -- tenant_key
        fingerprint TEXT NOT NULL,
        job INTEGER NOT NULL REFERENCES job (seq) ON DELETE CASCADE,
        created_at REAL NOT NULL
    );
    CREATE INDEX idempotency_job ON idempotency (job);
    CREATE TABLE event (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        job INTEGER NOT NULL REFERENCES job (seq) ON DELETE CASCADE,
        at REAL NOT NULL,
        kind TEXT NOT NULL,
        level TEXT NOT NULL,
        message TEXT NOT NULL,
        data TEXT NOT NULL
    );
    CREATE INDEX event_job ON event (job, seq);
    CREATE TABLE rollout (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        prompt_ids BLOB NOT NULL,               -- int32: model.image_tokens.packed_ids
        completion_ids BLOB NOT NULL,           -- likewise
        logprobs BLOB NOT NULL,                 -- float64: they come back exactly
        version TEXT NOT NULL,
        temperature REAL NOT NULL,
        finish_reason TEXT NOT NULL,
        text TEXT NOT NULL,
        created_at REAL NOT NULL,
        reshaped TEXT NOT NULL DEFAULT '',      -- names, with spaces between: SamplingParams.reshaped
        upto INTEGER NOT NULL DEFAULT 0,        -- bytes of all rollouts up to this one, forgotten ones too
        kept BLOB,                              -- recorded.SamplingMask.to_bytes (null where it is not recorded)
        kept_logprobs BLOB,                     -- a float64 for each token (null likewise)
        routed_experts BLOB,                    -- recorded.RoutedExperts.to_bytes (null likewise)
        job TEXT,                               -- the newest that was posted it (null before)
        reward REAL,                            -- its reward there (null likewise)
        tenant TEXT NOT NULL DEFAULT '',
        nth INTEGER NOT NULL DEFAULT 0          -- of its tenant's, as `upto` is
    );
    CREATE INDEX rollout_age ON rollout (tenant, created_at);
    CREATE INDEX rollout_upto ON rollout (tenant, upto);
    CREATE INDEX rollout_nth ON rollout (tenant, nth);
    CREATE TABLE feedback (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        key TEXT UNIQUE,                        -- tenant_key of the idempotency key it came with
        fingerprint TEXT NOT NULL,
        rollout TEXT NOT NULL,
        version TEXT NOT NULL,                  -- what sampled that rollout
        score REAL,                             -- 0 to 1
        correction TEXT,
        worse TEXT,                             -- a rollout of the same prompt that is worse
        sender TEXT NOT NULL DEFAULT '',        -- the name of the key it came with ('' is the owner's, or none)
        author TEXT,                            -- its `user`
        comment TEXT,
        created_at REAL NOT NULL,
        trained_by TEXT,                        -- the job that took it (null while it waits)
        failures INTEGER NOT NULL DEFAULT 0,    -- jobs that took it and failed
        tenant TEXT NOT NULL DEFAULT '',
        nth INTEGER NOT NULL DEFAULT 0          -- of its tenant's
    );
    CREATE INDEX feedback_tenant ON feedback (tenant, nth);
    CREATE INDEX feedback_rollout ON feedback (rollout);
    CREATE INDEX feedback_worse ON feedback (worse);
    CREATE INDEX feedback_waiting ON feedback (trained_by, seq);
    CREATE TABLE transition (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        kind TEXT NOT NULL,
        message TEXT NOT NULL,
        data TEXT NOT NULL
    );
    CREATE TABLE setting (
        key TEXT PRIMARY KEY,
        value TEXT NOT NULL                     -- JSON
    );
""" + ";".join((RATERS, TURNS, QUEUE))

READABLE = {  # what holds for every row that can be read
    "job": "json_valid(config) AND json_valid(summary) AND json_valid(metrics) AND json_valid(effective)"
    " AND (error IS NULL OR json_valid(error))"
    " AND state IN ('queued', 'running', 'completed', 'failed', 'cancelled')",
    "event": "json_valid(data)",
    "rollout": "length(prompt_ids) % 4 + length(completion_ids) % 4 + length(logprobs) % 8 = 0",
    "idempotency": "typeof(key) = 'text'",
    "feedback": "typeof(rollout) = 'text' AND (score IS NULL OR score BETWEEN 0 AND 1)",
    "transition": "json_valid(data)",
    "setting": "json_valid(value)",
    "known_vote": "agreed IN (0, 1)",
    "distrusted": "typeof(author) = 'text'",
}
# what a connection of the owner sees of each table; of a tenant's, NUMBERED stand in their place
_OF_JOBS = "WHERE EXISTS (SELECT 1 FROM main.job WHERE job.seq = mine.job AND job.tenant = '{tenant}')"
SHARE = {
    **dict.fromkeys(("job", "rollout", "feedback"), "SELECT * FROM main.{table} WHERE tenant = '{tenant}'"),
    **dict.fromkeys(("event", "idempotency"), f"SELECT * FROM main.{{table}} AS mine {_OF_JOBS}"),
    **dict.fromkeys(
        ("transition", "setting", "known_vote", "distrusted"), "SELECT * FROM main.{table} WHERE '{tenant}' = ''"
    ),
}
NUMBERED = {  # rows whose numbers a client is told: counted by the tenant's own, as the others would tell how many more
    **dict.fromkeys(
        ("rollout", "feedback"), "SELECT nth AS seq, {columns} FROM main.{table} WHERE tenant = '{tenant}'"
    ),
}


def create_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables in a new ledger, and bring those of versions in UPGRADES up to date. Raises GroupwiseError for
    another version."""
    if user_version_of(connection) == VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = user_version_of(connection)  # another process may have been first
        if found not in (0, *(version - 1 for version in UPGRADES), VERSION):
            age = "a newer groupwise" if found > VERSION else "an older groupwise"
            raise GroupwiseError(
                f"{path} was written by {age}: its tables are of version {found}, this one knows {VERSION}",
                hint=f"{'upgrade groupwise, or ' if found > VERSION else ''}give it another state directory",
            )
        steps = [step for version, step in UPGRADES.items() if version > found] if found else [SCHEMA]
        for statement in ";".join(steps).split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def user_version_of(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def see_as(db: sqlite3.Connection, tenant: str | None) -> None:
    """Make the names of the tables mean what a tenant sees; None: everything."""
    whose = OWNER if tenant is None else tenant
    db.create_function("tenant", 0, lambda: whose, deterministic=True)
    db.create_function("tenant_key", 1, lambda key: key and tenant_key(whose, key), deterministic=True)
    if tenant is None:
        return
    if tenant != OWNER:
        check_tenant(tenant)  # its name stands in the views
    db.execute("PRAGMA temp_store=MEMORY")
    for table, share in (SHARE if tenant == OWNER else {**SHARE, **NUMBERED}).items():
        names = [row["name"] for row in db.execute(f"PRAGMA main.table_info({table})") if row["name"] != "seq"]
        view = share.format(table=table, tenant=tenant, columns=", ".join(names))
        db.execute(f"CREATE TEMP VIEW {table} AS {view}")


def tenant_key(tenant: str | None, key: str) -> str:
    """Return an idempotency key as the ledger has it: no two tenants' are the same."""
    return f"{tenant}\n{key}" if tenant else key
