"""Alerts from a real Alertmanager: each becomes one event, however often it is told, and digests carry them."""

from __future__ import annotations

import datetime as dt
import json
import pathlib
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from conftest import ROOT, Process, free_port, program, wait_for
from peers import Receiver

KEY = "key-of-the-alerts"

# Alertmanager's shortest times, so that it re-sends while a test looks on.
CONFIG = """
route:
  receiver: digestd
  group_by: [alertname]
  group_wait: 200ms
  group_interval: 300ms
  repeat_interval: 300ms
receivers:
  - name: digestd
    webhook_configs:
      - url: http://127.0.0.1:{port}/v1/ingest/alertmanager/{workflow}?{to}
        send_resolved: true
        http_config:
          authorization:
            type: ApiKey
            credentials: {key}
"""

DAEMON = """
keys = ["{key}"]

[senders.hook]
type = "webhook"
url = "{url}"

[workflows.alerts]
[[workflows.alerts.steps]]
id = "digest"
type = "digest"
window = "1h"
[[workflows.alerts.steps]]
id = "chat"
type = "chat"
sender = "hook"
subject = "{{{{ steps.digest.eventCount }}}} alerts"
text = "{{% for e in steps.digest.events %}}{{{{ e.payload.status }}}} {{{{ e.payload.labels.alertname }}}}\\n{{% endfor %}}"
"""


class Alertmanager:
    """The process, its log, and a way to tell it of alerts."""

    def __init__(self, folder: pathlib.Path, daemon_port: int, key: str, to: str, workflow: str) -> None:
        self.port = free_port()
        (folder / "alertmanager.yml").write_text(CONFIG.format(port=daemon_port, key=key, to=to, workflow=workflow))
        self.console = folder / "alertmanager.log"
        self.process = subprocess.Popen(
            [
                program("prometheus-alertmanager"), f"--config.file={folder}/alertmanager.yml",
                f"--storage.path={folder}/alertmanager", f"--web.listen-address=127.0.0.1:{self.port}",
                "--cluster.listen-address=", "--log.level=debug",
            ],
            stdin=subprocess.DEVNULL, stdout=self.console.open("wb"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        wait_for(self._is_ready, what=f"Alertmanager\n{self.log()}")

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log()
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5).status == 200
        except OSError:
            return False

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)

    def log(self) -> str:
        return self.console.read_text("utf-8", "replace")

    def sends(self) -> int:
        """How many times it has told the receiver, as its own metrics count."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            name = 'alertmanager_notification_requests_total{integration="webhook"}'
            return next(int(line.rpartition(" ")[2]) for line in answer.read().decode().splitlines() if name in line)

    def tell(self, name: str, instance: str, resolved: bool = False, started: str = "2026-03-09T09:00:00Z") -> None:
        alert = {
            "labels": {"alertname": name, "instance": instance, "severity": "page"},
            "annotations": {"summary": f"{instance} über alles"},
            "startsAt": started,
            "generatorURL": "http://127.0.0.1/graph",
        }
        if resolved:
            alert["endsAt"] = dt.datetime.now(dt.UTC).isoformat()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/v2/alerts", json.dumps([alert]).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        assert urllib.request.urlopen(request, timeout=5).status == 200


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.stop()


@pytest.fixture
def process(daemon: Callable[..., Process], receiver: Receiver) -> Process:
    return daemon(DAEMON.format(key=KEY, url=receiver.url()))


@pytest.fixture
def start_alertmanager(process: Process, tmp_path: pathlib.Path) -> Iterator[Callable[..., Alertmanager]]:
    started: list[Alertmanager] = []

    def start(key: str = KEY, to: str = "to=oncall", workflow: str = "alerts") -> Alertmanager:
        started.append(Alertmanager(tmp_path, process.port, key, to, workflow))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def events(process: Process, to: str = "oncall") -> list[tuple[str, str, str]]:
    """Of each event of a subscriber: status, name and instance of its alert."""
    found = process.query(f"SELECT payload FROM events WHERE subscriber_id = '{to}' ORDER BY id")
    alerts = [json.loads(payload) for (payload,) in found]
    return [(one["status"], one["labels"]["alertname"], one["labels"]["instance"]) for one in alerts]


def wait_for_resend(alertmanager: Alertmanager) -> None:
    """Until it has told everything again, at least once in full after now."""
    seen = alertmanager.sends()
    wait_for(lambda: alertmanager.sends() >= seen + 2, what="alerts told again")


def test_each_alert_is_one_event_when_it_fires_and_one_when_it_ends_however_often_it_is_told(
    process, start_alertmanager, receiver
):
    alertmanager = start_alertmanager()
    alertmanager.tell("DiskFull", "a:9100")
    alertmanager.tell("DiskFull", "b:9100")
    firing = {("firing", "DiskFull", "a:9100"), ("firing", "DiskFull", "b:9100")}
    wait_for(lambda: set(events(process)) == firing, what=f"two events\n{alertmanager.log()}")
    wait_for_resend(alertmanager)
    assert len(events(process)) == 2

    alertmanager.tell("DiskFull", "a:9100", resolved=True)
    wait_for(lambda: ("resolved", "DiskFull", "a:9100") in events(process), what=f"the end\n{alertmanager.log()}")
    wait_for_resend(alertmanager)
    assert len(events(process)) == 3

    # one that comes back is news
    alertmanager.tell("DiskFull", "a:9100", started=dt.datetime.now(dt.UTC).isoformat())
    wait_for(lambda: events(process).count(("firing", "DiskFull", "a:9100")) == 2, what="the relapse")

    [(window,)] = process.query("SELECT id FROM digests WHERE state = 'open'")
    release(process, window)
    [post] = wait_for(lambda: list(receiver.requests), what="the digest")
    data = json.loads(post.body)["data"]
    assert data["subject"] == "4 alerts" and data["digest"]["eventCount"] == 4
    assert sorted(data["text"].splitlines()) == ["firing DiskFull"] * 3 + ["resolved DiskFull"]
    payload = data["digest"]["events"][0]["payload"]
    assert payload["labels"]["severity"] == "page" and payload["annotations"]["summary"].endswith("über alles")
    assert payload["startsAt"].startswith("2026-03-09T09:00:00") and payload["generatorURL"] and payload["fingerprint"]
    assert payload["receiver"] == "digestd" and payload["groupLabels"] == {"alertname": "DiskFull"}
    assert "DiskFull" in payload["groupKey"] and payload["externalURL"].startswith("http://")
    assert payload["commonLabels"]["alertname"] == "DiskFull" and "commonAnnotations" in payload


def release(process: Process, window: int) -> None:
    """End a window now, as `digestd release` does."""
    line = [sys.executable, str(ROOT / "digestd.py"), "release", str(window), "--config", str(process.config)]
    assert subprocess.run(line, capture_output=True, timeout=30).returncode == 0


def test_alerts_for_several_subscribers_are_events_of_each(process, start_alertmanager):
    alertmanager = start_alertmanager(to="to=ada&to=bob")
    alertmanager.tell("DiskFull", "a:9100")
    for to in ("ada", "bob"):
        wait_for(lambda to=to: events(process, to) == [("firing", "DiskFull", "a:9100")], what=f"the event of {to}")


def test_a_wrong_key_stores_nothing_and_is_told_in_the_log_of_alertmanager(process, start_alertmanager):
    alertmanager = start_alertmanager(key="a-wrong-key")
    alertmanager.tell("DiskFull", "a:9100")
    wait_for(lambda: "401" in alertmanager.log(), what="the refusal")
    assert process.query("SELECT * FROM events") == []


def test_an_unknown_workflow_is_told_in_the_log_of_alertmanager(process, start_alertmanager):
    alertmanager = start_alertmanager(workflow="nothing")
    alertmanager.tell("DiskFull", "a:9100")
    wait_for(lambda: "unexpected status code 4" in alertmanager.log(), what="the refusal")
    assert process.query("SELECT * FROM events") == []


def test_alerts_that_come_while_the_daemon_is_down_are_told_again_and_kept_once(process, start_alertmanager):
    alertmanager = start_alertmanager()
    process.kill()
    alertmanager.tell("DiskFull", "a:9100")
    wait_for(lambda: "connection refused" in alertmanager.log(), what="a try that finds nobody")
    process.start()
    wait_for(lambda: events(process) == [("firing", "DiskFull", "a:9100")], what=f"the event\n{alertmanager.log()}")
    wait_for_resend(alertmanager)
    assert len(events(process)) == 1
