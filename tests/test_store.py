"""The database: migrations, models, moves, refusals, the sqlite3 shell's view of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess

import peewee
import pytest

import digestd
from conftest import ROOT, START


@pytest.fixture
def path(tmp_path):
    yield tmp_path / "d.sqlite3"
    digestd.close_store()


def schema_text(connection: sqlite3.Connection) -> str:
    found = connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY type, name").fetchall()
    return ";\n\n".join(sql for (sql,) in found) + ";\n"


def test_models_declare_exactly_the_columns_of_the_tables(path):
    digestd.open_store(str(path), START)
    tables = {
        name
        for (name,) in digestd.rows("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%'")
    }
    assert tables == {model._meta.table_name for model in digestd.TABLES}
    for model in digestd.TABLES:
        columns = {column.name: column for column in digestd.database.get_columns(model._meta.table_name)}
        assert set(columns) == set(model._meta.fields), model
        for name, field in model._meta.fields.items():
            assert columns[name].null == field.null or columns[name].primary_key, (model, name)


def test_the_schema_is_the_stored_one(path):
    """tests/schema.sql is the present state; migrations.sql its history. Refresh: PYTHONPATH=. python tests/test_store.py"""
    digestd.open_store(str(path), START)
    assert schema_text(digestd.database.connection()) == (ROOT / "tests" / "schema.sql").read_text("utf-8")


def test_every_table_is_strict_and_the_shell_needs_no_function_of_ours(path):
    digestd.open_store(str(path), START)
    digestd.close_store()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for (sql,) in connection.execute(
            "SELECT sql FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
        ):
            assert sql.endswith("STRICT")
        for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'view'").fetchall():
            connection.execute(f"SELECT * FROM {name}").fetchall()


def test_the_sqlite3_shell_reads_a_live_database(path):
    shell = shutil.which("sqlite3")
    if shell is None:
        shell = None
    digestd.open_store(str(path), START)
    command = [shell, "-readonly", str(path), "SELECT count(*) FROM v_trouble"] if shell else None
    if command:
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"
    else:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as other:
            assert other.execute("SELECT count(*) FROM v_trouble").fetchone() == (0,)


def test_a_crash_in_the_middle_of_a_section_leaves_the_former_schema(path):
    def crash(event: peewee.QueryEvent) -> None:
        if "CREATE TABLE jobs" in event.sql:
            raise KeyboardInterrupt

    digestd.database.query_hooks.append(crash)
    try:
        with pytest.raises(KeyboardInterrupt):
            digestd.open_store(str(path), START)
    finally:
        digestd.database.query_hooks.clear()
    digestd.close_store()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,)
    digestd.open_store(str(path), START)
    assert digestd.database.pragma("user_version") == digestd.read_migrations().version


def test_a_newer_database_is_refused_and_both_versions_are_named(path):
    digestd.open_store(str(path), START)
    digestd.database.execute_sql("PRAGMA user_version = 999")
    digestd.close_store()
    with pytest.raises(digestd.StoreError, match="schema 999.*up to 1"):
        digestd.open_store(str(path), START)


def test_a_database_of_before_the_first_release_is_refused_with_what_to_do(path):
    digestd.open_store(str(path), START)
    digestd.database.execute_sql("ALTER TABLE runs DROP COLUMN count")
    digestd.close_store()
    with pytest.raises(digestd.StoreError, match="before the first release.*count") as refused:
        digestd.open_store(str(path), START)
    assert "move the file away" in refused.value.hint


@pytest.mark.parametrize(
    "content", [b"this is a text file, not a database\n" * 100, b"SQLite format 3\0" + b"\xff" * 5000]
)
def test_a_file_that_is_no_database_is_refused_and_untouched(path, content):
    path.write_bytes(content)
    with pytest.raises(digestd.StoreError, match="not a database|malformed"):
        digestd.open_store(str(path), START)
    digestd.close_store()
    assert path.read_bytes() == content


def test_the_database_of_another_program_is_refused_and_untouched(path):
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(digestd.StoreError, match="another program"):
        digestd.open_store(str(path), START)
    digestd.close_store()
    assert path.read_bytes() == before


def test_files_are_closed_to_others_whatever_the_umask(path):
    old = os.umask(0)
    try:
        digestd.open_store(str(path), START)
        with digestd.transaction():
            digestd.remember("x", "y", START)
    finally:
        os.umask(old)
    for name in (path, f"{path}-wal", f"{path}-shm"):
        assert stat.S_IMODE(os.stat(name).st_mode) == 0o600, name


def test_only_one_daemon_may_hold_a_database(path):
    lock = digestd.InstanceLock(path)
    assert digestd.lock_holder(path) == str(os.getpid())
    with pytest.raises(digestd.StoreError, match=f"process {os.getpid()}"):
        digestd.InstanceLock(path)
    lock.release()
    assert digestd.lock_holder(path) is None
    digestd.InstanceLock(path).release()


@pytest.mark.parametrize(
    ("table", "pair"), [(table, pair) for table, moves in digestd.MOVES.items() for pair in sorted(moves)]
)
def test_a_move_happens_once_and_only_from_the_state_it_names(world, table, pair):
    w = world()
    model = next(model for model in digestd.TABLES if model._meta.table_name == table)
    old, new = pair
    w.trigger("comments", payload={"postId": 1})
    w.rows("INSERT INTO runs (event_id, state, created_at, finished_at) VALUES (1, 'active', ?, NULL)", START)
    w.rows(
        "INSERT INTO jobs (run_id, step, type, state, due_at, public_id, created_at) VALUES (1, 's', 'chat', 'waiting', 1, 'm', 1)"
    )
    w.rows("INSERT INTO repeatables (key, name, source, every_ms, timezone, action, created_at, updated_at)"
           " VALUES ('k', 'n', 'command', 1, 'UTC', '{}', 1, 1)")  # fmt: skip
    w.rows("INSERT INTO senders (name, cause) VALUES ('hook', 'gone')")
    ends = {
        "events": "finished_at",
        "digests": "closed_at",
        "runs": "finished_at",
        "jobs": "finished_at",
        "repeatables": "finished_at",
        "senders": "disabled_at",
    }[table]
    final = {
        "disabled",
        "cancelled",
        "failed",
        "closed",
        "discarded",
        "completed",
        "merged",
        "skipped",
        "finished",
        "retired",
    }
    w.rows(f"UPDATE {table} SET state = ?, {ends} = ? WHERE id = 1", old, START if old in final else None)
    facts = {ends: START if new in final else None}
    assert digestd.move(model, 1, old, new, **facts) is True
    assert digestd.move(model, 1, old, new, **facts) is (old == new)


def test_a_move_that_is_not_in_the_vocabulary_is_refused(world):
    world()
    with pytest.raises(digestd.IllegalMove):
        digestd.move(digestd.Job, 1, "completed", "waiting")
    with pytest.raises(digestd.IllegalMove):
        digestd.move_all(digestd.Digest, [1], "closed", "open")


def test_what_is_cached_is_dropped_when_another_program_commits(world):
    w = world()
    w.trigger("comments", payload={"postId": 1})
    assert digestd.database.open_windows
    with contextlib.closing(sqlite3.connect(w.path)) as other:
        other.execute("DELETE FROM events")
        other.execute("DELETE FROM digests")
        other.commit()
    w.trigger("comments", payload={"postId": 1, "n": 2})
    w.advance("10m")
    assert [[event["n"] for event in events] for events in w.digested()] == [[2]]


def test_a_failed_transaction_leaves_nothing_cached(world):
    w = world()
    trigger = digestd.check_trigger(w.config, {"name": "comments", "to": "s1", "payload": {}}, w.now)
    with pytest.raises(RuntimeError), digestd.transaction():
        _, events = digestd.record_trigger(trigger, w.now)
        digestd.place_event(w.config, events[0], w.now)
        raise RuntimeError
    assert digestd.database.open_windows == {} and w.one("SELECT count(*) FROM digests") == 0
    w.trigger("comments")
    assert w.one("SELECT count(*) FROM digests") == 1


def test_views_are_made_again_when_they_were_changed_by_hand(path):
    digestd.open_store(str(path), START)
    digestd.rows("DROP VIEW v_jobs")
    digestd.rows("CREATE VIEW v_jobs AS SELECT 1 AS x")
    digestd.open_store(str(path), START)
    assert "sender" in [column[0] for column in digestd.database.execute_sql("SELECT * FROM v_jobs").description]


if __name__ == "__main__":
    digestd.open_store(":memory:", START)
    (ROOT / "tests" / "schema.sql").write_text(schema_text(digestd.database.connection()), "utf-8")
