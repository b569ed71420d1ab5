"""Certificates for the tests, made with the ``openssl`` program."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    """A certificate and its key."""

    cert: Path
    key: Path


def authority(directory: Path, name: str) -> Pair:
    pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", pair.key]
    _openssl("req", "-x509", *new, "-out", pair.cert, "-days", 2, "-subj", f"/CN={name}")
    return pair


def signed(directory: Path, name: str, by: Pair, names: str) -> Pair:
    """Return a pair for ``names``, such as ``IP:127.0.0.1``."""
    pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
    request, extensions = directory / f"{name}.csr", directory / f"{name}.ext"
    extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", pair.key]
    _openssl("req", *new, "-out", request, "-subj", f"/CN={name}")
    ca = ["-CA", by.cert, "-CAkey", by.key, "-CAcreateserial"]
    _openssl("x509", "-req", "-in", request, *ca, "-out", pair.cert, "-days", 2, "-extfile", extensions)
    return pair


def _openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
