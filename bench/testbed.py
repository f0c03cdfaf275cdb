"""Ranks in network namespaces, joined by links of a given rate and delay.

    with Testbed(ranks=2, rate="1gbit") as bed:
        outputs = bed.run([sys.executable, "-m", "bench.step_time", "--worker"], timeout_s=600)
        print(bed.sent_bytes())

Each rank has its own namespace, its own link to a switch (a bridge in one more namespace), and its own core
where there are enough. Needs root and iproute2; without them it says so and uses the loopback, where bytes
can't be counted. Namespaces are removed however the run ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType

SUBNET = "10.213.77"
DEVICE = "wire0"  # each rank's end of its link


class Testbed:
    """A few ranks and the links between them.

    Args:
        ranks: number of ranks, at most 200.
        rate: rate of each rank's link, as `tc` writes it (`"1gbit"`, `"100mbit"`); None: no links, the ranks
            share the loopback.
        delay: one-way delay added to each link (`"200us"`); None adds none.
    """

    def __init__(self, ranks: int, rate: str | None = "1gbit", delay: str | None = None) -> None:
        self.ranks, self.rate, self.delay = ranks, rate, delay
        self.isolated = rate is not None and os.geteuid() == 0 and shutil.which("ip") is not None
        self._tag = f"fx{os.getpid()}"
        self._processes: list[subprocess.Popen[str]] = []
        self._previous_handler: object = None

    def __enter__(self) -> Testbed:
        if self.rate is not None and not self.isolated:
            print("testbed: no root or no iproute2; ranks share the loopback", file=sys.stderr)
        self._previous_handler = signal.signal(signal.SIGTERM, _exit_on_signal)
        if self.isolated:
            try:
                self._build()
            except BaseException:
                self._remove()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop_processes()
        if self.isolated:
            self._remove()
        signal.signal(signal.SIGTERM, self._previous_handler)  # type: ignore[arg-type]

    def run(
        self, command: Sequence[str], timeout_s: float, env: dict[str, str] | None = None
    ) -> list[str]:
        """Run a command on every rank, with torch.distributed's environment set.

        Returns:
            Standard output of each rank.

        Raises:
            RuntimeError: when a rank fails or the time is over, naming the ranks and what they printed last.
        """
        port = str(_free_port())
        self._processes = [
            subprocess.Popen(
                [*self._prefix(rank), *command],
                env={**os.environ, **self._environment(rank, port), **(env or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(self.ranks)
        ]
        return self._collect(time.monotonic() + timeout_s)

    def sent_bytes(self) -> list[int]:
        """Bytes that each rank has sent over its link so far; empty on the loopback."""
        if not self.isolated:
            return []
        counts = []
        for rank in range(self.ranks):
            shown = _ip("-n", f"{self._tag}r{rank}", "-s", "-j", "link", "show", "dev", DEVICE)
            counts.append(int(json.loads(shown)[0]["stats64"]["tx"]["bytes"]))
        return counts

    def _collect(self, deadline: float) -> list[str]:
        outputs: list[str] = []
        for rank, process in enumerate(self._processes):
            try:
                output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                waiting = [r for r, p in enumerate(self._processes) if p.poll() is None]
                self._stop_processes()
                raise RuntimeError(f"timed out waiting for rank(s) {waiting}") from None
            if process.returncode != 0:
                self._stop_processes()
                raise RuntimeError(
                    f"rank {rank} exited with {process.returncode}:\n{output[-4000:]}"
                )
            outputs.append(output)
        return outputs

    def _stop_processes(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
        self._processes = []

    def _prefix(self, rank: int) -> list[str]:
        cores = sorted(os.sched_getaffinity(0))
        pin = ["taskset", "-c", str(cores[rank % len(cores)])] if shutil.which("taskset") else []
        return (["ip", "netns", "exec", f"{self._tag}r{rank}"] if self.isolated else []) + pin

    def _environment(self, rank: int, port: str) -> dict[str, str]:
        found = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": f"{SUBNET}.1" if self.isolated else "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        found["GLOO_SOCKET_IFNAME"] = DEVICE if self.isolated else _loopback()
        return found

    def _build(self) -> None:
        switch = f"{self._tag}sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for rank in range(self.ranks):
            name, port = f"{self._tag}r{rank}", f"port{rank}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            peer = ["type", "veth", "peer", "name", port, "netns", switch]
            _ip("-n", name, "link", "add", "name", DEVICE, *peer)
            _ip("-n", name, "addr", "add", f"{SUBNET}.{rank + 1}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "up")
            _ip("-n", switch, "link", "set", port, "master", "switch")
            _ip("-n", switch, "link", "set", port, "up")
            self._shape(name, DEVICE)
            self._shape(switch, port)

    def _shape(self, namespace: str, device: str) -> None:
        assert self.rate is not None, "without a rate there are no links"
        tc = ["tc", "-n", namespace, "qdisc", "add", "dev", device]
        limit = ["tbf", "rate", self.rate, "burst", "256kb", "latency", "50ms"]
        if self.delay is None:
            _call([*tc, "root", *limit])
        else:
            _call([*tc, "root", "handle", "1:", "netem", "delay", self.delay, "limit", "100000"])
            _call([*tc, "parent", "1:", "handle", "2:", *limit])

    def _remove(self) -> None:
        for name in [f"{self._tag}r{rank}" for rank in range(self.ranks)] + [f"{self._tag}sw"]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _exit_on_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _ip(*args: str) -> str:
    return _call(["ip", *args])


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
