"""A machine with a real systemd: systemd-nspawn over an overlay of this machine's own root, with digestd installed in
it as the head of digestd.service says. It has a loopback of its own and no other network; what it writes is in memory.

The mounts live in a namespace of the container's process, so that nothing of them outlives it. It needs root.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import http.client
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

from conftest import ROOT, missing, program, wait_for

PYTHON = "/usr/bin/python3"  # the one a unit may name: others may live in root's home, which the unit cannot see
PORT = 3210

# Mounts in a namespace of its own, waits until the root is filled, and becomes the container. What is written is kept
# in memory: an overlay cannot keep it in another overlay, which the root of a container is.
SCRIPT = """
set -e
mount -t tmpfs tmpfs "$1" || { echo refused; exit 1; }
mkdir "$1/up" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/up,workdir=$1/work" "$1/root" || { echo refused; exit 1; }
echo mounted
read -r go
exec systemd-nspawn --quiet --directory="$1/root" --boot --machine="$2" --private-network --register=no --keep-unit \
    --console=pipe systemd.unit=e2e.target < /dev/null
"""

# Namespaces that end with us, however we end: all processes in them are killed, all mounts undone.
APART = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]

# What the machine starts: the base, and none of the services that happen to be enabled on this machine.
TARGET = """
[Unit]
Requires=basic.target
After=basic.target
AllowIsolate=yes
"""


class Refused(Exception):
    """The kernel lets us mount nothing, as in a container without rights."""


class Machine:
    """The container's process, and ways to look and act inside."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="digestd-machine-")
        self.name = f"digestd-e2e-{os.getpid()}"
        self.console = pathlib.Path(self.folder + ".log")
        self.groups = [path for kind in ("systemd", "unified") if (path := _cgroup(kind, self.name))]
        self.process = subprocess.Popen(
            [*APART, "sh", "-c", SCRIPT, "sh", self.folder, self.name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.console.open("ab"), text=True,
            env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}, preexec_fn=self._enter_groups,
        )  # fmt: skip
        try:
            self._mount()
            self._install()
            self._boot()
        except BaseException:
            self.stop()
            raise

    def _enter_groups(self) -> None:
        for group in self.groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    # -- before the boot

    def _mount(self) -> None:
        assert self.process.stdout
        said = self.process.stdout.readline().strip()
        if said != "mounted":
            words = self.console.read_text("utf-8", "replace").strip()
            # unshare may be refused itself; anything else is a fault
            raise Refused(words) if said == "refused" or words.startswith("unshare:") else AssertionError(words)
        [self.host] = _children(str(self.process.pid))  # the script, later systemd-nspawn
        self.root = pathlib.Path(f"/proc/{self.host}/root{self.folder}/root")

    def _install(self) -> None:
        """digestd in /opt/digestd, the unit, and a target to boot to."""
        made = self.root / "opt" / "digestd"
        _run(PYTHON, "-m", "venv", "--without-pip", str(made))
        _run(
            sys.executable, "-m", "pip", "--python", str(made / "bin" / "python"), "install", "--quiet",
            "--disable-pip-version-check", "--constraint", str(ROOT / "constraints.txt"), str(ROOT),
        )  # fmt: skip
        command = made / "bin" / "digestd"
        command.write_text(command.read_text().replace(str(made), "/opt/digestd"))
        units = self.root / "etc" / "systemd" / "system"
        shutil.copy(ROOT / "digestd.service", units)
        (units / "e2e.target").write_text(TARGET)
        for name in (
            "systemd-firstboot.service",
            "systemd-networkd.service",
            "systemd-resolved.service",
            "dbus.socket",
        ):
            (units / name).unlink(missing_ok=True)
            (units / name).symlink_to("/dev/null")
        (self.root / "etc" / "digestd").mkdir()

    # -- life

    def _boot(self) -> None:
        assert self.process.stdin and self.process.stdout
        # all that comes now is the console of the guest
        threading.Thread(target=self._drain, args=(self.process.stdout,), daemon=True).start()
        self.process.stdin.write("go\n")
        self.process.stdin.close()
        self.leader = wait_for(self._find_leader, what="the container's first process")
        wait_for(self._is_up, what=f"the boot\n{self.console.read_text('utf-8', 'replace')}")
        self.root = pathlib.Path(f"/proc/{self.leader}/root")

    def _drain(self, stream: Any) -> None:
        with self.console.open("a") as console:
            for line in stream:
                console.write(line)

    def _find_leader(self) -> str:
        """The container's init: the first process below systemd-nspawn that has become systemd."""
        assert self.process.poll() is None, self.console.read_text("utf-8", "replace")
        return next((pid for pid in _children(self.host) if _name_of(pid) == "systemd"), "")

    def _is_up(self) -> bool:
        done = self.run("systemctl", "is-system-running", check=False)
        return done.stdout.strip() in ("running", "degraded")

    def stop(self) -> None:
        if hasattr(self, "host"):
            os.kill(int(self.host), signal.SIGKILL)  # the first of its namespaces: all others in them end with it
        else:
            self.process.kill()
        self.process.wait(10)
        for group in self.groups:
            wait_for(lambda group=group: _remove_group(group), what="the end of the container's processes")
        os.rmdir(self.folder)
        self.console.unlink()

    # -- commands

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program inside, as root."""
        line = ["nsenter", "-t", self.leader, "-m", "-u", "-i", "-n", "-p", "-C", "--", *command]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, env=PLAIN)
        assert not check or done.returncode == 0, f"{command}: exit {done.returncode}: {done.stdout}{done.stderr}"
        return done

    def path(self, inside: str) -> pathlib.Path:
        """A path of the machine, as this process reaches it."""
        return self.root / inside.lstrip("/")

    # -- network

    def socket(self) -> socket.socket:
        """A TCP socket in the machine's network: it belongs to the namespace of the thread that makes it."""

        def make() -> socket.socket:
            namespace = os.open(f"/proc/{self.leader}/ns/net", os.O_RDONLY)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(namespace, 0x40000000):  # CLONE_NEWNET
                    raise OSError(ctypes.get_errno(), "setns")
                return socket.socket()
            finally:
                os.close(namespace)

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(make).result()

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """One request to the machine's port 3210."""
        connection = http.client.HTTPConnection("127.0.0.1", PORT)
        connection.sock = self.socket()
        try:
            connection.sock.settimeout(20)
            connection.sock.connect(("127.0.0.1", PORT))
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else None
        finally:
            connection.close()


class Hook:
    """Takes webhooks at a port of the machine. While `is_open` is not set, they get no answer."""

    def __init__(self, machine: Machine) -> None:
        self.posts: list[tuple[dict[str, str], bytes]] = []
        self.is_open = threading.Event()
        self.is_open.set()
        hook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.posts.append(({name.lower(): value for name, value in self.headers.items()}, body))
                hook.is_open.wait(60)
                try:
                    self.send_response(204)
                    self.end_headers()
                except OSError:  # who asked is gone
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.server.socket.close()
        self.server.socket = machine.socket()
        self.server.daemon_threads = True
        self.server.socket.bind(("127.0.0.1", 0))
        self.server.socket.listen()
        self.port = self.server.socket.getsockname()[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(body) for _, body in self.posts]

    def stop(self) -> None:
        self.is_open.set()
        self.server.shutdown()
        self.server.server_close()


# What the machine's programs find in their environment: not what this machine's people have set up for themselves.
PLAIN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def _children(pid: str) -> list[str]:
    return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _name_of(pid: str) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}: exit {done.returncode}: {done.stdout}{done.stderr}"


def _cgroup(kind: str, name: str) -> pathlib.Path | None:
    """A group of our own where cgroups are of the old or the mixed kind: else two runs at once share theirs."""
    parent = pathlib.Path("/sys/fs/cgroup") / kind
    if not (parent / "cgroup.procs").exists():
        return None
    (parent / name).mkdir(exist_ok=True)
    return parent / name


def _remove_group(group: pathlib.Path) -> bool:
    """Whether a group and those in it could be removed: none can while a process is in it."""
    try:
        for path in sorted(group.rglob("*/"), reverse=True):
            path.rmdir()
        group.rmdir()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def commands_of(unit: str, beginning: str) -> Sequence[str]:
    """The words of a command that stands in a unit's comments."""
    [line] = re.findall(rf"(?m)^#\s+({beginning}.*)$", unit)
    return line.split()


def needed() -> None:
    """Fail, or skip where that is asked for, when something that all this needs is missing."""
    if os.geteuid() != 0:
        missing("root, which a machine with systemd needs,")
    for name in ("systemd-nspawn", "nsenter", "unshare", "setpriv"):
        program(name)
