"""Two hosts on one machine: network namespaces, joined by a cable, each with a name. Linux only, as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ADDRESSES = ("10.213.7.1", "10.213.7.2")
# A host's name belongs to the UTS namespace, which `ip netns` leaves alone.
_NAMED = 'hostname "$1"; shift; exec "$@"'


class Host(NamedTuple):
    """A namespace of the network; `interface` is its end of the cable."""

    name: str
    interface: str

    def command(self, *words: str) -> list[str]:
        """`words` as they run on this host."""
        named = ["unshare", "--uts", "sh", "-c", _NAMED, "sh", self.name]
        return ["ip", "netns", "exec", self.name, *named, *words]


def missing() -> str | None:
    """Why there can be no such hosts here; None where there can."""
    tools = [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "network namespaces need root"
    return f"there is no {', '.join(tools)} here" if tools else None


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that know each other by name. `RuntimeError` where the kernel refuses."""
    number = os.getpid() % 100_000
    hosts = (Host(f"ranks-a-{number}", f"ra{number}"), Host(f"ranks-b-{number}", f"rb{number}"))
    names = "127.0.0.1 localhost\n" + "".join(
        f"{address} {host.name}\n" for address, host in zip(_ADDRESSES, hosts, strict=True)
    )
    folders = [Path("/etc/netns") / host.name for host in hosts]
    try:
        for host, folder in zip(hosts, folders, strict=True):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(names)  # `ip netns exec` puts it in the place of /etc/hosts
            _ip("netns", "add", host.name)
        first, second = hosts
        _ip("link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
        for host, address in zip(hosts, _ADDRESSES, strict=True):
            _ip("link", "set", host.interface, "netns", host.name)
            _ip("-n", host.name, "addr", "add", f"{address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", host.interface, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host, folder in zip(hosts, folders, strict=True):
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)
            shutil.rmtree(folder, ignore_errors=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
