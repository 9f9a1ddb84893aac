"""``gradring run --input-workers``: tf.data service with the job, and what becomes of it."""

import json
import os
import signal
import socket
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import ssh_stand_in
from input_jobs import DEADLINE_S, ELEMENTS, program, started
from launching import gradring, pids_noted, wait_until_gone
from test_run_orphans import sleepers

from gradring.clusters.own_host import address_towards
from gradring.launch import input_server
from support.waiting import wait_until

#: Every other host knows one of these.
ANYWHERE = "192.0.2.1"

LOOP_AND_FIT = """
batches = tf.data.Dataset.range(ELEMENTS).apply(sleep(1000)).batch(6)
given = distribute_input(batches, strategy)
divided = strategy.experimental_distribute_dataset(given)
for epoch in range(2):
    sizes = [len(strategy.experimental_local_results(batch)[0]) for batch in divided]
    assert max(sizes) <= 3, sizes
    print("loop", json.dumps(of_all(list(elements(divided)))))

import keras
seen = tf.Variable(tf.zeros(ELEMENTS, tf.int64))

class Model(keras.Model):
    def train_step(self, data):
        numbers = tf.reshape(tf.cast(data[0], tf.int64), [-1])
        seen.assign_add(tf.reduce_sum(tf.one_hot(numbers, ELEMENTS, dtype=tf.int64), 0))
        return super().train_step(data)

class Tell(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("fit", json.dumps(comm.all_reduce(seen.numpy() + 0).tolist()))

def example(number):
    return [tf.cast(number, tf.float32)], [0.0]

with strategy.scope():
    inputs = keras.Input((1,))
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(1e-6), "mse")
examples = tf.data.Dataset.range(ELEMENTS).apply(sleep(1000)).map(example).batch(6)
model.fit(distribute_input(examples, strategy), epochs=3, verbose=0, callbacks=[Tell()])
print("service", input_service())
"""


def test_every_element_goes_to_one_rank_in_each_epoch(tmp_path: Path) -> None:
    """In a loop of its own, and in `fit`, of which each epoch has its own number of steps."""
    run = program(tmp_path, LOOP_AND_FIT)
    with started("-np", 2, "--input-workers", 2, run) as launcher:
        pids = list(launcher.servers(3).values())
        assert launcher.wait() == 0, launcher.stderr()
        wait_until_gone(pids, DEADLINE_S)
        lines = [line.split(" ", 2)[1:] for line in launcher.stdout().splitlines()]
    assert Counter(what for what, _ in lines) == {"loop": 4, "fit": 6, "service": 2}
    found = [json.loads(text) for what, text in lines if what == "loop"]
    assert found == [[1] * ELEMENTS] * 4
    found = sorted(json.loads(text) for what, text in lines if what == "fit")
    assert found == [[epochs] * ELEMENTS for epochs in (1, 1, 2, 2, 3, 3)]
    services = {text for what, text in lines if what == "service"}
    assert len(services) == 1 and services.pop().startswith("grpc://127.0.0.1:")


READS_AT_ONCE = """
numbers = tf.data.Dataset.range(ELEMENTS).batch(6)
divided = strategy.experimental_distribute_dataset(distribute_input(numbers, strategy))
print(json.dumps(of_all(list(elements(divided)))))
server = tf.data.experimental.service.DispatchServer()
worker = tf.data.experimental.service.WorkerServer(
    tf.data.experimental.service.WorkerConfig(server.target.split("://")[1])
)
one = tf.data.experimental.service.distribute("parallel_epochs", server.target)
print(len(list(tf.data.Dataset.range(ELEMENTS).apply(one))))
"""


def test_a_proxy_is_not_asked_for_hosts_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the launcher's input workers nor for those that a program starts by itself."""
    # It takes connections and says nothing, as a proxy that is far away.
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        run = program(tmp_path, READS_AT_ONCE)
        with started("-np", 1, "--input-workers", 1, run) as launcher:
            assert launcher.wait() == 0, launcher.stderr()
            lines = launcher.stdout().splitlines()
    assert lines == [f"[0] {[1] * ELEMENTS}", f"[0] {ELEMENTS}"]


READS_ON = """
numbers = tf.data.Dataset.range(ELEMENTS).apply(sleep(50_000)).batch(2)
divided = strategy.experimental_distribute_dataset(distribute_input(numbers, strategy))
found = []
for number in elements(divided):
    if not found:
        (here / f"begun-{comm.rank}").touch()
        until("lost")
    found.append(number)
print(json.dumps(of_all(found)))
"""


@pytest.mark.slow
def test_a_lost_input_worker_is_named_and_starts_again(tmp_path: Path) -> None:
    with started("-np", 2, "--input-workers", 2, program(tmp_path, READS_ON)) as launcher:
        servers = launcher.servers(3)
        begun = [tmp_path / "begun-0", tmp_path / "begun-1"]
        wait_until(lambda: all(file.exists() for file in begun), "both ranks read", DEADLINE_S)
        first = min(title for title in servers if title != "dispatcher")
        os.kill(servers[first], signal.SIGKILL)
        wait_until(lambda: "it is started again in 1 s" in launcher.stderr(), "named", DEADLINE_S)
        (tmp_path / "lost").touch()
        assert launcher.wait() == 0, launcher.stderr()
        said = launcher.stderr()
        (counts, _) = [
            json.loads(line.partition(" ")[2]) for line in launcher.stdout().splitlines()
        ]
    assert "gradring run: input worker " in said and "failed (killed by SIGKILL)" in said
    assert "the elements that it was reading are missing in this epoch" in said
    assert max(counts) == 1
    assert ELEMENTS / 2 < sum(counts) <= ELEMENTS


@pytest.mark.slow
def test_a_lost_dispatcher_ends_the_job_and_is_named(tmp_path: Path) -> None:
    with started("-np", 2, "--input-workers", 1, "--grace", 1, *sleepers(tmp_path)) as launcher:
        servers = launcher.servers(2)
        pids = pids_noted(tmp_path, 2)
        os.kill(servers["dispatcher"], signal.SIGKILL)
        assert launcher.wait() == 128 + signal.SIGKILL
        wait_until_gone([*pids, *servers.values()], DEADLINE_S)
        assert "input dispatcher on " in launcher.stderr()
        assert "failed first (killed by SIGKILL)" in launcher.stderr()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["launcher killed", "SIGINT", "SIGTERM", "rank killed", "elastic"])
def test_input_servers_end_with_the_job(tmp_path: Path, how: str) -> None:
    options = ["--min-np", 1, "--max-restarts", 0] if how == "elastic" else []
    command = ["-np", 2, "--input-workers", 2, "--grace", 1, *options, *sleepers(tmp_path)]
    with started(*command) as launcher:
        servers = launcher.servers(3)
        pids = pids_noted(tmp_path, 2)
        if how == "launcher killed":
            launcher.popen.kill()
            code = -signal.SIGKILL
        elif how in ("rank killed", "elastic"):
            for pid in pids[0 :: 1 if how == "elastic" else 4]:
                os.kill(pid, signal.SIGKILL)
            code = 128 + signal.SIGKILL
        else:
            launcher.popen.send_signal(signal.Signals[how])
            code = 128 + signal.Signals[how]
        assert launcher.wait() == code, launcher.stderr()
        wait_until_gone([*pids, *servers.values()], DEADLINE_S)


@pytest.mark.slow
def test_a_rank_that_is_asked_to_end_can_read_until_it_does(tmp_path: Path) -> None:
    """A rank may save what it has when it gets SIGTERM, after a step that needs another batch."""
    text = """
import signal
numbers = tf.data.Dataset.range(ELEMENTS).repeat().batch(2)
batches = iter(strategy.experimental_distribute_dataset(distribute_input(numbers, strategy)))
next(batches)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
(here / f"begun-{comm.rank}").touch()
while not asked: time.sleep(0.01)
for _ in range(200): next(batches)
print("has saved")
"""
    run = program(tmp_path, text)
    with started("-np", 2, "--input-workers", 1, "--grace", DEADLINE_S, run) as launcher:
        begun = [tmp_path / "begun-0", tmp_path / "begun-1"]
        wait_until(lambda: all(file.exists() for file in begun), "both ranks read", DEADLINE_S)
        launcher.popen.send_signal(signal.SIGTERM)
        assert launcher.wait() == 128 + signal.SIGTERM
        assert launcher.stdout().count("has saved") == 2


@pytest.mark.slow
def test_each_attempt_has_a_service_of_its_own(tmp_path: Path) -> None:
    text = """
import os, sys
print(os.environ["GRADRING_RESTART"], os.environ["GRADRING_INPUT_SERVICE"])
sys.exit(int(os.environ["GRADRING_RESTART"]) == 0)
"""
    command = ["-np", 1, "--input-workers", 1, "--max-restarts", 1]
    with started(*command, program(tmp_path, text, head="")) as launcher:
        assert launcher.wait() == 0, launcher.stderr()
        found = dict(line.split(" ")[1:] for line in launcher.stdout().splitlines())
    assert found.keys() == {"0", "1"}
    assert all(address.startswith("grpc://127.0.0.1:") for address in found.values())


@pytest.mark.slow
def test_no_other_host_reaches_the_service_of_one_host(tmp_path: Path) -> None:
    text = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[0]).parent
(here / "address-").write_text(os.environ["GRADRING_INPUT_SERVICE"])
os.rename(here / "address-", here / "address")
time.sleep(300)
"""
    try:
        own = address_towards(ANYWHERE)
    except OSError:
        pytest.skip("this machine has no address beside loopback")
    run = program(tmp_path, text, head="")
    with started("-np", 1, "--input-workers", 1, run) as launcher:
        wait_until((tmp_path / "address").exists, "the rank runs", DEADLINE_S)
        port = int((tmp_path / "address").read_text().rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((own, port), DEADLINE_S)
        assert launcher.popen.poll() is None


def test_a_start_that_takes_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a worker that cannot reach the dispatcher."""
    left = []

    class Server:
        _server = SimpleNamespace(bound_port=lambda: 4711)

        def join(self) -> None:
            left.append(signal.getitimer(signal.ITIMER_REAL)[0])

    def starts(*_: object) -> Server:
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        return Server()

    monkeypatch.setattr(input_server, "_started", starts)
    monkeypatch.setattr("sys.argv", ["input_server", "node-a", "0", "node-b:4712"])
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    assert input_server.main() == 1
    while_it_starts, then = left
    assert 0 < while_it_starts <= input_server.START_S and then == 0


def test_other_descriptors_are_left_as_they_are() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.TemporaryFile():
        before = os.listdir("/proc/self/fd")
        (found,) = input_server._listeners(server.getsockname()[1])
        found.close()
        assert os.listdir("/proc/self/fd") == before


def test_input_workers_of_a_job_with_authentication_need_the_users_word() -> None:
    run = ["-np", 2, "--input-workers", 2, "train.py"]
    done = gradring("run", *run, GRADRING_REQUIRE_AUTH="1")
    assert done.returncode == 2
    assert "GRADRING_REQUIRE_AUTH asks for authentication" in done.stderr
    assert "give --input-unprotected" in done.stderr


@pytest.mark.slow
@ssh_stand_in.needs_addresses
def test_the_dispatcher_is_on_the_first_host_and_workers_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
numbers = tf.data.Dataset.range(ELEMENTS).batch(6)
divided = strategy.experimental_distribute_dataset(distribute_input(numbers, strategy))
print(os.environ["SSH_HOST"], input_service(), json.dumps(of_all(list(elements(divided)))))
"""
    for name, value in ssh_stand_in.install(tmp_path).items():
        monkeypatch.setenv(name, value)
    hosts = ["--hosts", "me@127.0.0.2,me@127.0.0.3", "--input-workers", 2, "--input-unprotected"]
    with started(*hosts, program(tmp_path, text)) as launcher:
        assert launcher.wait() == 0, launcher.stderr()
        lines = sorted(line.split(" ", 3)[1:] for line in launcher.stdout().splitlines())
    assert [host for host, *_ in lines] == ["127.0.0.2", "127.0.0.3"]
    assert all(service.startswith("grpc://127.0.0.2:") for _, service, _ in lines)
    assert [json.loads(counts) for *_, counts in lines] == [[1] * ELEMENTS] * 2
    # The dispatcher, two workers and two ranks.
    notes = (tmp_path / "notes").read_text().splitlines()
    logins = Counter("127.0.0.2" in note for note in notes if "remote_rank" in note)
    assert logins == {True: 3, False: 2}


@pytest.mark.slow
def test_workers_of_parameter_servers_share_the_elements(tmp_path: Path) -> None:
    """They form no group in which the chief could say what it has registered."""
    text = """
import json
import tensorflow as tf
from gradring import updates
from gradring.tensorflow import CustomCollectiveStrategy, distribute_input
strategy = CustomCollectiveStrategy(update=updates.ParameterServer())
numbers = tf.data.Dataset.range(48).batch(6)
divided = strategy.experimental_distribute_dataset(distribute_input(numbers, strategy))
parts = [strategy.experimental_local_results(batch)[0].numpy().tolist() for batch in divided]
print(json.dumps(sum(parts, [])))
strategy.leave()
"""
    run = program(tmp_path, text, head="")
    with started("-np", 2, "--ps", 1, "--input-workers", 1, run) as launcher:
        assert launcher.wait() == 0, launcher.stderr()
        lines = [line.split(" ", 1) for line in launcher.stdout().splitlines()]
    found = [json.loads(text) for who, text in lines if who in ("[0]", "[1]")]
    one, other = found
    assert sorted(one + other) == list(range(48))


@pytest.mark.slow
def test_programs_with_horovods_names_read_by_input_workers(tmp_path: Path) -> None:
    text = """
import json
import tensorflow as tf
import gradring.horovod.tensorflow as hvd
from gradring.horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service
hvd.init()
config = TfDataServiceConfig.read("a file that nobody writes", wait_for_file_creation=True)
place = (config, hvd.rank(), hvd.size())
numbers = tf.data.Dataset.range(12).batch(2)
def found(dataset):
    return sorted(tf.concat(list(dataset), 0).numpy().tolist())
shared = hvd.allgather_object(found(numbers.send_to_data_service(*place, reuse_dataset=True)))
print("shared", json.dumps(sorted(sum(shared, []))))
print("own", json.dumps(found(numbers.send_to_data_service(*place))))
endless = numbers.repeat().send_to_data_service(*place, reuse_dataset=True, round_robin=True)
print("in turn", len(list(endless.take(6))))
with tf_data_service(config, hvd.rank()) as service:
    print("service", service.partition("://")[0])
refused = {"zip": tf.data.Dataset.zip((numbers, numbers)), "already": endless}
for why, dataset in refused.items():
    try:
        dataset.send_to_data_service(*place)
    except ValueError as error:
        said = str(error).startswith("send_to_data_service: the dataset ")
        print("refused", said and why in str(error), why)
"""
    with started("-np", 2, "--input-workers", 2, program(tmp_path, text, head="")) as launcher:
        assert launcher.wait() == 0, launcher.stderr()
        lines = Counter(line.split(" ", 1)[1] for line in launcher.stdout().splitlines())
    every = json.dumps(list(range(12)))
    expected = [f"shared {every}", f"own {every}", "in turn 6", "service grpc"]
    expected += ["refused True zip", "refused True already"]
    assert lines == dict.fromkeys(expected, 2)


def test_what_needs_all_elements_is_refused() -> None:
    """Windows over each input worker's own elements would skip those of the others."""
    tf = pytest.importorskip("tensorflow")
    from gradring.errors import ConfigError
    from gradring.tensorflow.data.input_service import check

    numbers = tf.data.Dataset.range(6)
    refused = {
        "enumerate": numbers.enumerate(),
        "scan": numbers.scan(tf.constant(0, tf.int64), lambda total, x: (total + x, total)),
        "shard": numbers.shard(2, 0),
        "skip": numbers.skip(1),
        "take": numbers.take(1),
        "take_while": numbers.take_while(lambda x: x < 3),
        "unique": numbers.unique(),
        "window": numbers.window(2, shift=1).flat_map(lambda window: window.batch(2)),
        "zip": tf.data.Dataset.zip((numbers, numbers)),
    }
    for name, dataset in refused.items():
        with pytest.raises(ConfigError, match=rf"it has .*\b{name}\b.* its own elements alone"):
            check(dataset.prefetch(1))
    python = numbers.map(lambda x: tf.numpy_function(abs, [x], tf.int64))
    with pytest.raises(
        ConfigError, match=r"fit: the dataset calls Python \(PyFunc, .* behind fit,"
    ):
        check(python, caller="fit")
    # There, one input worker has all of them.
    check(numbers.interleave(lambda n: tf.data.Dataset.range(n).take(1)).batch(2).repeat(2))


def test_horovods_names_say_what_is_missing() -> None:
    pytest.importorskip("tensorflow")
    from gradring.horovod.tensorflow.data.compute_service import (
        TfDataServiceConfig,
        compute_worker_fn,
    )

    with pytest.raises(ValueError, match="gradring run --input-workers K"):
        TfDataServiceConfig.read("config.json")
    config = TfDataServiceConfig(key=b"\x01")
    assert TfDataServiceConfig.from_dict(config.to_dict()) == config
    with pytest.raises(NotImplementedError, match="--input-workers"):
        compute_worker_fn(config)
    with pytest.raises(NotImplementedError, match="ends the input workers"):
        config.compute_client()
