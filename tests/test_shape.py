"""The rules of the file itself: order of sections, the one clock, small functions, no await in a transaction."""

from __future__ import annotations

import ast
import re
import statistics

import digestd
from conftest import ROOT

SOURCE = (ROOT / "digestd.py").read_text("utf-8")
TREE = ast.parse(SOURCE)
BANNERS = [(int(n), name, SOURCE.count("\n", 0, m.start()) + 1)
           for m in re.finditer(r"^# -{100,}\n# (\d+) (\w+)\n# -{100,}$", SOURCE, re.MULTILINE)
           for n, name in [m.groups()]]  # fmt: skip


def section_of(line: int) -> int:
    return max((number for number, _, start in BANNERS if start <= line), default=0)


def defined() -> dict[str, int]:
    """Every name of the module, and the line that first gives it."""
    names: dict[str, int] = {}
    for node in TREE.body:
        targets: list[str] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            targets = [node.name]
        elif isinstance(node, ast.Assign):
            targets = [leaf.id for target in node.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            targets = [node.target.id]
        for name in targets:
            names.setdefault(name, node.lineno)
    return names


def functions() -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(TREE) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def test_sections_stand_in_the_order_of_the_map_and_the_map_names_each():
    in_map = re.findall(r"^ +(\d+) +([A-Z]\w+) ", digestd.__doc__, re.MULTILINE)
    assert [(int(number), name) for number, name in in_map] == [(number, name) for number, name, _ in BANNERS]
    assert [number for number, _, _ in BANNERS] == list(range(1, 18))


def test_a_section_uses_only_names_that_stand_above_it():
    names = defined()
    wrong = []
    for node in ast.walk(TREE):
        used = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names
        if used and section_of(node.lineno) < section_of(names[node.id]):
            wrong.append(f"line {node.lineno} uses {node.id}, which stands in section {section_of(names[node.id])}")
    assert wrong == []


def test_only_the_clock_reads_time():
    readers = {("time", "time"), ("time", "time_ns"), ("time", "monotonic"), ("time", "perf_counter"), ("datetime", "now"),
               ("datetime", "utcnow"), ("datetime", "today"), ("date", "today")}  # fmt: skip
    found = [
        node.lineno
        for node in ast.walk(TREE)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, (ast.Name, ast.Attribute))
        and (getattr(node.value, "id", getattr(node.value, "attr", "")), node.attr) in readers
    ]
    assert found and {section_of(line) for line in found} == {3}
    makers = [
        node.lineno
        for node in ast.walk(TREE)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "SystemClock"
    ]
    assert {section_of(line) for line in makers} == {17}
    assert "'now'" not in "".join(SOURCE.splitlines(keepends=True)[BANNERS[5][2] :])  # nor does a statement


def test_no_function_is_over_60_lines_and_most_are_under_30():
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions()}
    assert {name: length for name, length in lengths.items() if length > 60} == {}
    assert sum(length <= 30 for length in lengths.values()) / len(lengths) > 0.9
    assert statistics.median(lengths.values()) <= 12


def test_nothing_awaits_inside_a_transaction():
    openers = {"transaction", "savepoint", "atomic"}
    wrong = []
    for node in ast.walk(TREE):
        if isinstance(node, (ast.With, ast.AsyncWith)):
            called = {getattr(item.context_expr, "func", None) for item in node.items}
            if {getattr(func, "id", getattr(func, "attr", "")) for func in called} & openers:
                wrong += [inner.lineno for part in node.body for inner in ast.walk(part)
                          if isinstance(inner, (ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom))]  # fmt: skip
    stores = range(BANNERS[5][2], BANNERS[6][2])  # `transaction` and `savepoint` themselves yield to their caller
    assert [line for line in wrong if line not in stores] == []


def test_senders_know_neither_database_nor_config_nor_clock():
    start, end = BANNERS[10][2], BANNERS[11][2]
    used = {node.id for node in ast.walk(TREE) if isinstance(node, ast.Name) and start <= node.lineno < end}
    forbidden = {"database", "rows", "row", "execute", "insert", "move", "move_all", "transaction", "savepoint", "Config",
                 "config", "SystemClock", *(model.__name__ for model in digestd.TABLES)}  # fmt: skip
    assert used & forbidden == set()


def test_every_change_of_state_goes_through_move():
    start, end = BANNERS[5][2], BANNERS[6][2]
    found = [
        number
        for number, line in enumerate(SOURCE.splitlines(), 1)
        if re.search(r"SET (?:(?!WHERE)[^'\"])*\bstate\b *=", line)
    ]
    assert found and all(start <= line < end for line in found)


def test_states_in_code_are_the_states_of_the_schema():
    schema = (ROOT / "migrations.sql").read_text("utf-8")
    for table, moves in digestd.MOVES.items():
        body = re.search(rf"CREATE TABLE {table} \((.*?)\n\) STRICT;", schema, re.DOTALL)[1]
        states = set(re.findall(r"'(\w+)'", re.search(r"CHECK\s*\((state (?:=|IN) .*?)\),\n", body, re.DOTALL)[1]))
        assert {state for pair in moves for state in pair} == states, table


def test_every_command_and_stage_says_what_it_does():
    missing = [
        node.name
        for node in TREE.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    bare = {"Table", "CronField", "DaemonSettings", "ApiSettings", "SenderSettings", "WebhookSettings", "SmtpSettings",
            "SendmailSettings", "LogSettings", "StepSettings", "DigestStep", "DelayStep", "ChannelStep", "InAppStep", "WorkflowSettings",
            "RepeatableTrigger", "RepeatableSettings", "TriggerCall", "CancelCall", "Composed", "Sent", "Signal",
            *(model.__name__ for model in digestd.TABLES)}  # fmt: skip
    assert set(missing) - bare <= {"config_of", "show", "set_log_level", "forget_refusal", "remembered", "result_of"}
