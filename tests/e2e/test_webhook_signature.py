"""The signature of a webhook, checked by the library that Standard Webhooks publishes for JavaScript."""

from __future__ import annotations

import base64

import pytest

from conftest import Process, SdkError, wait_for
from peers import Receiver

OLD, NEW = (f"whsec_{base64.b64encode(letter * 32).decode()}" for letter in (b"o", b"n"))


@pytest.fixture
def hook():
    receiver = Receiver()
    yield receiver
    receiver.stop()


@pytest.fixture
def sent(hook, tmp_path):
    """A webhook that a daemon sent, with a secret that is being replaced."""
    config = f"""
[senders.hook]
type = "webhook"
url = "{hook.url()}"
secret = ["{NEW}", "{OLD}"]

[workflows.note]
steps = [{{ id = "chat", type = "chat", sender = "hook", text = "Grüße, {{{{ payload.who }}}} 🦆" }}]
"""
    process = Process(tmp_path, config)
    process.trigger("note", "ann", {"who": "Ann"})
    wait_for(lambda: hook.requests, what="the webhook")
    yield hook.requests[0]
    process.kill()


@pytest.fixture(scope="module")
def verify(start_client):
    client = start_client("webhooks_driver.mjs")
    return lambda secret, request, body=None: client.ask(
        "verify", {"body": request.body.decode() if body is None else body, "headers": request.headers}, secret
    )


@pytest.mark.parametrize("secret", [NEW, OLD], ids=["new secret", "old secret"])
def test_a_webhook_is_accepted_with_each_of_the_secrets(verify, sent, secret):
    assert verify(secret, sent)["data"]["text"] == "Grüße, Ann 🦆"


def test_a_webhook_with_a_changed_body_or_another_secret_is_not(verify, sent):
    other = f"whsec_{base64.b64encode(b'x' * 32).decode()}"
    for secret, body in ((NEW, sent.body.decode() + " "), (other, None)):
        with pytest.raises(SdkError) as refused:
            verify(secret, sent, body)
        assert refused.value.name == "WebhookVerificationError"
