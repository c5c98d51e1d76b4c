"""The line protocol of the clients: {call, args, key} comes in on a line, {result} or {error} goes out on one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def answer_lines(answer: Callable[..., Any], explain: Callable[[Exception], dict[str, Any]]) -> None:
    """Answer until the input ends. `answer` gets what a line holds."""
    for line in sys.stdin:
        try:
            said: dict[str, Any] = {"result": answer(**json.loads(line))}
        except Exception as error:
            said = {"error": explain(error)}
        print(json.dumps(said), flush=True)
