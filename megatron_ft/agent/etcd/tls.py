"""The certificates of a run's own etcd: each connection to a member, and between members, shows one that the run has signed.

The first host with a member makes a certificate authority for the run and a certificate for its clients, in a directory of
the run directory that only this user can read; each member gets a certificate for its address. They are made with the
``openssl`` program.

Failures it assumes: there is no ``openssl``; a host sees the directory late (:func:`member` waits).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from megatron_ft.errors import LaunchError
from megatron_ft.utils import socket_tracker

INSTALL = "as root: apt-get install openssl"
_VALID_DAYS = 3650
_SEEN_S, _LOOK_S = 60.0, 0.1
_LIMIT_S = 60.0
_CA, _CA_KEY, _CLIENT, _CLIENT_KEY = "ca.pem", "ca.key", "client.pem", "client.key"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout")


def missing() -> str:
    """Return why no certificates can be made here; empty when they can."""
    return "" if shutil.which("openssl") else "no openssl on PATH"


def found(directory: Path) -> str:
    """Make a new authority and its client certificate under ``directory``; returns the name of the new directory there."""
    own = Path(tempfile.mkdtemp(prefix="tls.", dir=directory))  # mode 0700
    extensions = own / "authority.cnf"
    extensions.write_text(
        "[req]\ndistinguished_name=dn\nx509_extensions=ca\n[dn]\n[ca]\nbasicConstraints=critical,CA:TRUE\n"
    )
    name = ["-subj", "/CN=megatron_ft run", "-config", extensions]
    _openssl("req", "-x509", *_KEY, own / _CA_KEY, "-out", own / _CA, "-days", _VALID_DAYS, *name)
    _sign(own, own / _CLIENT, own / _CLIENT_KEY, "DNS:client")
    return own.name


def member(tls: Path, directory: Path, address: str) -> tuple[Path, Path]:
    """Make a member's certificate and key in ``directory``.

    It is issued for ``address``, the member's IP address, and for all others of this host: etcd also checks whether a
    member's call comes from an address that its certificate names. ``tls``: where :func:`found` has made the authority.
    """
    deadline = time.monotonic() + _SEEN_S
    while not (tls / _CLIENT).exists():
        if time.monotonic() > deadline:
            raise LaunchError(f"{tls} is not seen on this host; all hosts need the run directory, at the same path")
        time.sleep(_LOOK_S)
    cert, key = directory / "member.pem", directory / "member.key"
    others = (other for _, name in socket.if_nameindex() for other in socket_tracker.addresses_of(name))
    named = dict.fromkeys([address.partition("%")[0], "127.0.0.1", "::1", *others])
    _sign(tls, cert, key, ",".join(f"IP:{other}" for other in named))
    return cert, key


def client(tls: Path) -> dict[str, str]:
    """Return the files of a client, as options of the store's address."""
    return {"ca": str(tls / _CA), "cert": str(tls / _CLIENT), "key": str(tls / _CLIENT_KEY)}


def options(tls: Path, cert: Path, key: Path) -> list[str]:
    """Return etcd's options: it shows this certificate, and asks clients and members for one that the run has signed."""
    words = []
    for peer in ("", "peer-"):
        words += [f"--{peer}cert-file={cert}", f"--{peer}key-file={key}"]
        words += [f"--{peer}client-cert-auth", f"--{peer}trusted-ca-file={tls / _CA}"]
    return words


def _sign(tls: Path, cert: Path, key: Path, names: str) -> None:
    """Sign a certificate for a server and a client in one: etcd's gateway calls etcd with the member's own certificate."""
    with tempfile.TemporaryDirectory(prefix="megatron_ft.") as scratch:
        request, extensions = Path(scratch) / "request", Path(scratch) / "extensions"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        config = Path(scratch) / "config"
        config.write_text("[req]\ndistinguished_name=dn\n[dn]\n")
        _openssl("req", *_KEY, key, "-out", request, "-subj", "/CN=megatron_ft", "-config", config)
        serial = ["-set_serial", str(int.from_bytes(os.urandom(8), "big") >> 1)]
        by = ["-CA", tls / _CA, "-CAkey", tls / _CA_KEY, *serial]
        _openssl("x509", "-req", "-in", request, *by, "-out", cert, "-days", _VALID_DAYS, "-extfile", extensions)
    os.chmod(key, 0o600)


def _openssl(*words: object) -> None:
    done = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise LaunchError(
            f"openssl {words[0]} makes no certificate for the run's etcd: {last}; use openssl 1.1.1 or newer"
        )
