"""HTTP as the store needs it: urllib with the certificates and credentials that pip would use."""

from __future__ import annotations

import base64
import http.client
import netrc
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace import __version__
from headrace.errors import ConfigError, DownloadError

TRANSIENT = (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, ConnectionError, TimeoutError)
"""What a second try may cure. (HTTPError is a URLError: see :func:`is_final`.)"""


TRIES = 5
RETRY_DELAY_S = 0.5


def pause(failures: int) -> None:
    """Wait before the next try: RETRY_DELAY_S, then twice as long each time."""
    time.sleep(RETRY_DELAY_S * 2 ** (failures - 1))


def is_final(error: Exception) -> bool:
    """Whether the answer is no, rather than a server that is slow, cut off, or over its limits."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code < 500 and error.code not in (408, 429)
    reason = getattr(error, "reason", error)
    return isinstance(reason, ssl.SSLCertVerificationError | FileNotFoundError)


@dataclass(frozen=True, slots=True)
class Client:
    """Opens http, https and file URLs."""

    cert: str | None = None
    timeout_s: float = 15.0

    def open(self, url: str, headers: dict[str, str] | None = None) -> IO[bytes]:
        """The response as a binary file with ``headers``, ``status`` and ``url``.

        Raises the exceptions of urllib, and DownloadError for a URL that is none.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https", "file"):
            raise DownloadError(f"Only http, https and file URLs can be fetched, not {redacted(url)}")
        request = urllib.request.Request(_without_credentials(parts), headers=headers or {})
        request.add_header("User-Agent", f"headrace/{__version__}")
        if parts.scheme != "file" and (secret := _credentials(parts)):
            # Unredirected: a redirect to another host must not carry the index's password along.
            request.add_unredirected_header("Authorization", secret)
        handler = urllib.request.HTTPSHandler(context=self._tls())
        opened: IO[bytes] = urllib.request.build_opener(handler).open(request, timeout=self.timeout_s)
        return opened

    def _tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        try:
            if self.cert is not None:
                context.load_verify_locations(
                    **({"capath": self.cert} if Path(self.cert).is_dir() else {"cafile": self.cert})
                )
            elif not context.cert_store_stats()["x509_ca"]:
                # A Python that finds no system certificates, such as the macOS installers'.
                import certifi

                context.load_verify_locations(cafile=certifi.where())
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"The certificates in {self.cert} cannot be read: {error}") from error
        return context


def redacted(url: str) -> str:
    """The URL without user and password, fit for messages."""
    return _without_credentials(urllib.parse.urlsplit(url))


def _without_credentials(parts: urllib.parse.SplitResult) -> str:
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))


def _credentials(parts: urllib.parse.SplitResult) -> str | None:
    user, password = parts.username, parts.password
    if user is None and parts.hostname:
        try:
            found = netrc.netrc().authenticators(parts.hostname)
        except (OSError, netrc.NetrcParseError):
            found = None
        if found is not None:
            user, password = found[0], found[2]
            return _basic(user, password or "")
    if user is None:
        return None
    return _basic(urllib.parse.unquote(user), urllib.parse.unquote(password or ""))


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode("ascii")
