"""Encryption and login against a real broker that has a listener of every kind."""

from __future__ import annotations

import base64
import json
import logging
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streams.errors import LogError, LogUnavailable
from streams.log import NewRecord

pytest.importorskip("kafka")
pytest.importorskip("confluent_kafka")

from kafka import KafkaAdminClient
from kafka.admin import NewTopic

from streams.broker.node import Node
from streams.broker.properties import Listener
from streams.kafka import security as logins
from streams.kafka.errors import LoginRefused
from streams.kafka.settings import KafkaSettings, Security
from streams.kafka.writer import Writer
from tests.support.kafka import QUICK

SOON = 30.0
CLIENTS = ["kafka-python", "confluent"]
PASSWORD, KEY_PASSWORD = "s3cret-of-ann", "s3cret-of-the-key"
LOGIN_MODULE = "org.apache.kafka.common.security"


class Certificates(NamedTuple):
    ca: Path
    server: Path  # key and certificate
    client: Path
    client_key: Path  # encrypted with KEY_PASSWORD


class Secured(NamedTuple):
    node: Node
    certificates: Certificates
    topic: str


def make_certificates(folder: Path) -> Certificates:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=SOON)

    ca, server, client, client_key = (folder / f"{n}.pem" for n in ("ca", "server", "client", "client-key"))
    days = ("-days", "2", "-sha256")
    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-noenc", "-keyout", "ca.key", "-out", ca.name, *days),
        *("-subj", "/CN=ca of this test"),
    )
    for name in ("server", "client"):
        openssl("req", "-newkey", "rsa:2048", "-noenc", "-keyout", f"{name}.key", "-out", f"{name}.csr",
                "-subj", f"/CN={name}")  # fmt: skip
        (folder / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1\n")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", ca.name, "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.crt", "-extfile", f"{name}.ext", *days)  # fmt: skip
    server.write_text((folder / "server.key").read_text() + (folder / "server.crt").read_text())
    client.write_text((folder / "client.crt").read_text())
    openssl(
        "pkcs8", "-topk8", "-in", "client.key", "-out", client_key.name, "-passout", f"pass:{KEY_PASSWORD}"
    )
    return Certificates(ca, server, client, client_key)


@pytest.fixture(scope="module")
def secured(kafka_folder: Path) -> Iterator[Secured]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = kafka_folder / "secured"
    (folder / "certificates").mkdir(parents=True)
    certificates = make_certificates(folder / "certificates")
    tls = {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(certificates.server)}
    scram = f"{LOGIN_MODULE}.scram.ScramLoginModule required;"
    node = Node(
        folder / "node",
        port=0,
        java_options=QUICK,
        scram_users={"ann": PASSWORD},
        listeners=[
            Listener(
                "LOGIN",
                "SASL_PLAINTEXT",
                {
                    "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
                    "scram-sha-256.sasl.jaas.config": scram,
                    "scram-sha-512.sasl.jaas.config": scram,
                    "plain.sasl.jaas.config": f"{LOGIN_MODULE}.plain.PlainLoginModule required "
                    f'user_ann="{PASSWORD}";',
                },
            ),
            Listener("TLS", "SSL", tls),
            Listener(
                "MUTUAL",
                "SSL",
                {
                    **tls,
                    "ssl.client.auth": "required",
                    "ssl.truststore.type": "PEM",
                    "ssl.truststore.location": str(certificates.ca),
                },
            ),
            Listener(
                "BOTH",
                "SASL_SSL",
                {
                    **tls,
                    "sasl.enabled.mechanisms": "SCRAM-SHA-512",
                    "scram-sha-512.sasl.jaas.config": scram,
                },
            ),
            Listener(
                "TOKEN",
                "SASL_PLAINTEXT",
                {
                    "sasl.enabled.mechanisms": "OAUTHBEARER",
                    "oauthbearer.sasl.jaas.config": f"{LOGIN_MODULE}.oauthbearer.OAuthBearerLoginModule required "
                    'unsecuredLoginStringClaim_sub="broker";',
                },
            ),
        ],
    )
    node.start()
    admin = KafkaAdminClient(bootstrap_servers=node.address)
    admin.create_topics([NewTopic("t", 1, 1)])
    admin.close()
    yield Secured(node, certificates, "t")
    node.kill()


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Any:
    return request.param


def append(secured: Secured, client: Any, listener: str, security: Security, **changes: Any) -> int:
    """One append by a writer of its own; the offset, or what it raises."""
    address = changes.pop("address", secured.node.address_of(listener))
    timeout = changes.pop("timeout", timedelta(seconds=20))
    settings = KafkaSettings((address,), client=client, security=security, delivery_timeout=timeout)
    writer = Writer(settings, lambda *_: None)
    try:
        return writer.submit(secured.topic, 0, [NewRecord(b"x")]).result(SOON)
    finally:
        writer.close(timedelta(0))


def refusals(
    secured: Secured,
    listener: str,
    security: Security,
    timeout: timedelta = timedelta(seconds=4),
    **changes: Any,
) -> list[BaseException | None]:
    """What an append by either client ends with, both at once since each takes its time."""
    with ThreadPoolExecutor() as pool:
        tries = [
            pool.submit(append, secured, client, listener, security, timeout=timeout, **changes)
            for client in CLIENTS
        ]
        return [each.exception(SOON) for each in tries]


def login(mechanism: Any, **changes: Any) -> Security:
    given: dict[str, Any] = {"protocol": "SASL_PLAINTEXT", "username": "ann", "password": lambda: PASSWORD}
    return Security(mechanism=mechanism, **{**given, **changes})


def token(lasts_s: float, subject: str = "ann") -> str:
    """What the broker's development validator takes: a JWS without a signature."""

    def part(content: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")

    now = time.time()
    return f"{part({'alg': 'none'})}.{part({'sub': subject, 'iat': now - 1, 'exp': now + lasts_s})}."


# -- login


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_user_with_the_right_password_is_let_in(secured: Secured, client: Any, mechanism: Any) -> None:
    assert append(secured, client, "LOGIN", login(mechanism)) >= 0


def test_a_wrong_password_is_an_error_that_names_user_mechanism_and_setting_but_no_secret(
    secured: Secured, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for mechanism in ("PLAIN", "SCRAM-SHA-512"):
        wrong = login(mechanism, password=lambda: "wr0ng-secret")
        for error in refusals(secured, "LOGIN", wrong, timedelta(seconds=20)):
            assert isinstance(error, LoginRefused)
            for named in ("'ann'", mechanism, secured.node.address_of("LOGIN"), "sasl_password"):
                assert named in str(error)
            assert "wr0ng-secret" not in str(error)
    assert "wr0ng-secret" not in caplog.text


def test_a_password_that_was_mended_is_seen_without_opening_the_log_again(secured: Secured) -> None:
    def mend(client: Any) -> None:
        passwords = ["wr0ng-secret"]
        settings = KafkaSettings(
            (secured.node.address_of("LOGIN"),),
            client=client,
            security=login("SCRAM-SHA-512", password=lambda: passwords[-1]),
            delivery_timeout=timedelta(seconds=20),
        )
        writer = Writer(settings, lambda *_: None)
        try:
            with pytest.raises(LoginRefused):
                writer.submit(secured.topic, 0, [NewRecord(b"x")]).result(SOON)
            passwords.append(PASSWORD)
            assert writer.submit(secured.topic, 0, [NewRecord(b"x")]).result(SOON) >= 0
        finally:
            writer.close(timedelta(0))

    with ThreadPoolExecutor() as pool:
        list(pool.map(mend, CLIENTS))


def test_a_bearer_of_a_token_is_let_in_and_the_token_is_asked_for_when_it_is_needed(
    secured: Secured, client: Any
) -> None:
    asked: list[str] = []

    def secret() -> str:
        asked.append(token(60))
        return asked[-1]

    security = Security(protocol="SASL_PLAINTEXT", mechanism="OAUTHBEARER", token=secret)
    assert append(secured, client, "TOKEN", security) >= 0
    assert asked


def test_a_token_that_has_ended_is_an_error_that_says_so(secured: Secured) -> None:
    security = Security(protocol="SASL_PLAINTEXT", mechanism="OAUTHBEARER", token=lambda: token(-30))
    for error in refusals(secured, "TOKEN", security, timedelta(seconds=20)):
        assert not isinstance(error, LogUnavailable)
        assert re.search(r"log\.kafka\.sasl_oauth_token ended 3\d s ago", str(error))


# -- encryption


def test_a_broker_whose_certificate_is_trusted_is_spoken_to(secured: Secured, client: Any) -> None:
    ca = str(secured.certificates.ca)
    assert append(secured, client, "TLS", Security(protocol="SSL", cafile=ca)) >= 0
    both = login("SCRAM-SHA-512", protocol="SASL_SSL", cafile=ca)
    assert append(secured, client, "BOTH", both) >= 0


def test_a_certificate_of_an_unknown_authority_is_refused_saying_so(secured: Secured) -> None:
    for error in refusals(secured, "TLS", Security(protocol="SSL")):
        assert isinstance(error, LogUnavailable)
        assert re.search(r"certificate that is not trusted.*ssl_cafile", str(error))


def test_a_certificate_of_another_host_is_refused_unless_the_check_is_off(
    secured: Secured,
) -> None:
    ca, port = str(secured.certificates.ca), secured.node.address_of("TLS").rpartition(":")[2]
    address = f"localhost:{port}"  # the certificate is for 127.0.0.1
    for error in refusals(secured, "TLS", Security(protocol="SSL", cafile=ca), address=address):
        assert isinstance(error, LogUnavailable)
        assert re.search(r"not trusted.*localhost", str(error))
    off = Security(protocol="SSL", cafile=ca, check_hostname=False)
    for client in CLIENTS:
        assert append(secured, client, "TLS", off, address=address) >= 0


def test_a_client_certificate_with_an_encrypted_key_is_shown_when_the_broker_wants_one(
    secured: Secured,
) -> None:
    made = secured.certificates
    security = Security(
        protocol="SSL",
        cafile=str(made.ca),
        certfile=str(made.client),
        keyfile=str(made.client_key),
        key_password=lambda: KEY_PASSWORD,
    )
    for client in CLIENTS:
        assert append(secured, client, "MUTUAL", security) >= 0
    for error in refusals(secured, "MUTUAL", Security(protocol="SSL", cafile=str(made.ca))):
        assert isinstance(error, LogUnavailable)
        assert re.search(r"certificate", str(error))


def test_speaking_plainly_to_an_encrypted_port_says_what_may_be_wrong(secured: Secured) -> None:
    for error in refusals(secured, "TLS", Security()):
        assert isinstance(error, LogUnavailable)
        assert re.search(r'security protocol.*"PLAINTEXT"', str(error))


def test_files_that_cannot_be_used_are_named(secured: Secured, client: Any, tmp_path: Path) -> None:
    made, nonsense = secured.certificates, tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    for wrong, named in (
        (Security(protocol="SSL", cafile=str(nonsense)), r"ssl_cafile.*nonsense\.pem"),
        (Security(protocol="SSL", cafile="/absent.pem"), r"ssl_cafile.*/absent\.pem"),
        (
            Security(protocol="SSL", certfile=str(made.client), keyfile=str(made.client_key)),
            "ssl_certfile.*ssl_key_password",
        ),
    ):
        started = time.monotonic()
        with pytest.raises(LogError, match=named):
            append(secured, client, "TLS", wrong)
        assert time.monotonic() - started < 3


# -- without a broker


def test_a_login_that_lacks_something_is_refused_naming_what() -> None:
    for security, missing in (
        (Security(protocol="SASL_SSL"), "sasl_username and log.kafka.sasl_password"),
        (login("PLAIN", password=None), "sasl_password"),
        (Security(protocol="SASL_SSL", mechanism="OAUTHBEARER", username="ann"), "sasl_oauth_token"),
    ):
        with pytest.raises(LogError, match=missing):
            logins.check(security)
    logins.check(Security())
    logins.check(login("SCRAM-SHA-512"))


def test_a_secret_that_cannot_be_had_is_an_error_naming_its_setting() -> None:
    def absent() -> str:
        raise OSError("no such file: /run/secrets/kafka")

    with pytest.raises(LogError, match=r"log\.kafka\.sasl_password.*/run/secrets/kafka"):
        logins.ask(absent, "log.kafka.sasl_password")
    with pytest.raises(LogError, match=r"log\.kafka\.sasl_password is empty"):
        logins.ask(lambda: "", "log.kafka.sasl_password")


def test_the_end_of_a_token_is_read_from_it_and_else_soon() -> None:
    now = time.time()
    assert abs(logins.token_end(token(500), now) - now - 500) < 2
    assert logins.token_end("opaque", now) == now + 300
    assert logins.token_end("a.!!.c", now) == now + 300
