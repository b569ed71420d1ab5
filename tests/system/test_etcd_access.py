"""A real etcd with TLS, client certificates and users: which clients get access, and which errors the others get."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ft.config.store_address import PASSWORD_VARIABLE, EtcdAddress
from megatron_ft.run.store import ControlStore, patient
from megatron_ft.run.store.etcd_access import Access, Refused
from megatron_ft.run.store.etcd_http import Gateway
from tests import certificates, support
from tests.stores import DEADLINE_S, Process, etcd_missing, held_port

MISSING = etcd_missing() or ("" if shutil.which("openssl") else "no openssl here; as root: apt-get install openssl")
pytestmark = [pytest.mark.system, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

SILENCE_S = 10.0
PASSWORD = "correct horse/battery?staple&"


class Server(Process):
    """One etcd node; ``certs``: with TLS, and clients must show a certificate if ``mutual``."""

    def __init__(self, directory: Path, tls: bool = True, mutual: bool = False) -> None:
        self.directory, self.tls, self.mutual = directory, tls, mutual
        self.ca = certificates.authority(directory, "ca")
        self.other_ca = certificates.authority(directory, "other")
        self.server = certificates.signed(directory, "server", self.ca, "IP:127.0.0.1")
        self.client = certificates.signed(directory, "client", self.ca, "DNS:client")
        self.stranger = certificates.signed(directory, "stranger", self.other_ca, "DNS:stranger")
        self._held = [held_port() for _ in range(2)]
        self.port, self._peer = (held.getsockname()[1] for held in self._held)
        self.start()

    def start(self) -> None:
        url, peer = f"http{'s' * self.tls}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer}"
        options = ["--name=n", f"--data-dir={self.directory}/data", f"--listen-client-urls={url}"]
        options += [f"--advertise-client-urls={url}", f"--listen-peer-urls={peer}"]
        options += [f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=n={peer}", "--logger=zap"]
        if self.tls:
            options += [f"--cert-file={self.server.cert}", f"--key-file={self.server.key}"]
        if self.mutual:
            options += ["--client-cert-auth", f"--trusted-ca-file={self.ca.cert}"]
        with (self.directory / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(["etcd", *options], stdout=log, stderr=log)
        own = f"&cert={self.client.cert}&key={self.client.key}" if self.mutual else ""
        first = EtcdAddress.parse(self.address(f"?ca={self.ca.cert}{own}") if self.tls else self.address())
        gateway = Gateway(first.endpoints, SILENCE_S, access=Access(first))
        patient(lambda: gateway.call("/v3/maintenance/status", {}), patience_s=DEADLINE_S)
        gateway.close()

    def address(self, options: str = "", host: str = "127.0.0.1", tls: bool | None = None) -> str:
        return f"etcd{'s' * (self.tls if tls is None else tls)}://{host}:{self.port}{options}"

    def close(self) -> None:
        self.kill()
        for held in self._held:
            held.close()


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("tls"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def mutual(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("mutual"), mutual=True)
    yield server
    server.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("plain"), tls=False)
    yield server
    server.close()


def works(address: str) -> bool:
    """Make all kinds of calls that a run makes to a store."""
    store = ControlStore(address, os.urandom(8).hex(), SILENCE_S)
    waiting = store.clone()
    threading.Timer(0.2, lambda: store.set("late", 7)).start()
    assert waiting.wait("late", DEADLINE_S) == 7
    store.add("all", "one", 1)
    assert store.members("all") == {"one": 1}
    group = dist.ProcessGroupGloo(store.rendezvous("pg"), 0, 1)
    group.allreduce([torch.ones(1)]).wait()
    return True


def refused(address: str) -> str:
    """Return the error that a user gets, and check that it comes at once: a wrong setting is not a store that is
    away."""
    with pytest.raises(Refused) as caught:
        ControlStore(address, "run", DEADLINE_S)
    return str(caught.value)


def test_the_right_ca_lets_a_client_in(encrypted):
    assert works(encrypted.address(f"?ca={encrypted.ca.cert}"))


def test_a_server_that_another_ca_has_signed_is_refused(encrypted):
    for options in (f"?ca={encrypted.other_ca.cert}", ""):
        said = refused(encrypted.address(options))
        assert "certificate is not valid here" in said and "ca=" in said, said


def test_a_server_with_a_certificate_for_another_name_is_refused(encrypted):
    said = refused(encrypted.address(f"?ca={encrypted.ca.cert}", host="localhost"))
    assert "Hostname mismatch" in said and "by which the store setting names that node" in said


def test_tls_is_asked_for_where_there_is_none_and_the_other_way_round(encrypted, plain):
    assert "it speaks TLS only; use etcds://" in refused(encrypted.address(tls=False))
    assert "it does not speak TLS" in refused(plain.address(tls=True))


def test_a_client_certificate_is_asked_for_and_has_to_be_signed_by_the_servers_ca(mutual):
    ca = f"?ca={mutual.ca.cert}"
    assert works(mutual.address(f"{ca}&cert={mutual.client.cert}&key={mutual.client.key}"))
    assert "it refuses a client without a certificate" in refused(mutual.address(ca))
    said = refused(mutual.address(f"{ca}&cert={mutual.stranger.cert}&key={mutual.stranger.key}"))
    assert f"it refuses the certificate {mutual.stranger.cert}" in said


def test_files_that_cannot_be_used_are_named(mutual, tmp_path):
    ca, client = mutual.ca.cert, mutual.client
    nothing, empty = tmp_path / "nothing.pem", tmp_path / "empty.pem"
    empty.write_text("")
    assert f"{nothing} cannot be read here (No such file" in refused(mutual.address(f"?ca={nothing}"))
    assert f"ca {empty} holds no certificate" in refused(mutual.address(f"?ca={empty}"))
    said = refused(mutual.address(f"?ca={ca}&cert={client.cert}&key={mutual.stranger.key}"))
    assert "do not fit together" in said


def test_a_certificate_that_is_replaced_is_used_by_the_next_connection(mutual, tmp_path):
    cert, key = tmp_path / "own.pem", tmp_path / "own.key"
    shutil.copy(mutual.client.cert, cert)
    shutil.copy(mutual.client.key, key)
    address = mutual.address(f"?ca={mutual.ca.cert}&cert={cert}&key={key}")
    store = ControlStore(address, "run", SILENCE_S)
    store.set("key", 1)
    shutil.copy(mutual.stranger.cert, cert)
    shutil.copy(mutual.stranger.key, key)
    store.close()
    with pytest.raises(Exception, match="it refuses the certificate"):
        store.get("key")
    shutil.copy(mutual.client.cert, cert)
    shutil.copy(mutual.client.key, key)
    assert patient(lambda: store.get("key"), patience_s=DEADLINE_S) == 1


@pytest.fixture
def guarded(tmp_path):
    """An etcd with authentication: user ``mft`` may read and write all keys, user ``reader`` may only read them."""
    server = Server(tmp_path)
    access = Access(EtcdAddress.parse(server.address(CA.format(server))))
    admin = Gateway(access.address.endpoints, SILENCE_S, access=access)
    role = {"name": "reader", "perm": {"permType": "READ", "key": "AA==", "range_end": "AA=="}}
    for path, body in [
        ("user/add", {"name": "root", "password": "r"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("role/add", {"name": "writer"}),
        ("role/grant", {**role, "name": "writer", "perm": {**role["perm"], "permType": "READWRITE"}}),
        ("user/add", {"name": "mft", "password": PASSWORD}),
        ("user/grant", {"user": "mft", "role": "writer"}),
        ("role/add", {"name": "reader"}),
        ("role/grant", role),
        ("user/add", {"name": "reader", "password": "r"}),
        ("user/grant", {"user": "reader", "role": "reader"}),
        ("enable", {}),
    ]:
        admin.call(f"/v3/auth/{path}", body)
    server.admin = Gateway(access.address.endpoints, SILENCE_S, access=Access(root(server, tmp_path)))
    server.password_file = tmp_path / "password"
    server.password_file.write_text(f"{PASSWORD}\n")
    server.password_file.chmod(0o600)
    yield server
    server.close()


CA = "?ca={0.ca.cert}"


def root(server: Server, directory: Path) -> EtcdAddress:
    file = directory / "root"
    file.write_text("r")
    file.chmod(0o600)
    return EtcdAddress.parse(server.address(f"{CA.format(server)}&user=root&password_file={file}"))


def test_the_right_password_lets_a_user_in_also_when_etcd_has_forgotten_the_token(guarded, tmp_path, monkeypatch):
    ca, file = CA.format(guarded), guarded.password_file
    own = f"{ca}&user=mft&password_file={file}"
    assert works(guarded.address(own))
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    assert works(guarded.address(f"{ca}&user=mft"))
    store = ControlStore(guarded.address(own), "run", SILENCE_S)
    store.set("key", 1)
    before = dict(store._client._access.header)
    guarded.admin.call(
        "/v3/auth/user/changepw", {"name": "mft", "password": "another"}
    )  # etcd forgets the user's tokens
    file.write_text("another\n")
    assert store.get("key") == 1
    assert store._client._access.header != before
    # A refusal is reported, with the remedy, and the call is not repeated.
    wrong = tmp_path / "wrong"
    wrong.write_text("guessed")
    wrong.chmod(0o600)
    said = refused(guarded.address(f"{ca}&user=mft&password_file={wrong}"))
    assert "does not let user 'mft' in" in said and str(wrong) in said and "guessed" not in said
    assert "wants a user: etcds://" in refused(guarded.address(ca))
    file.chmod(0o644)
    assert f"chmod 600 {file}" in refused(guarded.address(own))
    monkeypatch.setenv(PASSWORD_VARIABLE, "r")
    reader = ControlStore(guarded.address(f"{ca}&user=reader"), "run", SILENCE_S)
    with pytest.raises(Refused, match="may read and write all keys"):
        reader.set("key", 2)
    monkeypatch.delenv(PASSWORD_VARIABLE)
    assert PASSWORD_VARIABLE in refused(guarded.address(f"{ca}&user=mft"))


def test_a_run_on_an_etcd_with_tls_and_a_password_shows_the_password_nowhere(guarded, tmp_path, data_dir):
    """Command line and record have the path of its file only. A wrong password ends the launch before a rank is started."""
    own = f"{CA.format(guarded)}&user=mft&password_file={guarded.password_file}"
    gate = support.Gate(tmp_path, 2)
    run = support.start(tmp_path / "run", data_dir, steps=4, groups=2, store=guarded.address(own), script=gate.script)
    support.wait_for(lambda: gate.waiting(2) == 2, run)
    ranks = json.loads((run.directory / "ranks.json").read_text())
    assert ranks
    shown = [path.read_bytes() for path in run.directory.rglob("*") if path.is_file()]
    shown += [Path(f"/proc/{run.process.pid}/cmdline").read_bytes()]
    gate.open()
    output = run.finish()
    assert run.process.returncode == 0, output + run.logs()
    assert not any(PASSWORD.encode() in text for text in [*shown, output.encode()])
    guarded.password_file.write_text("guessed")
    again = support.start(tmp_path / "again", data_dir, groups=2, store=guarded.address(own))
    said = again.finish()
    assert again.process.returncode == Refused.exit_code and "does not let user 'mft' in" in said, said
    assert "Traceback" not in said and not list(again.directory.glob("logs/*"))
