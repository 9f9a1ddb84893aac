"""A process of tf.data service: ``input_server HOST PORT [DISPATCHER]``.

HOST is the name at which the ranks reach the process. PORT is its port, 0 for any free one.
DISPATCHER is the dispatcher's address, for a worker; without this argument, the process is a
dispatcher. The actual port goes to the launcher, in a line of standard error that is not shown.

TensorFlow's servers listen at all addresses of a host, have no authentication, and run the datasets
that they receive. So if all ranks run on one host, the kernel accepts connections over loopback
only.
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

#: Interval of a worker's requests to the dispatcher for work; TensorFlow's default is 30 s.
HEARTBEAT_MS = 1000
#: Seconds for the start, in which a worker must reach the dispatcher; then SIGALRM ends it.
START_S = 300


def main() -> int:
    """Runs the server until the process is killed."""
    host, port, *dispatcher = sys.argv[1:]
    # TensorFlow's messages below this level only report the start.
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
    """Starts and returns the server.

    Raises:
        ImportError: TensorFlow is not installed.
        RuntimeError: The server cannot listen, or cannot reach the dispatcher.
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
    """Restricts this process's listening sockets of a port to the loopback interface.

    Raises:
        OSError: The kernel is older than Linux 5.7, or no socket listens at the port.
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
