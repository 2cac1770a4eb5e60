"""Encryption and login: what `Security` says, in the forms in which the clients take it.

Secrets are asked for as late as a client allows: tokens at every connection, passwords whenever a client is made
(a client whose login is refused is made anew, so a changed password is seen). None of them is ever part of a repr,
of an error or of `streams.kafka.options.effective`.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import ssl
import time
from collections.abc import Callable
from typing import Any

from streams.errors import LogError
from streams.kafka.settings import Secret, Security

REDACTED = "***"
_TOKEN_LASTS_S = 300.0  # a token that does not say when it ends is asked for again so often


def check(security: Security) -> None:
    """Raise LogError, naming the setting, for a login that cannot work."""
    if not security.protocol.startswith("SASL"):
        return
    if security.mechanism == "OAUTHBEARER":
        needed = {"sasl_oauth_token": security.token}
    else:
        needed = {"sasl_username": security.username, "sasl_password": security.password}
    missing = [f"log.kafka.{name}" for name, value in needed.items() if not value]
    if missing:
        raise LogError(
            f'log.kafka.security_protocol = "{security.protocol}" with sasl_mechanism = "{security.mechanism}" '
            f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not set"
        )


def has_tls(security: Security) -> bool:
    return security.protocol in ("SSL", "SASL_SSL")


def has_login(security: Security) -> bool:
    return security.protocol in ("SASL_PLAINTEXT", "SASL_SSL")


def who(security: Security) -> str:
    """Who this process is to the brokers, for messages: never holds a secret."""
    if has_login(security):
        name = f"user {security.username!r}" if security.username else "the bearer of the token"
        return f"{name} ({security.mechanism} over {security.protocol})"
    if security.certfile:
        return f"the holder of {security.certfile} ({security.protocol})"
    return f"an anonymous client ({security.protocol})"


def ask(secret: Secret, setting: str) -> str:
    """The secret now. Raises LogError naming the setting when it is not to be had."""
    try:
        value = secret()
    except Exception as error:
        raise LogError(f"{setting} cannot be read: {error}") from error
    if not value:
        raise LogError(f"{setting} is empty where it is read from")
    return value


class _ClosingSocket(ssl.SSLSocket):
    """kafka-python leaves a socket whose handshake failed to the garbage collector, and does not read what a broker
    says right before it hangs up (as streams/kafka/connect.py has it without TLS)."""

    _has_said = False

    def recv(self, *arguments: Any) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        said = super().recv(*arguments)
        if not said and self._has_said:
            self._has_said = False
            raise ssl.SSLWantReadError
        self._has_said = bool(said)
        return said

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except BaseException:
            self.close()
            raise


def tls_context(security: Security) -> ssl.SSLContext:
    """Raises LogError naming the file that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = security.check_hostname
    context.sslsocket_class = _ClosingSocket
    if security.cafile:  # these certificates and no others
        try:
            context.load_verify_locations(security.cafile)
        except (OSError, ssl.SSLError) as error:
            raise LogError(
                f"log.kafka.ssl_cafile = {security.cafile!r} is no file of PEM certificates: {error}"
            ) from error
    else:
        context.load_default_certs()
    if security.certfile:
        password = security.key_password
        try:
            context.load_cert_chain(
                security.certfile,
                security.keyfile,
                # Without a password of ours, OpenSSL would ask for one at the terminal, and wait.
                password=lambda: ask(password, "log.kafka.ssl_key_password") if password else "",
            )
        except (OSError, ssl.SSLError, ValueError) as error:
            raise LogError(
                f"log.kafka.ssl_certfile = {security.certfile!r} with ssl_keyfile = {security.keyfile!r} cannot be "
                f"used: {error}; needed are a PEM certificate, its key, and ssl_key_password if the key has one"
            ) from error
    return context


def hush() -> None:
    """kafka-python writes whole requests at level DEBUG, passwords in them: it is kept above that."""
    kafka = logging.getLogger("kafka")
    if kafka.level < logging.INFO:
        kafka.setLevel(logging.INFO)


def python_token_provider(token: Secret) -> Any:
    """kafka-python's way to ask for a token: at every connection, and in time for every re-authentication."""
    from kafka.net.sasl.oauth import AbstractTokenProvider  # pyright: ignore[reportMissingImports]

    class TokenProvider(AbstractTokenProvider):
        def token(self) -> str:
            return _fresh(token)

    return TokenProvider()


def confluent_token_callback(token: Secret) -> Callable[[str], tuple[str, float]]:
    """librdkafka's way: asked whenever the last answer has nearly run out, and now: it takes ten seconds to tell that
    it could not have the first. Raises LogError."""
    _fresh(token)

    def answer(_: str) -> tuple[str, float]:
        value = _fresh(token)
        return value, token_end(value, time.time())

    return answer


def _fresh(token: Secret) -> str:
    """The token now. Raises LogError for one that has ended: some brokers just hang up on it."""
    value, now = ask(token, "log.kafka.sasl_oauth_token"), time.time()
    if (end := token_end(value, now)) <= now:
        raise LogError(
            f"log.kafka.sasl_oauth_token ended {now - end:.0f} s ago; renew it where it is read from"
        )
    return value


def token_end(token: str, now: float) -> float:
    """When a JWT expires, in seconds since 1970; soon, for a token that does not say."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return float(claims["exp"])
    except (IndexError, KeyError, TypeError, ValueError, binascii.Error):
        return now + _TOKEN_LASTS_S
