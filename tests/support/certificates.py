"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
NEW = ("req", "-x509", *CURVE, "-nodes", "-days", "2")


def make_certificates(directory: Path) -> Path:
    """ca, server (localhost, 127.0.0.1) and client signed by ca; stranger signed by itself: .pem and .key."""
    for name in ("ca", "stranger"):
        _openssl(directory, *NEW, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name in ("server", "client"):
        issue(directory, name)
    return directory


def issue(directory: Path, name: str) -> None:
    """A new certificate and key, signed by the ca of the directory; replaces files of that name."""
    san = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    files = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    _openssl(directory, *NEW, "-CA", "ca.pem", "-CAkey", "ca.key", *san, *files)


def _openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)
