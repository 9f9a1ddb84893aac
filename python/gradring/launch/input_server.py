"""A process of tf.data service: ``input_server HOST PORT [DISPATCHER]``, with it a worker.

HOST is the name by which the ranks reach it, PORT where it listens, 0 for any free one. Its port
goes to the launcher, in a line of standard error that is not shown.

TensorFlow's servers listen at all addresses of a host, know no password, and run the datasets that
they are given. For the ranks of one host, the kernel therefore lets in what comes over loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from typing import Any

from gradring.launch.output import FAILURE_MARK
from gradring.machine.ports import LOOPBACK
from gradring.machine.streams import print_error, write

#: How often a worker asks the dispatcher what there is to do; TensorFlow's own is half a minute.
HEARTBEAT_MS = 1000
#: Seconds for a start, in which a worker has to reach the dispatcher; then SIGALRM ends it.
START_S = 300


def main() -> int:
    """Serves until it is killed."""
    host, port, *dispatcher = sys.argv[1:]
    # It says little else than that it has started.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    signal.alarm(START_S)
    try:
        server = _started(host, int(port), *dispatcher)
        bound = server._server.bound_port()  # noqa: SLF001 - no public name has a worker's
        if host == LOOPBACK:
            _keep_to_loopback(bound)
    except ImportError as error:
        print_error(f"{socket.gethostname()}: --input-workers needs TensorFlow: {error}")
        return 1
    except (RuntimeError, OSError) as error:
        print_error(f"{socket.gethostname()}: tf.data service cannot start: {error}")
        return 1
    write(sys.stderr.buffer, FAILURE_MARK + json.dumps({"port": bound}).encode() + b"\n")
    signal.alarm(0)
    server.join()
    return 1


def _started(host: str, port: int, dispatcher: str | None = None) -> Any:
    """The server.

    Raises:
        ImportError: There is no TensorFlow.
        RuntimeError: It cannot listen, or not reach the dispatcher.
    """
    from tensorflow.data.experimental import service

    if dispatcher is None:
        return service.DispatchServer(service.DispatcherConfig(port=port, protocol="grpc"))
    return service.WorkerServer(
        service.WorkerConfig(
            dispatcher_address=dispatcher,
            worker_address=f"{f'[{host}]' if ':' in host else host}:%port%",
            port=port,
            protocol="grpc",
            heartbeat_interval_ms=HEARTBEAT_MS,
        )
    )


def _keep_to_loopback(port: int) -> None:
    """Has the sockets of this process that listen at a port take connections over loopback only.

    Raises:
        OSError: The kernel is older than Linux 5.7, or there is no such socket.
    """
    found = False
    for listener in _listeners(port):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        found = True
    if not found:
        raise OSError(f"no socket listens at port {port}")


def _listeners(port: int) -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
                listens = is_tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and found.getsockname()[1] == port:
                    yield found


if __name__ == "__main__":
    sys.exit(main())
